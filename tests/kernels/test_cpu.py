import math
import multiprocessing
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from covering import cover

from dmc.kernels import cpu, cpu_build, load_backend, reference

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where kernels will lie; this process has not looked for any yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_build.load_library.cache_clear()
    yield tmp_path / "dmc" / "kernels"
    cpu_build.load_library.cache_clear()


def compiled_code_attends() -> bool:
    """Return whether it does, after three times of attending as the reference does."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(*shape, generator=generator) for shape in ((1, 4, 32), (6, 16, 32), (6, 16, 32)))
    tables = torch.tensor([[[4, 0, 2], [1, 5, 3]]], dtype=torch.int32)
    lengths = torch.tensor([[40, 17]], dtype=torch.int32)
    expected = reference.paged_attention(query, key, value, tables, lengths, 0.2)
    for _ in range(3):
        out = cpu.paged_attention(query, key, value, tables, lengths, 0.2)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
    return cpu.load_library() is not None


def test_loading_the_kernels_leaves_the_subnormal_numbers_of_the_process_alone() -> None:
    assert cpu.load_library() is not None
    assert sys.float_info.min / 2 > 0


def build_and_attend() -> None:
    warnings.simplefilter("error")
    sys.exit(0 if compiled_code_attends() else 1)


def test_processes_that_build_at_the_same_time_do_not_disturb_each_other(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (compiler := next(filter(None, map(shutil.which, cpu_build.COMPILERS)), None)) is None:
        pytest.skip("no C++ compiler")
    quick = nothing_built.parents[1] / "quick"
    quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CXX", str(quick))
    processes = [FORK.Process(target=build_and_attend) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    (built,) = nothing_built.iterdir()
    assert built.suffix == ".so"


def test_kernels_of_a_wheel_that_this_system_cannot_load_are_compiled_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.load_library() is None:
        pytest.skip("no C++ compiler")
    path = tmp_path / "cpu_avx2.so"
    path.write_bytes(b"made for another system")
    monkeypatch.setattr(cpu_build, "BUILT", {torch.backends.cpu.get_cpu_capability(): path})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cpu_build.load_library.__wrapped__() is not None


BROKEN = '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such instruction >&2\nexit 1\n'


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nonexistent/g++", "/nonexistent/g++ not found"),
        ("false", "returned non-zero exit status"),
        (BROKEN, "no such instruction"),
    ],
)
def test_without_a_compiler_that_works_the_reference_serves_after_one_warning(
    compiler: str, reason: str, nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == BROKEN:
        path = nothing_built.parents[1] / "broken"
        path.write_text(compiler)
        path.chmod(0o755)
        compiler = str(path)
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match="could not be built") as caught:
        assert not compiled_code_attends()
    (said,) = (str(warning.message) for warning in caught)
    assert reason in said and "install a C++ compiler" in said and "CXX" in said
    assert not [*nothing_built.glob("*")]


def openmp_runtimes() -> set[str]:
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {path for path in paths if "omp" in Path(path).name and ".so" in path}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_no_second_openmp_runtime_is_loaded() -> None:
    before = openmp_runtimes()
    if cpu.load_library() is None:
        pytest.skip("no C++ compiler")
    assert openmp_runtimes() == before


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 24), (torch.float32, 272), (torch.float16, 32)])
def test_what_is_not_compiled_is_served_by_the_reference_after_one_warning(dtype: torch.dtype, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, head_dim, generator=generator).to(dtype)
    key, value = (torch.randn(3, 16, head_dim, generator=generator).to(dtype) for _ in range(2))
    pages = key, value, torch.tensor([[[2, 0], [1, 0]]], dtype=torch.int32), torch.tensor([[20, 9]], dtype=torch.int32)
    cpu._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"no compiled code for {dtype} with head_dim={head_dim}") as caught:
        outs = [cpu.paged_attention(query, *pages, 0.2) for _ in range(3)]
    assert len(caught) == 1
    torch.testing.assert_close(outs[-1], reference.paged_attention(query, *pages, 0.2), rtol=0, atol=0)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_attention_equals_loops_over_slots(group: int) -> None:
    lengths = torch.tensor([[0, 1, 15], [16, 17, 48]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(20, 16, 32, generator=generator) for _ in range(2))
    tables = torch.randperm(20, generator=generator)[:18].int().view(2, 3, 3)
    query = torch.randn(2, 3 * group, 32, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = cpu.paged_attention(query, key, value, tables, lengths, 32**-0.5)
    for row in range(2):
        for head in range(3 * group):
            slots = range(int(lengths[row, head // group]))
            place = [(int(tables[row, head // group, slot // 16]), slot % 16) for slot in slots]
            scores = [float(query[row, head].double() @ key[slot].double()) / math.sqrt(32) for slot in place]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            expected = sum((w * value[slot].double() for w, slot in zip(weights, place)), torch.zeros(32).double())
            torch.testing.assert_close(out[row, head].double(), expected, rtol=0, atol=2e-5)


def test_the_cpu_backend_is_picked_for_the_cpu() -> None:
    assert load_backend("auto", "cpu") is cpu
    assert load_backend("auto", torch.device("cuda", 0)) is not cpu
    assert cpu.supports(torch.float16, 24, 16, torch.device("cpu")) is None
    assert "not on cuda" in str(cpu.supports(torch.float32, 64, 16, torch.device("cuda")))


@pytest.mark.parametrize(
    ("rows", "inputs", "dtype"),
    cover((0, 1, 2, 7, 8, 9, 16, 17), (32, 96, 100), (torch.float32, torch.bfloat16)),
    ids=str,
)
def test_linear_layers_compute_what_torch_computes(rows: int, inputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, rows, inputs, generator=generator).to(dtype)
    weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((70, inputs), (70,)))
    for given in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if given is None else given.double())
        got = cpu.linear(x, weight, given)
        assert (got.shape, got.dtype) == ((1, rows, 70), dtype)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02 * float(expected.abs().max()) if rows else 0.0
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
