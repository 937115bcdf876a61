"""Llama checkpoints of Megatron-LM, its `dmc` branch included, to and from Hugging Face folders."""

from dmc.megatron.convert import export_checkpoint, import_checkpoint

__all__ = ["export_checkpoint", "import_checkpoint"]
