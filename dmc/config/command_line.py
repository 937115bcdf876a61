"""What every command does around its work: plain values of its settings, errors in one line, a prepared process."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

GPUS_OF_JOB = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS")
"""Variables by which Slurm tells a job of its GPUs."""
DEVICE_FILES = Path("/dev")
"""Folder of the files `nvidia0`, `nvidia1`, ... of NVIDIA's GPUs."""
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
    StrictDataclassError,  # a model's configuration that contradicts itself
)
"""Errors of wrong settings and damaged files; any other error is a defect, and shows its stack."""


def run_task(name: str, settings: DictConfig, on_devices: bool, shows_stack: bool) -> None:
    """Run a command with the values of its settings.

    Args:
        name: of the command, whose `main` is in `dmc/commands/NAME.py`.
        settings: as Hydra has composed them.
        on_devices: whether it computes on GPUs where there are any.
        shows_stack: whether errors of wrong input keep their stack.
    Raises:
        ValueError: in a run of a sweep, for a launcher waits forever for a run that exits; elsewhere errors of wrong
            input end the process with one line and status 1.
    """
    is_run = HydraConfig.get().mode is RunMode.RUN
    with errors_in_one_line() if is_run and not shows_stack else nullcontext():
        values = plain_values(settings)
        if on_devices:
            check_torch_build(values)
        prepare_process()  # here, for a launcher hands the environment of its process to jobs elsewhere
        importlib.import_module(f"dmc.commands.{name}").main(values)


def plain_values(settings: DictConfig) -> Any:
    """Resolve composed settings.

    Raises:
        ValueError: one has no value.
    """
    if missing := sorted(OmegaConf.missing_keys(settings)):
        raise ValueError(f"give a value for {', '.join(missing)}")
    return OmegaConf.to_container(settings, resolve=True)


def check_torch_build(settings: Mapping[str, Any]) -> None:
    """Refuse a Slurm job that has GPUs, and a torch that cannot use them.

    Outside of Slurm, for a plan, or with an accelerator or device `cpu`, any torch will do.

    Raises:
        ValueError: its torch is a CPU build; the message says how to replace it.
    """
    devices = settings.get("device"), (settings.get("trainer") or {}).get("accelerator")
    if "SLURM_JOB_ID" not in os.environ or settings.get("plan") or "cpu" in devices:
        return
    named = [f"{name}={os.environ[name]}" for name in GPUS_OF_JOB if os.environ.get(name) not in (None, "", "0")]
    if not (found := [*named, *map(str, sorted(DEVICE_FILES.glob("nvidia[0-9]*")))]):
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


def _in_one_line(error: BaseException) -> str:
    """Return an error's message without line breaks; of an OmegaConf error the setting and what is wrong with it."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("full_key:", "object_type="))]
    setting = getattr(error, "full_key", None)
    return (f"{setting}: " if setting else "") + (" ".join(kept) or type(error).__name__)


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
