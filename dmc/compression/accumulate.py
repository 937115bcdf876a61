"""Merge consecutive tokens into weighted running averages, at every position of a sequence at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def accumulate(key_value: Tensor, alpha: Tensor, omega: Tensor, window_size: int | None) -> Tensor:
    """Merge consecutive tokens into weighted averages (DMC, arXiv:2403.09636, eq. 10).

    With C(t, j) = alpha[t] alpha[t-1] ... alpha[t-j+1] and sums over j < window_size:

        out[t] = sum_j C(t, j) omega[t-j] key_value[t-j] / sum_j C(t, j) omega[t-j]

    Args:
        key_value: keys before RoPE and values side by side, or any vector per token, [batch, heads, time, channels].
        alpha: decision in [0, 1], 1 merges a token into the slot of the token before it, [batch, heads, time].
            The first token has nothing to merge into: `alpha[..., 0]` is read as 0 and its gradient is 0.
        omega: importance > 0, [batch, heads, time].
        window_size: number of newest tokens of a segment in its average; None averages all of them, by the exact
            recurrence. The work per token grows with the window.
    Returns:
        Running average after each token, shape of `key_value`, float32 (float64 for float64 input), differentiable in
        key_value, alpha and omega. 16-bit input is accumulated in float32.
    Raises:
        ValueError: shapes that do not belong together, or window_size < 1.
    """
    if key_value.dim() != 4 or alpha.shape != key_value.shape[:-1] or omega.shape != alpha.shape:
        raise ValueError(
            f"accumulate got key_value {tuple(key_value.shape)}, alpha {tuple(alpha.shape)}, omega "
            f"{tuple(omega.shape)}; expected [batch, heads, time, channels] and twice [batch, heads, time]: "
            "give all three the same number of KV heads, and alpha and omega no channel axis."
        )
    if window_size is not None and window_size < 1:
        raise ValueError(
            f"window_size={window_size} is not supported by accumulate (a slot holds at least its own token); "
            "use window_size >= 1, or None for no window."
        )
    flat = key_value.flatten(0, 1), alpha.flatten(0, 1), omega.flatten(0, 1)
    with torch.autocast(key_value.device.type, enabled=False):  # autocast would run the sums in 16 bit
        if window_size is None or window_size >= key_value.shape[2]:
            pooled = _ScannedAverage.apply(*flat)
        else:
            pooled = _WindowedAverage.apply(*flat, window_size)
    return pooled.view(key_value.shape)


class _WindowedAverage(torch.autograd.Function):
    """Weighted average over a sliding window, as a banded matrix product in blocks of rows.

    The band of a block of rows is cut in two: the block's own columns, and the halo of window - 1 tokens before it.
    """

    @staticmethod
    def forward(ctx: Any, key_value: Tensor, alpha: Tensor, omega: Tensor, window: int) -> Tensor:
        ctx.save_for_backward(key_value, alpha, omega)
        ctx.window = window
        rows, halo = _rows_per_block(window), window - 1
        values = _blocks(key_value, rows)  # [heads, blocks, rows, channels]
        weights = _window_weights(alpha, omega, window, values)[0]
        band, band_halo = _band(weights, rows)
        out = torch.bmm(band.flatten(0, 1), values.flatten(0, 1)).view(values.shape)
        tails = values[:, :-1, rows - halo :].flatten(0, 1)
        out[:, 1:, :halo] += torch.bmm(band_halo.flatten(0, 1), tails).unflatten(0, band_halo.shape[:2])
        return _join(out, key_value.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key_value, alpha, omega = ctx.saved_tensors  # read once: activation checkpointing refuses a second access
        alpha_dtype = alpha.dtype
        window, time = ctx.window, key_value.shape[1]
        rows, halo = _rows_per_block(window), window - 1
        values, grad = _blocks(key_value, rows), _blocks(grad, rows)
        weights, products, omegas, total = _window_weights(alpha, omega, window, values)
        band, band_halo = _band(weights, rows)

        block_ends = values[:, :-1, rows - halo :].flatten(0, 1)
        block_starts = grad[:, 1:, :halo].flatten(0, 1)
        grad_band = band.new_zeros(*band.shape[:3], halo + rows)
        grad_band[..., halo:] = torch.bmm(grad.flatten(0, 1), values.flatten(0, 1).mT).view(band.shape)
        grad_band[:, 1:, :halo, :halo] = torch.bmm(block_starts, block_ends.mT).unflatten(0, band_halo.shape[:2])
        grad_values = torch.bmm(band.flatten(0, 1).mT, grad.flatten(0, 1)).view(values.shape)
        grad_values[:, :-1, rows - halo :] += torch.bmm(band_halo.flatten(0, 1).mT, block_starts).unflatten(
            0, band_halo.shape[:2]
        )

        # out = sum_j weight_j value_j / total, so d out / d weight_j = (value_j - out) / total.
        grad_weights = _run_of_band(grad_band, window).permute(3, 0, 1, 2).reshape(weights.shape)
        grad_weights = (grad_weights - (grad_weights * weights).sum(0)) / total
        grad_omega = torch.zeros_like(total)
        grad_alpha = torch.zeros_like(total)
        chain = torch.zeros_like(total)  # gradient of C(t, j), from j = window - 1 down to 1
        products_times_grad, omegas_times_grad = grad_weights * products, grad_weights * omegas
        alpha = _without_first(alpha, total)
        span = total.shape[1]
        for j in range(window - 1, 0, -1):
            grad_omega[:, : span - j] += products_times_grad[halo - j, :, j:]
            chain[:, j:] *= alpha[:, : span - j]
            chain += omegas_times_grad[halo - j]
            grad_alpha[:, 1 : span - j + 1] += chain[:, j:] * products[halo - j + 1, :, j:]
        grad_omega += products_times_grad[halo]
        grad_alpha[:, 0] = 0
        return (
            _join(grad_values, time).to(key_value.dtype),
            grad_alpha[:, :time].to(alpha_dtype),
            grad_omega[:, :time].to(omega.dtype),
            None,
        )


def _rows_per_block(window: int) -> int:
    # Few rows waste little arithmetic on the zeros beside the band; the halo must fit into the block before.
    return max(32, 1 << (window - 1).bit_length())


def _blocks(values: Tensor, rows: int) -> Tensor:
    """Cut [heads, time, channels] into [heads, blocks, rows, channels] in the accumulation dtype, padded with 0."""
    values = values.to(_accumulation_dtype(values)).contiguous()
    missing = -values.shape[1] % rows
    if missing:
        values = functional.pad(values, (0, 0, 0, missing))
    return values.unflatten(1, (-1, rows))


def _join(blocks: Tensor, time: int) -> Tensor:
    return blocks.flatten(1, 2)[:, :time].contiguous()


def _window_weights(alpha: Tensor, omega: Tensor, window: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (weights, products, omegas), each [window, heads, padded time], and their total [heads, padded time].

    Index [window - 1 - j, :, t] belongs to token t - j: products holds C(t, j), omegas holds omega[t-j], and weights
    their product over its sum. Padding gets weight 1 on itself, so nothing is divided by 0.
    """
    heads, time = alpha.shape
    span = values.shape[1] * values.shape[2]
    omega = functional.pad(omega.to(values.dtype), (0, span - time), value=1.0)
    alpha = _without_first(alpha, omega)
    products = omega.new_zeros(window, heads, span)
    products[-1] = 1
    for j in range(1, window):
        products[-j - 1, :, j:] = products[-j, :, j:] * alpha[:, 1 : span - j + 1]
    omegas = functional.pad(omega, (window - 1, 0))
    omegas = omegas.as_strided((window, heads, span), (1, span + window - 1, 1))
    weights = products * omegas
    total = weights.sum(0)
    return weights.div_(total), products, omegas, total


def _without_first(alpha: Tensor, like: Tensor) -> Tensor:
    """Copy the decisions into the shape and dtype of `like`, 0 for the first token and for padding."""
    copy = torch.zeros_like(like)
    copy[:, 1 : alpha.shape[1]] = alpha[:, 1:]
    return copy


def _run_of_band(band: Tensor, window: int) -> Tensor:
    """View row t's `window` entries of a band [heads, blocks, rows, window - 1 + rows], which start in column t."""
    heads, blocks, rows, columns = band.shape
    size = rows * columns
    return band.as_strided((heads, blocks, rows, window), (blocks * size, size, columns + 1, 1))


def _band(weights: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Lay the weights out as matrices [heads, blocks, rows, rows], and [heads, blocks - 1, halo, halo] for the halo."""
    window, heads, span = weights.shape
    halo = window - 1
    band = weights.new_zeros(heads, span // rows, rows, halo + rows)
    _run_of_band(band, window).copy_(weights.view(window, heads, -1, rows).permute(1, 2, 3, 0))
    return band[..., halo:], band[:, 1:, :halo, :halo]


class _ScannedAverage(torch.autograd.Function):
    """Weighted average over whole segments, by the recurrence S[t] = alpha[t] S[t-1] + omega[t] value[t]."""

    @staticmethod
    def forward(ctx: Any, key_value: Tensor, alpha: Tensor, omega: Tensor) -> Tensor:
        values = key_value.to(_accumulation_dtype(key_value))
        weight = omega.to(values.dtype).unsqueeze(-1)
        sums = _scan(_without_first(alpha, weight[..., 0]), torch.cat([values * weight, weight], dim=-1))
        total = sums[..., -1:].clone()
        out = sums[..., :-1] / total
        ctx.save_for_backward(key_value, alpha, omega, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        key_value, alpha, omega, out, total = ctx.saved_tensors
        values, weight = key_value.to(out.dtype), omega.to(out.dtype).unsqueeze(-1)
        decay = _without_first(alpha, total[..., 0])
        # The gradient of the sums runs backwards: G[t] = grad[t] + alpha[t+1] G[t+1].
        grad = grad / total
        grad = torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], dim=-1)
        later = functional.pad(decay[:, 1:], (0, 1)).flip(1)
        grad = _scan(later, grad.flip(1)).flip(1)
        grad_sum, grad_total = grad[..., :-1], grad[..., -1]
        grad_alpha = torch.zeros_like(decay)
        before = (grad_sum[:, 1:] * out[:, :-1]).sum(-1) + grad_total[:, 1:]
        grad_alpha[:, 1:] = before * total[:, :-1, 0]
        grad_omega = (grad_sum * values).sum(-1) + grad_total
        return (grad_sum * weight).to(key_value.dtype), grad_alpha.to(alpha.dtype), grad_omega.to(omega.dtype)


def _scan(decay: Tensor, values: Tensor, rows: int = 32) -> Tensor:
    """Solve S[t] = decay[t] S[t-1] + values[t], S[-1] = 0: in blocks of rows, then over the blocks' last rows.

    No logarithm or division: a decay of 0 or 1 is exact, and so are the gradients made of this.

    Args:
        decay: [heads, time].
        values: [heads, time, channels].
        rows: tokens in a block.
    """
    heads, time, channels = values.shape
    missing = -time % rows
    decay = functional.pad(decay, (0, missing)).view(heads, -1, rows)
    values = functional.pad(values, (0, 0, 0, missing)).view(heads, -1, rows, channels)
    # products[t, j] = decay[j+1] ... decay[t] for j <= t, 0 above the diagonal.
    below = torch.ones(rows, rows, dtype=torch.bool, device=decay.device).tril(-1)
    products = torch.where(below, decay.unsqueeze(-1), 1).cumprod(-2).tril()
    sums = torch.bmm(products.flatten(0, 1), values.flatten(0, 1)).view(values.shape)
    if values.shape[1] > 1:
        reach = decay.cumprod(-1)  # how much of the block before is left at each row
        carried = _scan(reach[..., -1], sums[:, :, -1], rows)
        sums[:, 1:].addcmul_(reach[:, 1:].unsqueeze(-1), carried[:, :-1].unsqueeze(-2))
    return sums.flatten(1, 2)[:, :time]


def _accumulation_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
