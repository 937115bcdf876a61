"""Masked attention in blocks of rows by matrix products: any device; the fastest on a CPU for short sequences."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmc.models.masked_attention.form import AttentionForm, Gradients, Operands, accumulation_dtype

_ROWS = 64
"""Query rows of one KV head in a block: more give faster matrix products, fewer waste less beside the diagonal."""
_SCORES = {"cpu": 1 << 19}
"""Scores held at once: on a CPU as many as fit its cache."""


class BlockedAttention(torch.autograd.Function):
    """Softmax over the columns that a block of rows can see, one block at a time; backward computes it again."""

    @staticmethod
    def forward(ctx: Any, form: AttentionForm, *tensors: Tensor | None) -> Tensor:
        """Attend; `tensors` are those of `Operands`."""
        ctx.form = form
        ctx.save_for_backward(*tensors)
        operands = _scaled_operands(form, tensors)
        out = torch.empty_like(operands.query[..., : operands.channels])
        for block, heads in _blocks(operands):
            probabilities = block.probabilities(operands, heads, block.keys(operands, heads))
            attended = torch.bmm(probabilities, block.values(operands, heads))
            out[heads, block.start : block.stop] = attended.unflatten(1, (-1, out.shape[2]))
        return operands.sighted(operands.heads_of(out))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s arguments."""
        operands = _scaled_operands(ctx.form, ctx.saved_tensors)
        gradients = Gradients(operands)
        grad = operands.rows_of(operands.sighted(grad), operands.channels)
        for block, heads in _blocks(operands):
            rows = slice(block.start, block.stop)
            query_rows, grad_rows = operands.query[heads, rows].flatten(1, 2), grad[heads, rows].flatten(1, 2)
            key = block.keys(operands, heads)
            probabilities = block.probabilities(operands, heads, key)
            grad_value = torch.bmm(probabilities.mT, grad_rows)
            block.add(grad_value, gradients.recent_value, gradients.stream_value, heads)
            scores = torch.bmm(grad_rows, block.values(operands, heads).mT)
            scores = torch._softmax_backward_data(scores, probabilities, -1, scores.dtype)
            block.add(torch.bmm(scores.mT, query_rows), gradients.recent_key, gradients.stream_key, heads)
            gradients.query[heads, rows] = torch.bmm(scores, key).unflatten(1, (-1, grad.shape[2]))
            if operands.top is not None and block.kept:
                top = block.top(operands, scores).sum(1)  # these scores had no bias
                entries = slice(block.kept - top.shape[1], block.kept)
                gradients.stream_key[heads, entries, operands.channel] -= top
        gradients.query *= ctx.form.scaling
        return None, *gradients.unpack()


@dataclass(frozen=True)
class _Block:
    """Rows start..stop; their columns are stream[:kept], then recent[window:stop]."""

    start: int
    stop: int
    kept: int
    window: int
    unseen: int
    """First column that some row of the block does not see."""
    causal: Tensor
    """0 where a row sees a column from `unseen` on, else -inf, [rows, 1, columns]."""

    def keys(self, operands: Operands, heads: slice) -> Tensor:
        """Return the keys of the block's columns, [heads, columns, width]."""
        return self._columns(operands.recent_key, operands.stream_key, heads)

    def values(self, operands: Operands, heads: slice) -> Tensor:
        """Return the values of the block's columns, [heads, columns, channels]."""
        return self._columns(operands.recent_value, operands.stream_value, heads)

    def _columns(self, recent: Tensor | None, stream: Tensor, heads: slice) -> Tensor:
        if recent is None:
            return stream[heads, : self.kept]
        recent = recent[heads, self.window : self.stop]
        return torch.cat([stream[heads, : self.kept], recent], dim=1) if self.kept else recent

    def add(self, columns: Tensor, recent: Tensor | None, stream: Tensor, heads: slice) -> None:
        """Add values of the block's columns to the recent and stream entries they came from."""
        stream[heads, : self.kept] += columns[:, : self.kept]
        if recent is not None:
            recent[heads, self.window : self.stop] += columns[:, self.kept :]

    def probabilities(self, operands: Operands, heads: slice, key: Tensor) -> Tensor:
        """Return the attention of the block's rows to its columns, [heads, rows * group, columns]."""
        scores = torch.bmm(operands.query[heads, self.start : self.stop].flatten(1, 2), key.mT)
        scores.unflatten(1, (self.stop - self.start, -1))[..., self.unseen :] += self.causal
        if operands.top is not None and self.kept:
            top = self.top(operands, scores)
            top.copy_(operands.top[heads, self.kept - top.shape[-1] : self.kept].mT)
        return torch.softmax(scores, dim=-1, out=scores)

    def top(self, operands: Operands, scores: Tensor) -> Tensor:
        """View each row's score of stream entry i - delay, [heads, group, rows that have one]."""
        scores = scores.unflatten(1, (self.stop - self.start, -1))
        row = max(self.start, operands.form.delay)
        return scores[:, row - self.start :, :, row - operands.form.delay : self.kept].diagonal(0, 1, 3)


def _scaled_operands(form: AttentionForm, tensors: tuple[Tensor | None, ...]) -> Operands:
    assert tensors[0] is not None
    operands = Operands(form, tensors, accumulation_dtype(tensors[0]), multiple=1)
    operands.query *= form.scaling
    return operands


def _blocks(operands: Operands) -> Iterator[tuple[_Block, slice]]:
    """Yield each block of rows with each slice of heads, small enough that their scores fit `_SCORES`."""
    num_heads, time, group, _ = operands.query.shape
    device, delay = operands.query.device, operands.form.delay
    num_rows = max(1, _ROWS // group)
    for start in range(0, time, num_rows):
        stop = min(start + num_rows, time)
        kept, unseen = max(0, stop - delay), max(0, start - delay)
        window = max(0, start - delay + 1) if delay else stop
        rows = torch.arange(start, stop, device=device).unsqueeze(-1)
        recent = torch.arange(window, stop, device=device)
        seen = torch.arange(unseen, kept, device=device) <= rows - delay
        seen = torch.cat([seen, (recent <= rows) & (recent > rows - delay)], dim=1)
        causal = operands.query.new_zeros(seen.shape).masked_fill_(~seen, -math.inf).unsqueeze(1)
        block = _Block(start, stop, kept, window, unseen, causal)
        scores = num_rows * group * (kept + stop - window)
        step = max(1, _SCORES.get(device.type, 1 << 26) // scores)
        for first in range(0, num_heads, step):
            yield block, slice(first, min(first + step, num_heads))
