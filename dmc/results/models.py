"""The models of a comparison: what a user names, and what can be said of it without loading it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import StrictInt
from transformers import AutoConfig, PretrainedConfig
from transformers.utils.hub import cached_file, extract_commit_hash

from dmc.compression.full_attention import refuse_other_attention
from dmc.config.settings import build_config, checked_dataclass, suggest
from dmc.data.sources import file_stamps
from dmc.files import json_digest
from dmc.gguf import ModelName
from dmc.models.weights import open_weights

MODEL_FILES = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja"}
"""Types of the files that make a model: weights, configuration, tokenizer and chat template, but no README."""


@checked_dataclass(frozen=True)
class ComparedModel:
    """A model of the grid."""

    path: ModelName
    """Folder, hub name or GGUF file of a stock or compressed model."""
    dtype: str = "auto"
    revision: str | None = None
    """Hub revision."""
    variant: str | None = None
    """Common name of models that differ in their seed, one line of a table: `{a: {path: A, variant: cr4, seed: 0}, b:
    {path: B, variant: cr4, seed: 1}}`; None: the model is its own variant."""
    seed: StrictInt | None = None
    """Seed of the model within its variant: a compressed model is compared with the reference of its seed."""
    policies: list[str] | None = None
    """Names of the grid's policies to run on it; None: all."""


@dataclass(frozen=True)
class PlannedModel:
    """A model of the grid that is there, but not loaded."""

    name: str
    settings: ComparedModel
    target_ratio: float | None
    """Target ratio of its learned gates; None: a stock model."""
    target_counts: str | None
    """What that ratio counts, see `CompressionConfig`."""
    num_layers: int
    version: str | None
    """When its files were last modified, with a hash of their names, sizes and times, or its commit on the hub."""

    @property
    def is_learned(self) -> bool:
        """Whether it has learned gates."""
        return self.target_ratio is not None

    @property
    def row_settings(self) -> dict[str, Any]:
        """Settings in its rows; `policies` choose cells, and change none."""
        chosen = {name: value for name, value in asdict(self.settings).items() if name != "policies"}
        return chosen | {"version": self.version}

    @property
    def variant(self) -> str:
        """Common name of models that differ in their seed."""
        return self.settings.variant or self.name

    def check_unchanged(self) -> None:
        """Check that its files are those that its rows name.

        Raises:
            ValueError: they were replaced meanwhile.
        """
        if version_of(self.settings) != self.version:
            raise ValueError(f"models.{self.name}: its files have changed since the start: run the same command again")


def plan_model(name: str, value: Any) -> PlannedModel:
    """Read a model of the grid, and identify it without loading it.

    Args:
        name: its name.
        value: a folder or hub name, or a mapping with the fields of `ComparedModel`.
    Raises:
        ValueError, FileNotFoundError: a field is unknown or of another type, there is no such model, or its weights are
            missing or cut off.
        NotImplementedError: see `refuse_other_attention`.
    """
    where = f"models.{name}"
    model = build_config(ComparedModel, {"path": value} if isinstance(value, str) else value, where)
    folder = Path(model.path).expanduser()
    if not folder.is_dir() and (folder.parent.is_dir() or model.path.startswith(("/", ".", "~"))):
        beside = (str(other) for other in folder.parent.glob("*") if other.is_dir())
        raise ValueError(f"{where}: there is no folder {model.path}; {suggest(folder, beside)}")
    try:
        values, _ = PretrainedConfig.get_config_dict(str(folder), revision=model.revision)
    except OSError as error:
        missing = "" if folder.exists() else f"there is no folder {model.path!r}; as a name of the hub: "
        raise ValueError(f"{where}={model.path}: {missing}{str(error).splitlines()[0]}") from error
    if "model_type" not in values:
        raise ValueError(f"{where}: {model.path} has no config.json with a model_type: it is not a Hugging Face model")
    compressed = str(values["model_type"]).startswith("dmc_")
    if folder.is_dir():
        open_weights(folder)
    try:
        refuse_other_attention(
            AutoConfig.from_pretrained(str(folder), revision=model.revision, trust_remote_code=False)
        )
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{where}: {error}") from error
    gates = values["compression"] if compressed else {"target_ratio": values.get("dms_cr"), "target_counts": "decided"}
    ratio = None if gates["target_ratio"] is None else float(gates["target_ratio"])  # without one: a stock model
    counts = None if ratio is None else gates.get("target_counts", "held")
    return PlannedModel(name, model, ratio, counts, values["num_hidden_layers"], version_of(model))


def version_of(model: ComparedModel) -> str | None:
    """Return when the files of a model's folder were last modified, and a hash of all of them; or the hub's commit."""
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        return extract_commit_hash(cached_file(model.path, "config.json", revision=model.revision), None)
    files = sorted(path for path in folder.glob("*") if path.suffix in MODEL_FILES)
    modified = datetime.fromtimestamp(max(path.stat().st_mtime for path in files), timezone.utc)
    return f"{modified.isoformat(' ', 'seconds')}, {json_digest(file_stamps(files, relative_to=folder))[:8]}"
