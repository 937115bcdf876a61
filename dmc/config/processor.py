"""This machine's processor: the cores that are ours, and what they do fast."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROCESSOR = Path("/proc/cpuinfo")
BFLOAT16 = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")
"""Flags of processors that multiply bfloat16 in hardware."""


def multiplies_bfloat16(processor: Path = PROCESSOR) -> bool:
    """Say whether the processor multiplies bfloat16 in hardware, as Linux tells: else float32 is faster.

    Args:
        processor: file of its flags.
    """
    return processor.is_file() and BFLOAT16.search(processor.read_text()) is not None


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
