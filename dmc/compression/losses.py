"""The share of tokens that a cache holds under given decisions, and the losses that pull it to the target ratio."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dmc.budget import check_ratio
from dmc.compression.relaxation import straight_through

HeadAgreement = Literal["mean", "ratio"]


def held_fraction(alpha: Tensor, *, delay: int = 0, token_mask: Tensor | None = None) -> Tensor:
    """Return the share of tokens that each KV head holds after the last token: slots / tokens.

    The last `delay` tokens are raw and all count: (min(n, W) + sum_{t < n - W} (1 - alpha_t)) / n. The first token of
    a sequence is always appended and counts as alpha = 0.

    Args:
        alpha: decisions in [0, 1], [L, B, H, T].
        delay: tokens that stay raw (W).
        token_mask: True at real tokens, [B, T]; None: all are real.
    Returns:
        [L, B, H], in (0, 1].
    """
    if token_mask is None:
        token_mask = torch.ones(alpha.shape[1], alpha.shape[-1], dtype=torch.bool, device=alpha.device)
    merged = (alpha * decided_tokens(token_mask, delay)[None, :, None, :]).sum(-1)
    length = token_mask.sum(-1)[None, :, None]
    return (length - merged) / length


def decided_tokens(token_mask: Tensor, delay: int) -> Tensor:
    """Return True at tokens whose decisions count: real, behind the first of a sequence and before its last `delay`.

    Args:
        token_mask: True at real tokens, [B, T].
        delay: tokens that stay raw.
    """
    order = token_mask.long().cumsum(-1)  # 1 at the first real token  [B, T]
    length = order[:, -1:]
    return token_mask & (order > 1) & (order <= length - delay)


def compression_loss(
    alpha: Tensor,
    target_ratio: float | Tensor,
    *,
    soft: bool = False,
    delay: int = 0,
    token_mask: Tensor | None = None,
    prior: Literal["global", "local"] = "global",
) -> Tensor:
    """One-sided loss on the memory held (DMC eq. 11): max(0, held share - 1 / CR) per sequence, then the batch mean.

    The share is averaged over layers and heads before the hinge (the paper's global prior), or over heads alone, with
    the mean over the layers behind it (local prior): (1 / L) sum_l max(0, held share of layer l - 1 / CR).

    Args:
        alpha: relaxed decisions in [0, 1], [L, B, H, T].
        target_ratio: CR >= 1.
        soft: use the relaxed decisions; False: their rounded value with the relaxed gradient, as the official code.
        delay: tokens that stay raw.
        token_mask: True at real tokens, [B, T].
        prior: whether all layers together (global) or each layer (local) must meet the target.
    Raises:
        ValueError: the ratio is below 1, or the prior is unknown.
    """
    if not isinstance(target_ratio, Tensor):  # whose value would be read from the device
        check_ratio(target_ratio, "target_ratio")
    if prior not in ("global", "local"):
        raise ValueError(f"prior={prior!r} is unknown: expected 'global' or 'local'")
    decisions = alpha if soft else straight_through(alpha)
    held = held_fraction(decisions, delay=delay, token_mask=token_mask).mean(2)  # [L, B]
    if prior == "global":
        held = held.mean(0)
    return torch.relu(held - 1.0 / target_ratio).mean()


def head_agreement_loss(alpha: Tensor, form: HeadAgreement = "mean") -> Tensor:
    """Penalize heads of a layer that compress differently (DMC-C, eq. 14), on relaxed decisions.

        mean:  (1 / N) sum over l, h, t of |alpha_lht - mean over h' of alpha_lh't|
        ratio: (1 / (L H)) sum over l, h of |mean over t of alpha_lht - mean over h, t of alpha_lht|

    N = L H T, then the batch mean. The paper prints a sum over h', whose optimum is that nothing is merged: four heads
    that all merge a token cost 4 * |1 - 4|. `ratio` asks for equal compression ratios alone, as the paper's text does.

    Args:
        alpha: relaxed decisions in [0, 1], [L, B, H, T].
        form: one of the two above.
    Raises:
        ValueError: the form is unknown.
    """
    if form == "ratio":
        alpha = alpha.mean(3, keepdim=True)
    elif form != "mean":
        raise ValueError(f"form={form!r} is unknown: expected 'mean' or 'ratio'")
    return (alpha - alpha.mean(2, keepdim=True)).abs().mean()
