"""Llama checkpoints of Megatron-LM, its `dmc` branch included, to and from Hugging Face folders."""

from dmc.megatron.exporting import export_checkpoint
from dmc.megatron.importing import import_checkpoint

__all__ = ["export_checkpoint", "import_checkpoint"]
