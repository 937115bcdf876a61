"""Masked attention in blocks of rows by matrix products: any device, any dtype, and what a CPU runs.

Keys whose bias is so low that they add nothing are left out: the others are gathered in their order, per KV head. A
block of rows sees first of these, and all keys from the first on that not all of its rows see with a bias.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

MASKED = -1e30
"""Stands for -inf among biases: a row that sees nothing is no NaN before it is set to 0."""
_ROWS, _LONG = (64, 128), 384
"""Query rows of one KV head in a block, of short sequences and of longer ones than this: more give faster matrix
products, fewer waste less beside the diagonal."""
_SCORES = {"cpu": 1 << 19}
"""Scores held at once: on a CPU as many as fit its cache."""
_GATHERED = 0.9
"""Share of keys that are kept, up to which they are gathered."""


class BlockedAttention(torch.autograd.Function):
    """Softmax over the columns that a block of rows can see, one block at a time; backward computes it again."""

    @staticmethod
    def forward(ctx: Any, sinks: Tensor | None, *inputs: Any) -> Tensor:
        """Attend.

        Args:
            ctx: of autograd.
            sinks: a column of the softmax whose value is 0, [H_q].
            *inputs: those of `fused_attention`.
        """
        ctx.form = inputs[-5:]
        ctx.save_for_backward(sinks, *inputs[:-5])
        operands = _Operands(sinks, *inputs)
        out = torch.empty_like(operands.query)
        for block in operands.blocks():
            block.store(block.by_part(operands.narrow(block.probabilities()), "value"), out)
        return operands.sighted(operands.heads_of(out))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s inputs."""
        sinks, *tensors = ctx.saved_tensors
        operands = _Operands(sinks, *tensors, *ctx.form)
        by_sink = None if operands.sinks is None else torch.zeros_like(operands.sinks)
        by_query = torch.empty_like(operands.query)
        for states in operands.all_states:
            states.prepare_gradients()
        grad = operands.rows_of(operands.sighted(grad))
        for block in operands.blocks():
            query, grad_rows = block.of_rows(operands.query), block.of_rows(grad)
            probabilities = block.probabilities()
            block.add_by_part(operands.narrow(probabilities), grad_rows, "value_grad")
            scores = block.of_columns(grad_rows, "value", 1)
            if by_sink is not None:
                scores[..., block.num_columns] = 0
            torch._softmax_backward_data(scores, probabilities, -1, scores.dtype, grad_input=scores)
            if by_sink is not None:
                by_sink[block.heads] += scores[..., block.num_columns].unflatten(1, (-1, grad.shape[2])).sum(1)
            block.add_bias(scores)
            scores = operands.narrow(scores)
            block.add_by_part(scores, query, "key_grad")
            block.store(block.by_part(scores, "key"), by_query)
        by_query = operands.heads_of(by_query.mul_(ctx.form[0]))
        if by_sink is not None:
            by_sink = by_sink.unflatten(0, (operands.batch, -1)).sum(0).flatten().to(sinks.dtype)
        gradients = (
            None if gradient is None else gradient.to(like.dtype).view(like.shape)
            for gradient, like in zip(operands.gradients(), tensors[1:6], strict=True)
        )  # fmt: skip
        return by_sink, by_query, *gradients, *[None] * 8


class _States:
    """Keys and values of all heads, [heads, tokens, channels], their biases [heads, tokens], and gradients of all."""

    key_grad: Tensor
    value_grad: Tensor
    bias_grad: Tensor | None

    def __init__(self, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
        self.key, self.value, self.bias = key, value, bias
        self.narrow = {"key": key, "value": value}

    def prepare_gradients(self) -> None:
        self.key_grad, self.value_grad = torch.zeros_like(self.key), torch.zeros_like(self.value)
        self.bias_grad = None if self.bias is None else torch.zeros_like(self.bias)


class _Kept(_States):
    """States of the keys that count, gathered in their order; heads that keep fewer are filled with others.

    Attributes:
        places: where each was, [heads, kept], `time` for what fills.
    """

    def __init__(self, states: _States, keep: Tensor, most: int) -> None:
        heads, time = keep.shape
        order = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        self.index = (order + torch.arange(0, heads * time, time, device=order.device)[:, None]).flatten()
        assert states.bias is not None
        super().__init__(*(self._gather(tensor) for tensor in (states.key, states.value, states.bias)))
        self.places = torch.where(torch.arange(most, device=keep.device) < keep.sum(1, keepdim=True), order, time)
        self.counts = torch.nn.functional.pad(keep.cumsum(1), (1, 0)).cpu().numpy()

    def _gather(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1)[self.index].unflatten(0, (tensor.shape[0], -1))

    def scatter_gradients(self, states: _States) -> None:
        """Add the gradients to those of the states that these were gathered from, each to its own place."""
        for name in ("key_grad", "value_grad", "bias_grad"):
            getattr(states, name).flatten(0, 1).index_add_(0, self.index, getattr(self, name).flatten(0, 1))

    def slice(self, heads: slice, start: int, stop: int) -> tuple[slice, bool]:
        """Return where the kept keys of some heads between two places are, and whether all there are of these."""
        first, last = self.counts[heads, start], self.counts[heads, stop]
        begin, end = int(first.min()), int(last.max())
        return slice(begin, end), bool((first == begin).all() and (last == end).all())


class _Operands:
    """The operands as matrices: batch and KV heads in one axis ("heads"), in float32 (float64 for float64).

    Attributes:
        query: scaled, [heads, time, group, channels]; the query heads of one KV head are adjacent, so keys are never
            repeated.
        stream, recent, kept: states of the stream, of the raw keys, and of the stream's keys that count where they
            have their biases; without the last two, None.
        sinks: [heads, group].
        padding: `MASKED` where keys are hidden, [heads, time].
    """

    def __init__(
        self, sinks: Tensor | None, query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor | None,
        recent_key: Tensor | None, recent_value: Tensor | None, hidden: Tensor | None, first: Tensor | None,
        end: Tensor | None, scaling: float, delay: int, keep_top: bool, window: int | None, skip_below: float | None,
    ) -> None:  # fmt: skip
        self.given, self.hidden, self.first, self.window = query, hidden, first, window
        self.batch, self.kv_heads, self.time, self.channels = key.shape
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.lag, self.near = delay if recent_key is not None else 0, delay + keep_top
        self.query = self.rows_of(query)
        self.query *= scaling
        bias = None if log_keep is None else self._flat(log_keep)
        self.stream = _States(self._flat(key), self._flat(value), None if bias is None else bias.clamp(min=MASKED))
        self.recent = None
        if recent_key is not None and recent_value is not None:
            self.recent = _States(self._flat(recent_key), self._flat(recent_value), None)
        self.sinks = None
        if sinks is not None:
            self.sinks = sinks.to(self.dtype).view(self.kv_heads, -1).repeat(self.batch, 1)
        self.padding = None
        if hidden is not None:
            padding = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device).masked_fill_(hidden, MASKED)
            self.padding = padding.repeat_interleave(self.kv_heads, dim=0)
        self.kept = None if bias is None or skip_below is None else self._gathered(bias > skip_below)
        self._scratch = [self.query.new_empty(0) for _ in range(2)]
        self._narrow_scratch = self.query.new_empty(0)
        self.narrow_dtype = query.dtype if _multiplies_fast(query) else self.dtype
        for states in self.all_states:
            states.narrow = {name: getattr(states, name).to(self.narrow_dtype) for name in ("key", "value")}

    def _gathered(self, keep: Tensor) -> _Kept | None:
        if is_fake(keep):  # a plan's, which keep nothing that could be counted
            return None
        if self.padding is not None:
            keep = keep & (self.padding == 0)
        most = int(keep.sum(1).max())
        return _Kept(self.stream, keep, most) if keep.float().mean() <= _GATHERED else None

    @property
    def all_states(self) -> list[_States]:
        """All states that there are."""
        return [states for states in (self.kept, self.stream, self.recent) if states is not None]

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of key, value, bias, recent key and recent value."""
        if self.kept is not None:
            self.kept.scatter_gradients(self.stream)
        of_recent = (None, None) if self.recent is None else (self.recent.key_grad, self.recent.value_grad)
        return self.stream.key_grad, self.stream.value_grad, self.stream.bias_grad, *of_recent

    def scratch(self, index: int, shape: Sequence[int]) -> Tensor:
        """Return memory for a block's scores, always the same: fresh pages from the system cost as much as a pass.

        Args:
            index: which of two.
            shape: of the scores.
        """
        size = math.prod(shape)
        if self._scratch[index].numel() < size:
            self._scratch[index] = self.query.new_empty(size)
        return self._scratch[index][:size].view(shape)

    def narrow(self, scores: Tensor) -> Tensor:
        """Round weights or their gradients to the dtype of products, in scratch memory where it is another.

        Scores are products in float32, of which bfloat16 has too few bits.
        """
        if scores.dtype == self.narrow_dtype:
            return scores
        if self._narrow_scratch.numel() < scores.numel():
            self._narrow_scratch = scores.new_empty(scores.numel(), dtype=self.narrow_dtype)
        return self._narrow_scratch[: scores.numel()].view(scores.shape).copy_(scores)

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
            if self.kept is not None:
                columns = min(columns, self.kept.key.shape[1] + num_rows + self.near)
            step = max(1, _SCORES.get(self.query.device.type, 1 << 26) // (num_rows * group * columns))
            spans: dict[tuple[int, bool], _Span] = {}
            for head in range(0, num_heads, step):
                heads = slice(head, min(head + step, num_heads))
                rows = range(head // self.kv_heads, (heads.stop - 1) // self.kv_heads + 1)
                lowest, highest = min(firsts[row][index] for row in rows), max(lasts[row][index] for row in rows)
                if self.window is not None:
                    lowest, highest = max(lowest, start - self.window + 1), max(highest, stop - self.window)
                bounds = lowest, lowest < highest
                yield _Block(self, heads, spans.setdefault(bounds, _Span(self, slice(start, stop), *bounds)))


@dataclass
class _Span:
    """Rows and the places that they see, of whatever head."""

    operands: _Operands
    rows: slice
    lowest: int
    """First place that any row sees."""
    is_divided: bool
    """Whether some row does not see all places from `lowest` on, because its document or window starts later."""

    @cached_property
    def biased_stop(self) -> int:
        """Place up to which the rows see all keys of the stream with their biases."""
        return max(self.lowest, self.rows.start - self.operands.near + 1, 0)

    @cached_property
    def stream(self) -> slice:
        """Places that the rows see of the stream, by their places."""
        stop = max(0, self.rows.stop - self.operands.lag)
        start = self.lowest if self.operands.kept is None else self.biased_stop
        return slice(min(start, stop), stop)

    @cached_property
    def recent(self) -> slice:
        """Places that the rows see raw."""
        return slice(max(self.lowest, self.rows.start - self.operands.lag + 1), self.rows.stop)

    @cached_property
    def biased(self) -> tuple[int, int, Tensor]:
        """Up to which of `stream` the biases count for all rows, up to which for some, and for which."""
        start, near, stop = self.stream.start, self.operands.near, self.stream.stop
        full = min(max(0, self.rows.start - near + 1 - start), stop - start)
        some = min(max(full, self.rows.stop - near - start), stop - start)
        rows, columns = self.places(slice(start + full, start + some))
        return full, some, rows - columns >= near

    @cached_property
    def num_seen(self) -> int:
        """Of how many of `stream` all rows see all."""
        return 0 if self.is_divided else max(0, self.rows.start - self.operands.lag - self.stream.start)

    @cached_property
    def unseen(self) -> Tensor:
        """Which places of `stream` from `num_seen` on and of `recent` the rows do not see, [rows, 1, places]."""
        operands = self.operands
        rows, columns = self.places(slice(self.stream.start + self.num_seen, self.stream.stop))
        unseen = columns > rows - operands.lag
        if operands.recent is not None:
            recent = self.places(self.recent)[1]
            unseen = torch.cat([unseen, (recent > rows) | (recent <= rows - operands.lag)], dim=-1)
        elif operands.window is not None:
            unseen |= columns <= rows - operands.window
        return unseen

    def places(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the places of the rows, [rows, 1, 1], and of columns, [columns]."""
        device = self.operands.query.device
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        return rows[:, None, None], torch.arange(columns.start, columns.stop, device=device)


class _Block:
    """Rows of some heads; their columns are kept keys, then those of the stream by their places, then the raw ones.

    Behind these `num_columns` the scores have one of the sinks, if there are any.
    """

    def __init__(self, operands: _Operands, heads: slice, span: _Span) -> None:
        self.operands, self.heads, self.span, self.rows = operands, heads, span, span.rows
        parts: list[tuple[_States, slice]] = [(operands.stream, span.stream)]
        self.kept, self.is_kept_whole = slice(0, 0), True
        if operands.kept is not None:
            self.kept, self.is_kept_whole = operands.kept.slice(heads, span.lowest, span.biased_stop)
            parts.insert(0, (operands.kept, self.kept))
        if operands.recent is not None:
            parts.append((operands.recent, span.recent))
        self.parts: list[tuple[_States, slice, slice]] = []
        self.num_columns = 0
        for states, places in parts:
            begin, self.num_columns = self.num_columns, self.num_columns + places.stop - places.start
            if self.num_columns > begin:
                self.parts.append((states, places, slice(begin, self.num_columns)))

    def of_rows(self, states: Tensor) -> Tensor:
        """Return the block's rows of [heads, time, group, channels], [heads, rows * group, channels]."""
        return states[self.heads, self.rows].flatten(1, 2)

    def store(self, rows: Tensor, states: Tensor) -> None:
        """Store what `of_rows` returns."""
        states[self.heads, self.rows] = rows.unflatten(1, (-1, states.shape[2]))

    def of_columns(self, rows: Tensor, name: str, scratch: int) -> Tensor:
        """Multiply rows [heads, rows * group, channels] with the keys or values of the columns; in scratch memory."""
        width = self.num_columns + (self.operands.sinks is not None)
        scores = self.operands.scratch(scratch, (*rows.shape[:2], width))
        for states, places, columns in self.parts:
            torch.bmm(rows, getattr(states, name)[self.heads, places].mT, out=scores[..., columns])
        return scores

    def by_part(self, scores: Tensor, name: str) -> Tensor:
        """Multiply [heads, rows * group, columns] with the keys or values of the columns."""
        total = None
        for states, places, columns in self.parts:
            part, operand = scores[..., columns], states.narrow[name][self.heads, places]
            total = _add_product(total, part, operand, self.operands.dtype)
        assert total is not None  # a row sees its own key
        return total

    def add_by_part(self, scores: Tensor, rows: Tensor, name: str) -> None:
        """Add the products of [heads, rows * group, columns] with the rows to the columns' gradients."""
        rows = rows.to(scores.dtype)
        for states, places, columns in self.parts:
            total = getattr(states, name)[self.heads, places]
            _add_product(total, scores[..., columns].mT, rows, self.operands.dtype)

    def probabilities(self) -> Tensor:
        """Return the attention of the block's rows to its columns and sinks, [heads, rows * group, columns]."""
        operands, span = self.operands, self.span
        joined = self.of_columns(self.of_rows(operands.query), "key", 0)
        by_row = joined.unflatten(1, (self.rows.stop - self.rows.start, -1))
        scores = by_row[..., : self.num_columns]
        num_kept = self.kept.stop - self.kept.start
        if num_kept:
            self._add_kept_biases(scores[..., :num_kept])
        by_place = scores[..., num_kept:]
        if (bias := operands.stream.bias) is not None:
            bias = bias[self.heads, None, None, span.stream]
            full, some, has_bias = span.biased
            if full:
                by_place[..., :full] += bias[..., :full]
            by_place[..., full:some] += torch.where(has_bias, bias[..., full:some], 0.0)
        if operands.padding is not None:
            places = (span.stream,) if operands.recent is None else (span.stream, span.recent)
            by_place += torch.cat([operands.padding[self.heads, None, None, each] for each in places], -1)
        by_place[..., span.num_seen :].masked_fill_(self._unseen(), -math.inf)
        if operands.sinks is not None:
            by_row[..., self.num_columns] = operands.sinks[self.heads, None]
        return torch.softmax(joined, dim=-1, out=joined)

    def _add_kept_biases(self, scores: Tensor) -> None:
        kept = self.operands.kept
        assert kept is not None and kept.bias is not None
        bias = kept.bias[self.heads, self.kept]
        if not self.is_kept_whole:
            places = kept.places[self.heads, self.kept]
            bias = bias.masked_fill((places >= self.span.biased_stop) | (places < self.span.lowest), -math.inf)
        scores += bias[:, None, None]
        if self.span.is_divided:
            scores.masked_fill_(kept.places[self.heads, None, None, self.kept] < self._firsts(), -math.inf)

    def _unseen(self) -> Tensor:
        """Tell which places of the stream from `num_seen` on the rows do not see, [1 or heads, rows, 1, places]."""
        unseen, span = self.span.unseen[None], self.span
        if not span.is_divided or self.operands.first is None:
            return unseen
        columns = torch.arange(span.stream.start, span.stream.stop, device=unseen.device)
        if self.operands.recent is not None:
            recent = torch.arange(span.recent.start, span.recent.stop, device=unseen.device)
            columns = torch.cat([columns, recent], dim=-1)
        return unseen | (columns < self._firsts())

    def _firsts(self) -> Tensor:
        """Return the first place of each row's document, [heads, rows, 1, 1]."""
        assert self.operands.first is not None
        first = self.operands.first[:, self.rows].repeat_interleave(self.operands.kv_heads, 0)
        return first[self.heads, :, None, None]

    def add_bias(self, scores: Tensor) -> None:
        """Add the gradients of the block's scores to those of the biases that they have."""
        for states, places, columns in self.parts:
            if states.bias_grad is None:
                continue
            if states is self.operands.kept:
                states.bias_grad[self.heads, places] += scores[..., columns].sum(1)
                continue
            full, some, has_bias = self.span.biased
            of_stream, start = states.bias_grad[self.heads, places], columns.start
            if full:
                of_stream[:, :full] += scores[..., start : start + full].sum(1)
            part = scores[..., start + full : start + some].unflatten(1, (self.rows.stop - self.rows.start, -1))
            of_stream[:, full:some] += part.masked_fill(~has_bias, 0).sum((1, 2))


def _multiplies_fast(query: Tensor) -> bool:
    """Whether a CPU multiplies matrices of the given dtype faster than in float32."""
    return query.dtype == torch.bfloat16 and query.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the product of two batches of matrices to `total`, of a dtype that may be wider than theirs."""
    if total is None:
        return torch.bmm(left, right).to(dtype)
    return torch.baddbmm(total, left, right, out=total) if left.dtype == dtype else total.add_(torch.bmm(left, right))
