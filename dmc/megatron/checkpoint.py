"""Read the ranks of a Megatron checkpoint as tensors and plain arguments; no code named in a file is run."""

from __future__ import annotations

import argparse
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmc.files import flattened

TRACKER = "latest_checkpointed_iteration.txt"
FILE_NAMES = ("model_optim_rng.pt", "model_rng.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
INERT = ("megatron.", "numpy.", "_io.BytesIO")
"""Name prefixes of the other objects in checkpoints: enums, states of random generators, FP8 scales."""
SYNONYMS = (
    ("language_model.encoder.", "decoder."),
    ("language_model.", ""),
    (".input_norm.weight", ".self_attention.linear_qkv.layer_norm_weight"),
    (".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"),
    (".post_attention_norm.weight", ".mlp.linear_fc1.layer_norm_weight"),
    (".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"),
    (".query_key_value.", ".linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".dense_h_to_4h.", ".linear_fc1."),
    (".dense_4h_to_h.", ".linear_fc2."),
    (".final_norm.", ".final_layernorm."),
)
"""Names in legacy models and in layers without Transformer Engine, and the names of Megatron-Core with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors stay in memory-mapped files until they are used."""

    arguments: dict[str, Any]
    """Megatron's arguments, as stored or given."""
    shards: dict[str, list[Tensor]]
    """Each tensor-parallel rank's shard of every tensor; layers are numbered across all pipeline stages."""

    @property
    def tensor_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return len(next(iter(self.shards.values())))


class Inert:
    """Placeholder for an object of a checkpoint that the weights do not need; discards its state."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_checkpoint(folder: Path, given: dict[str, Any]) -> Checkpoint:
    """Open all ranks of a checkpoint.

    Args:
        folder: of one iteration (with `mp_rank_00` in it), or the folder of several with its tracker file.
        given: arguments that override the stored ones.
    Raises:
        FileNotFoundError: there is no such folder, or a rank is missing.
        ValueError: the folder holds no checkpoint, or one of an unsupported kind.
    """
    stages = rank_files(iteration_folder(folder))
    arguments: dict[str, Any] = {}
    shards: dict[str, list[Tensor]] = {}
    first_layer = 0
    for stage in stages:
        names: set[str] = set()
        for path in stage:
            content = read_rank(path)
            arguments = arguments or vars(content.get("args") or argparse.Namespace())
            tensors = {renumbered(name, first_layer): tensor for name, tensor in tensors_of(content, path).items()}
            for name, tensor in tensors.items():
                shards.setdefault(name, []).append(tensor)
            names |= set(tensors)
        uneven = next((name for name in sorted(names) if len(shards[name]) != len(stage)), None)
        if uneven is not None:
            raise ValueError(f"{stage[0].parents[1]}: not every tensor-parallel rank holds {uneven}: copy it again")
        first_layer = 1 + max((int(found[0]) for name in names if (found := LAYER.search(name))), default=-1)
    arguments = {**arguments, **given}
    sizes = tuple(arguments.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline"))
    if sizes[0] > len(stages[0]) or sizes[1] > len(stages):
        raise FileNotFoundError(
            f"{folder} holds {len(stages[0])} tensor x {len(stages)} pipeline ranks, its arguments say {sizes[0]} x "
            f"{sizes[1]}: copy the missing mp_rank folders"
        )
    return Checkpoint(arguments, shards)


def iteration_folder(folder: Path) -> Path:
    """Return the folder that holds the ranks: the given one, or the one its tracker names.

    Raises:
        FileNotFoundError, ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give the folder of a Megatron checkpoint")
    tracker = folder / TRACKER
    found = folder
    if not any(folder.glob("mp_rank_*")) and tracker.is_file():
        latest = tracker.read_text().strip()
        if not latest.isdecimal() and (latest == ".." or Path(latest).name != latest):
            raise ValueError(f"{tracker} names {latest!r}: expected a number, or release; copy the checkpoint again")
        found = folder / (f"iter_{int(latest):07d}" if latest.isdecimal() else latest)
    if (found / ".metadata").is_file() or (found / "metadata.json").is_file():
        raise ValueError(
            f"{found} is a distributed checkpoint: let Megatron save it with --ckpt-format torch, one file a rank"
        )
    if not any(found.glob("mp_rank_*")):
        raise ValueError(f"{found} holds no mp_rank_00: it is not a Megatron checkpoint with one file for each rank")
    return found


def rank_files(folder: Path) -> list[list[Path]]:
    """List the file of every rank, by pipeline stage and tensor-parallel rank.

    Raises:
        FileNotFoundError: a rank or its file is missing.
        ValueError: a folder's name is not one of Megatron's, or belongs to experts.
    """
    folders: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = RANK_FOLDER.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: expected mp_rank_00 or mp_rank_00_000 (tensor and pipeline rank, no experts)")
        folders[int(match[2] or 0), int(match[1])] = path
    num_stages, tensor_size = (1 + max(ranks) for ranks in zip(*folders, strict=True))
    stages: list[list[Path]] = []
    for stage in range(num_stages):
        stages.append([])
        for rank in range(tensor_size):
            if (stage, rank) not in folders:
                raise FileNotFoundError(
                    f"{folder} lacks tensor-parallel rank {rank} of pipeline stage {stage}, but holds others of "
                    f"{tensor_size} x {num_stages}: copy the missing mp_rank folder"
                )
            files = [folders[stage, rank] / name for name in FILE_NAMES]
            present = next((file for file in files if file.is_file()), None)
            if present is None:
                raise FileNotFoundError(f"{files[0]} is missing: copy the whole checkpoint again")
            stages[-1].append(present)
    return stages


def read_rank(path: Path) -> dict[str, Any]:
    """Read one rank's file, its tensors memory-mapped.

    Raises:
        ValueError: the file is damaged or foreign, or names code beyond tensors and Megatron's arguments.
    """
    foreign = ValueError(f"{path} is cut off or was not written by torch.save: copy it again")
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except (ValueError, RuntimeError, OSError):
            raise foreign from None
        refused = sorted(name for name in named if not name.startswith(INERT))
        if refused:
            raise ValueError(f"{path} would run {', '.join(refused)}: only tensors and Megatron's arguments are read")
        with torch.serialization.safe_globals([(Inert, name) for name in named]):
            try:
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except (RuntimeError, OSError, pickle.UnpicklingError):
                raise foreign from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        kind = "a virtual pipeline" if isinstance(content, dict) and "model0" in content else "no Megatron model"
        raise ValueError(f"{path} holds {kind}: expected the weights of one model under the key 'model'")
    version = content.get("checkpoint_version", 3.0)
    if version < 2:
        raise ValueError(f"{path} has checkpoint_version {version}, whose queries are ordered otherwise: expected >= 2")
    return content


def tensors_of(content: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights of a rank under the names of `dmc.megatron.mapping`, the layers numbered from 0.

    Raises:
        ValueError: one of them is not a tensor.
    """
    tensors = {}
    for name, value in flattened(content["model"]).items():
        if name.endswith(("_extra_state", ".inv_freq")) or value == {}:
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{path}: {name} is a {type(value).__name__}, expected a tensor")
        for synonym, core_name in SYNONYMS:
            name = name.replace(synonym, core_name)
        tensors[name] = value
    return tensors


def renumbered(name: str, first_layer: int) -> str:
    """Add `first_layer` to the layer's number in `name`: each pipeline stage counts its own layers from 0."""
    return LAYER.sub(lambda found: str(int(found[0]) + first_layer), name)
