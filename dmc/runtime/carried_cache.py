"""Carried caches: what a session holds, written into a folder, from which engines of the same kind go on.

The folder has the tensors (safetensors) and a description: what they belong to, and a checksum. Which tensors there are
follows from the cache's declared fields.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import StrictInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dmc.config.settings import build_config, checked_dataclass
from dmc.files import flattened, read_mapping, refuse_occupied, replacement
from dmc.policies import CachePolicy
from dmc.ranks import Ranks
from dmc.runtime.engine_core import EngineCore
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.request import Sequence
from dmc.runtime.snapshot import Snapshot

FORMAT = 1
"""Version of the files; another one is refused."""
DESCRIPTION_NAME, TENSORS_NAME = "cache.json", "cache.safetensors"
PACKAGES = ("dmc-retrofit", "torch", "transformers")
UNRELATED = {
    *("_name_or_path", "architectures", "transformers_version", "use_cache"),
    *("compression", "dtype", "model_type"),
}
"""Keys of a model's configuration that do not change its cache, or are compared apart."""
TABLES = ("block_tables", "ring_tables")
"""Fields that are made anew."""
ELEMENTS = 1024
"""Parts of each weight whose bits are summed for the fingerprint, if it has as many; an element of each enters too."""
CHUNK = 2**24
"""Bytes of a file that are hashed together."""


@checked_dataclass(frozen=True)
class Description:
    """What belongs to the tensors of a carried cache."""

    format: StrictInt
    save_id: str
    """The same in the files that all ranks have written together."""
    sha256: str
    """See `file_hash`."""
    identity: dict[str, Any]
    """See `identity_of`."""
    versions: dict[str, str]
    """Of the packages that wrote it; nothing is refused because of them."""


def save(core: EngineCore, policy: CachePolicy | None, sequence: Sequence, folder: Path, overwrite: bool) -> None:
    """Write the cache of a sequence that rests; see `Engine.save`."""
    core.settle()
    cache, ranks = core.cache, core.cache.layout.ranks
    if (reason := core.scheduler.why_not_shared(sequence)) is not None:
        raise ValueError(reason)
    (save_id, *_) = ranks.all_gather_object(uuid.uuid4().hex)

    def write() -> None:
        _check_around(folder, ranks)
        with replacement(_place(folder, ranks), overwrite, marker=DESCRIPTION_NAME) as partial:
            save_file(_tensors_of(sequence) | _tensors_in(cache, sequence), partial / TENSORS_NAME)
            description = Description(
                format=FORMAT,
                save_id=save_id,
                sha256=file_hash(partial / TENSORS_NAME),
                identity=identity_of(core.runner.model, cache, policy),
                versions={package: importlib.metadata.version(package) for package in PACKAGES},
            )
            (partial / DESCRIPTION_NAME).write_text(json.dumps(dataclasses.asdict(description), indent=1) + "\n")

    ranks.run_on_all(write)


def check_can_save(folder: Path, overwrite: bool, ranks: Ranks, policy: CachePolicy | None) -> None:
    """Check, before a model is loaded and a long text is read, that this rank may save its cache in a folder.

    Raises:
        FileExistsError: see `refuse_occupied`; or the folder of several ranks holds something else.
        ValueError: the policy keeps something outside the pages.
    """
    if policy is not None and policy.why_not_copied is not None:
        raise ValueError(policy.why_not_copied)
    _check_around(folder, ranks)
    refuse_occupied(_place(folder, ranks), overwrite, marker=DESCRIPTION_NAME)


def load(core: EngineCore, policy: CachePolicy | None, folder: Path) -> Sequence:
    """Read a sequence that `save` has written, and let it rest; see `Engine.load`."""
    core.settle()
    cache, ranks = core.cache, core.cache.layout.ranks
    save_id, tensors = ranks.run_on_all(lambda: _read(_place(folder, ranks), core, policy))
    if len(set(ranks.all_gather_object(save_id))) > 1:
        raise ValueError(f"{folder} is damaged: its ranks were not saved together; save the session again")
    lengths = tensors["row.lengths"]
    sequence = Sequence(
        tensors["tokens"].tolist(),
        next_logit_position=len(tensors["tokens"]),
        kept=True,
        prompts=[(begin, end) for begin, end in tensors["prompts"].tolist()],
        next_prompt=int(tensors["next_prompt"]),
    )

    def open_row() -> int:
        used = _slots_used(lengths, cache.block_size)
        tables = torch.zeros(used.shape, dtype=torch.int32, device=used.device)
        tables[used > 0] = cache.take(int((used > 0).sum()))
        fields = cache.fields
        fields.write_blocks(tables[used > 0].long(), {name: tensors[f"block.{name}"] for name in _kept(cache, "block")})
        states = {name: tensors[f"row.{name}"] for name in _kept(cache, "row")} | {"block_tables": tables}
        row = cache.open_row(Snapshot(int(tensors["tokens_seen"]), states), moves=True)
        cache.free.count()
        return row

    core.scheduler.adopt(sequence, int((_slots_used(lengths, cache.block_size) > 0).sum()), open_row)
    return sequence


def _read(folder: Path, core: EngineCore, policy: CachePolicy | None) -> tuple[str, dict[str, Tensor]]:
    """Read and check a folder.

    Raises:
        FileNotFoundError: it holds no carried cache.
        ValueError: the cache is damaged, or belongs to another engine.
    """
    description = _read_description(folder)
    _refuse_others(folder, description.identity, identity_of(core.runner.model, core.cache, policy))
    path = folder / TENSORS_NAME
    damaged = f"{path} is damaged or cut off: copy it again, or save the session again"
    if not path.is_file() or file_hash(path) != description.sha256:
        raise ValueError(damaged)
    try:
        tensors = load_file(path, device=str(core.cache.layout.device))
    except SafetensorError:
        raise ValueError(damaged) from None
    if not _fits(tensors, core.cache):
        raise ValueError(damaged)
    return description.save_id, tensors


def _read_description(folder: Path) -> Description:
    path = folder / DESCRIPTION_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no saved cache: there is no {path.name}, which Engine.save writes; several ranks need a "
            "folder each"
        )
    values = read_mapping(path)
    if values.get("format") != FORMAT:
        raise ValueError(f"{path} has format {values.get('format')!r:.80}, expected {FORMAT}: save the session again")
    return build_config(Description, values, str(path))


def _refuse_others(folder: Path, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise ValueError for the first difference."""
    theirs, ours = flattened(saved), flattened(present)
    for key in dict.fromkeys((*ours, *theirs)):
        was, now = theirs.get(key), ours.get(key)
        if was != now:
            raise ValueError(
                f"{folder} is the cache of another engine: {key} was {was!r:.80} there, it is {now!r:.80} here"
            )


def identity_of(model: Any, cache: PagedCache, policy: CachePolicy | None) -> dict[str, Any]:
    """Describe what a cache belongs to, as JSON has it: model, gates, policy and pages, the most telling first."""
    layout, config = cache.layout, model.config.to_dict()
    fields = {
        field.name: [str(field.dtype), field.per, field.shape, field.every, field.num_layers]
        for field in layout.fields
        if field.name not in TABLES
    }
    identity = {
        "model_type": model.config.model_type,
        "gates": {"action": None} if layout.compression is None else layout.compression.to_dict(),
        "policy": {"method": None} if policy is None else _options_of(policy),
        "pages": {
            "dtype": str(layout.page_dtype or layout.dtype),
            "block_size": cache.block_size,
            "layers": [layout.num_layers, *layout.rings],
        },
        "ranks": {"rank": layout.ranks.rank, "size": layout.ranks.size},
        "config": {key: value for key, value in sorted(config.items()) if key not in UNRELATED},
        "fields": fields,
        "weights": fingerprint(model),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return plain


def _options_of(policy: CachePolicy) -> dict[str, Any]:
    options: Any = dataclasses.asdict(policy) if dataclasses.is_dataclass(policy) else vars(policy)  # type: ignore[call-overload]
    content = {"files": [file_hash(path) for path in policy.files]} if policy.files else {}
    return {"method": f"{type(policy).__module__}.{type(policy).__qualname__}", **options, **content}


def fingerprint(model: nn.Module) -> str:
    """Hash the weights of a model where they are: of each the name, type and shape, sums of its bits, and a sample.

    A part's sum changes with any single number, parts and sample show which order they are in. Weights that hooks have
    offloaded are read for this.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        if weight.is_meta and (weight := _offloaded(model, name)) is None:
            continue
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = weight.detach().contiguous().flatten().view(kinds.get(weight.itemsize, torch.uint8))
        size = -(-bits.numel() // ELEMENTS) or 1
        whole = bits[: bits.numel() // size * size]
        sums = whole.view(-1, size).sum(-1, dtype=torch.int64), bits[len(whole) :].sum(dtype=torch.int64)[None]
        digest.update(torch.cat((*sums, bits[::size].long())).cpu().numpy().tobytes())
    return digest.hexdigest()


def _offloaded(model: nn.Module, name: str) -> Tensor | None:
    """Return a weight that accelerate's hooks keep in the host's memory or on disk, or None."""
    owner, _, leaf = name.rpartition(".")
    hook = getattr(model.get_submodule(owner), "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if (weights := getattr(one, "weights_map", None)) is not None and leaf in weights:
            found: Tensor = weights[leaf]
            return found
    return None


def file_hash(path: Path) -> str:
    """Return the SHA-256 of the SHA-256 of a file's chunks, which several threads compute."""

    def hash_of(begin: int) -> bytes:
        with path.open("rb") as file:
            file.seek(begin)
            return hashlib.sha256(file.read(CHUNK)).digest()

    with ThreadPoolExecutor() as threads:
        return hashlib.sha256(b"".join(threads.map(hash_of, range(0, path.stat().st_size, CHUNK)))).hexdigest()


def _place(folder: Path, ranks: Ranks) -> Path:
    """Return where a rank's files are."""
    return folder if ranks.size == 1 else folder / f"rank-{ranks.rank}-of-{ranks.size}"


def _check_around(folder: Path, ranks: Ranks) -> None:
    """Check that what holds the folders of several ranks holds nothing else, such as a model."""
    there = sorted(path.name for path in folder.iterdir()) if ranks.size > 1 and folder.is_dir() else []
    if others := [name for name in there if not name.lstrip(".").startswith("rank-")]:
        raise FileExistsError(f"{folder} holds {others[0]}, which is no rank's cache: give another folder")


def _kept(cache: PagedCache, per: str) -> list[str]:
    """Return the names of the fields that are written of rows, but for what is made anew, or of blocks."""
    names = cache.fields.names("row") if per == "row" else cache.fields.names("slot", "block")
    return [name for name in names if name not in TABLES]


def _tensors_of(sequence: Sequence) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor(sequence.tokens),
        "prompts": torch.tensor(sequence.prompts, dtype=torch.long).view(-1, 2),
        "next_prompt": torch.tensor(sequence.next_prompt),
        "tokens_seen": torch.tensor(sequence.num_computed_tokens),
    }


def _tensors_in(cache: PagedCache, sequence: Sequence) -> dict[str, Tensor]:
    """Copy a sequence's fields: those of its row, [layers, ...], and all heads' blocks in turn, [n, ...]."""
    assert sequence.row is not None
    states = cache.read_row(sequence.row)
    tables = states["block_tables"]
    used = _slots_used(states["lengths"], cache.block_size, tables.shape[-1])
    blocks = cache.fields.read_blocks(tables[used > 0].long(), used[used > 0])
    tensors = {f"row.{name}": states[name] for name in _kept(cache, "row")}
    tensors |= {f"block.{name}": states for name, states in blocks.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _slots_used(lengths: Tensor, block_size: int, width: int | None = None) -> Tensor:
    """Return how many slots of each block of each head hold an entry, [L, H, M]; lengths [L, H]."""
    width = -(-int(lengths.max()) // block_size) if width is None else width
    begins = torch.arange(width, device=lengths.device) * block_size
    return (lengths[..., None] - begins).clamp(0, block_size)


def _fits(tensors: dict[str, Tensor], cache: PagedCache) -> bool:
    """Whether these are the tensors of a sequence of this cache."""
    fields, layout = cache.fields, cache.layout
    counts = {name: tensors.get(name, torch.empty(0)) for name in ("tokens", "prompts", "next_prompt", "tokens_seen")}
    lengths = tensors.get("row.lengths")
    if any(count.dtype != torch.long for count in counts.values()) or lengths is None:
        return False
    seen, num_tokens = counts["tokens_seen"], counts["tokens"].numel()
    limits = [num_tokens] * layout.num_layers + list(layout.rings)
    if seen.numel() != 1 or not 0 < int(seen) <= num_tokens or len(lengths) != len(limits):
        return False
    if bool((lengths < 0).any()) or bool((lengths.amax(-1).cpu() > torch.tensor(limits)).any()):
        return False
    num_blocks = int((-(-lengths // cache.block_size)).sum())
    expected = {f"row.{name}": (fields[name].dtype, [*fields[name][:, 0].shape]) for name in _kept(cache, "row")}
    for name in _kept(cache, "block"):
        expected[f"block.{name}"] = fields[name].dtype, [num_blocks, *fields[name].shape[1:]]
    found = {name: (tensor.dtype, [*tensor.shape]) for name, tensor in tensors.items() if name not in counts}
    return found == expected
