"""How much memory the cache's pages may take."""

from __future__ import annotations

import logging
import os

import torch

AUTO_FRACTION = {"cpu": 0.5, "cuda": 0.85}
"""Share of the free memory that "auto" takes; the rest is for activations and, on a CPU, for other programs."""

logger = logging.getLogger(__name__)


def pool_bytes(memory: int | float | str | None, device: torch.device, most: int) -> int | None:
    """Turn a `memory=` setting into bytes.

    Args:
        memory: bytes as a whole number, a fraction of the device's free memory as a float, "auto", or None.
        device: where the pages will lie; the weights are there already.
        most: bytes beyond which "auto" has no use.
    Returns:
        Bytes for pages; None: no limit.
    Raises:
        ValueError: the setting is none of these, or out of range.
    """
    if memory is None:
        return None
    if memory == "auto":
        free = free_bytes(device)
        chosen = min(int(AUTO_FRACTION.get(device.type, AUTO_FRACTION["cpu"]) * free), most)
        logger.info("memory=auto: %d bytes for the cache's pages, of %d that are free on %s", chosen, free, device)
        return chosen
    if isinstance(memory, float) and 0 < memory <= 1:
        return int(memory * free_bytes(device))
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    raise ValueError(
        f"memory={memory!r}: expected a whole number of bytes > 0, a float in (0, 1] (fraction of the free memory), "
        "'auto', or None (grow as needed)"
    )


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, those that torch holds in reserve included."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)
