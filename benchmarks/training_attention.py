"""Time training attention, forward and backward, over PyTorch's causal attention in the same run: medians, ratios.

python benchmarks/training_attention.py
python benchmarks/training_attention.py --dtype bfloat16 --threads 2 --clock perf_counter    (on an idle machine)
"""

import argparse
import time
from functools import partial
from typing import Any

import torch
from timings import Case, Table, add_output_option, medians
from torch import Tensor
from torch.nn import functional

from dmc.models.masked_attention import (
    Documents,
    causal_attention,
    delayed_masked_attention,
    masked_attention,
    window_attention,
)

SHAPES = ["1,8,8,2048,64", "4,9,3,1024,64"]
"""The second is that of a gates-only step of SmolLM2-135M."""


def step(case: Case, leaves: list[Tensor]) -> None:
    """Run a case forward and backward."""
    out: Any = case()
    torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


def attention_cases(
    shape: tuple[int, ...], delay: int, window: int, dtype: torch.dtype
) -> tuple[dict[str, Case], list[Tensor]]:
    """Return the cases by name, causal attention first, and the tensors that they differentiate by.

    Args:
        shape: batch, heads, KV heads, time, channels.
        delay: tokens that a delayed gate leaves raw.
        window: tokens of window attention, and a quarter of a document.
        dtype: of queries, keys and values.
    """
    batch, heads, kv_heads, time_, channels = shape
    states = [torch.randn(batch, time_, n, channels, dtype=dtype).transpose(1, 2) for n in (heads, *[kv_heads] * 4)]
    query, raw_key, raw_value, key, value = leaves = [tensor.requires_grad_() for tensor in states]
    logits = torch.randn(batch, kv_heads, time_, requires_grad=True)
    sinks = torch.randn(heads, requires_grad=True)
    scaling = channels**-0.5
    documents = Documents.from_starts((torch.arange(time_) % (4 * window) == 0).expand(batch, -1))

    def causal() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    few = torch.where(torch.rand(batch, kv_heads, time_) < 0.3, 0.0, -torch.inf).requires_grad_()

    def masked(bias: Tensor | None = None, **options: Any) -> Tensor:
        bias = functional.logsigmoid(logits) if bias is None else bias
        return masked_attention(query, key, value, bias, scaling, **options)

    def delayed(keep_top: bool, **options: Any) -> Tensor:
        raw, log_keep = (raw_key, raw_value) if keep_top else (None, None), functional.logsigmoid(logits)
        options |= {"delay": delay, "keep_top": keep_top}
        return delayed_masked_attention(query, *raw, key, value, log_keep, scaling, **options)

    cases: dict[str, Case] = {
        "causal SDPA": causal,
        "merge": masked,
        f"merge, delay {delay}": lambda: delayed(True),
        f"drop, delay {delay}": lambda: delayed(False),
        "drop, sinks": lambda: delayed(False, sinks=sinks),
        "merge, 30 % of the keys kept": lambda: masked(few),
        "merge, documents": lambda: masked(documents=documents),
        "no gates, sinks": lambda: causal_attention(query, key, value, scaling, sinks=sinks),
        f"no gates, window {window}": lambda: window_attention(query, key, value, scaling, window),
    }
    return cases, [*leaves, logits, few, sinks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clock", default="process_time", help="function of `time` (process_time)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--delay", type=int, default=128)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="batch,heads,kv_heads,time,head_dim")
    add_output_option(parser)
    arguments = parser.parse_args()
    table = Table(__file__, arguments.output)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    for text in arguments.shapes:
        shape = tuple(int(number) for number in text.split(","))
        cases, leaves = attention_cases(shape, arguments.delay, arguments.window, getattr(torch, arguments.dtype))
        steps = {name: partial(step, case, leaves) for name, case in cases.items()}
        title = "B{} H{} ({} KV) T{} d{}, {}, forward + backward".format(*shape, arguments.dtype)
        table.add(title, medians(steps, arguments.rounds, warm_up=2, clock=getattr(time, arguments.clock)))


if __name__ == "__main__":
    main()
