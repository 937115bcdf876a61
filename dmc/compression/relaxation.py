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


def logistic_noise(uniform: Tensor) -> Tensor:
    """Turn uniform numbers, float32 [*], into G1 - G2 for two Gumbel variables, which is Logistic(0, 1)."""
    uniform = uniform.clamp(SMALLEST_UNIFORM, 1 - SMALLEST_UNIFORM * 2)
    return torch.log(uniform) - torch.log1p(-uniform)


def sample_decisions(
    logits: Tensor, temperature: float, generator: torch.Generator | None = None, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Relax binary decisions with logistic noise (Gumbel-sigmoid; DMC section 3.2).

    P(alpha > 0.5) = sigmoid(logit) whatever the temperature.

    Args:
        logits: decision logits, any shape.
        temperature: > 0; lower is closer to binary.
        generator: source of noise; None: torch's default.
        noise: Logistic(0, 1) noise, drawn before, float32 in the shape of `logits`; None: drawn from `generator`.
    Returns:
        (alpha, noised): alpha = sigmoid(noised) in [0, 1] and noised = (logits + noise) / temperature, float32.
    """
    if noise is None:
        uniform = torch.rand(logits.shape, device=logits.device, dtype=torch.float32, generator=generator)
        noise = logistic_noise(uniform)
    noised = (logits.float() + noise) / temperature
    return torch.sigmoid(noised), noised


class DecisionNoise:
    """Noise of all layers in one pass, so that no layer holds a generator; each sample and layer has its own seed.

    Recomputation, resuming, another batch split or another world size draw the same noise for the same sample.
    Not a dataclass: FSDP2 casts the tensors of dataclasses among a layer's arguments.

    Args:
        seeds: of the B samples.
        layers: indices of the layers that draw.
        heads: number of decisions for each token, over all ranks.
        length: T.
        device: where to draw.
        ranks: processes that share the heads: all are drawn on each, and each keeps its own.
    """

    def __init__(
        self, seeds: Sequence[int], layers: Sequence[int], heads: int, length: int, device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        uniform = torch.empty(len(layers), len(seeds), heads, length, dtype=torch.float32, device=device)
        generator = new_generator(device)
        for layer, of_layer in zip(layers, uniform.unbind(), strict=True):
            for seed, of_sample in zip(seeds, of_layer.unbind(), strict=True):
                if generator is not None:
                    generator.manual_seed(decision_seed(seed, layer))
                torch.rand(of_sample.shape, out=of_sample, generator=generator)
        self._of_layers = dict(zip(layers, logistic_noise(ranks.chunk(uniform, 2)).unbind(), strict=True))

    def of_layer(self, index: int) -> Tensor:
        """Return the noise of a layer, float32 [B, H, T]."""
        return self._of_layers[index]


def decision_seed(seed: int, layer: int) -> int:
    """Return the seed of a sample's noise in a layer, which no other layer of it has."""
    return (seed * 1_000_003 + layer) % 2**63


def new_generator(device: torch.device) -> torch.Generator | None:
    """Make a generator of random numbers on a device."""
    return torch.Generator(device)


def straight_through(alpha: Tensor) -> Tensor:
    """Round decisions, any shape, to 0 or 1 in value, with the gradient of the relaxed ones (DMC section 3.2)."""
    hard = (alpha > 0.5).to(alpha.dtype)
    return hard + (alpha - alpha.detach())  # the bracket is exactly 0; without it the sum rounds


def log_one_minus_sigmoid(noised: Tensor) -> Tensor:
    """Return log(1 - sigmoid(x)), any shape, without cancellation: the mask is made of noised logits, not of alpha."""
    return F.logsigmoid(-noised)
