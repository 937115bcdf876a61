"""Load the CPU kernels: those of a platform's wheel, else compiled on first use into a cache of the user's."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from dmc.files import written_whole

SOURCE = Path(__file__).with_name("cpu.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = tuple(SOURCE.read_text().split("// flags: ", 1)[1].splitlines()[0].split())
BUILT = {"AVX512": SOURCE.with_name("cpu_avx512.so"), "AVX2": SOURCE.with_name("cpu_avx2.so")}
"""Kernels in a wheel of this platform, by torch's name of the processor's capability; see setup.py."""


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, with a warning, where they cannot be built."""
    try:
        library = _built() or ctypes.CDLL(str(_compile()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"the CPU kernels could not be built ({error}); the slower reference backend serves instead: install a "
            "C++ compiler (g++ or clang++), or name one in CXX, and see that the cache folder can be written",
            stacklevel=2,
        )
        return None
    openmp = _openmp_of_torch()
    if openmp is not None:
        library.use_fork_join(ctypes.cast(ctypes.CDLL(openmp).GOMP_parallel, ctypes.c_void_p))
    return library


def cache_folder() -> Path:
    """Return the folder of built kernels: `dmc/kernels` under XDG_CACHE_HOME, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmc" / "kernels"


def _built() -> ctypes.CDLL | None:
    """Load the wheel's kernels for this processor; None if it brings none, or none that this system can load."""
    path = BUILT.get(torch.backends.cpu.get_cpu_capability())
    if path and path.is_file():
        with suppress(OSError):  # of a C library older than the one they were linked with
            return ctypes.CDLL(str(path))
    return None


def _compile() -> Path:
    """Return the shared object for this source, compiler and processor, compiling if there is none yet."""
    compiler = _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = (SOURCE.read_bytes(), shlex.join(compiler).encode(), version.encode(), " ".join(FLAGS).encode(), _cpu())
    target = cache_folder() / f"cpu_{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (  # a concurrent build finds either nothing or the whole file
        tempfile.TemporaryDirectory(dir=target.parent) as folder,
        written_whole(target, Path(folder) / target.name) as built,
    ):
        command = [*compiler, *FLAGS, "-march=native", str(SOURCE), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed: {result.stderr.strip()[-500:]}")
    return target


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    for candidate in [named] if named else COMPILERS:
        command = shlex.split(candidate)
        if shutil.which(command[0]):
            return command
    raise RuntimeError(f"no C++ compiler: {named or ', '.join(COMPILERS)} not found")


def _cpu() -> bytes:
    """Return a key that differs between processors with different instruction sets."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor().encode()
    lines = info.read_bytes().splitlines()
    return b"".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))


def _openmp_of_torch() -> str | None:
    """Return the path of this process's OpenMP runtime, torch's own if there are several, or None."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    found = sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")))
    beside_torch = [path for path in found if path.startswith(str(Path(torch.__file__).parent))]
    return next(iter(beside_torch or found), None)
