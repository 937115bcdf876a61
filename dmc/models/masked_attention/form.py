"""Shared by the implementations of masked attention: the form they compute and the layout of its operands."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASKED = -1e30
"""Stands for -inf, which flash kernels turn into NaN or, silently, into a wrong forward."""


@dataclass(frozen=True)
class AttentionForm:
    """Which keys a query sees, and how; `delayed_masked_attention` defines it."""

    scaling: float
    """Multiplies query . key."""
    delay: int
    """Newest tokens that a query sees raw."""
    keep_top: bool
    """Whether a query sees its newest stream entry, i - delay, without a bias."""
    free_channel: int | None
    """Channel that is 0 in query and keys and may carry the bias; None: one is added."""


class Operands:
    """The operands as matrices: batch and KV heads in one axis ("heads"), the bias in a channel of the keys.

    The bias channel holds 1 / scaling in the queries and the bias in the keys: scaling * query . key then includes the
    bias, and the gradient of the keys includes its gradient. It is `free_channel`, or the first one behind the head.

    Attributes:
        query: [heads, time, group, width]; the query heads of one KV head are adjacent, so keys are never repeated.
        recent_key, stream_key: [heads, time, width]; recent_key is None where nothing is delayed.
        recent_value, stream_value: [heads, time, channels].
        top: score of row i and stream entry i - delay without its bias, [heads, time - delay, group], in the
            accumulation dtype; None unless keep_top.
    """

    def __init__(
        self, form: AttentionForm, tensors: Sequence[Tensor | None], dtype: torch.dtype, multiple: int
    ) -> None:
        """Copy what must be copied.

        Args:
            form: the attention to compute.
            tensors: query, recent_key, recent_value, stream_key, stream_value, log_keep, hidden.
            dtype: dtype of the products.
            multiple: the width of queries and keys is a multiple of this.
        """
        query, recent_key, recent_value, stream_key, stream_value, log_keep, hidden = tensors
        assert query is not None and stream_key is not None and stream_value is not None and log_keep is not None
        self.form, self.dtype, self.tensors = form, dtype, tensors
        self.batch, self.kv_heads, self.time, self.channels = stream_key.shape
        self.channel = self.channels if form.free_channel is None else form.free_channel % self.channels
        width = max(self.channels, self.channel + 1)
        self.width = width + -width % multiple
        self.accumulation = accumulation_dtype(query)
        padding = None
        if hidden is not None:
            padding = torch.zeros(hidden.shape, dtype=self.accumulation, device=hidden.device)
            padding = padding.masked_fill_(hidden, MASKED).repeat_interleave(self.kv_heads, dim=0)
        bias = log_keep.flatten(0, 1).to(self.accumulation).clamp(min=MASKED)

        self.query = self.rows_of(query, self.width)
        self.query[..., self.channel] = 1 / form.scaling
        self.recent_key = None if recent_key is None else self._biased(recent_key, padding)
        self.recent_value = None if recent_value is None else self._flat(recent_value)
        self.stream_key = self._biased(stream_key, bias if padding is None else bias + padding)
        self.stream_value = self._flat(stream_value)
        self.top = None
        if form.keep_top:
            rows = self.query[:, form.delay :, :, : self.channels].to(self.accumulation)
            entries = self._flat(stream_key)[:, : rows.shape[1]].to(self.accumulation)
            self.top = torch.linalg.vecdot(rows, entries.unsqueeze(2)) * form.scaling
            if padding is not None:
                self.top += padding[:, : rows.shape[1]].unsqueeze(-1)

    def rows_of(self, states: Tensor, width: int) -> Tensor:
        """Copy [batch, query heads, time, channels] to [heads, time, group, width], 0 behind the channels."""
        group = states.shape[1] // self.kv_heads
        rows = states.new_empty(self.batch, self.kv_heads, self.time, group, width, dtype=self.dtype)
        rows[..., : self.channels] = states.unflatten(1, (self.kv_heads, group)).transpose(2, 3)
        rows[..., self.channels :] = 0
        return rows.flatten(0, 1)

    def heads_of(self, rows: Tensor) -> Tensor:
        """Copy [heads, time, group, width or channels] to the shape and dtype of the query tensor.

        The memory is laid out as [batch, time, query heads, channels]: joining the heads afterwards costs nothing.
        """
        query = self.tensors[0]
        assert query is not None
        states = query.new_empty(self.batch, self.time, query.shape[1], self.channels)
        rows = rows[..., : self.channels].unflatten(0, (self.batch, self.kv_heads)).transpose(1, 2)
        states.view(rows.shape).copy_(rows)
        return states.transpose(1, 2)

    def sighted(self, states: Tensor) -> Tensor:
        """Return [batch, query heads, time, channels] with 0 where a token and all tokens before it are hidden."""
        hidden = self.tensors[-1]
        if hidden is None:
            return states
        blind = (~hidden).cumsum(dim=-1) == 0
        return states.masked_fill(blind[:, None, :, None], 0)

    def _flat(self, states: Tensor) -> Tensor:
        return states.to(self.dtype).flatten(0, 1).contiguous()

    def _biased(self, key: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None and self.width == self.channels:
            return self._flat(key)
        keys = key.new_empty(*key.shape[:-1], self.width, dtype=self.dtype)
        keys[..., : self.channels] = key
        keys[..., self.channels :] = 0
        keys = keys.flatten(0, 1)
        if bias is not None:
            keys[..., self.channel] = bias.clamp(min=torch.finfo(self.dtype).min / 2)
        return keys


class Gradients:
    """Sums of gradients in the layout of `Operands`; the bias channel of `stream_key` is the gradient of the bias."""

    def __init__(self, operands: Operands) -> None:
        def zeros_like(states: Tensor | None) -> Tensor | None:
            return None if states is None else torch.zeros_like(states, dtype=operands.accumulation)

        self.operands = operands
        self.query = torch.zeros_like(operands.query, dtype=operands.accumulation)
        self.recent_key, self.recent_value = zeros_like(operands.recent_key), zeros_like(operands.recent_value)
        self.stream_key = torch.zeros_like(operands.stream_key, dtype=operands.accumulation)
        self.stream_value = torch.zeros_like(operands.stream_value, dtype=operands.accumulation)

    def unpack(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors that `Operands` was made of, in their shapes and dtypes."""
        operands = self.operands
        channels, channel = operands.channels, operands.channel
        bias = self.stream_key[..., channel].clone()
        query = operands.heads_of(self.query)
        if channel < channels:
            for states in (query, self.recent_key, self.stream_key):
                if states is not None:
                    states[..., channel] = 0
        flat = (self.recent_key, self.recent_value, self.stream_key, self.stream_value)
        gradients: list[Tensor | None] = [query]
        for states, like in zip(flat, operands.tensors[1:5], strict=True):
            if states is None or like is None:
                gradients.append(None)
            else:
                gradients.append(states[..., :channels].to(like.dtype).view(like.shape))
        log_keep = operands.tensors[5]
        assert log_keep is not None
        return *gradients, bias.to(log_keep.dtype).view(log_keep.shape), None


def accumulation_dtype(states: Tensor) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.promote_types(states.dtype, torch.float32)
