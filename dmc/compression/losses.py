"""What a cache would hold under given decisions, and the loss that pulls it to the target compression ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from dmc.budget import check_ratio
from dmc.compression.relaxation import straight_through


def held_fraction(alpha: Tensor, *, delay: int = 0, token_mask: Tensor | None = None) -> Tensor:
    """Share of the tokens that each KV head holds after the last token: slots / tokens.

    The last `delay` tokens are raw and count whole: (min(n, W) + sum_{t < n - W} (1 - alpha_t)) / n. The first token of
    a sequence is always appended and counts as alpha = 0.

    Args:
        alpha: decisions in [0, 1], [L, B, H, T].
        delay: tokens that stay raw (W).
        token_mask: True at real tokens, [B, T]; None: all are real.
    Returns:
        [L, B, H], in (0, 1].
    """
    num_tokens = alpha.shape[-1]
    if token_mask is None:
        token_mask = torch.ones(alpha.shape[1], num_tokens, dtype=torch.bool, device=alpha.device)
    order = token_mask.long().cumsum(-1)  # 1 at the first real token  [B, T]
    length = order[:, -1:]
    decided = token_mask & (order > 1) & (order <= length - delay)
    merged = (alpha * decided[None, :, None, :]).sum(-1)
    length = length[None].squeeze(-1)[..., None]  # [1, B, 1]
    return (length - merged) / length


def compression_loss(
    alpha: Tensor, target_ratio: float, *, soft: bool = False, delay: int = 0, token_mask: Tensor | None = None
) -> Tensor:
    """One-sided loss on the memory held (DMC eq. 11): max(0, held share - 1 / CR) per sequence, then the batch mean.

    The share is averaged over layers and heads before the hinge (the paper's global prior).

    Args:
        alpha: relaxed decisions in [0, 1], [L, B, H, T].
        target_ratio: CR >= 1.
        soft: use the relaxed decisions; False: their rounded value with the relaxed gradient, as the official code.
        delay: tokens that stay raw.
        token_mask: True at real tokens, [B, T].
    Raises:
        ValueError: the ratio is below 1.
    """
    check_ratio(target_ratio, "target_ratio")
    decisions = alpha if soft else straight_through(alpha)
    held = held_fraction(decisions, delay=delay, token_mask=token_mask).mean(dim=(0, 2))  # [B]
    return torch.relu(held - 1.0 / target_ratio).mean()
