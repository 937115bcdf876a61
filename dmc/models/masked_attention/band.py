"""Attention of every query to the newest keys alone: dense blocks along the diagonal."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dmc.models.masked_attention.form import MASKED, Gradients, Operands

_SCORES = {"cpu": 1 << 19}
"""Scores held at once: on a CPU as many as fit its cache."""


class Band:
    """Queries i against the raw keys j with i - delay < j <= i, in blocks of rows.

    A block of rows sees its own keys and a halo of delay - 1 before them. Everything runs in the accumulation dtype.
    """

    def __init__(self, operands: Operands) -> None:
        assert operands.recent_key is not None and operands.recent_value is not None
        self.operands, self.key, self.value = operands, operands.recent_key, operands.recent_value
        delay, device = operands.form.delay, operands.query.device
        self.halo = delay - 1
        self.rows = min(256, max(32, 1 << (delay - 1).bit_length()))
        row = torch.arange(self.rows, device=device).unsqueeze(-1)
        column = torch.arange(self.rows + self.halo, device=device)
        unseen = (column < row) | (column > row + self.halo)
        self.causal = torch.zeros(unseen.shape, dtype=operands.accumulation, device=device)
        self.causal = self.causal.masked_fill_(unseen, -torch.inf).unsqueeze(1)  # [rows, 1, columns]

    def attend(self) -> tuple[Tensor, Tensor]:
        """Return the band's softmax, [heads, time, group, channels], and its log-sum-exp, [heads, time, group]."""
        query = self.operands.query
        out = self.value.new_empty(*query.shape[:-1], self.operands.channels, dtype=self.operands.accumulation)
        log_sum_exp = torch.empty_like(out[..., 0])
        for heads in self._slices():
            scores = self._scores(self._query(heads), self._keys(heads))
            peak = scores.amax(-1)
            probabilities = torch.softmax(scores, dim=-1, out=scores)
            # The largest probability is exp(peak - log_sum_exp), which is at least 1 / columns.
            log_sum_exp[heads] = self._join(peak - probabilities.amax(-1).log())
            out[heads] = self._join(torch.bmm(probabilities, self._windows(self.value[heads])))
        return out, log_sum_exp

    def backward(self, grad: Tensor, delta: Tensor, gradients: Gradients) -> None:
        """Add the band's gradients.

        Args:
            grad: gradient of the output, times the band's share of each row, [heads, time, group, channels].
            delta: output . gradient of the whole row, times the band's share of it, [heads, time, group].
            gradients: sums to add to.
        """
        assert gradients.recent_key is not None and gradients.recent_value is not None
        for heads in self._slices():
            query, key, value = self._query(heads), self._keys(heads), self._windows(self.value[heads])
            grad_rows, delta_rows = self._blocks(grad[heads]), self._blocks(delta[heads].unsqueeze(-1))
            scores = self._scores(query, key)
            probabilities = torch.softmax(scores, dim=-1, out=scores)
            self._add(torch.bmm(probabilities.mT, grad_rows), gradients.recent_value[heads])
            scores = torch.baddbmm(delta_rows, grad_rows, value.mT, beta=-1).mul_(probabilities)
            self._add(torch.bmm(scores.mT, query), gradients.recent_key[heads])
            gradients.query[heads] += self._join(torch.bmm(scores, key).mul_(self.operands.form.scaling))

    def _slices(self) -> Iterator[slice]:
        num_heads, time, group, _ = self.operands.query.shape
        scores = (time + self.rows) * group * (self.rows + self.halo)
        step = max(1, _SCORES.get(self.key.device.type, 1 << 26) // scores)
        for first in range(0, num_heads, step):
            yield slice(first, min(first + step, num_heads))

    def _query(self, heads: slice) -> Tensor:
        return self._blocks(self.operands.query[heads].to(self.operands.accumulation) * self.operands.form.scaling)

    def _keys(self, heads: slice) -> Tensor:
        return self._windows(self.key[heads], before=MASKED)

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = torch.bmm(query, key.mT)
        scores.unflatten(1, (self.rows, -1)).add_(self.causal)
        return scores

    def _blocks(self, rows: Tensor) -> Tensor:
        """Cut [heads, time, group, channels] into [heads * blocks, rows * group, channels], the end padded with 0."""
        missing = -rows.shape[1] % self.rows
        if missing:
            rows = functional.pad(rows, (0, 0, 0, 0, 0, missing))
        return rows.reshape(-1, self.rows * rows.shape[2], rows.shape[3])

    def _join(self, blocks: Tensor) -> Tensor:
        """Undo `_blocks`: [heads * blocks, rows * group, ...] to [heads, time, group, ...]."""
        time, group = self.operands.query.shape[1:3]
        num_blocks = -(-time // self.rows)
        joined = blocks.unflatten(1, (self.rows, group)).unflatten(0, (-1, num_blocks)).flatten(1, 2)
        return joined[:, :time]

    def _windows(self, states: Tensor, before: float = 0.0) -> Tensor:
        """Gather [heads, time, channels] as [heads * blocks, halo + rows, channels], overlapping by the halo.

        `before` fills the columns before token 0.
        """
        states = functional.pad(states.to(self.operands.accumulation), (0, 0, self.halo, -states.shape[1] % self.rows))
        if before:
            states[:, : self.halo, self.operands.channel] = before
        return states.unfold(1, self.halo + self.rows, self.rows).mT.flatten(0, 1)

    def _add(self, windows: Tensor, total: Tensor) -> None:
        """Add windows [heads * blocks, halo + rows, channels] to the tokens they came from, [heads, time, channels]."""
        time = total.shape[1]
        windows = windows.unflatten(0, (total.shape[0], -1))
        size = self.halo + self.rows
        padded = functional.pad(torch.zeros_like(total), (0, 0, self.halo, -time % self.rows))
        for first in range(0, size, self.rows):  # pieces of the windows that do not overlap each other
            piece = windows[:, :, first : first + self.rows]
            entries = padded[:, first:].unfold(1, piece.shape[2], self.rows).mT
            entries[:, : piece.shape[1]] += piece
        total += padded[:, self.halo : self.halo + time]
