"""Every Triton kernel compiles for a GPU, which needs none: it finds what the interpreter lets pass."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.cache_layers import Stream, make_layer

from dmc.compression import CompressionConfig
from dmc.kernels import reference
from dmc.kernels.batch import ForwardBatch

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dmc.kernels.triton import append, attention, compaction, eviction, prefill  # noqa: E402

SHARED_MEMORY = {86: 99 * 1024, 90: 227 * 1024}
"""Bytes that one program may use, by compute capability."""
REGISTERS, THREADS, PROGRAMS = 64 * 1024, {86: 1536, 90: 2048}, {86: 16, 90: 32}
"""Of a multiprocessor."""
SPILLED = 8
"""Bytes of a thread's stack that a kernel may take, to which registers spill."""
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.bool: "*i1",
}


def resources_of(cubin: bytes) -> dict[str, int]:
    """Read what NVIDIA's tool says of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}


def blocks_per_multiprocessor(capability: int, registers: int, threads: int, shared: int) -> int:
    """Programs that one multiprocessor holds at once: registers come by 8 a thread, 1 KiB of memory is the system's."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    by_memory = (SHARED_MEMORY[capability] + 1024) // (shared + 1024)
    return min(by_registers, by_memory, THREADS[capability] // threads, PROGRAMS[capability])


class Compiled:
    """Stands for a kernel: compiles it for what it is launched with, and launches nothing."""

    def __init__(self, kernel: Any, target: Any) -> None:
        self.kernel, self.target, self.shared_memory = kernel, target, []
        self.used: list[dict[str, int]] = []
        """Of each binary: registers of a thread, bytes of its stack, to which registers spill, and threads."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, **constants: Any) -> None:
            values = dict(zip(self.kernel.arg_names, arguments, strict=False)) | constants
            signature = {name: self.type_of(name, values[name], constants) for name in self.kernel.arg_names}
            fixed = {
                (index,): values[name]
                for index, name in enumerate(self.kernel.arg_names)
                if signature[name] == "constexpr"
            }
            aligned = {
                (index,): [["tt.divisibility", 16]]
                for index, name in enumerate(self.kernel.arg_names)
                if str(signature[name]).startswith("*") or (signature[name] == "i32" and values[name] % 16 == 0)
            }
            source = ASTSource(self.kernel, signature=signature, constexprs=fixed, attrs=aligned)
            binary = triton.compile(source, target=self.target, options={"num_warps": num_warps})
            self.shared_memory.append(binary.metadata.shared)
            self.used.append({**resources_of(binary.asm["cubin"]), "THREADS": 32 * num_warps})

        return launch

    @staticmethod
    def type_of(name: str, value: Any, constants: dict[str, Any]) -> Any:
        if name in constants or value is None:
            return "constexpr"
        if isinstance(value, tuple):
            return tuple(POINTERS[each.dtype] for each in value)
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        return "fp32" if isinstance(value, float) else "i32"


@pytest.mark.parametrize(
    ("dtype", "capability", "head_dim"), [(torch.bfloat16, 90, 128), (torch.float32, 86, 64)], ids=str
)
def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(
    dtype: torch.dtype, capability: int, head_dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = []
    for module in (append, attention, prefill, compaction, eviction):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            compiled.append(Compiled(getattr(module, name), GPUTarget("cuda", capability, 32)))
            monkeypatch.setattr(module, name, compiled[-1])

    for config in (None, CompressionConfig(window_size=None), CompressionConfig(delay=4)):
        for in_8_bits in (False, True):
            layer = make_layer(config, head_dim=head_dim, max_blocks=40, dtype=dtype, in_8_bits=in_8_bits)
            stream = Stream(layer, config, rows=[2, 0], time=20)
            single = append.append_or_merge(layer, *stream.tokens(15, 16), config)
            if config is None or config.delay == 0:
                continue
            batch, tokens = stream.tokens(0, 20)
            seen = reference.append_or_merge(layer, batch, tokens, config)
            assert seen.top is not None and seen.recent is not None
            query, rows = torch.zeros(40, 8, head_dim, dtype=dtype), batch.row_index
            pages = layer.key_pages, layer.value_pages, layer.block_tables
            prefill.prefill_attention(query, *pages, batch, seen, 0.1, layer.scales)
            options = {"scales": layer.scales, "rows": rows, "recent": single.recent, "return_scores": True}
            attention.paged_attention(query[:2], *pages, layer.lengths, 0.1, **options)
            compaction.compact(layer, rows, torch.ones(2, 2, 40 * 16, dtype=torch.bool))
    layer.entry_metadata = {"position": torch.zeros(layer.key_pages.shape[:2], dtype=torch.int32)}
    layer.entry_metadata |= {name: torch.zeros(layer.key_pages.shape[:2]) for name in ("mass", "squares")}
    one, counts = ForwardBatch([2, 0], [20, 20], [1, 1]), torch.ones(2, 2, dtype=torch.int64)
    eviction.write_metadata(
        layer, one, {name: torch.zeros(2, 2, dtype=each.dtype) for name, each in layer.entry_metadata.items()}
    )
    positions, mass = eviction.read_metadata(layer, rows, ["position", "mass"], 600)
    eviction.add_attention(layer, rows, torch.zeros(2, 8, 640), {"mass": 1, "squares": 2}, 600)
    eviction.nth_newest(positions, counts)
    eviction.evict(layer, rows, eviction.eviction_candidate(mass, positions, counts, counts[0]))

    assert len(compiled) == 16
    for each in compiled:
        assert each.shared_memory, each.kernel.__name__
        assert max(each.shared_memory) <= SHARED_MEMORY[capability], each.kernel.__name__
        for used, shared in zip(each.used, each.shared_memory, strict=True):
            blocks = blocks_per_multiprocessor(capability, used["REG"], used["THREADS"], shared)
            row = (each.kernel.__name__, used["REG"], used["STACK"], shared, blocks)
            print(f"| sm_{capability} | {' | '.join(map(str, row))} |")  # pytest -s
            assert used["STACK"] <= SPILLED, row
            assert blocks >= 1, row
