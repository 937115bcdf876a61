"""Checks of a weights folder before it is loaded: errors name what is missing, truncated or of another shape."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dmc.files import read_mapping
from dmc.gguf import imported_folders, local_model
from dmc.models.build import check_shape, refuse_kernels
from dmc.models.experts import as_in_model
from dmc.models.ties import settle_ties
from dmc.ranks import Ranks

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
GATES_NAME = "dmc_gates.safetensors"
"""File of an adapter of gates: its folder has no other weights, and takes them from the base that it names."""
BASE_KEYS = ("base_model_name_or_path", "base_revision", "base_digest")
"""Keys by which an adapter's config.json names its base: a folder or hub name, its revision, its `weights_digest`."""
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WHOLE_BYTES = 2**30
"""Bytes of weights up to which all are hashed."""
REMEDY = "copy the folder again, or take a checkpoint from before its training failed"
SAMPLED_BYTES = 2**12
"""Bytes of each sample of a tensor in larger files."""


def open_weights(folder: Path) -> dict[str, Any]:
    """Open all weights of a folder under their names in the model: each is read where it is indexed.

    Most are slices of safetensors; of experts, which files hold apart, see `StackedWeight`. An adapter's folder answers
    with its base's weights and its own gates.

    Raises:
        FileNotFoundError: the folder has no safetensors weights, or misses a shard.
        ValueError: a shard is damaged, or lacks a weight that the index promises.
    """
    weights: dict[str, Any] = {}
    for path in weight_files(folder):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: copy all of the folder again, or export it anew")
        try:
            tensors: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} ({path.stat().st_size} bytes) is cut off or is no safetensors file ({error}): copy it again, "
                "or export it anew"
            ) from error
        weights |= {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    index = weights_folder(folder) / INDEX_NAME
    promised = _read_index(index) if index.is_file() else {}
    if lacking := sorted(set(promised) - set(weights)):
        shard = index.with_name(promised[lacking[0]])
        raise ValueError(f"{shard} lacks {lacking[0]} (and {len(lacking) - 1} more) named in {INDEX_NAME}")
    config = folder / "config.json"
    model_type = read_mapping(config).get("model_type") if config.is_file() else None
    return as_in_model(weights, str(model_type))


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Collect the shape of every weight in a folder, see `open_weights`."""
    return {name: tuple(weight.get_shape()) for name, weight in open_weights(folder).items()}


def _read_index(path: Path) -> dict[str, str]:
    """Read which file of a folder holds each weight.

    Raises:
        ValueError: the index is damaged, or names a file outside its folder.
    """
    try:
        weight_map = dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: copy it again, or export the folder anew") from None
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{path} names {shard!r}: expected files of its own folder; get the model anew")
    return weight_map


def read_model_config(folder: Path) -> Any:
    """Read the transformers configuration of a local folder; its weights say whether the head is the embedding.

    Raises:
        FileNotFoundError, ValueError: the folder has no config.json, or it describes no model.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    check_shape(read_mapping(path), str(path))
    with _describing(path):
        config = without_base(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    with suppress(FileNotFoundError, ValueError):  # without weights, or with damaged ones, as `check_weights` says
        settle_ties(config, open_weights(folder))
    return config


def without_base(config: Any) -> Any:
    """Remove from a configuration, in place, what names an adapter's base: a loaded model has all of its weights."""
    for key in BASE_KEYS:
        vars(config).pop(key, None)
    return config


@contextmanager
def _describing(path: Path) -> Iterator[None]:
    """Name the file in whatever transformers raises on values that describe no model."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} describes no model: {error}") from error


def refuse_dms(config: Any, name: str) -> None:
    """Refuse a checkpoint of NVIDIA's DMS outside `load_model`, which alone reads its gates."""
    if hasattr(config, "dms_window_size"):
        raise ValueError(
            f"{name} is a DMS checkpoint (it has dms_window_size): load it with dmc.load_model and save it once, "
            "model.save_pretrained(folder)"
        )


def check_weights(folder: Any, model_class: Any = AutoModelForCausalLM, reads_dms: bool = False) -> None:
    """Compare a local folder's weights with those its configuration asks for; anything else (a hub name) passes.

    Raises:
        FileNotFoundError, ValueError: there is no such folder; see `stored_shapes`; or a weight has another shape, is
            missing, or belongs to a layer that the configuration does not have.
    """
    name, folder = str(folder), Path(str(folder))
    if not folder.is_dir():
        if name.startswith(("/", ".", "~")):
            raise FileNotFoundError(f"there is no folder {name}: give a model's folder, or its name on the hub")
        return
    config = read_model_config(folder)
    shapes = stored_shapes(folder)
    refuse_kernels(config, str(folder / "config.json"))
    if not reads_dms:
        refuse_dms(config, str(folder))
    build = model_class.from_config if model_class is AutoModelForCausalLM else model_class
    with torch.device("meta"), _describing(folder / "config.json"):
        model = build(config)
    _refuse_more_layers(folder, shapes, model)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    for name, parameter in model.named_parameters():
        if name not in shapes:
            if name not in tied:
                raise ValueError(
                    f"{folder} lacks the weight {name} {tuple(parameter.shape)} that its config.json needs"
                )
        elif shapes[name] != tuple(parameter.shape):
            raise ValueError(
                f"{folder}: weight {name} has shape {shapes[name]}, its config.json asks for {tuple(parameter.shape)}"
            )


def _refuse_more_layers(folder: Path, names: Iterable[str], model: Any) -> None:
    """Refuse weights of layers beyond the configuration's last: without them the model would be another."""
    count = model.config.num_hidden_layers
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    for name in names:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= count and not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(
                f"{folder} holds {name}, but its config.json has num_hidden_layers={count}: half a model would be "
                "loaded; copy the folder again, or export it anew"
            )


def empty_model(folder: Any, dtype: torch.dtype, revision: str | None = None) -> Any:
    """Make the model of a folder or hub name without weights, on the meta device.

    Raises:
        FileNotFoundError, ValueError: see `check_weights`.
    """
    check_weights(folder)
    config = read_model_config(local_folder(str(folder), revision))
    refuse_kernels(config, str(folder))
    refuse_dms(config, str(folder))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with suppress(OSError):  # a folder may have none: those of the configuration count
        model.generation_config = GenerationConfig.from_pretrained(folder, revision=revision)
    return model


def refuse_nonfinite(weights: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Refuse weights that hold nan or inf: every step, and every answer, would be nan.

    Args:
        weights: tensors by name.
        name: of the model, for the message.
    Raises:
        ValueError: the first that does.
    """
    if found := nonfinite_weight(weights):
        raise ValueError(f"{name}: {found}: {REMEDY}")


def refuse_nonfinite_parts(weights: Iterable[tuple[str, Tensor]], name: str, ranks: Ranks) -> None:
    """Refuse weights of which each rank holds parts, on all ranks together, see `refuse_nonfinite`."""
    found = next(filter(None, ranks.all_gather_object(nonfinite_weight(weights))), None)
    if found is not None:
        raise ValueError(f"{name}: {found} of a rank's part: {REMEDY}")


def nonfinite_weight(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Say which weight is the first that holds nan or inf."""
    for name, weight in weights:
        if weight.is_meta or not weight.is_floating_point() or weight.sum(dtype=torch.float32).isfinite():
            continue  # a sum of finite numbers may overflow, but one with nan or inf is never finite
        if wrong := int((~weight.isfinite()).sum()):
            return f"weight {name} ({weight.dtype}) holds nan or inf in {wrong} of {weight.numel()} numbers"
    return None


def weights_digest(folder: Path) -> str:
    """Return a hash of a model's weights and configuration, independent of its place and of times.

    Of more than `WHOLE_BYTES` it takes all sizes, names and shapes, and of each tensor its beginning, middle and end.

    Raises:
        FileNotFoundError, ValueError: see `open_weights`.
    """
    open_weights(folder)
    config = read_mapping(folder / "config.json")
    others = ("_name_or_path", "transformers_version", *BASE_KEYS[:2])
    told = {key: value for key, value in config.items() if key not in others}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    files = weight_files(folder)
    is_whole = sum(path.stat().st_size for path in files) <= WHOLE_BYTES
    for path in files:
        with path.open("rb") as file:
            header = file.read(struct.unpack("<Q", file.read(8))[0])
            digest.update(header)
            if is_whole:
                while block := file.read(2**20):
                    digest.update(block)
                continue
            tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
            for begin, end in sorted(tensor["data_offsets"] for tensor in tensors.values()):
                for place in sorted({begin, (begin + end) // 2, max(begin, end - SAMPLED_BYTES)}):
                    file.seek(8 + len(header) + place)
                    digest.update(file.read(min(SAMPLED_BYTES, end - place)))
    return digest.hexdigest()


def read_dtype(name: str) -> torch.dtype | None:
    """Read the name of the weights' dtype; None: "auto", the configuration's.

    Raises:
        ValueError: there is no such dtype.
    """
    if name == "auto":
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={name!r}: expected auto, or a torch dtype such as float32 or bfloat16")
    return found


def local_folder(name: str, revision: str | None = None) -> Path:
    """Return a folder with safetensors and JSON files: a hub name's are downloaded, a GGUF file's imported."""
    name = local_model(name)
    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.json"]))


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds gates alone, and takes its other weights from a base."""
    return (folder / GATES_NAME).is_file()


def weights_folder(folder: Path) -> Path:
    """Return the folder of a model's weights: of an adapter the base's, see `find_base`."""
    return find_base(folder) if is_adapter(folder) else folder


def find_base(folder: Path) -> Path:
    """Find the base of an adapter of gates, and check that it is the one that they were learned on.

    A relative path counts from the adapter's folder, or else from the working directory. A base that was moved along
    with the adapter is found by the last parts of its path; one that was imported from a GGUF file, wherever it is.

    Raises:
        FileNotFoundError: the base is not there.
        ValueError: config.json names none, or what has its name holds other weights.
    """
    return named_base(read_mapping(folder / "config.json"), folder)


def named_base(config: Mapping[str, Any], folder: Path) -> Path:
    """Find the base that a configuration names, see `find_base`; it is that of the gates in `folder`."""
    name, revision, digest = map(config.get, BASE_KEYS)
    if not isinstance(name, str) or not isinstance(digest, str):
        raise ValueError(
            f"the configuration of {folder} does not name the base of its gates ({', '.join(BASE_KEYS)}): copy it again"
        )
    parts = [part for part in Path(name).parts if part not in ("/", "..")]
    tails = [Path(*parts[-count:]) for count in range(min(3, len(parts)), 0, -1)]
    beside = [parent / tail for parent in folder.resolve().parents[:4] for tail in tails]
    named = [place for place in (folder / name, Path(name)) if _is_base(place)]
    for place in (*named, *filter(_is_base, [*beside, *imported_folders()])):
        if known_digest(place) == digest:
            return place
    if not named and HUB_NAME.fullmatch(name):
        try:
            named = [local_folder(name, revision)]
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise FileNotFoundError(_without_base(folder, name, f" and cannot be fetched ({reason})")) from error
        if known_digest(named[0]) == digest:
            return named[0]
    if not named:
        raise FileNotFoundError(_without_base(folder, name))
    raise ValueError(
        f"the gates of {folder} were learned on a base with digest {digest[:12]}, {name} has "
        f"{known_digest(named[0])[:12]}: put back that base, or learn the gates anew on this one"
    )


def _is_base(folder: Path) -> bool:
    has_weights = any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    return has_weights and not is_adapter(folder)


def _without_base(folder: Path, name: str, reason: str = "") -> str:
    return (
        f"{folder} holds gates alone, and their base {name} is no folder here{reason}: put it beside this folder, or "
        f"give its place as {BASE_KEYS[0]} in config.json"
    )


def known_digest(folder: Path) -> str:
    """Return a folder's `weights_digest`, computed once in a process while its files stay as they are."""
    files = [folder / "config.json", *weight_files(folder)]
    stamps = [(path.name, stat.st_size, stat.st_mtime_ns) for path in files if (stat := path.stat())]
    return _digest_of(folder.resolve(), tuple(stamps))


@lru_cache
def _digest_of(folder: Path, stamps: tuple[Any, ...]) -> str:
    return weights_digest(folder)


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder; an adapter's is the last, after those of its base.

    Raises:
        FileNotFoundError, ValueError: it has none, or a damaged index; see `find_base`.
    """
    if is_adapter(folder):
        return [*weight_files(find_base(folder)), folder / GATES_NAME]
    index = folder / INDEX_NAME
    if not index.is_file() and not (folder / SINGLE_NAME).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}: only safetensors weights are read (no pickle)"
        )
    names = set(_read_index(index).values()) if index.is_file() else {SINGLE_NAME}
    return [folder / name for name in sorted(names)]
