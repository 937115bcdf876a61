"""The folder of an exported model: what lies in it, whether it is complete, and its upload to the hub."""

from __future__ import annotations

import copy
import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from dmc.files import read_mapping
from dmc.models.weights import BASE_KEYS, check_weights, is_adapter
from dmc.results.provenance import provenance
from dmc.special_tokens import ends_of_text

logger = logging.getLogger(__name__)
METRICS_NAME = "retrofit.json"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
METHODS = {"merge": "tokens are merged (DMC, arXiv:2403.09636)", "drop": "tokens are dropped (DMS, arXiv:2506.05345)"}


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
    repository: str | None = None
    """Name on the hub that the folder gets; None: it stays where it is."""

    def text(self, compression: dict[str, Any] | None, origin: dict[str, Any]) -> str:
        """Write the card as Markdown."""
        method, gates = "none: a stock model", "none"
        if compression is not None:
            method = METHODS[compression["action"]] + f", after {compression['delay']} tokens" * (
                compression["delay"] > 0
            )
            gates = ", ".join(f"{name} {value}" for name, value in compression.items())
        ratio = f"target {(compression or {}).get('target_ratio', 1):g}"
        if "achieved_ratio" in self.metrics:
            ratio += f", achieved {self.metrics['achieved_ratio']:.2f} on held-out text"
        if "decided_ratio" in self.metrics:
            ratio += f" ({self.metrics['decided_ratio']:.2f} as decided)"
        on_hub = HUB_NAME.fullmatch(self.base) and not Path(self.base).exists()
        figures = "\n".join(f"| {name} | {_shown(value)} |" for name, value in self.metrics.items())
        return (
            "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [kv-cache-compression, dmc]\n"
            + (f"base_model: {self.base}\n" if on_hub else "")
            + f"---\n\n# {self.title}\n\n"
            f"A causal language model with a learned, compressed key-value cache (Dynamic Memory Compression, "
            f"arXiv:2403.09636).\n\n- base: {self.base}\n- method: {method}\n- compression ratio: {ratio}\n"
            f"- data: {self.data}\n- gates: {gates}\n\n| figure | value |\n|---|---|\n{figures}\n\n"
            "```python\nimport dmc\nfrom transformers import AutoModelForCausalLM\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{self.repository or "THIS_FOLDER"}")\n```\n\n'
            f"Made by `{origin['command']}` with "
            + ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
            + (f", commit {origin['git_commit']}" if origin["git_commit"] else "")
            + ".\n"
        )


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def write_generation_config(folder: Path, settings: GenerationConfig, tokenizer: Any) -> None:
    """Write a model's generation settings, also those that transformers loads and refuses to save.

    What the tokenizer ends a text with ends a generation too, see `ends_of_text`.

    Args:
        folder: the model's.
        settings: the model's.
        tokenizer: saved beside the model; None: none.
    """
    settings, ends = copy.deepcopy(settings), ends_of_text(settings, tokenizer)
    if len(ends) > 1:
        settings.eos_token_id = ends
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    else:
        settings.save_pretrained(folder)


def describe(folder: Path, tokenizer: Any, card: ModelCard, compression: dict[str, Any] | None) -> None:
    """Write the files beside a model's weights: its tokenizer, unless None, the card, and the metrics."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    origin = provenance()
    (folder / "README.md").write_text(card.text(compression, origin))
    record = {"metrics": card.metrics, "compression": compression, "base": card.base, "data": card.data, **origin}
    (folder / METRICS_NAME).write_text(json.dumps(record, indent=2, default=str) + "\n")


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds an exported model: its metrics, and all of its weights."""
    if not (folder / METRICS_NAME).is_file():
        return False
    try:
        check_weights(folder)
    except (OSError, ValueError) as error:
        logger.warning("%s does not count as exported: %s", folder, error)
        return False
    return True


def is_final(folder: Path) -> bool:
    """Return whether a folder holds the complete model of a run's last step."""
    if not is_complete(folder):
        return False
    try:
        return is_of_last_step(json.loads((folder / METRICS_NAME).read_text())["metrics"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.warning("%s does not count as exported: %s is damaged (%s)", folder, METRICS_NAME, error)
        return False


def is_of_last_step(metrics: dict[str, Any]) -> bool:
    """Return whether the metrics are of a run's last step."""
    return metrics.get("steps", 0) >= metrics.get("planned_steps", 0)


def check_push(repository: str) -> None:
    """Refuse an upload that could not succeed, before the work that makes its folder; the hub is not asked.

    Raises:
        ValueError: the name is none of the hub's, there is no token, or the hub is switched off.
    """
    setting = f"push_to_hub={repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{setting}: {str(error).splitlines()[0]}") from None
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{setting}: HF_HUB_OFFLINE is set: unset it, or leave push_to_hub out")
    if get_token() is None:
        raise ValueError(f"{setting}: no Hugging Face token was found: log in with `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str) -> str:
    """Upload an exported folder; a new repository is private, from an old one weights of other names go.

    Returns:
        URL of the commit.
    Raises:
        OSError: it failed; the folder stays.
    """
    api, weights = HfApi(), ["*.safetensors", "*.safetensors.index.json"]
    base = read_mapping(folder / "config.json").get(BASE_KEYS[0]) if is_adapter(folder) else None
    if base is not None and Path(base).is_dir():
        logger.warning("%s holds gates alone, and their base %s is a folder here: others need it too", folder, base)
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}", delete_patterns=weights
        )
    except Exception as error:  # of HTTP, of the network, of what stores large files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(
            f"{folder} is exported but could not be uploaded ({reason}): `hf upload {repository} {folder}` tries again"
        ) from error
    return str(commit.commit_url)
