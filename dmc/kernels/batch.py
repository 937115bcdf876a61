"""The tokens of a forward pass: which sequences they belong to, and where they are in the flat row."""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Phase(enum.Flag):
    """Part of a sequence that tokens fed together belong to, for policies."""

    PROMPT = enum.auto()
    """Prompt tokens; without this flag: generated tokens."""
    FIRST = enum.auto()
    """The prompt's first token is among them."""
    LAST = enum.auto()
    """The prompt's last token is among them."""


GENERATED = Phase(0)


def on_device(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Copy numbers of the host to a device; it waits for nothing, as a copy of memory that may move would.

    Where a GPU is torch's default device they are there already.
    """
    if torch.device(device).type == "cuda" and not numbers.is_cuda:
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


@dataclass(eq=False)
class ForwardBatch:
    """New tokens of S sequences, T in all, in one flat row without padding, the tokens of a sequence contiguous.

    The lists are on the host; the tensors are made from them once and serve every layer.
    """

    rows: list[int]
    """Cache row of each sequence."""
    begins: list[int]
    """Position of each sequence's first new token."""
    num_new: list[int]
    """Number of each sequence's new tokens, at least one."""
    device: torch.device | str = "cpu"
    phases: list[Phase] = dataclasses.field(default_factory=list)
    """Phase of each sequence's tokens; empty without a policy."""
    prompt_ends: list[int] = dataclasses.field(default_factory=list)
    """End of each sequence's prompt that is being fed, or was fed last; empty: unused."""
    is_known: bool = True
    """Whether the lists of rows and positions are valid; else only the device knows them."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin, borrowed neuron removed, [T + S W, D] each: at the W positions before each sequence's new tokens and
    at theirs (`extended`), W the gate's delay; None: keys come rotated."""

    _extended: dict[int, ForwardBatch] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _in_extended: dict[int, Tensor] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _by_head: dict[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _tiles: dict[int, Tensor] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of_ones(
        cls, count: int, device: torch.device | str, rows: Tensor | None = None, positions: Tensor | None = None
    ) -> ForwardBatch:
        """Make a batch of one token of each sequence.

        Args:
            count: number of sequences.
            device: device of all tensors.
            rows: cache rows, where the host does not know them, int64 [count]; None: 0 .. count - 1.
            positions: positions of the tokens, likewise; None: unused.
        """
        batch = cls(list(range(count)), [0] * count, [1] * count, device, is_known=rows is None)
        known = {"row_index": rows, "begin_index": positions}
        batch.__dict__.update({name: tensor for name, tensor in known.items() if tensor is not None})
        return batch

    @classmethod
    def of_device(cls, num_new: list[int], most: list[int], rows: Tensor, begins: Tensor) -> ForwardBatch:
        """Make a batch of sequences whose rows and positions only the device knows.

        Args:
            num_new: number of each sequence's new tokens.
            most: what each sequence's position is at most: it orders tiles, and no result depends on it.
            rows: cache rows, int64 [S].
            begins: positions of the first new tokens, int64 [S].
        """
        batch = cls(list(range(len(num_new))), most, num_new, rows.device, is_known=False)
        batch.__dict__.update(row_index=rows, begin_index=begins)
        return batch

    @property
    def most_new(self) -> int:
        """Largest number of new tokens of a sequence."""
        return max(self.num_new)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return sum(self.num_new)

    @cached_property
    def row_index(self) -> Tensor:
        """`rows` on the device, int64 [S]."""
        return on_device(torch.tensor(self.rows), self.device)

    @cached_property
    def begin_index(self) -> Tensor:
        """`begins` on the device, int64 [S]."""
        return on_device(torch.tensor(self.begins), self.device)

    @cached_property
    def _even(self) -> int | None:
        """Number of new tokens of each sequence if all have as many, so that no host tensors are needed; else None."""
        return self.num_new[0] if len(set(self.num_new)) == 1 else None

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where the tokens of each sequence begin in the flat row, and the end, int64 [S + 1]."""
        if (count := self._even) is not None:
            return torch.arange(0, self.num_tokens + 1, count, device=self.device)
        return on_device(torch.tensor([0, *self.num_new]).cumsum(0), self.device)

    @cached_property
    def sequence(self) -> Tensor:
        """Index of each token's sequence, int64 [T]."""
        if (count := self._even) is not None:
            return torch.arange(self.num_tokens, device=self.device) // count
        return on_device(torch.arange(len(self.rows)).repeat_interleave(torch.tensor(self.num_new)), self.device)

    @cached_property
    def offset(self) -> Tensor:
        """Index of each token among the new ones of its sequence, int64 [T]."""
        if (count := self._even) is not None:
            return torch.arange(self.num_tokens, device=self.device) % count
        return on_device(torch.cat([torch.arange(new) for new in self.num_new]), self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, int64 [T]."""
        if (count := self._even) is not None:
            return (self.begin_index[:, None] + torch.arange(count, device=self.device)).flatten()
        return self.begin_index[self.sequence] + self.offset

    @cached_property
    def spans(self) -> list[slice]:
        """Slices of the flat row with the tokens of each sequence."""
        ends = list(itertools.accumulate(self.num_new))
        return [slice(end - new, end) for end, new in zip(ends, self.num_new, strict=True)]

    @cached_property
    def last(self) -> Tensor:
        """Index in the flat row of each sequence's last token, int64 [S]."""
        return self.cu_seqlens[1:] - 1

    @cached_property
    def ends(self) -> list[int]:
        """Number of tokens of each sequence so far, the new ones included."""
        return [begin + new for begin, new in zip(self.begins, self.num_new, strict=True)]

    @cached_property
    def tokens_seen(self) -> Tensor:
        """`ends` on the device, int64 [S]."""
        return self.begin_index + self.cu_seqlens.diff()

    @cached_property
    def ends_of_prompts(self) -> Tensor:
        """`prompt_ends` on the device, int64 [S]."""
        return on_device(torch.tensor(self.prompt_ends), self.device)

    def extended(self, count: int) -> ForwardBatch:
        """Begin each sequence `count` positions earlier; tokens before its start have negative positions."""
        if count == 0:
            return self
        if count not in self._extended:
            begins, num_new = [begin - count for begin in self.begins], [new + count for new in self.num_new]
            self._extended[count] = ForwardBatch(self.rows, begins, num_new, self.device, is_known=self.is_known)
            known = {"row_index": self.row_index, "begin_index": self.begin_index - count}
            self._extended[count].__dict__.update(known)
        return self._extended[count]

    def new_in_extended(self, count: int) -> Tensor:
        """Indices of the new tokens in the flat row of `extended(count)`, int64 [T]."""
        if count not in self._in_extended:
            index = torch.arange(self.num_tokens, device=self.device) + (self.sequence + 1) * count
            self._in_extended[count] = index
        return self._in_extended[count]

    def tiles(self, size: int) -> Tensor:
        """Cut each sequence's new tokens into tiles of `size`, those that see most first; none is empty.

        Returns:
            Each tile's sequence and the offset of its first token, int32 [tiles, 2].
        """
        if size not in self._tiles:
            every = [(i, first) for i, new in enumerate(self.num_new) for first in range(0, new, size)]
            every.sort(key=lambda tile: self.begins[tile[0]] + tile[1], reverse=True)
            self._tiles[size] = on_device(torch.tensor(every, dtype=torch.int32), self.device)
        return self._tiles[size]

    def by_head(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """Lay the tokens of each head of a sequence side by side.

        Returns:
            Where each token of each head is then, int64 [T, H], and where each one's tokens begin, and the end, int32
            [S H + 1].
        """
        if num_heads not in self._by_head:
            heads, begins = torch.arange(num_heads, device=self.device), self.cu_seqlens[:-1, None] * num_heads
            begins = begins + heads * self.cu_seqlens.diff()[:, None]
            bounds = torch.cat((begins.flatten(), self.cu_seqlens[-1:] * num_heads)).int()
            self._by_head[num_heads] = begins[self.sequence] + self.offset[:, None], bounds
        return self._by_head[num_heads]

    @cached_property
    def query_rotary(self) -> tuple[Tensor, Tensor]:
        """Rotary tables at the new tokens, [T, D] each."""
        assert self.rotary is not None
        cos, sin = self.rotary
        missing = len(cos) - self.num_tokens
        if missing == 0:
            return cos, sin
        index = self.new_in_extended(missing // len(self.rows))
        return cos[index], sin[index]

    def with_rotary(self, cos: Tensor, sin: Tensor) -> ForwardBatch:
        """Return the same tokens with other rotary tables."""
        other = copy.copy(self)
        other.rotary = cos, sin
        for made_of_tables in ("query_rotary", "by_count"):
            other.__dict__.pop(made_of_tables, None)
        return other

    def part(self, members: list[int]) -> tuple[ForwardBatch, Tensor | slice]:
        """Take some sequences, in order; also return the indices of their tokens in this flat row, int64 [n]."""
        spans = self.spans
        taken = ForwardBatch(
            [self.rows[i] for i in members],
            [self.begins[i] for i in members],
            [self.num_new[i] for i in members],
            self.device,
            [self.phases[i] for i in members if self.phases],
            [self.prompt_ends[i] for i in members if self.prompt_ends],
            self.is_known,
        )
        if not self.is_known:
            index = on_device(torch.tensor(members), self.device)
            taken.__dict__.update(row_index=self.row_index[index], begin_index=self.begin_index[index])
        if members == list(range(members[0], members[-1] + 1)):
            return taken, slice(spans[members[0]].start, spans[members[-1]].stop)
        where = [torch.arange(spans[i].start, spans[i].stop) for i in members]
        return taken, on_device(torch.cat(where), self.device)

    def cut(self, first: int, end: int) -> ForwardBatch:
        """Take tokens first..end-1 of each sequence."""
        begins, num_new = [begin + first for begin in self.begins], [end - first] * len(self.rows)
        return ForwardBatch(self.rows, begins, num_new, self.device, self.phases, self.prompt_ends)

    @cached_property
    def by_phase(self) -> list[tuple[ForwardBatch, Tensor | slice]]:
        """Split into generated and prompt tokens, each with the indices of its tokens in this row, int64 [n]."""
        kinds = [Phase.PROMPT in phase for phase in self.phases]
        if len(set(kinds)) < 2:
            return [(self, slice(None))]
        members = ([i for i, kind in enumerate(kinds) if kind == wanted] for wanted in (False, True))
        return [self.part(part_members) for part_members in members]

    @cached_property
    def by_count(self) -> list[tuple[ForwardBatch, Tensor | slice]]:
        """Split into sequences of one new token and of several, as `by_phase`; each part has its RoPE tables."""
        if self.most_new == 1 or 1 not in self.num_new:
            return [(self, slice(None))]
        members = ([i for i, new in enumerate(self.num_new) if (new > 1) is several] for several in (False, True))
        return [self._with_tables(part_members) for part_members in members]

    @cached_property
    def by_equal_count(self) -> list[tuple[ForwardBatch, Tensor | slice]]:
        """Split into sequences of equally many new tokens, as `by_phase`."""
        counts = list(dict.fromkeys(self.num_new))
        if len(counts) == 1:
            return [(self, slice(None))]
        return [self.part([i for i, new in enumerate(self.num_new) if new == count]) for count in counts]

    def _with_tables(self, members: list[int]) -> tuple[ForwardBatch, Tensor | slice]:
        part, where = self.part(members)
        if self.rotary is not None:
            missing = len(self.rotary[0]) - self.num_tokens
            _, around = self.extended(missing // len(self.rows)).part(members)
            part.rotary = self.rotary[0][around], self.rotary[1][around]
        return part, where

    @property
    def is_prompt(self) -> bool:
        """Whether the tokens, all of one phase, are prompt tokens."""
        return bool(self.phases) and Phase.PROMPT in self.phases[0]

    def pad(self, states: Tensor, before: int = 0) -> Tensor:
        """Pad flat states [T + S before, ...] with zeros to [S, n + before, ...], n the most new tokens of any."""
        wide = self.extended(before)
        if wide.num_tokens == len(self.rows) * wide.most_new:
            return states.unflatten(0, (len(self.rows), wide.most_new))
        padded = states.new_zeros(len(self.rows), wide.most_new, *states.shape[1:])
        padded[wide.sequence, wide.offset] = states
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        """Take the tokens out of padded states [S, n, ...], [T, ...]; the inverse of `pad`."""
        if self.num_tokens == len(self.rows) * self.most_new:
            return padded.flatten(0, 1)
        return padded[self.sequence, self.offset]
