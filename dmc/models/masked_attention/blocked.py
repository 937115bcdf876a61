"""Masked attention in blocks of rows by matrix products: any device, any dtype, and what a CPU runs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MASKED = -1e30
"""Stands for -inf among biases: a row that sees nothing is no NaN before it is set to 0."""
_ROWS, _LONG = (64, 128), 384
"""Query rows of one KV head in a block, of short sequences and of longer ones than this: more give faster matrix
products, fewer waste less beside the diagonal."""
_SCORES = {"cpu": 1 << 19}
"""Scores held at once: on a CPU as many as fit its cache."""


class BlockedAttention(torch.autograd.Function):
    """Softmax over the columns that a block of rows can see, one block at a time; backward computes it again."""

    @staticmethod
    def forward(ctx: Any, sinks: Tensor | None, *inputs: Any) -> Tensor:
        """Attend; `inputs` are those of `fused_attention`, sinks [H_q] a column of the softmax whose value is 0."""
        ctx.form = inputs[-4:]
        ctx.save_for_backward(sinks, *inputs[:-4])
        operands = _Operands(sinks, *inputs)
        out = torch.empty_like(operands.query)
        for block in operands.blocks():
            attended = torch.bmm(block.probabilities(block.keys()), block.values())
            out[block.heads, block.rows] = attended.unflatten(1, (-1, out.shape[2]))
        return operands.sighted(operands.heads_of(out))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s inputs."""
        sinks, *tensors = ctx.saved_tensors
        operands = _Operands(sinks, *tensors, *ctx.form)
        by_sink = None if operands.sinks is None else torch.zeros_like(operands.sinks)
        by_query = torch.empty_like(operands.query)
        by_key, by_value = torch.zeros_like(operands.key), torch.zeros_like(operands.value)
        by_bias, by_recent_key, by_recent_value = (
            None if tensor is None else torch.zeros_like(tensor)
            for tensor in (operands.bias, operands.recent_key, operands.recent_value)
        )
        grad = operands.rows_of(operands.sighted(grad))
        for block in operands.blocks():
            query, grad_rows, key = block.of_rows(operands.query), block.of_rows(grad), block.keys()
            probabilities = block.probabilities(key)
            block.add(torch.bmm(probabilities.mT, grad_rows), by_value, by_recent_value)
            scores = torch.bmm(grad_rows, block.values().mT, out=operands.scratch(1, probabilities.shape))
            if by_sink is not None:
                shares = (1 - probabilities.sum(-1)) * (probabilities * scores).sum(-1)  # of the column, as below
                by_sink[block.heads] -= shares.unflatten(1, (-1, grad.shape[2])).sum(1)
            torch._softmax_backward_data(scores, probabilities, -1, scores.dtype, grad_input=scores)
            block.add(torch.bmm(scores.mT, query), by_key, by_recent_key)
            by_query[block.heads, block.rows] = torch.bmm(scores, key).unflatten(1, (-1, grad.shape[2]))
            if by_bias is not None:
                block.add_bias(scores, by_bias)
        by_query = operands.heads_of(by_query.mul_(ctx.form[0]))
        flat = (by_key, by_value, by_bias, by_recent_key, by_recent_value)
        gradients = (
            None if gradient is None else gradient.to(like.dtype).view(like.shape)
            for gradient, like in zip(flat, tensors[1:6], strict=True)
        )  # fmt: skip
        if by_sink is not None:
            by_sink = by_sink.unflatten(0, (operands.batch, -1)).sum(0).flatten().to(sinks.dtype)
        return by_sink, by_query, *gradients, *[None] * 7


class _Operands:
    """The operands as matrices: batch and KV heads in one axis ("heads"), in float32 (float64 for float64).

    Attributes:
        query: scaled, [heads, time, group, channels]; the query heads of one KV head are adjacent, so keys are never
            repeated.
        key, value, recent_key, recent_value: [heads, time, channels].
        bias: of the keys, [heads, time].
        sinks: [heads, group].
        padding: likewise, `MASKED` where they are hidden.
    """

    def __init__(
        self, sinks: Tensor | None, query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor | None,
        recent_key: Tensor | None, recent_value: Tensor | None, hidden: Tensor | None, first: Tensor | None,
        end: Tensor | None, scaling: float, delay: int, keep_top: bool, window: int | None,
    ) -> None:  # fmt: skip
        self.given, self.hidden, self.first, self.window = query, hidden, first, window
        self.batch, self.kv_heads, self.time, self.channels = key.shape
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.lag, self.near = delay if recent_key is not None else 0, delay + keep_top
        self.query = self.rows_of(query)
        self.query *= scaling
        self._scratch = [self.query.new_empty(0) for _ in range(2)]
        self.key, self.value = self._flat(key), self._flat(value)
        self.recent_key, self.recent_value, self.bias = (
            None if tensor is None else self._flat(tensor) for tensor in (recent_key, recent_value, log_keep)
        )
        if self.bias is not None:
            self.bias = self.bias.clamp(min=MASKED)
        self.sinks = None
        if sinks is not None:
            self.sinks = sinks.to(self.dtype).view(self.kv_heads, -1).repeat(self.batch, 1)
        self.padding = None
        if hidden is not None:
            padding = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device).masked_fill_(hidden, MASKED)
            self.padding = padding.repeat_interleave(self.kv_heads, dim=0)

    def scratch(self, index: int, shape: Sequence[int]) -> Tensor:
        """Return memory for a block's scores, always the same: fresh pages from the system cost as much as a product.

        Args:
            index: which of two.
            shape: of the scores.
        """
        size = math.prod(shape)
        if self._scratch[index].numel() < size:
            self._scratch[index] = self.query.new_empty(size)
        return self._scratch[index][:size].view(shape)

    def _flat(self, states: Tensor) -> Tensor:
        return states.to(self.dtype).flatten(0, 1).contiguous()

    def rows_of(self, states: Tensor) -> Tensor:
        """Copy [batch, query heads, time, channels] to [heads, time, group, channels]."""
        rows = states.unflatten(1, (self.kv_heads, -1)).transpose(2, 3)
        return rows.to(self.dtype, memory_format=torch.contiguous_format, copy=True).flatten(0, 1)

    def heads_of(self, rows: Tensor) -> Tensor:
        """Copy [heads, time, group, channels] to the shape and dtype of the given query.

        The memory is laid out as [batch, time, query heads, channels]: joining the heads afterwards costs nothing.
        """
        states = self.given.new_empty(self.batch, self.time, self.given.shape[1], self.channels)
        rows = rows.unflatten(0, (self.batch, self.kv_heads)).transpose(1, 2)
        states.view(rows.shape).copy_(rows)
        return states.transpose(1, 2)

    def sighted(self, states: Tensor) -> Tensor:
        """Return [batch, query heads, time, channels] with 0 where a token and all that it sees before are hidden."""
        if self.hidden is None:
            return states
        seen = (~self.hidden).cumsum(dim=-1)
        start = torch.zeros_like(seen) if self.first is None else self.first.long()
        if self.window is not None:
            start = start.maximum(torch.arange(1, self.time + 1, device=start.device) - self.window)
        seen = seen - torch.nn.functional.pad(seen, (1, 0)).gather(1, start)
        return states.masked_fill((seen == 0)[:, None, :, None], 0)

    def blocks(self) -> Iterator["_Block"]:
        """Yield each block of rows of each slice of heads, small enough that their scores fit `_SCORES`."""
        num_heads, time, group, _ = self.query.shape
        num_rows = max(1, _ROWS[time > _LONG] // group)
        firsts = lasts = [[0] * -(-time // num_rows)] * self.batch
        if self.first is not None:
            ends = torch.arange(num_rows - 1, time + num_rows - 1, num_rows).clamp(max=time - 1)
            firsts, lasts = self.first[:, ::num_rows].tolist(), self.first[:, ends.to(self.first.device)].tolist()
        for index, start in enumerate(range(0, time, num_rows)):
            stop = min(start + num_rows, time)
            columns = min(stop, num_rows + (self.window or stop)) + min(self.lag, stop)
            step = max(1, _SCORES.get(self.query.device.type, 1 << 26) // (num_rows * group * columns))
            for head in range(0, num_heads, step):
                heads = slice(head, min(head + step, num_heads))
                rows = range(head // self.kv_heads, (heads.stop - 1) // self.kv_heads + 1)
                lowest, highest = min(firsts[row][index] for row in rows), max(lasts[row][index] for row in rows)
                if self.window is not None:
                    lowest, highest = max(lowest, start - self.window + 1), max(highest, stop - self.window)
                yield _Block(self, heads, slice(start, stop), lowest, lowest < highest)


@dataclass(frozen=True)
class _Block:
    """Rows of some heads; their columns are those of the stream, then those of the raw keys."""

    operands: _Operands
    heads: slice
    rows: slice
    lowest: int
    """First place that any row sees."""
    is_divided: bool
    """Whether some row does not see all places from `lowest` on, because its document or window starts later."""

    @property
    def stream(self) -> slice:
        """Places that the block sees of the stream."""
        stop = max(0, self.rows.stop - self.operands.lag)
        return slice(min(self.lowest, stop), stop)

    @property
    def recent(self) -> slice:
        """Places that the block sees raw."""
        return slice(max(self.lowest, self.rows.start - self.operands.lag + 1), self.rows.stop)

    def of_rows(self, states: Tensor) -> Tensor:
        """Return the block's rows of [heads, time, group, channels], [heads, rows * group, channels]."""
        return states[self.heads, self.rows].flatten(1, 2)

    def keys(self) -> Tensor:
        """Return the keys of the block's columns, [heads, columns, channels]."""
        return self._columns(self.operands.key, self.operands.recent_key)

    def values(self) -> Tensor:
        """Return the values of the block's columns, [heads, columns, channels]."""
        return self._columns(self.operands.value, self.operands.recent_value)

    def _columns(self, stream: Tensor, recent: Tensor | None) -> Tensor:
        if recent is None:
            return stream[self.heads, self.stream]
        return torch.cat([stream[self.heads, self.stream], recent[self.heads, self.recent]], dim=1)

    def add(self, columns: Tensor, stream: Tensor, recent: Tensor | None) -> None:
        """Add values of the block's columns to the stream and raw entries they came from."""
        num_stream = self.stream.stop - self.stream.start
        stream[self.heads, self.stream] += columns[:, :num_stream]
        if recent is not None:
            recent[self.heads, self.recent] += columns[:, num_stream:]

    def probabilities(self, key: Tensor) -> Tensor:
        """Return the attention of the block's rows to its columns, [heads, rows * group, columns]."""
        operands, stream = self.operands, self.stream
        query = self.of_rows(operands.query)
        joined = torch.bmm(query, key.mT, out=operands.scratch(0, (*query.shape[:2], key.shape[1])))
        scores = joined.unflatten(1, (self.rows.stop - self.rows.start, -1))
        if operands.bias is not None:
            full, part, has_bias = self._biased()
            scores[..., full] += operands.bias[self.heads, None, None, stream.start : stream.start + full.stop]
            places = slice(stream.start + part.start, stream.start + part.stop)
            scores[..., part] += torch.where(has_bias, operands.bias[self.heads, None, None, places], 0.0)
        if operands.padding is not None:
            recent = None if operands.recent_key is None else operands.padding
            scores += self._columns(operands.padding, recent)[:, None, None]
        unseen = 0 if self.is_divided else max(0, self.rows.start - operands.lag - stream.start)
        scores[..., unseen:].masked_fill_(self._unseen(unseen), -math.inf)
        if operands.sinks is None:
            return torch.softmax(joined, dim=-1, out=joined)
        sinks = operands.sinks[self.heads].repeat(1, self.rows.stop - self.rows.start)[..., None]
        peak = torch.maximum(joined.amax(-1, keepdim=True), sinks)
        joined = joined.sub_(peak).exp_()
        return joined.div_(joined.sum(-1, keepdim=True) + (sinks - peak).exp())

    def _biased(self) -> tuple[slice, slice, Tensor]:
        """Return the columns whose bias counts for all rows, those where it does for some, and where."""
        start, near, stop = self.stream.start, self.operands.near, self.stream.stop
        full = min(max(0, self.rows.start - near + 1 - start), stop - start)
        some = min(max(full, self.rows.stop - near - start), stop - start)
        rows, columns = self._places(slice(start + full, start + some))
        return slice(0, full), slice(full, some), rows - columns >= near

    def add_bias(self, scores: Tensor, bias: Tensor) -> None:
        """Add the gradients of the block's scores to those of the biases that they have."""
        full, part, has_bias = self._biased()
        start = self.stream.start
        bias[self.heads, start : start + full.stop] += scores[..., full].sum(1)
        scores = scores[..., part].unflatten(1, (self.rows.stop - self.rows.start, -1))
        bias[self.heads, start + part.start : start + part.stop] += scores.masked_fill(~has_bias, 0).sum((1, 2))

    def _unseen(self, from_column: int) -> Tensor:
        """Tell which columns from one on the rows do not see, [1 or heads, rows, 1, columns]."""
        lag = self.operands.lag
        rows, columns = self._places(slice(self.stream.start + from_column, self.stream.stop))
        unseen = columns > rows - lag
        if self.operands.recent_key is not None:
            columns = torch.cat([columns, (recent := self._places(self.recent)[1])], dim=-1)
            unseen = torch.cat([unseen, (recent > rows) | (recent <= rows - lag)], dim=-1)
        if not self.is_divided:
            return unseen[None]
        if self.operands.window is not None:  # without raw keys
            unseen = unseen | (columns <= rows - self.operands.window)
        if self.operands.first is None:
            return unseen[None]
        first = self.operands.first[:, self.rows].repeat_interleave(self.operands.kv_heads, 0)[self.heads]
        return unseen | (columns < first[:, :, None, None])

    def _places(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the places of the rows, [rows, 1, 1], and of columns, [columns]."""
        device = self.operands.query.device
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        return rows[:, None, None], torch.arange(columns.start, columns.stop, device=device)
