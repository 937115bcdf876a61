"""Training attention: forward and backward apart, against causal SDPA, and the error of both against float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from timings import Case
from torch import Tensor
from torch.nn import functional
from training_kernels import apart

from dmc.compression.relaxation import log_one_minus_sigmoid, sample_decisions
from dmc.models.masked_attention import delayed_masked_attention, masked_attention, window_attention
from gpu_parts.place import CALLS, Figure, Place, Rows, row

SHAPES = (16, 9, 3, 2048, 64), (8, 16, 8, 4096, 128), (1, 32, 8, 4096, 128), (4, 9, 3, 8192, 64)
"""Batch, heads, KV heads, tokens, head_dim: SmolLM2-135M, Qwen3-0.6B, a 7B, and SmolLM2-135M's whole context."""
TINY_SHAPES = ((2, 4, 2, 48, 16),)
SURE = 4.0
"""Size of the logits drawn: as trained gates are, a third of the keys at CR 4 has a bias above -14."""
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Of results, and of each gradient: norm of the difference over the norm."""


def figures(place: Place) -> Iterator[Figure]:
    """Training attention: forward and backward apart, against SDPA and float64, four shapes"""
    yield Figure("ceilings", partial(_ceilings, place))
    for shape in TINY_SHAPES if place.is_tiny else SHAPES:
        name = "B{} H{} ({} KV) T{} d{}".format(*shape)
        yield Figure(f"{name}, error", partial(_errors, place, shape, name))
        yield Figure(f"{name}, times", partial(_times, place, shape, name))


def draw_gates(shape: tuple[int, ...], device: str) -> dict[str, Tensor]:
    """Draw log(1 - alpha) of each key, [batch, kv_heads, time]: none dropped, and of gates at CR 4 that are sure.

    `relaxed` are decisions as training draws them, with noise, at a temperature of 0.1; `thresholded` those of
    validation, where a dropped key has -inf.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.where(torch.rand(shape, generator=generator) < 0.25, -SURE, SURE)
    _, noised = sample_decisions(logits, 0.1, generator)
    gates = {
        "none dropped": torch.zeros(shape),
        "CR 4": log_one_minus_sigmoid(noised),
        "CR 4, thresholded": torch.where(logits > 0, -torch.inf, 0.0),
    }
    return {name: log_keep.to(device) for name, log_keep in gates.items()}


def _leaves(place: Place, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    batch, heads, kv_heads, length, dim = shape
    generator = torch.Generator(place.device).manual_seed(0)

    def drawn(num_heads: int) -> Tensor:
        states = torch.randn(batch, length, num_heads, dim, device=place.device, generator=generator)
        return states.to(place.dtype).transpose(1, 2).requires_grad_()

    return drawn(heads), drawn(kv_heads), drawn(kv_heads)


def _cases(place: Place, shape: tuple[int, ...]) -> dict[str, tuple[Case, list[Tensor], tuple[str, int]]]:
    """Return cases by name: the call, what it has gradients for, and its gates with the delay (0: merge at once)."""
    states = _leaves(place, shape)
    batch, _, kv_heads, length, dim = shape
    scaling, delays = dim**-0.5, (4, 8, 16) if place.is_tiny else (64, 128, 256)
    gates = draw_gates((batch, kv_heads, length), place.device)
    biases = {name: log_keep.requires_grad_() for name, log_keep in gates.items()}
    cases: dict[str, Any] = {}

    def add(name: str, gates: str, delay: int, call: Case) -> None:
        cases[name] = call, [*states, *([biases[gates]] if gates in biases else [])], (gates, delay)

    def dropped(gates: str, delay: int) -> Tensor:
        return delayed_masked_attention(
            states[0], None, None, *states[1:], biases[gates], scaling, delay=delay, keep_top=False
        )

    sdpa = functional.scaled_dot_product_attention
    add("causal SDPA", "", length, lambda: sdpa(*states, is_causal=True, enable_gqa=True))
    for gates_name in ("CR 4", "none dropped"):
        for delay in delays:
            add(f"drop, delay {delay}, {gates_name}", gates_name, delay, partial(dropped, gates_name, delay))
    name = "CR 4, thresholded"
    add(f"drop, delay {delays[1]}, {name}", name, delays[1], partial(dropped, name, delays[1]))
    add("merge, CR 4", "CR 4", 0, lambda: masked_attention(*states, biases["CR 4"], scaling))
    window = delays[-1]
    add(f"window of {window} alone", "window", window, lambda: window_attention(*states, scaling, window))
    return cases


def _ceilings(place: Place) -> Rows:
    copied, multiplied = place.ceilings()
    yield row("copy on the device", copied, "GB/s")
    yield row("product of 8,192 x 8,192", multiplied, "TFLOP/s", str(place.dtype))


def _times(place: Place, shape: tuple[int, ...], name: str) -> Rows:
    """Time all cases in turns, forward, then backward."""
    batch, heads, _, length, dim = shape
    pairs = {case: apart(call, leaves) for case, (call, leaves, _) in _cases(place, shape).items()}
    for index, direction in enumerate(("forward", "backward")):
        found = place.milliseconds({case: pair[index] for case, pair in pairs.items()}, CALLS, rounds=5)
        operations = (2, 5)[index] * batch * heads * length**2 * dim  # of the causal half of two products, or five
        first = found["causal SDPA"]
        for case, milliseconds in found.items():
            rate = "" if "window" in case else f", {operations / milliseconds / 1e9:.0f} TFLOP/s of causal attention"
            yield row(f"{name}, {direction}: {case}", milliseconds, "ms", f"{milliseconds / first:.2f} x SDPA{rate}")


def _errors(place: Place, shape: tuple[int, ...], name: str) -> Rows:
    """Compare results and gradients of the first KV head of the first sequence with float64."""
    group, dropped = shape[1] // shape[2], f"drop, delay {place.size(128, 8)}, CR 4"
    chosen = "causal SDPA", "merge, CR 4", dropped, f"{dropped}, thresholded"
    for case, (call, leaves, (gates, delay)) in _cases(place, shape).items():
        if case not in chosen:
            continue
        out: Any = call()
        generator = torch.Generator(place.device).manual_seed(1)
        weights = torch.randn(out.shape, device=out.device, generator=generator).to(out.dtype)
        found = [out, *torch.autograd.grad(out, leaves, weights)]
        heads = [group, group, 1, 1, 1][: len(found)]
        inputs = [leaf[:1, :n].detach().double().requires_grad_() for leaf, n in zip(leaves, heads[1:], strict=True)]
        exact = by_definition(*inputs, delay=delay)
        wanted = [exact, *torch.autograd.grad(exact, inputs, weights[:1, :group].double())]
        parts = ("result", "dq", "dk", "dv", "d log_keep")
        errors = {
            part: _relative(value[:1, :n].double(), want)
            for part, value, n, want in zip(parts, found, heads, wanted, strict=False)
            if not (part == "d log_keep" and "thresholded" in gates)  # the bias is constant there
        }
        worst = max(errors.values())
        listed = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
        yield row(f"{name}: {case}", worst, "of float64", listed, holds=worst <= LARGEST_ERROR[place.dtype])


def by_definition(query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor | None = None, *, delay: int) -> Tensor:
    """Attend with T x T scores, one KV head: a key has its bias from `delay` tokens back on, 0: from the next on."""
    length = query.shape[2]
    distance = torch.arange(length, device=query.device)
    distance = distance[:, None] - distance
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if log_keep is not None:
        scores = scores + torch.where(distance >= max(delay, 1), log_keep[:, :, None], 0.0)
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).norm() / wanted.norm()).detach())
