"""Shared by all scripts: translate settings as people write them into Hydra's, and report errors in one line."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

LISTS = ("tasks", "policies", "budgets", "folders", "batch_sizes", "ratios", "seeds", "only")
"""Settings that are lists in every script that has them."""
CHOOSING = ("train", "prepare_data")
"""Scripts whose `model` names a file of `configs/model`; in the others it holds path, dtype and revision."""
OPEN = (
    "training.stages.",
    "data.train.",
    "data.validation.",
    "data.calibration.",
    "data.test.",
    "trainer.",
    "logger.",
    "callbacks.",
)
"""Prefixes of settings that may be given without being in a config file; they are checked all the same."""
LENGTHS = ("steps", "tokens", "tokens_per_ratio")
"""Lengths of a stage; giving one removes the others."""
OUTPUTS = ("output", "output_dir")
"""Settings that name a folder to write to in every script that has them."""
FLAGS = ("overwrite", "trust_run", "use_previous_checkpoint", "control")
"""Settings that are true or false in every script that has them."""
ON_DEVICES = ("train", "compare", "serve", "benchmark", "generate", "export", "replay")
"""Scripts that compute on GPUs where there are any."""
GPUS_OF_JOB = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS")
"""Variables by which Slurm tells a job of its GPUs."""
DEVICE_FILES = Path("/dev")
"""Folder of the files `nvidia0`, `nvidia1`, ... of NVIDIA's GPUs."""
_SHOW_STACK = "HYDRA_FULL_ERROR"
INPUT_ERRORS = (
    ValueError,
    TypeError,
    OSError,
    ImportError,
    NotImplementedError,
    ArithmeticError,  # a run whose steps are not finite, numbers too large
    RecursionError,  # a file with brackets in thousands of brackets
    HydraException,
    OmegaConfBaseException,
    SafetensorError,
)
"""Errors of wrong settings and damaged files; any other error is a defect, and shows its stack."""


def script(name: str) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Decorate a script's main function, which takes composed settings, so that it reads the command line.

    Wrong input ends the process with one line on stderr and status 1; HYDRA_FULL_ERROR=1 shows the stack.

    Args:
        name: name of its file in `configs/`, beside the script's folder in a checkout as in a wheel.
    Raises:
        ValueError: in a run of a sweep; elsewhere errors end the process.
    """

    def decorate(function: Callable[[Any], None]) -> Callable[[], None]:
        configs = Path(function.__code__.co_filename).resolve().parent.parent / "configs"
        told = nullcontext if os.environ.get(_SHOW_STACK) == "1" else errors_in_one_line

        @functools.wraps(function)
        def task(settings: DictConfig) -> None:
            # A launcher waits forever for the result of a run that exits: runs of a sweep raise.
            with told() if HydraConfig.get().mode is RunMode.RUN else nullcontext():
                if missing := sorted(OmegaConf.missing_keys(settings)):
                    raise ValueError(f"give a value for {', '.join(missing)}")
                check_outputs(settings)
                check_flags(settings)
                if name in ON_DEVICES:
                    check_torch_build(settings)
                prepare_process()  # not in main: a launcher hands the environment of its process to jobs elsewhere
                function(settings)

        run = hydra.main(version_base="1.3", config_path=str(configs), config_name=name)(task)

        @functools.wraps(function)
        def main() -> None:
            sys.path.insert(0, str(Path.cwd()))  # folder of a user's own sources, policies and callbacks
            sys.argv[1:] = plain_settings(name, sys.argv[1:], configs)
            with told(), _raised_by_hydra():
                run()

        return main

    return decorate


def check_outputs(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError if an output folder is a file, or is inside one."""
    for name in OUTPUTS:
        folder = settings.get(name)
        for path in (Path(folder), *Path(folder).parents) if isinstance(folder, str) else ():
            if path.exists() and not path.is_dir():
                raise ValueError(f"{name}={folder}: {path} is a file; give a folder, a new one or one that is there")


def check_flags(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError if a flag is neither true nor false."""
    for name in FLAGS:
        if not isinstance(settings.get(name, False), bool):
            raise ValueError(f"{name}={settings[name]}: expected true or false")


def check_torch_build(settings: Mapping[str, Any]) -> None:
    """Refuse a Slurm job that has GPUs, and a torch that cannot use them.

    Outside of Slurm, for a plan, or with an accelerator or device `cpu`, any torch will do.

    Raises:
        ValueError: its torch is a CPU build; the message says how to replace it.
    """
    devices = settings.get("device"), (settings.get("trainer") or {}).get("accelerator")
    if "SLURM_JOB_ID" not in os.environ or settings.get("plan") or "cpu" in devices:
        return
    told = [f"{name}={os.environ[name]}" for name in GPUS_OF_JOB if os.environ.get(name) not in (None, "", "0")]
    if not (found := [*told, *map(str, sorted(DEVICE_FILES.glob("nvidia[0-9]*")))]):
        return
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(
            f"this job has GPUs ({found[0]}), but torch {torch.__version__} is a build for CPUs: replace it with "
            "`TORCH=cuda ./scripts/setup_environment.sh train,slurm`, or train on CPUs with trainer.accelerator=cpu"
        )


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the process with one line on stderr and status 1 on wrong input."""
    try:
        yield
    except INPUT_ERRORS as error:
        sys.exit(f"error: {_in_one_line(error)}")


@contextmanager
def _raised_by_hydra() -> Iterator[None]:
    """Make Hydra raise the errors of a command line, which it would print in several lines."""
    before = os.environ.get(_SHOW_STACK)
    os.environ[_SHOW_STACK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SHOW_STACK]
        else:
            os.environ[_SHOW_STACK] = before


def _in_one_line(error: BaseException) -> str:
    """Return an error's message without line breaks; of an OmegaConf error only the part about the value."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("full_key:", "object_type="))]
    return " ".join(told) or type(error).__name__


def _warning_in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Write a warning without its line of code, and one of this package without its place."""
    is_own = Path(__file__).parents[1] in Path(filename).parents
    return f"{'warning' if is_own else f'{filename}:{lineno}: {category.__name__}'}: {message}\n"


def prepare_process() -> None:
    """Flush numbers below 1e-38 to 0 in this process: a CPU is up to 15 times slower on them.

    Attention to entries that a confident gate has closed is full of them. Call it before the first product: a thread
    keeps the mode that was set when it started. Where this machine has no accelerator, DeepSpeed, which saving a model
    imports, is told to use the CPU and so does not warn. Warnings are printed in one line.
    """
    import torch  # seconds, which a wrong command line does not wait for

    warnings.formatwarning = _warning_in_one_line
    torch.set_flush_denormal(True)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else the next line forbids CUDA in forked processes
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def plain_settings(name: str, arguments: Sequence[str], configs: Path) -> list[str]:
    """Translate a command line into Hydra's syntax.

    `model=DIR` becomes `model.path=DIR`, unless the script chooses `configs/model` and the name is a file there; lists
    may be without brackets; a stage's new length replaces its old one. Each value of a sweep is translated.

    Args:
        name: name of the script's file in `configs`.
        arguments: settings and Hydra's own options.
        configs: folder of all settings.
    """
    sweeps = bool({"-m", "--multirun"} & set(arguments))
    given = {argument.partition("=")[0] for argument in arguments}
    found: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "model" and value[:1] not in ("", "{") and not (name in CHOOSING and _is_choice(value, configs)):
            found += ["model=pretrained"] * (name in CHOOSING) + [f"model.path={value}"]
        elif key in LISTS and value[:1] not in ("", "["):
            found.append(f"{key}={_listed(value, sweeps)}")
        elif key.startswith(OPEN):
            stage, _, last = key.rpartition(".")
            others = [f"{stage}.{each}" for each in LENGTHS if last in LENGTHS and value != "null"]
            found += [f"++{argument}", *(f"++{each}=null" for each in others if each not in given)]
        else:
            found.append(argument)
    return found


def _is_choice(value: str, configs: Path) -> bool:
    """Return whether a value is (or may be meant as) a name of `configs/model`, not a folder or hub name."""
    files = configs / "model"
    names = value.split(",")
    return all("/" not in each and ((files / f"{each}.yaml").is_file() or not Path(each).is_dir()) for each in names)


def _listed(value: str, sweeps: bool) -> str:
    """Write `a,b` as `[a,b]`; in a sweep, which has one value after the other, as `[a],[b]`."""
    if not sweeps:
        return f"[{value}]"
    return value if set(value) & set("[{(") else ",".join(f"[{each}]" for each in value.split(","))
