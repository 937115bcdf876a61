"""The NVIDIA backend: Triton kernels without host synchronization while decoding, so a step fits a CUDA graph.

append.py      one new token per head: blocks off the free stack, pooling, RoPE, page write, history
append_chunk.py  the same of several tokens of each sequence, tile by tile
decode.py      decode: the ragged heads' slots dealt out evenly, then a merge of the heads that were cut
prefill.py     many queries per sequence: closed slots, their own running state, the band of recent tokens
received.py    what each slot receives from a prompt's queries
evict_one.py   after a generated token: metadata of entries, attention received, and which entry goes
compaction.py  evict entries, and close the gaps
"""

from __future__ import annotations

import torch
import triton

from dmc.kernels.reference import append_to_ring
from dmc.kernels.triton.append import append_or_merge
from dmc.kernels.triton.compaction import compact, evict
from dmc.kernels.triton.decode import paged_attention
from dmc.kernels.triton.evict_one import (
    add_attention,
    eviction_candidate,
    nth_newest,
    read_metadata,
    write_metadata,
)
from dmc.kernels.triton.prefill import prefill_attention
from dmc.kernels.triton.received import attention_received

__all__ = [
    "add_attention",
    "append_or_merge",
    "append_to_ring",
    "attention_received",
    "compact",
    "evict",
    "eviction_candidate",
    "nth_newest",
    "paged_attention",
    "prefill_attention",
    "read_metadata",
    "supports",
    "write_metadata",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def supports(dtype: torch.dtype, head_dim: int, block_size: int, device: torch.device) -> str | None:
    """Return why these kernels cannot serve such a cache, or None; every block size is served.

    The interpreter of Triton (`TRITON_INTERPRET=1`) runs them on a CPU, for tests, in float32 and with 8-bit pages of
    float32 models alone.
    """
    if dtype not in DTYPES:
        return f"dtype={dtype} is not supported by kernels.triton (float32, bfloat16, float16, int8)"
    if head_dim % 2 or not 16 <= head_dim <= 256:
        return f"head_dim={head_dim} is not supported by kernels.triton (even numbers from 16 to 256)"
    if triton.knobs.runtime.interpret:
        is_right = dtype in (torch.float32, torch.int8)
        return None if is_right else f"dtype={dtype} is wrong in Triton's interpreter: use float32"
    if device.type != "cuda":
        return f"kernels.triton needs an NVIDIA GPU, the cache is on {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"kernels.triton needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    return None
