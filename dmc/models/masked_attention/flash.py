"""Masked attention by the device's flash kernel; the few keys it cannot handle are merged by log-sum-exp."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dmc.models.masked_attention.band import Band
from dmc.models.masked_attention.flash_ops import find_flash_kernel
from dmc.models.masked_attention.form import MASKED, AttentionForm, Gradients, Operands, accumulation_dtype


class FlashAttention(torch.autograd.Function):
    """One softmax over up to three parts, which are computed separately and merged by their log-sum-exps.

    far: queries from `delay + keep_top` on against the stream from 0 on: causal attention, by the flash kernel.
    top: stream entry i - delay without its bias: one score per row.
    band: the `delay` newest raw keys: dense blocks.

    Backward calls the flash backward with the merged output and log-sum-exp, which gives the far part's share of the
    gradient (as in ring attention), and adds the gradients of the other two.
    """

    @staticmethod
    def forward(ctx: Any, form: AttentionForm, *tensors: Tensor | None) -> Tensor:
        """Attend; `tensors` are those of `Operands`."""
        query = tensors[0]
        assert query is not None
        kernel = find_flash_kernel(query)
        assert kernel is not None
        operands = Operands(form, tensors, query.dtype, kernel.multiple)
        heads, time, group, _ = operands.query.shape
        delay, shift = form.delay, form.delay + form.keep_top
        part_lse = query.new_full((heads, time, group, 3), -torch.inf, dtype=accumulation_dtype(query))
        state: Sequence[Any] = ()
        if shift < time:
            far, log_sum_exp, state = kernel.forward(*_far(operands, shift), form.scaling)
            part_lse[:, shift:, :, 0] = log_sum_exp.transpose(1, 2)
        if operands.top is not None:
            part_lse[:, delay:, :, 1] = operands.top
        if delay:
            recent, part_lse[..., 2] = Band(operands).attend()
        weights = torch.softmax(part_lse, dim=-1)
        out = part_lse.new_zeros(heads, time, group, operands.channels)
        if shift < time:
            out[:, shift:].addcmul_(far.transpose(1, 2)[..., : operands.channels], weights[:, shift:, :, 0:1])
        if operands.top is not None:
            out[:, delay:].addcmul_(operands.stream_value[:, : time - delay].unsqueeze(2), weights[:, delay:, :, 1:2])
        if delay:
            out.addcmul_(recent, weights[..., 2:])
        attended = operands.sighted(operands.heads_of(out))
        ctx.form, ctx.kernel, ctx.state = form, kernel, state
        ctx.save_for_backward(*tensors, part_lse, attended)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s arguments."""
        form, kernel = ctx.form, ctx.kernel
        *tensors, part_lse, attended = ctx.saved_tensors
        operands = Operands(form, tensors, tensors[0].dtype, kernel.multiple)
        gradients = Gradients(operands)
        time, channels, delay, shift = operands.time, operands.channels, form.delay, form.delay + form.keep_top
        grad = operands.rows_of(operands.sighted(grad), operands.width)
        out = operands.rows_of(attended, operands.width)
        log_sum_exp = part_lse.logsumexp(dim=-1)
        weights = torch.exp(part_lse - log_sum_exp.unsqueeze(-1))
        if shift < time:
            # Where all is masked, score - log-sum-exp is a rounding error of MASKED; with 0 the keys get no weight.
            safe = torch.where(log_sum_exp > MASKED / 2, log_sum_exp, 0.0)
            grad_rows, out_rows = (states[:, shift:].transpose(1, 2) for states in (grad, out))
            safe = safe[:, shift:].transpose(1, 2).contiguous()
            far_query, far_key, far_value = kernel.backward(
                grad_rows, _far(operands, shift), out_rows, safe, ctx.state, form.scaling
            )
            gradients.query[:, shift:] = far_query.transpose(1, 2)
            gradients.stream_key[:, : time - shift] = far_key.sum(1, dtype=part_lse.dtype)
            gradients.stream_value[:, : time - shift] = far_value.sum(1, dtype=part_lse.dtype)[..., :channels]
        grad, out = (states[..., :channels].to(part_lse.dtype) for states in (grad, out))
        delta = torch.linalg.vecdot(grad, out)
        if operands.top is not None:
            _top_backward(operands, grad[:, delay:], delta[:, delay:], weights[:, delay:, :, 1], gradients)
        if delay:
            Band(operands).backward(grad * weights[..., 2:], delta * weights[..., 2], gradients)
        return None, *gradients.unpack()


def _far(operands: Operands, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of the causal part, [heads, group, time - shift, width]; keys are not copied."""
    query = operands.query[:, shift:].transpose(1, 2)
    value = operands.stream_value
    if operands.width > operands.channels:
        value = functional.pad(value, (0, operands.width - operands.channels))
    stream = (states[:, : operands.time - shift].unsqueeze(1) for states in (operands.stream_key, value))
    key, value = (states.expand(-1, query.shape[1], -1, -1) for states in stream)
    return query, key, value


def _top_backward(operands: Operands, grad: Tensor, delta: Tensor, weight: Tensor, gradients: Gradients) -> None:
    """Add the gradients of the rows' scores of stream entry i - delay and of that entry's value.

    All are [heads, time - delay, group, ...]: the gradient of the output, output . gradient, and the entry's weight.
    """
    delay, channels = operands.form.delay, operands.channels
    rows, entries = slice(delay, None), slice(0, operands.time - delay)
    key, value = operands.stream_key[:, entries, None], operands.stream_value[:, entries, None]
    score = (torch.linalg.vecdot(grad, value.to(grad.dtype)) - delta) * weight * operands.form.scaling
    score = score.unsqueeze(-1)
    bias = gradients.stream_key[..., operands.channel].clone()
    gradients.query[:, rows, :, :channels].addcmul_(score, key[..., :channels])
    gradients.stream_key[:, entries] += (score * operands.query[:, rows]).sum(2)
    gradients.stream_key[..., operands.channel] = bias  # this score has none
    gradients.stream_value[:, entries] += (grad * weight.unsqueeze(-1)).sum(2)
