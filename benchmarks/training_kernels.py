"""Time the training kernels against what they replace: forward, backward, both; interleaved, medians and ratios.

python benchmarks/training_kernels.py
python benchmarks/training_kernels.py --threads 1 --clock process_time    (on a machine that has other work)
python benchmarks/training_kernels.py --device cuda --dtype bfloat16 --shapes 8,32,8,4096,128

On a GPU 20 calls are launched without waiting for one another, and its own clock is read.
"""

import argparse
import time
from functools import partial
from typing import Any

import torch
from timings import Case, Table, add_output_option, device_medians, medians
from torch import Tensor
from torch.nn import functional

from dmc.compression import accumulate
from dmc.models.masked_attention import delayed_masked_attention, masked_attention

SHAPES = ["16,8,4,256,32", "1,8,8,512,64", "1,8,8,2048,64", "1,8,8,4096,64"]
OPTIONS = {
    "device": "cpu", "dtype": "float32", "clock": "perf_counter", "threads": 2, "rounds": 7, "calls": 20, "delay": 16
}  # fmt: skip


def step(case: Case, leaves: list[Tensor]) -> None:
    """Run a case forward and backward."""
    out: Any = case()
    torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


def apart(case: Case, leaves: list[Tensor]) -> tuple[Case, Case]:
    """Return a case forward alone, its graph made as training does, and backward alone through one graph."""
    out: Any = case()
    gradient = torch.ones_like(out)
    return case, partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True, allow_unused=True)


def attention_cases(shape: tuple[int, ...], delay: int, options: dict) -> tuple[dict[str, Case], list[Tensor]]:
    batch, heads, kv_heads, time_, channels = shape
    states = [torch.randn(batch, time_, n, channels, **options).transpose(1, 2) for n in (heads, *[kv_heads] * 4)]
    query, raw_key, raw_value, key, value = leaves = [tensor.requires_grad_() for tensor in states]
    logits = torch.randn(batch, kv_heads, time_, device=options["device"], requires_grad=True)
    scaling = channels**-0.5

    def causal() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def dense_bias() -> Tensor:
        bias = functional.logsigmoid(logits).repeat_interleave(heads // kv_heads, 1).unsqueeze(-2)
        row = torch.arange(time_, device=query.device).unsqueeze(-1)
        bias = bias.masked_fill(row == row.mT, 0.0).masked_fill(row < row.mT, -torch.inf)
        return functional.scaled_dot_product_attention(query, key, value, bias.to(query.dtype), enable_gqa=True)

    def masked() -> Tensor:
        return masked_attention(query, key, value, functional.logsigmoid(logits), scaling)

    def delayed(keep_top: bool) -> Tensor:
        raw, log_keep = (raw_key, raw_value) if keep_top else (None, None), functional.logsigmoid(logits)
        return delayed_masked_attention(query, *raw, key, value, log_keep, scaling, delay=delay, keep_top=keep_top)

    cases: dict[str, Case] = {
        "causal SDPA": causal,
        "masked_attention": masked,
        f"delayed, merge, {delay}": lambda: delayed(True),
        f"delayed, drop, {delay}": lambda: delayed(False),
        "SDPA with a dense bias": dense_bias,
    }
    return cases, [*leaves, logits]


def accumulate_cases(shape: tuple[int, ...], window: int, options: dict) -> tuple[dict[str, Case], list[Tensor]]:
    batch, _, heads, time_, channels = shape
    states = torch.randn(batch, heads, time_, 2 * channels, **options, requires_grad=True)
    alpha, omega = (torch.rand(states.shape[:3], device=states.device, requires_grad=True) for _ in range(2))

    def windows(states: Tensor) -> Tensor:
        return functional.pad(states, [0, 0] * (states.dim() - 3) + [window - 1, 0]).unfold(2, window, 1).flip(-1)

    def unfold() -> Tensor:
        products = windows(torch.cat([torch.zeros_like(alpha[..., :1]), alpha[..., 1:]], dim=-1))
        products = torch.cat([torch.ones_like(products[..., :1]), products[..., :-1]], dim=-1).cumprod(-1)
        weights = products * windows(omega)
        return torch.einsum("bhtdw,bhtw->bhtd", windows(states.float()), weights) / weights.sum(-1, keepdim=True)

    cases: dict[str, Case] = {
        "unfold": unfold,
        f"accumulate, window {window}": lambda: accumulate(states, alpha, omega, window),
        "accumulate, no window": lambda: accumulate(states, alpha, omega, None),
    }
    return cases, [states, alpha, omega]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in OPTIONS.items():
        parser.add_argument(f"--{option}", type=type(default), default=default)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="batch,heads,kv_heads,time,head_dim")
    add_output_option(parser)
    arguments = parser.parse_args()
    table = Table(__file__, arguments.output)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    options = {"device": torch.device(arguments.device), "dtype": getattr(torch, arguments.dtype)}
    clock = getattr(time, arguments.clock)

    def timed(cases: dict[str, Case]) -> dict[str, float]:
        if arguments.device == "cuda":
            return device_medians(cases, arguments.rounds, arguments.calls)
        return medians(cases, arguments.rounds, warm_up=2, clock=clock)

    for text in arguments.shapes:
        shape = tuple(int(number) for number in text.split(","))
        title = "B{} H{} ({} KV) T{} d{}, {}, ".format(*shape, arguments.dtype)
        for make, size in ((attention_cases, arguments.delay), (accumulate_cases, 12)):
            cases, leaves = make(shape, size, options)
            table.add(
                title + "forward + backward", timed({name: partial(step, case, leaves) for name, case in cases.items()})
            )
            for index, direction in enumerate(("forward", "backward")):
                alone = {name: apart(case, leaves)[index] for name, case in cases.items()}
                table.add(title + direction, timed(alone))


if __name__ == "__main__":
    main()
