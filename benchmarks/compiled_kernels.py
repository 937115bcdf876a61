"""Compile every Triton kernel for GPUs that are not there: registers, spills, shared memory, and what is held at once.

python benchmarks/compiled_kernels.py
python benchmarks/compiled_kernels.py --capabilities 86 --dtypes float32 --head_dims 64 128

"stack" is what registers spill to, in bytes of a thread; "programs" how many a multiprocessor holds at once; "in
flight" how many groups of asynchronous copies a loop leaves under way while it computes, none without such copies.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas
import torch
import triton
from decode_kernels import empty_layer
from timings import add_output_option
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dmc.compression import CompressionConfig
from dmc.kernels.base import LayerCache, NewTokens, OpenSlotState, Recent, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.triton import append, append_chunk, compaction, decode, evict_one, prefill, received
from dmc.models import fused_losses, token_loss_kernel
from dmc.models.masked_attention import fused, kept_keys, kernels

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that one program may use, by compute capability; the system takes 1 KiB more for each."""
REGISTERS, THREADS, PROGRAMS = 64 * 1024, {80: 2048, 86: 1536, 89: 1536, 90: 2048}, {80: 32, 86: 16, 89: 24, 90: 32}
"""Of a multiprocessor."""
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
BATCH, KV_HEADS, GROUP, LENGTH, DELAY = 2, 2, 4, 640, 4
"""What kernels are launched with: all that they are compiled for anew is their constants."""


class Compiled:
    """Stands for a kernel: compiles it for what it is launched with, and launches nothing."""

    def __init__(self, kernel: Any, capability: int, rows: list[dict[str, Any]]) -> None:
        self._kernel, self._capability, self._rows = kernel, capability, rows

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
            names = self._kernel.arg_names
            values = dict(zip(names, arguments, strict=False)) | constants
            signature = {name: type_of(name, values[name], constants) for name in names}
            is_fixed = [signature[name] == "constexpr" for name in names]
            fixed = {(i,): values[name] for i, name in enumerate(names) if is_fixed[i]}
            aligned = {
                path: [["tt.divisibility", 16]]
                for i, name in enumerate(names)
                for path, kind, value in leaves_of((i,), signature[name], values[name])
                if str(kind).startswith("*") or (kind == "i32" and value % 16 == 0)
            }
            source = ASTSource(self._kernel, signature=signature, constexprs=fixed, attrs=aligned)
            target = GPUTarget("cuda", self._capability, 32)
            binary = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})
            used, shared = resources_of(binary.asm["cubin"]), binary.metadata.shared
            held = programs_per_multiprocessor(self._capability, used["REG"], 32 * num_warps, shared)
            in_flight = [int(number) for number in re.findall(r"cp\.async\.wait_group\s+(\d+)", binary.asm["ptx"])]
            tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
            found = {
                "kernel": self._kernel.__name__,
                "8-bit pages": any(tensor.dtype == torch.int8 for tensor in tensors),
                "registers": used["REG"],
                "stack": used["STACK"],
                "shared": shared,
                "programs": held,
                "in flight": max(in_flight, default=0),
            }
            self._rows.append(found)

        return launch


class LaunchesNothing:
    """Stands for a kernel that nobody asks for."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **constants: None


def type_of(name: str, value: Any, constants: dict[str, Any]) -> Any:
    if name in constants or value is None:
        return "constexpr"
    if isinstance(value, tuple):
        return tuple(type_of("", part, {}) for part in value)
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def leaves_of(path: tuple[int, ...], kind: Any, value: Any) -> list[tuple[tuple[int, ...], Any, Any]]:
    """Return where an argument's parts are, a tuple's or its own, with their types."""
    if not isinstance(kind, tuple):
        return [(path, kind, value)]
    return [((*path, i), *pair) for i, pair in enumerate(zip(kind, value, strict=True))]


def resources_of(cubin: bytes) -> dict[str, int]:
    """Read what NVIDIA's tool says of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}


def programs_per_multiprocessor(capability: int, registers: int, threads: int, shared: int) -> int:
    """Programs that one multiprocessor holds at once; registers come by 8 a thread."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    by_memory = (SHARED_MEMORY[capability] + 1024) // (shared + 1024)
    return min(by_registers, by_memory, THREADS[capability] // threads, PROGRAMS[capability])


def layer_of(config: CompressionConfig | None, dtype: torch.dtype, head_dim: int, in_8_bits: bool) -> LayerCache:
    """Make a layer with all that kernels may write; nobody does."""
    layer = empty_layer(config, (BATCH, KV_HEADS), LENGTH, torch.empty(16, head_dim, dtype=dtype))
    mean = {"mean": torch.empty(BATCH, KV_HEADS, 2 * head_dim), "weight": torch.empty(BATCH, KV_HEADS)}
    eights: dict[str, Any] = {}
    if in_8_bits:
        scales = torch.empty(*layer.key_pages.shape[:2], 1)
        eights = {"key_scales": scales, "value_scales": scales}
        eights |= {name: getattr(layer, name).to(torch.int8) for name in ("key_pages", "value_pages")}
    return dataclasses.replace(layer, **(mean | eights))


def tokens_of(num_new: int, delay: int, dtype: torch.dtype, head_dim: int) -> tuple[ForwardBatch, NewTokens]:
    batch = ForwardBatch(list(range(BATCH)), [15] * BATCH, [num_new] * BATCH)
    tables = torch.empty(BATCH * (num_new + delay), head_dim, dtype=dtype)
    batch.rotary = tables, tables
    states, gates = torch.empty(BATCH * num_new, KV_HEADS, head_dim, dtype=dtype), (BATCH * num_new, KV_HEADS)
    return batch, NewTokens(states, states, torch.empty(gates, dtype=torch.bool), torch.empty(gates))


def launch_all(dtype: torch.dtype, head_dim: int) -> None:
    """Launch every kernel in every form that differs by more than numbers."""
    for in_8_bits in (False, True):
        for config in (None, CompressionConfig(window_size=None), CompressionConfig(delay=DELAY)):
            layer = layer_of(config, dtype, head_dim, in_8_bits)
            for num_new in (20, 1):
                batch, tokens = tokens_of(num_new, 0 if config is None else config.delay, dtype, head_dim)
                recent = append.append_or_merge(layer, batch, tokens, config).recent
        pages, rows = (layer.key_pages, layer.value_pages, layer.block_tables), batch.row_index
        query = torch.empty(BATCH, GROUP * KV_HEADS, head_dim, dtype=dtype)
        for options in ({}, {"recent": recent}, {"return_scores": True}):  # the two never come together
            decode.paged_attention(query, *pages, layer.lengths, 0.1, scales=layer.scales, rows=rows, **options)
        batch, tokens = tokens_of(20, DELAY, dtype, head_dim)
        around, with_held_back = tokens_of(20 + DELAY - 1, 0, dtype, head_dim)
        seen = VisibleKeys(
            torch.empty(batch.num_tokens, KV_HEADS, dtype=torch.int32),
            OpenSlotState(tokens.key, tokens.value, torch.empty(batch.num_tokens, dtype=torch.bool)),
            Recent(with_held_back.key, with_held_back.value, torch.empty(around.num_tokens, dtype=torch.bool)),
        )
        query = torch.empty(batch.num_tokens, GROUP * KV_HEADS, head_dim, dtype=dtype)
        prefill.prefill_attention(query, *pages, batch, seen, 0.1, layer.scales)
        alone = VisibleKeys(seen.slots)
        _, lse = prefill.prefill_attention(query, *pages, batch, alone, 0.1, layer.scales, return_lse=True)
        received.attention_received(query, layer, batch, seen.slots, 0.1, lse)
        compaction.compact(layer, rows, torch.empty(BATCH, KV_HEADS, LENGTH, dtype=torch.bool))
    size, numbers = layer.key_pages.shape[:2], (BATCH, KV_HEADS)
    layer.entry_metadata = {"position": torch.empty(size, dtype=torch.int32), "mass": torch.empty(size)}
    one, counts = tokens_of(1, 0, dtype, head_dim)[0], torch.empty(numbers, dtype=torch.int64)
    written = {name: torch.empty(numbers, dtype=entry.dtype) for name, entry in layer.entry_metadata.items()}
    evict_one.write_metadata(layer, one, written)
    positions, mass = evict_one.read_metadata(layer, rows, ["position", "mass"], LENGTH)
    evict_one.add_attention(layer, rows, torch.empty(BATCH, GROUP * KV_HEADS, LENGTH), {"mass": 1}, LENGTH)
    evict_one.nth_newest(positions, counts)
    compaction.evict(layer, rows, evict_one.eviction_candidate(mass, positions, counts, counts[0]))


def launch_training(dtype: torch.dtype, head_dim: int) -> None:
    """Launch the kernels of training's attention: one range, two with documents and padding, a window, skipped keys."""
    shapes = [(GROUP * KV_HEADS,), *[(KV_HEADS,)] * 4]
    states = [torch.empty(BATCH, LENGTH, *heads, head_dim, dtype=dtype).transpose(1, 2) for heads in shapes]
    log_keep, log_sum_exp = (torch.empty(BATCH, heads, LENGTH) for heads in (KV_HEADS, GROUP * KV_HEADS))
    hidden, first = torch.empty(BATCH, LENGTH, dtype=torch.bool), torch.empty(BATCH, LENGTH, dtype=torch.int32)
    plain, full = (log_keep, None, None, None, None, None), (log_keep, *states[3:], hidden, first, first)
    with patch.object(torch.cuda, "device_of", contextlib.nullcontext):
        forms = [(plain, 0, None), (full, DELAY, None), ((None,) * 6, 0, LENGTH // 2)]
        for others, delay, window, skip_below in [*((*form, None) for form in forms), (plain, 0, None, -30.0)]:
            fused.fused_attention._init_fn(*states[:3], *others, 0.1, delay, True, window, skip_below)
            result = (states[0], log_sum_exp, 0.1, delay, True, window, skip_below)
            fused.fused_attention_backward._init_fn(states[0], *states[:3], *others, *result)


def launch_losses(dtype: torch.dtype) -> None:
    """Launch the kernel of the losses over a vocabulary: from text alone, and from a teacher."""
    logits, targets, weights = torch.empty(BATCH, LENGTH), torch.empty(BATCH, dtype=torch.int64), torch.empty(BATCH)
    with patch.object(torch.cuda, "device_of", contextlib.nullcontext):
        for theirs, by in ((None, None), (logits, weights)):
            fused_losses.row_losses._init_fn(logits, theirs, targets, weights, by, 1.0, False, dtype)


def compile_kernels(capability: int, dtype: torch.dtype, head_dim: int, names: str = "") -> pandas.DataFrame:
    """Compile the kernels whose names match, or all, for a GPU; give a row for each binary."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        for module in (
            append,
            append_chunk,
            decode,
            prefill,
            received,
            compaction,
            evict_one,
            kernels,
            kept_keys,
            token_loss_kernel,
        ):
            for name, kernel in [item for item in vars(module).items() if item[0].endswith("_kernel")]:
                stand_in = Compiled(kernel, capability, rows) if re.search(names, name) else LaunchesNothing()
                stack.enter_context(patch.object(module, name, stand_in))
        for module in (prefill, fused):
            stack.enter_context(patch.object(module, "major_capability", lambda device: capability // 10))
        launch_all(dtype, head_dim)
        launch_training(dtype, head_dim)
        launch_losses(dtype)
    table = pandas.DataFrame(rows).drop_duplicates()
    return table.assign(sm=capability, dtype=str(dtype).removeprefix("torch."), head_dim=head_dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="*", choices=SHARED_MEMORY, default=list(SHARED_MEMORY))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--head_dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--kernels", default="", help="regular expression of names, such as attend|prefill; all")
    add_output_option(parser)
    options = parser.parse_args()
    tables = []
    for settings in itertools.product(options.capabilities, options.dtypes, options.head_dims):
        capability, dtype, head_dim = settings
        tables.append(compile_kernels(capability, getattr(torch, dtype), head_dim, options.kernels))
        print(f"sm_{capability}, {dtype}, heads of {head_dim}\n{tables[-1].to_string(index=False)}\n", flush=True)
        path = Path(options.output) / "compiled_kernels.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        pandas.concat(tables).to_csv(path, index=False)


if __name__ == "__main__":
    main()
