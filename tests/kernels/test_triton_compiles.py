"""Every Triton kernel compiles for a GPU, which needs none: it finds what the interpreter lets pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import compiled_kernels
from compiled_kernels import SHARED_MEMORY, compile_kernels, main

from dmc.kernels.triton import decode
from dmc.kernels.triton.decode import Tuning

SPILLED = 16
"""Bytes of a thread's stack that a kernel may take, to which registers spill."""
MEASURED = {90: ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel")}
"""Kernels whose tiles are those that such a chip was fastest with, which says more than what they spill."""


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "names"),
    [
        (89, torch.bfloat16, 128, "attend|prefill"),
        (90, torch.bfloat16, 64, "row_losses|number_kernel|gather_kernel"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (90, torch.bfloat16, 128, ""),
                (86, torch.float32, 64, ""),
                (80, torch.bfloat16, 128, "attend|enter_chunk|forward|query_gradient|key_gradient"),
                (86, torch.float32, 128, "attend|prefill|enter_chunk"),  # the least shared memory, the widest tiles
            )
        ),
    ],
    ids=str,
)
def test_kernels_compile_for_a_gpu_spill_nothing_and_fit_its_shared_memory(
    capability: int, dtype: torch.dtype, head_dim: int, names: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    table = compile_kernels(capability, dtype, head_dim, names)
    assert table["kernel"].nunique() == (names.count("|") + 1 if names else 28)
    is_guessed = ~table["kernel"].isin(MEASURED.get(capability, ()))
    assert (table["stack"] <= SPILLED)[is_guessed].all(), table
    assert (table["shared"] <= SHARED_MEMORY[capability]).all(), table
    attend = table[table["kernel"] == "_attend_kernel"]
    assert (attend["programs"] >= (Tuning().programs if dtype.itemsize * head_dim <= 256 else 1)).all(), attend
    prefill = table[(table["kernel"] == "_prefill_kernel") & ~table["8-bit pages"]]
    assert capability != 90 or (prefill["programs"] >= 2).all(), prefill
    loops = table[table["kernel"].isin(("_attend_kernel", "_prefill_kernel"))]
    assert (loops["in flight"] >= 3).all(), loops  # the next tile: a table's entries, keys and values


def test_as_many_parts_as_a_gpu_merges_at_once_spill_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, most = decode.MERGED_TOGETHER  # a CPU's few programs leave few parts
    monkeypatch.setattr(decode, "MERGED_TOGETHER", (most, most))
    table = compile_kernels(90, torch.bfloat16, 128, "_merge_kernel")
    assert len(table) and (table["stack"] <= SPILLED).all(), table


def test_no_number_of_sequences_compiles_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constants(compiled_kernels.Compiled):
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **constants: self._rows.append({"kernel": f"{self._kernel.__name__} {constants}"})

    monkeypatch.setattr(compiled_kernels, "Compiled", Constants)
    found = []
    for count in (1, 3, 200):
        monkeypatch.setattr(compiled_kernels, "BATCH", count)
        found.append({*compile_kernels(80, torch.bfloat16, 128)["kernel"]})
    assert found[0] == found[1] == found[2] and len(found[0]) >= 25


def test_the_table_of_binaries_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = ["--capabilities", "80", "--dtypes", "float16", "--head_dims", "64", "--kernels", "merge"]
    monkeypatch.setattr(sys, "argv", ["compiled_kernels.py", *options, "--output", str(tmp_path / "out")])
    main()
    (row,) = pandas.read_csv(tmp_path / "out" / "compiled_kernels.csv").to_dict("records")
    assert (row["kernel"], row["sm"], row["dtype"], row["head_dim"]) == ("_merge_kernel", 80, "float16", 64)
    assert "sm_80, float16, heads of 64" in capsys.readouterr().out
