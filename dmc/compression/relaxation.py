"""From a decision logit to a decision: the Gumbel-sigmoid relaxation, the straight-through estimate, THE threshold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dmc.ranks import ALONE, Ranks

SMALLEST_UNIFORM = 2.0**-25
"""Half the spacing of `torch.rand`: keeps log(u) and log(1 - u) finite."""


def hard_decisions(logits: Tensor) -> Tensor:
    """Return the thresholded decisions: THE threshold, in training and at inference.

    Ties go to append: round(sigmoid(0)) is undefined in the paper, the official code tests > 0.

    Args:
        logits: decision logits, any shape.
    Returns:
        Whether each token is merged (or dropped), bool, shape of `logits`.
    """
    return logits.float() > 0


def logistic_noise(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw G1 - G2 for two Gumbel variables, which is Logistic(0, 1), float32 [*shape]."""
    uniform = torch.rand(shape, device=device, dtype=torch.float32, generator=generator)
    uniform = uniform.clamp(SMALLEST_UNIFORM, 1 - SMALLEST_UNIFORM * 2)
    return torch.log(uniform) - torch.log1p(-uniform)


def sample_decisions(
    logits: Tensor,
    temperature: float,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor]:
    """Relax binary decisions with logistic noise (Gumbel-sigmoid; DMC section 3.2).

    P(alpha > 0.5) = sigmoid(logit) whatever the temperature.

    Args:
        logits: decision logits, [B, H, T].
        temperature: > 0; lower is closer to binary.
        generator: source of noise; one for all, one for each row of the batch, or None for torch's default.
        ranks: processes that share the heads: each row's generator draws for all heads, each rank keeps its own part.
    Returns:
        (alpha, noised): alpha = sigmoid(noised) in [0, 1] and noised = (logits + noise) / temperature, float32.
    """
    if generator is None or isinstance(generator, torch.Generator):
        noise = logistic_noise(logits.shape, logits.device, generator)
    else:
        shape = torch.Size((logits.shape[1] * ranks.size, logits.shape[2]))
        noise = torch.stack([ranks.chunk(logistic_noise(shape, logits.device, row), 0) for row in generator])
    noised = (logits.float() + noise) / temperature
    return torch.sigmoid(noised), noised


def sample_generators(noise_seeds: Sequence[int], layer_index: int, device: torch.device) -> list[torch.Generator]:
    """Make one generator for each sequence of a batch, seeded by the sample and the layer alone.

    Recomputation, resuming, another batch split or another world size draw the same noise for the same sample.
    """
    return [torch.Generator(device).manual_seed((seed * 1_000_003 + layer_index) % (2**63)) for seed in noise_seeds]


def straight_through(alpha: Tensor) -> Tensor:
    """Round decisions, any shape, to 0 or 1 in value, with the gradient of the relaxed ones (DMC section 3.2)."""
    hard = (alpha > 0.5).to(alpha.dtype)
    return hard + (alpha - alpha.detach())  # the bracket is exactly 0; without it the sum rounds


def log_one_minus_sigmoid(noised: Tensor) -> Tensor:
    """Return log(1 - sigmoid(x)), any shape, without cancellation: the mask is made of noised logits, not of alpha."""
    return F.logsigmoid(-noised)
