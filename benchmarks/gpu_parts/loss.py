"""The losses over the vocabulary alone: cross-entropy and divergence from a teacher, without their model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from timings import Case
from torch import Tensor

from dmc.models.token_losses import LossHead, TeacherOutput
from gpu_parts.place import Figure, Place, Rows, row

HEADS = {"SmolLM2-135M": (49_152, 576), "Qwen3-0.6B": (151_936, 1024)}
"""Words and hidden size."""
TOKENS = 8, 4096
"""Sequences of a micro-batch, and the tokens of each: 32,768."""
IDEAL_BYTES = 18
"""Of memory traffic for one logit, forward and backward, in two passes over rows of logits."""
LARGEST_ERROR = {"cpu": 1e-5, "cuda": 5e-3}
"""Of the mean divergence, in nats; on a GPU products are in bfloat16."""


def figures(place: Place) -> Iterator[Figure]:
    """The losses over the vocabulary alone, with a teacher: time, bandwidth, memory, error against float64"""
    for name, sizes in {"tiny": (97, 16)}.items() if place.is_tiny else HEADS.items():
        yield Figure(f"{name}, error", partial(_error, place, name, *sizes))
        yield Figure(f"{name}, times", partial(_times, place, name, *sizes))


def _head(
    place: Place, tokens: tuple[int, int], words: int, size: int
) -> tuple[LossHead, Tensor, Tensor, TeacherOutput]:
    """Make an output projection, hidden states, targets, and a teacher about 1e-2 nats from them."""
    torch.manual_seed(0)
    options = {"device": place.device}
    head = LossHead(size, words, bias=False, device=place.device)
    torch.nn.init.normal_(head.weight, std=2 * size**-0.5)  # logits with a standard deviation of 2
    hidden = torch.randn(*tokens, size, **options)
    theirs = hidden + 0.07 * torch.randn(*tokens, size, **options)
    targets = torch.randint(words, tokens, **options)
    return head, hidden.requires_grad_(), targets, TeacherOutput(theirs, head.weight.detach().clone())


def _times(place: Place, name: str, words: int, size: int) -> Rows:
    tokens = (2, 24) if place.is_tiny else TOKENS
    head, hidden, targets, teacher = _head(place, tokens, words, size)

    def losses(teacher_output: TeacherOutput | None) -> Tensor:
        with torch.autocast(place.device, torch.bfloat16, enabled=place.device == "cuda"):
            entropy, divergence = head(hidden, targets, teacher_output)
        return entropy.mean() if divergence is None else (entropy + divergence).mean()

    def forward(teacher_output: TeacherOutput | None) -> None:
        with torch.no_grad():
            losses(teacher_output)

    def both(teacher_output: TeacherOutput | None) -> None:
        torch.autograd.grad(losses(teacher_output), (hidden, head.weight))

    cases: dict[str, Case] = {
        "with a teacher, forward and backward": partial(both, teacher),
        "with a teacher, forward without gradients": partial(forward, teacher),
        "cross-entropy, forward and backward": partial(both, None),
        "products alone": _products(place, hidden, head.weight),
    }
    found = place.milliseconds(cases, 2, rounds=5)
    title, logits = f"{name}, {tokens[0] * tokens[1]} tokens, {words} words", tokens[0] * tokens[1] * words
    for case, milliseconds in found.items():
        beside = f"{milliseconds / found['products alone']:.2f} x the products"
        if case == "with a teacher, forward and backward":
            beside += f", {IDEAL_BYTES * logits / milliseconds / 1e6:.0f} GB/s if a logit moved {IDEAL_BYTES} bytes"
        yield row(f"{title}: {case}", milliseconds, "ms", beside)
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both(teacher)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        yield row(f"{title}: memory beside the inputs", peak, "GiB")


def _products(place: Place, hidden: Tensor, weight: Tensor) -> Case:
    """Return the four products that the losses need at least: logits of both models, and two gradients."""
    states, matrix = (tensor.detach().to(place.dtype) for tensor in (hidden.flatten(0, 1), weight))
    chunks = states.split(4096)
    logits = torch.empty(len(chunks[0]), len(matrix), device=place.device, dtype=place.dtype)

    def case() -> None:
        for chunk in chunks:
            into = logits[: len(chunk)]
            torch.mm(chunk, matrix.T, out=into)
            torch.mm(chunk, matrix.T, out=into)
            into @ matrix
            into.T @ chunk

    return case


def _error(place: Place, name: str, words: int, size: int) -> Rows:
    """Compare divergence and the hidden states' gradient of a few tokens with float64."""
    head, hidden, targets, teacher = _head(place, (1, place.size(512, 24)), words, size)
    dtype = torch.bfloat16 if place.device == "cuda" else torch.float32
    for tensor in (hidden.data, head.weight.data, teacher.hidden_states, teacher.weight):
        tensor.copy_(tensor.to(dtype))  # what the products read: that rounding is no error of theirs
    with torch.autocast(place.device, torch.bfloat16, enabled=place.device == "cuda"):
        _, divergence = head(hidden, targets, teacher)
    (gradient,) = torch.autograd.grad(divergence[:, :-1].mean(), hidden)
    states = hidden.detach().double().requires_grad_()
    logits = states @ head.weight.detach().double().T
    theirs = (teacher.hidden_states.double() @ teacher.weight.double().T).log_softmax(-1)
    exact = (theirs.exp() * (theirs - logits.log_softmax(-1))).sum(-1)
    (wanted,) = torch.autograd.grad(exact[:, :-1].mean(), states)
    difference = divergence.detach().double() - exact.detach()
    error = float(difference.abs().mean())
    holds = error <= LARGEST_ERROR[place.device]
    beside = f"of a mean of {float(exact.detach().mean()):.2e}; mean of the difference {float(difference.mean()):.1e}"
    yield row(f"{name}: divergence of a token", error, "nats off float64", beside, holds=holds)
    relative = float((gradient.double() - wanted).norm() / wanted.norm())
    yield row(f"{name}: gradient of hidden states", relative, "of float64")
