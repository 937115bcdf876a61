"""Protected tokens: those nearest to the bounds of prompts and instructions are never evicted (arXiv:2605.18053)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, StrictFloat
from torch import Tensor
from typing_extensions import Self

from dmc.budget import rounded_down
from dmc.config.settings import NonNegative, checked_dataclass
from dmc.kernels.base import LayerCache
from dmc.kernels.batch import ForwardBatch, on_device
from dmc.kernels.pages import gather_pages, places
from dmc.policies.base import Entries
from dmc.policies.layer_attention import Cache, CacheAttention

PROTECTED = 1 << 30
"""What the cache's field `position` has in addition for protected entries: a flag that takes no memory."""
BEYOND = torch.iinfo(torch.int64).max
CHAT = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]


@checked_dataclass(frozen=True, kw_only=True)
class Protection:
    """Options of every method that evicts: tokens that stay whatever their scores are, within the same budget."""

    protect: Annotated[StrictFloat, Field(ge=0, le=0.25)] = 0.0
    """Share of a layer's budget that is reserved at the beginning, and as much at the end, of what the bounds divide.
    These are prompts, one for each turn, and their instructions. See `num_protected`."""
    bounds: tuple[NonNegative, ...] | None = None
    """Token ids that bound an instruction; None: the special tokens that the tokenizer's chat template inserts."""

    def num_protected(self, budget: int) -> int:
        """Return how many of `budget` entries are reserved: at least the first and the last, at most half."""
        return min(2 * max(1, rounded_down(self.protect * budget)), budget // 2) if self.protect else 0

    def tokenized(self, tokenizer: Any) -> Self:
        """See `CachePolicy`; finds the bounds."""
        if not self.protect or self.bounds is not None:
            return self
        return dataclasses.replace(self, bounds=chat_bounds(tokenizer))


def chat_bounds(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer's chat template inserts; none without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    special = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    return tuple(sorted(special & {*tokenizer.apply_chat_template(CHAT, return_dict=False)}))


def nearness(prompts: Sequence[tuple[int, int]], tokens: Sequence[int], bounds: Sequence[int]) -> Tensor:
    """Rank a sequence's tokens by their distance to the nearest bound of their prompt, of equal ones the first first.

    Args:
        prompts: begin and end of each; the first and the last token of a prompt are bounds.
        tokens: ids of all tokens.
        bounds: ids of tokens that are bounds wherever they are in a prompt.
    Returns:
        Int64 [tokens]; the largest int64 for tokens of no prompt.
    """
    distances = torch.full((len(tokens),), BEYOND)
    are_bounds = torch.isin(torch.tensor(tokens), torch.tensor(bounds, dtype=torch.long))
    for begin, end in prompts:
        is_bound, places_in_prompt = are_bounds[begin:end], torch.arange(end - begin)
        is_bound[[0, -1]] = True
        at = is_bound.nonzero().flatten()
        behind = at[torch.searchsorted(at, places_in_prompt, right=True) - 1]
        ahead = at[torch.searchsorted(at, places_in_prompt)]
        distances[begin:end] = torch.minimum(places_in_prompt - behind, ahead - places_in_prompt)
    ranks = torch.empty_like(distances)
    ranks[distances.argsort(stable=True)] = torch.arange(len(tokens))
    return ranks.where(distances < BEYOND, BEYOND)


def split_positions(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Split the field `position` into positions and whether entries are protected, shape of `stored` each."""
    protected = stored >= PROTECTED
    return torch.where(protected, stored - PROTECTED, stored), protected


def positions_held(cache: Cache, row: int) -> list[list[Tensor]]:
    """List the positions of the tokens that each head of a sequence holds, by layer and head, int64 [n], ascending.

    Raises:
        ValueError: the cache keeps no positions: no policy evicts any, or the model merges tokens.
    """
    if "position" not in cache.fields:
        raise ValueError("held tokens are recorded only for a stock model with an evicting policy such as H2O")
    held = []
    for table, lengths in zip(cache.block_tables[:, row], cache.lengths[:, row].tolist(), strict=True):
        stored = gather_pages(cache.fields["position"], table[None], max(lengths))[0]
        positions = split_positions(stored)[0].long().cpu()
        held.append([head[:length].sort().values for head, length in zip(positions, lengths, strict=True)])
    return held


class Protector:
    """Decides when a prompt ends which entries are protected from then on.

    Args:
        policy: what evicts.
        attention: knows the tokens and the prompts of each pass.
    """

    def __init__(self, policy: Any, attention: CacheAttention) -> None:
        self._policy, self._attention = policy, attention
        self._ranks: dict[int, Tensor] = {}  # of tokens of the sequences whose prompts end in this pass, by cache row

    def rank(self, rows: list[int], batch: ForwardBatch) -> None:
        """Rank the tokens of sequences whose prompts end in a pass by `nearness`, if any are to be protected."""
        self._ranks.clear()
        for row in rows if self._policy.protect else ():
            end, seen = batch.ends[batch.rows.index(row)], self._attention
            prompts = [prompt for prompt in seen.prompts[row] if prompt[1] <= end]
            ranks = nearness(prompts, seen.tokens[row][:end], self._policy.bounds or ())
            self._ranks[row] = on_device(ranks, batch.device)

    def chosen(self, row: int, positions: Tensor, budget: int) -> Tensor:
        """Return which entries of a sequence are protected in a layer of this budget; positions [S, H, N] or -1."""
        ranks = self._ranks[row][positions.clamp_min(0)]
        return (positions >= 0) & (ranks < self._policy.num_protected(budget))

    def protect(self, layer: LayerCache, entries: Entries, row: int, budget: int) -> None:
        """Protect the entries nearest to a bound, and no others.

        Args:
            layer: its field `position` is updated, if the policy evicts while generating.
            entries: its entries, whose `protected` is updated; None: none are to be protected.
            row: cache row of their sequence.
            budget: entries per head that stay.
        """
        if entries.protected is None:
            return
        before, entries.protected = entries.protected, self.chosen(row, entries.positions, budget)
        if self._policy.evicts_decoding:
            place = places(layer.block_tables[row][None], entries.slots[None, None], layer.block_size)
            change = (entries.protected.int() - before.int()) * PROTECTED  # 0 beyond the length, wherever that leads
            layer.entry_metadata["position"].view(-1).index_put_((place,), change, accumulate=True)
