"""Load a folder as a stock or compressed causal LM; NVIDIA's DMS checkpoints become compressed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dmc.compression import CompressionConfig
from dmc.gguf import local_model
from dmc.models.build import refuse_kernels
from dmc.models.conversion import retrofit
from dmc.models.modeling import CompressedCausalLM
from dmc.models.ties import follow_tensors
from dmc.models.weights import (
    check_weights,
    find_base,
    is_adapter,
    local_folder,
    open_weights,
    read_dtype,
    refuse_nonfinite,
)


def load_model(folder: Any, **kwargs: Any) -> Any:
    """Load a stock or compressed causal LM, or a DMS checkpoint, from safetensors and JSON only: no code, no pickle.

    Args:
        folder: a local folder, a hub name or a GGUF file.
        kwargs: passed to `AutoModelForCausalLM.from_pretrained` (dtype, device_map, revision, ...).
    Returns:
        The model in eval mode.
    Raises:
        FileNotFoundError: there is no such folder, or it lacks a file.
        ValueError: a weight is missing, damaged, not finite or of another shape; or the gates of a DMS checkpoint are
            not supported, see `from_dms`.
    """
    if isinstance(dtype := kwargs.get("dtype"), str):
        read_dtype(dtype)
    folder = local_model(str(folder))
    check_weights(folder, reads_dms=True)
    if not Path(folder).is_dir():
        config = read_hub_config(folder, kwargs.get("revision"))
        refuse_kernels(config, folder)
    safely = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    model, loading = AutoModelForCausalLM.from_pretrained(folder, **{**kwargs, **safely})
    if missing := sorted(loading["missing_keys"]):  # a hub name's files could not be checked before
        raise ValueError(f"{folder} lacks the weight {missing[0]} (and {len(missing) - 1} more) that its config needs")
    model = from_dms(model, folder, kwargs.get("revision")) if hasattr(model.config, "dms_window_size") else model
    refuse_nonfinite(model.state_dict().items(), folder)
    return follow_tensors(model).eval()


def read_hub_config(name: str, revision: str | None = None) -> Any:
    """Read the configuration of a model on the hub.

    Raises:
        FileNotFoundError: the hub has none, or cannot be reached; the message says first that no such folder exists.
    """
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(f"there is no folder {name!r}; as a name of the hub: {reason}") from error


def load_with_tokenizer(path: str, dtype: str = "auto", revision: str | None = None) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer, or None if it has none.

    Args:
        path: folder, hub name or GGUF file of a stock or compressed model.
        dtype: dtype of the weights.
        revision: hub revision.
    Raises:
        FileNotFoundError, ValueError: see `load_model` and `load_tokenizer`.
    """
    path, device = local_model(path), "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path, dtype=dtype, revision=revision).to(device)
    lacks_tokenizer = Path(path).is_dir() and not any(_tokenizer_folder(path).glob("tokenizer*"))
    return model, None if lacks_tokenizer else load_tokenizer(path, revision, model.config.vocab_size)


def load_tokenizer(path: str | Path, revision: str | None = None, vocab_size: int | None = None) -> Any:
    """Load a tokenizer without running code from its folder.

    Args:
        path: folder, hub name or GGUF file.
        revision: hub revision.
        vocab_size: vocabulary size of the model that reads its tokens; None: any.
    Raises:
        ValueError: the tokenizer is missing or damaged, or has more tokens than the model.
    """
    path = local_model(str(path))
    path = str(_tokenizer_folder(path)) if Path(path).is_dir() else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:
        missing = "" if Path(path).is_dir() else f"there is no folder {path!r}: as a name of the hub, "
        raise ValueError(
            f"{missing}{path} has no tokenizer, or a damaged one ({error}): copy its files again"
        ) from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of {path} has token ids up to {largest}, its model knows only {vocab_size} tokens"
        )
    return tokenizer


def _tokenizer_folder(path: str | Path) -> Path:
    """Return the folder of a model's tokenizer: an adapter may leave it to its base."""
    folder = Path(path)
    return find_base(folder) if is_adapter(folder) and not any(folder.glob("tokenizer*")) else folder


@torch.no_grad()
def from_dms(model: Any, folder: Any, revision: str | None = None) -> CompressedCausalLM:
    """Give a stock model the gates of its DMS checkpoint (arXiv:2506.05345, Qwen3-8B-DMS-8x and kin).

    A token decides whether the one before it is dropped as it leaves the window of dms_window_size + 1, if

        logit = dms_alpha_scale * x - dms_initial_alpha_offset > 0.

    Borrowed neuron: x is the last channel of the normalized query of each group's first head, which then loses it.
    Adapter (weights named dms_proj_alpha): x = W (n * r / rms(r)) + b of the layer's residual r, before its own norm.
    That norm divides by the same rms: with its weights m the layer's input is m * r / rms(r). So x is what our adapter
    computes from that input with W diag(n / m). Differs from NVIDIA's code: the first token always stays, and decisions
    are thresholded in float32.

    Args:
        model: loaded from the folder as a stock one; its parameters are reused.
        folder: a local folder or a hub name, for the adapter's weights.
        revision: hub revision.
    Raises:
        ValueError: the settings or the adapter's weights are not those of a supported DMS checkpoint.
    """
    config, weights = model.config, open_weights(local_folder(str(folder), revision))
    stored = {name: weight[:] for name, weight in weights.items() if ".dms_proj_alpha" in name}
    settings = {key: getattr(config, key) for key in list(vars(config)) if key.startswith("dms_")}
    shared = settings.get("dms_alpha_per", "head") == "layer"
    if settings.get("dms_disable_eviction") or (shared and not stored):
        refused = "dms_alpha_per='layer' without an adapter" if shared else "dms_disable_eviction=True"
        raise ValueError(f"{folder} has {refused}: expected a DMS checkpoint whose heads evict, each for itself")
    compression = CompressionConfig(
        action="drop",
        decided_token="previous",
        gate_input="hidden" if stored else "query",
        delay=settings["dms_window_size"] + 1,
        decision_scale=settings.get("dms_alpha_scale", 100.0),
        decision_offset=settings.get("dms_initial_alpha_offset", 5.0),
        temperature=settings.get("dms_tau", 0.1),
        target_counts="decided",
        target_ratio=settings.get("dms_cr") or 1.0,
    )
    for key in (*settings, "auto_map"):
        vars(config).pop(key, None)
    compressed = retrofit(model, compression)
    for layer, adapter in zip(compressed.compressed_layers, compressed.adapters(), strict=False):  # of all, or none
        index = layer.self_attn.layer_idx
        name, norm = f"model.layers.{index}.self_attn.dms_proj_alpha", model.model.layers[index].input_layernorm.weight
        if f"{name}.weight" not in stored or f"{name}_norm.weight" not in stored or not norm.all():
            raise ValueError(
                f"{folder}: expected {name}.weight and {name}_norm.weight, and no 0 in the layer's own norm; copy the "
                "folder again"
            )
        weight = stored[f"{name}.weight"].double() * (stored[f"{name}_norm.weight"].double() / norm.double().cpu())
        bias = stored.get(f"{name}.bias", torch.zeros(len(weight)))
        adapter.weight[adapter.decision_rows] = (weight[:1] if shared else weight).to(adapter.weight)
        adapter.bias[adapter.decision_rows] = (bias[:1] if shared else bias).to(adapter.bias)
    return compressed
