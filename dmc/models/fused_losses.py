"""Losses of tokens from their logits as one operator of PyTorch: a Triton kernel on a GPU, shapes on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORDS = 4096
"""Logits of a row that a program holds at a time."""
WARPS = 8


def fused_losses_of_rows(
    logits: Tensor,
    theirs: Tensor | None,
    targets: Tensor,
    teacher_output: Any,
    by: tuple[Tensor, Tensor | None] | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute what `losses_of_rows` does; the gradient is made in `dtype`."""
    options = (
        (1.0, False) if teacher_output is None else (teacher_output.temperature, teacher_output.direction == "reverse")
    )
    entropy, divergence, gradient = row_losses(logits, theirs, targets, *(by or (None, None)), *options, dtype)
    return entropy, None if theirs is None else divergence, None if by is None else gradient


@torch.library.custom_op("dmc::row_losses", mutates_args=())
def row_losses(
    logits: Tensor,
    theirs: Tensor | None,
    targets: Tensor,
    by_entropy: Tensor | None,
    by_divergence: Tensor | None,
    temperature: float,
    is_reverse: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses of tokens and the gradient by their logits.

    Args:
        logits: float32 [n, vocab].
        theirs: the teacher's, likewise.
        targets: int64 [n]; negative where nothing is to be predicted.
        by_entropy: weight of each token's cross-entropy, float32 [n]; None: no gradient.
        by_divergence: of its divergence, likewise; None: 0.
        temperature: softens both distributions.
        is_reverse: direction of the divergence.
        dtype: of the gradient.
    Returns:
        Cross-entropy, [n], divergence, [n], or [0] without a teacher, and gradient, [n, vocab], or [0] without weights.
    """
    entropy, divergence, gradient = found = _shapes(
        logits, theirs, targets, by_entropy, by_divergence, temperature, is_reverse, dtype
    )
    from dmc.models.token_loss_kernel import row_losses_kernel

    with torch.cuda.device_of(logits):
        row_losses_kernel[(len(logits),)](
            logits, theirs, targets, by_entropy, by_divergence, entropy, divergence, gradient,
            logits.shape[1], logits.stride(0), 0 if theirs is None else theirs.stride(0), temperature,
            IS_REVERSE=is_reverse, IS_SOFT=temperature != 1, WORDS=WORDS, num_warps=WARPS,
        )  # fmt: skip
    return found


@row_losses.register_fake
def _shapes(
    logits: Tensor, theirs: Tensor | None, targets: Tensor, by_entropy: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    entropy = logits.new_empty(len(logits))
    divergence = entropy.new_empty(0 if theirs is None else len(logits))
    gradient = logits.new_empty(0 if by_entropy is None else logits.shape, dtype=others[-1])
    return entropy, divergence, gradient
