"""Torch's flight recorder: each rank's last collectives, left in the run's folder when one of them hangs."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]  # its stub lacks it
from torch.distributed import distributed_c10d

FOLDER_NAME = Path("logs") / "flight_recorder"
"""Folder of the traces in a run's output folder: `nccl/rank_N` of the GPUs' collectives, `gloo/rank_N` of the CPUs'."""
SETTINGS = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_INCLUDE_STACK_TRACE": "1"}
"""What NCCL's watchdog reads beside the place: that a collective which times out writes the traces of all ranks."""
logger = logging.getLogger(__name__)


@contextmanager
def flight_recorder(folder: Path) -> Iterator[None]:
    """Have every rank leave its last collectives in the run's folder where one of them hangs.

    NCCL's watchdog writes those of all ranks and ends the processes. Gloo writes nothing: here a rank writes its own
    when an error of torch ends it. `torchfrtrace FOLDER` compares the ranks. All ranks enter this before their process
    group starts. Traces of an earlier start stay until the next hang. Variables that the environment has already stay
    as they are.

    Args:
        folder: output folder of the run.
    """
    places = {backend: folder / FOLDER_NAME / backend for backend in ("nccl", "gloo")}
    settings = {"TORCH_FR_DUMP_TEMP_FILE": str(places["nccl"].absolute() / "rank_"), **SETTINGS}
    added = {name: value for name, value in settings.items() if name not in os.environ}
    places["nccl"].mkdir(parents=True, exist_ok=True)  # the watchdog makes no folder
    os.environ.update(added)
    try:
        yield
    except RuntimeError as error:
        if dist.is_initialized() and not isinstance(error, torch.OutOfMemoryError):
            with suppress(OSError):  # a full disk must not hide the error
                trace = write_gloo_trace(places["gloo"])
                text = "%s has this rank's last collectives; to compare the ranks: torchfrtrace %s"
                logger.error(text, trace, trace.parent)
        raise
    finally:
        for name in added:
            del os.environ[name]


def write_gloo_trace(folder: Path) -> Path:
    """Write this rank's last gloo collectives as `rank_N`.

    Returns:
        The file.
    """
    trace = pickle.loads(_dump_fr_trace())  # its only reader, torchfrtrace, unpickles it too
    names = {entry["process_group"] for entry in trace["entries"]}
    ranks = {group.group_name: dist.get_process_group_ranks(group) for group in distributed_c10d._world.pg_map}
    # torch leaves out which ranks a gloo group has, without which torchfrtrace fails
    trace["pg_config"] = {
        name: {"name": name, "desc": description, "ranks": str(ranks[name])}
        for name, description in names
        if name in ranks
    }
    trace["entries"] = [entry for entry in trace["entries"] if entry["process_group"][0] in ranks]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank_{dist.get_rank()}"
    file.write_bytes(pickle.dumps(trace))
    return file
