"""Time the training kernels against what they replace: forward and backward, interleaved, medians and ratios.

python benchmarks/training_kernels.py
python benchmarks/training_kernels.py --device cuda --dtype bfloat16 --shapes 8,32,8,4096,128
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from dmc.compression import accumulate
from dmc.models.masked_attention import delayed_masked_attention, masked_attention

Case = Callable[[], Tensor]


def medians(cases: dict[str, Case], leaves: list[Tensor], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Give the median milliseconds of each case's forward and backward, the cases taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 2):
        for name, case in cases.items():
            synchronize(leaves[0].device)
            start = clock()
            out = case()
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
            synchronize(leaves[0].device)
            if turn >= 2:
                seconds[name].append(clock() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attention_cases(shape: tuple[int, ...], delay: int, options: dict) -> tuple[dict[str, Case], list[Tensor]]:
    batch, heads, kv_heads, time_, channels = shape
    states = [torch.randn(batch, time_, n, channels, **options).transpose(1, 2) for n in (heads, *[kv_heads] * 4)]
    for tensor in (states[0], states[1], states[3]):
        tensor[..., -1] = 0
    query, raw_key, raw_value, key, value = leaves = [tensor.requires_grad_() for tensor in states]
    logits = torch.randn(batch, kv_heads, time_, device=options["device"], requires_grad=True)
    scaling = channels**-0.5

    def causal() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def dense_bias() -> Tensor:
        bias = functional.logsigmoid(logits).repeat_interleave(heads // kv_heads, 1).unsqueeze(-2)
        bias = bias.expand(-1, -1, time_, -1)
        row = torch.arange(time_, device=query.device)
        bias = bias.masked_fill(row == row.unsqueeze(-1), 0.0).masked_fill(row > row.unsqueeze(-1), -torch.inf)
        return functional.scaled_dot_product_attention(query, key, value, bias.to(query.dtype), enable_gqa=True)

    def masked(free_channel: int | None) -> Tensor:
        log_keep = functional.logsigmoid(logits)
        return masked_attention(query, key, value, log_keep, scaling, free_channel=free_channel)

    def delayed(keep_top: bool) -> Tensor:
        raw = (raw_key, raw_value) if keep_top else (key, value)
        log_keep, where = functional.logsigmoid(logits), {"delay": delay, "keep_top": keep_top, "free_channel": -1}
        return delayed_masked_attention(query, *raw, key, value, log_keep, scaling, **where)

    cases: dict[str, Case] = {
        "causal SDPA": causal,
        "masked_attention": lambda: masked(-1),
        "masked_attention, no free channel": lambda: masked(None),
        f"delayed, merge, delay {delay}": lambda: delayed(True),
        f"delayed, drop, delay {delay}": lambda: delayed(False),
        "SDPA with a dense bias": dense_bias,
    }
    return cases, [*leaves, logits]


def accumulate_cases(shape: tuple[int, ...], window: int, options: dict) -> tuple[dict[str, Case], list[Tensor]]:
    batch, _, heads, time_, channels = shape
    states = torch.randn(batch, heads, time_, 2 * channels, **options, requires_grad=True)
    gates = [torch.rand(batch, heads, time_, device=options["device"], requires_grad=True) for _ in range(2)]
    alpha, omega = gates

    def windows(states: Tensor) -> Tensor:
        padding = [0] * (2 * (states.dim() - 3)) + [window - 1, 0]
        return functional.pad(states, padding).unfold(2, window, 1).flip(-1)

    def unfold() -> Tensor:
        products = windows(torch.cat([torch.zeros_like(alpha[..., :1]), alpha[..., 1:]], dim=-1))
        products = torch.cat([torch.ones_like(products[..., :1]), products[..., :-1]], dim=-1).cumprod(-1)
        weights = products * windows(omega)
        weighted = torch.einsum("bhtdw,bhtw->bhtd", windows(states.float()), weights)
        return weighted / weights.sum(-1, keepdim=True)

    cases: dict[str, Case] = {
        "unfold": unfold,
        f"accumulate, window {window}": lambda: accumulate(states, alpha, omega, window),
        "accumulate, no window": lambda: accumulate(states, alpha, omega, None),
    }
    return cases, [states, *gates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", default="perf_counter", choices=["perf_counter", "process_time"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--delay", type=int, default=16)
    parser.add_argument("--window", type=int, default=12)
    shapes = ["16,8,4,256,32", "1,8,8,512,64", "1,8,8,2048,64", "1,8,8,4096,64"]
    parser.add_argument("--shapes", nargs="*", default=shapes, help="batch,heads,kv_heads,time,head_dim")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    options = {"device": torch.device(arguments.device), "dtype": getattr(torch, arguments.dtype)}
    for text in arguments.shapes:
        shape = tuple(int(number) for number in text.split(","))
        print("B{} H{} ({} KV) T{} d{}, {}, ms forward + backward".format(*shape, arguments.dtype), flush=True)
        for make, size in ((attention_cases, arguments.delay), (accumulate_cases, arguments.window)):
            cases, leaves = make(shape, size, options)
            found = medians(cases, leaves, arguments.rounds, getattr(time, arguments.clock))
            reference = next(iter(found.values()))
            for name, milliseconds in found.items():
                print(f"  {name:36s}{milliseconds:9.1f}  {milliseconds / reference:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
