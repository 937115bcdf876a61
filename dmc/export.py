"""Export of a trained model as a Hugging Face folder: written aside, read back, compared, then moved into place."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dmc.compression import GateMode
from dmc.measure import evaluating
from dmc.models import CompressedCausalLM, load_model
from dmc.models.weights import check_weights
from dmc.provenance import provenance
from dmc.replacement import replacement

logger = logging.getLogger(__name__)
METRICS_NAME = "retrofit.json"
TOLERANCE = 1e-5
"""Largest difference of logits, relative to their largest, between the model in memory and the folder."""


@dataclass(frozen=True)
class ModelCard:
    """Content of an exported folder's model card."""

    title: str
    base: str
    """The model that was retrofitted."""
    data: str
    """The text it was trained on."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics, named with their unit."""

    def text(self, compression: dict[str, Any] | None, origin: dict[str, Any]) -> str:
        """Write the card as Markdown."""
        gates = "none: a stock model" if compression is None else ", ".join(f"{k} {v}" for k, v in compression.items())
        figures = "\n".join(f"| {name} | {_shown(value)} |" for name, value in self.metrics.items())
        return (
            f"---\nlibrary_name: transformers\ntags: [kv-cache-compression, dmc]\n---\n\n# {self.title}\n\n"
            f"A causal language model with a learned, compressed key-value cache (Dynamic Memory Compression, "
            f"arXiv:2403.09636).\n\n- base: {self.base}\n- data: {self.data}\n- gates: {gates}\n\n"
            f"| figure | value |\n|---|---|\n{figures}\n\n"
            "```python\nimport dmc\nfrom transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")\n```\n\n'
            f"Made by `{origin['command']}` with "
            + ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
            + (f", commit {origin['git_commit']}" if origin["git_commit"] else "")
            + ".\n"
        )


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def export(
    model: Any,
    folder: Path | str,
    *,
    tokenizer: Any,
    card: ModelCard,
    overwrite: bool = False,
    inputs: Iterable[Path] = (),
) -> Path:
    """Write a model as safetensors, configuration, tokenizer and model card; done only once it reads back equal.

    Args:
        model: compressed or stock causal LM.
        folder: new or empty folder.
        tokenizer: saved beside the weights; None: none.
        card: the model card.
        overwrite: replace a folder that was exported here; it stays until the new one is complete.
        inputs: folders that the model was read from, which are never replaced.
    Returns:
        The folder.
    Raises:
        FileExistsError: the folder may not be written or replaced, see `refuse_occupied`; nothing is written.
        RuntimeError: the folder does not give the logits of the model; nothing is replaced.
    """
    with replacement(Path(folder), overwrite, inputs) as partial:
        model.save_pretrained(partial)
        compression = model.config.compression if isinstance(model, CompressedCausalLM) else None
        describe(partial, tokenizer, card, compression)
        _compare(model, partial)
    return Path(folder)


def is_whole(folder: Path) -> bool:
    """Return whether a folder holds a whole exported model: its metrics, and all of its weights undamaged."""
    if not (folder / METRICS_NAME).is_file():
        return False
    try:
        check_weights(folder)
    except (OSError, ValueError) as error:
        logger.warning("%s does not count as exported: %s", folder, error)
        return False
    return True


def is_final(folder: Path) -> bool:
    """Return whether a folder holds the whole model of a run's last step."""
    if not is_whole(folder):
        return False
    try:
        return is_of_last_step(json.loads((folder / METRICS_NAME).read_text())["metrics"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.warning("%s does not count as exported: %s is damaged (%s)", folder, METRICS_NAME, error)
        return False


def is_of_last_step(metrics: dict[str, Any]) -> bool:
    """Return whether the metrics are of a run's last step."""
    return metrics.get("steps", 0) >= metrics.get("planned_steps", 0)


def describe(folder: Path, tokenizer: Any, card: ModelCard, compression: dict[str, Any] | None) -> None:
    """Write the files beside a model's weights: its tokenizer, unless None, the card, and the metrics."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    origin = provenance()
    (folder / "README.md").write_text(card.text(compression, origin))
    record = {"metrics": card.metrics, "compression": compression, "base": card.base, "data": card.data, **origin}
    (folder / METRICS_NAME).write_text(json.dumps(record, indent=2, default=str) + "\n")


def _compare(model: Any, folder: Path) -> None:
    """Reload a folder and compare logits on random tokens.

    Raises:
        RuntimeError: they differ.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(model.config.vocab_size, (2, 48), generator=generator).to(model.device)
    reloaded = load_model(folder, dtype=model.dtype).to(model.device)
    gates = {"gate_mode": GateMode()} if isinstance(model, CompressedCausalLM) else {}
    with evaluating(model), torch.no_grad():
        expected = model(input_ids, use_cache=False, **gates).logits.float()
        got = reloaded(input_ids, use_cache=False, **gates).logits.float()
    difference = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"{folder} was written but gives other logits than the model (relative difference {difference:.1e}); "
            "nothing was replaced"
        )
