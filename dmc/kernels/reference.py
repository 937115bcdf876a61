"""The reference backend: the specification of every kernel, written for reading; others are tested against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.compression import CompressionConfig, accumulate, rotate
from dmc.kernels.base import LayerCache, NewTokens, OpenSlotState, Recent, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import history_size
from dmc.kernels.pages import gather_pages, places, quantize, slots_below
from dmc.kernels.probabilities import QUERY_BLOCK, softmax_with_sinks
from dmc.kernels.probabilities import attention_received as attention_received


def supports(dtype: torch.dtype, head_dim: int, block_size: int, device: torch.device) -> str | None:
    """Return why this backend cannot serve such a cache, or None: the reference serves all."""
    return None


def append_or_merge(
    cache: LayerCache, batch: ForwardBatch, tokens: NewTokens, config: CompressionConfig | None
) -> VisibleKeys:
    """Append the next tokens of each sequence to the cache or merge them (DMC, algorithm 1), in place.

    With delay W the tokens that enter the compressed stream are the ones W positions behind the new ones. A merge
    gate's state after each token is the windowed closed form of eq. 10 over the raw history; exact accumulation
    continues from the open slot's mean. All sequences share one flat row: nothing merges across a start.

    Args:
        cache: pages, free list, tables, lengths, history and means are updated.
        batch: which tokens of which sequences.
        tokens: the new tokens.
        config: the gate's action, delay and window; None appends every token.
    Returns:
        The keys that the queries of the new tokens see.
    """
    if config is None:
        length = cache.lengths[batch.row_index][batch.sequence] + (batch.offset + 1).int()[:, None]
        _store(cache, batch, _as_stored(cache, tokens.key, tokens.value), length, None)
        return VisibleKeys(length, is_causal=True)
    assert batch.rotary is not None
    cos, sin = batch.rotary
    size, delay = history_size(config), config.delay
    raw = _with_history(cache, batch, tokens, size)
    entering = raw.part(batch, size, size - delay, 0)
    exists = entering.positions >= 0
    merged = entering.decisions & (entering.positions > 0)[:, None]  # nothing precedes the first token
    appended = exists[:, None] & ~merged
    length = _lengths_after(cache, batch, appended)
    if config.action == "drop":
        key, value, write_mask = entering.key, entering.value, appended
    else:
        key, value = _running_states(cache, batch, raw, entering, config)
        closes = appended.roll(-1, 0).index_fill(0, batch.last, True)
        write_mask = exists[:, None] & closes  # a state that a later token of this call overwrites is not written
    rotary_rows = batch.new_in_extended(delay) - delay  # W positions behind
    states = _as_stored(cache, rotate(key, cos[rotary_rows], sin[rotary_rows]), value)
    _store(cache, batch, states, length, write_mask)
    _remember(cache, batch, raw, size)
    seen = VisibleKeys(length)
    if config.action == "merge" and batch.most_new > 1:
        key, value, *scales = states
        if scales:  # as decoding reads it again
            key, value = (key * scales[0]).to(tokens.key.dtype), (value * scales[1]).to(tokens.value.dtype)
        seen = VisibleKeys((length - 1).clamp_min(0), OpenSlotState(key, value, exists))
    if delay > 0:
        recent = raw.part(batch, size, size - delay + 1, delay - 1)
        rotary_rows = batch.extended(delay - 1).new_in_extended(1)
        seen.recent = Recent(
            rotate(recent.key, cos[rotary_rows], sin[rotary_rows]), recent.value, recent.positions >= 0
        )
    return seen


def append_to_ring(cache: LayerCache, batch: ForwardBatch, tokens: NewTokens, window: int) -> Tensor:
    """Write the next tokens of each sequence over those that have left a layer's window, in place.

    Args:
        cache: pages, free list, tables and lengths are updated; the position p goes to slot p % window.
        batch: which tokens of which sequences.
        tokens: the new tokens, rotated.
        window: slots of the ring.
    Returns:
        Slots that the ring holds after each token, int32 [T, H].
    """
    heads, positions, states = cache.lengths.shape[1], batch.positions, _as_stored(cache, tokens.key, tokens.value)
    length = (positions + 1).clamp_max(window)[:, None].expand(-1, heads)
    take_blocks(cache, batch.row_index, length[batch.last])
    sequence = batch.sequence
    if batch.most_new > window:  # of tokens that share a slot the last one stays
        last = torch.cat([torch.arange(max(s.start, s.stop - window), s.stop) for s in batch.spans]).to(batch.device)
        positions, sequence, states = positions[last], sequence[last], [state[last] for state in states]
    slots = (positions % window)[:, None].expand(-1, heads)
    place = places(cache.block_tables[batch.row_index], slots, cache.block_size, sequence)
    for pages, state in zip(cache.entry_pages, states, strict=True):
        pages.flatten(0, 1)[place] = state
    return length.int()


def as_read(cache: LayerCache, tokens: NewTokens) -> NewTokens:
    """Return tokens as they will be read from the pages, which may hold 8 bits."""
    key, value, *scales = _as_stored(cache, tokens.key, tokens.value)
    if not scales:
        return tokens
    return NewTokens((key * scales[0]).to(tokens.key.dtype), (value * scales[1]).to(tokens.value.dtype))


@dataclass
class RawTokens:
    """Tokens before compression, flat: each sequence's R tokens of history, then its new ones."""

    key: Tensor
    value: Tensor
    decisions: Tensor
    omega: Tensor
    positions: Tensor
    """Positions, [T + S R]; negative where no such token exists."""

    def part(self, batch: ForwardBatch, size: int, begin: int, before: int) -> RawTokens:
        """Take n + `before` of each sequence's R + n tokens, from `begin` on."""
        wide = batch.extended(before)
        index = wide.new_in_extended(size - before) - (size - before) + begin
        omega, positions = self.omega[index], self.positions[index]
        return RawTokens(self.key[index], self.value[index], self.decisions[index], omega, positions)


def _lengths_after(cache: LayerCache, batch: ForwardBatch, appended: Tensor) -> Tensor:
    """Return the number of slots in pages after each token, int32 [T, H]."""
    total, start = appended.cumsum(0), batch.cu_seqlens[:-1]
    before = total[start] - appended[start].long()
    return (total + (cache.lengths[batch.row_index] - before)[batch.sequence]).int()


def _with_history(cache: LayerCache, batch: ForwardBatch, tokens: NewTokens, size: int) -> RawTokens:
    """Put each row's history, in time order, before its new tokens."""
    assert tokens.decisions is not None and tokens.omega is not None
    wide = batch.extended(size)
    rings = cache.history_key, cache.history_value, cache.history_decisions, cache.history_omega
    news = tokens.key, tokens.value, tokens.decisions, tokens.omega
    if size == 0:
        return RawTokens(*news, wide.positions)
    place = batch.row_index[wide.sequence], slice(None), wide.positions % size
    key, value, decisions, omega = (
        ring[place].index_copy(0, batch.new_in_extended(size), new) for ring, new in zip(rings, news, strict=True)
    )
    return RawTokens(key, value, decisions, omega, wide.positions)


def _remember(cache: LayerCache, batch: ForwardBatch, raw: RawTokens, size: int) -> None:
    """Keep the last R raw tokens for the next call."""
    if size > 0:
        last = batch.extended(size).last[:, None] + torch.arange(1 - size, 1, device=batch.last.device)
        place = batch.row_index[:, None], slice(None), raw.positions[last] % size
        cache.history_key[place], cache.history_value[place] = raw.key[last], raw.value[last]
        cache.history_decisions[place], cache.history_omega[place] = raw.decisions[last], raw.omega[last]


def _running_states(
    cache: LayerCache, batch: ForwardBatch, raw: RawTokens, entering: RawTokens, config: CompressionConfig
) -> tuple[Tensor, Tensor]:
    """Pool unrotated keys and values up to each entering token; float32 [T, H, D] each."""
    if (window := config.window_size) is not None:
        wide = batch.extended(window - 1)
        past, size = raw, history_size(config)
        if config.delay > 0:
            past = raw.part(batch, size, 0, window - 1)
        states, alpha, omega = _stream(past)
        alpha = alpha.index_fill(0, wide.cu_seqlens[:-1], 0.0)  # nothing merges across a start
        pooled = _accumulate(states, alpha, omega, window)[batch.new_in_extended(window - 1)]
    else:
        assert cache.mean is not None and cache.weight is not None
        rows, new = batch.row_index, batch.new_in_extended(1)
        start, last = batch.extended(1).cu_seqlens[:-1], batch.extended(1).last
        weight = cache.weight[rows]
        states, alpha, omega = (
            states.new_zeros(len(states) + len(rows), *states.shape[1:]).index_copy_(0, new, states)
            for states in _stream(entering)
        )
        states.index_copy_(0, start, cache.mean[rows])  # each sequence begins with its open slot
        omega.index_copy_(0, start, weight.where(weight > 0, 1.0))
        pooled = _accumulate(states, alpha, omega, None)
        started = (entering.positions[batch.last] >= 0)[:, None]
        index = torch.arange(len(alpha), device=alpha.device)[:, None]
        first = index.where(alpha == 0, 0).cummax(0).values[last]  # of the open slot
        omega = omega.nan_to_num(1.0, 1.0)
        sums = omega.double().cumsum(0)
        total = (sums[last] - sums.gather(0, first)).float() + omega.gather(0, first)
        cache.weight[rows] = total.where(started, 0.0)
        cache.mean[rows] = pooled[last].where(started[..., None], 0.0)
        pooled = pooled[new]
    key, value = pooled.chunk(2, dim=-1)
    return key, value


def _stream(raw: RawTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values side by side, decisions and importance, float32; neutral where there is no token."""
    alpha = (raw.decisions & (raw.positions > 0)[:, None]).float()
    omega = raw.omega.where((raw.positions >= 0)[:, None], 1.0)
    return torch.cat((raw.key, raw.value), dim=-1).float(), alpha, omega


def _accumulate(states: Tensor, alpha: Tensor, omega: Tensor, window_size: int | None) -> Tensor:
    """Pool flat states [T, H, C]; a NaN or infinity affects only its own slot.

    Multiplied by another slot's weight of 0 it would be NaN: it is replaced by a mark, which is pooled instead.
    """
    broken = ~(states.sum(-1) + omega).isfinite()
    marked = torch.cat((states.masked_fill(broken[..., None], 0), broken[..., None].float()), dim=-1)
    by_head = [gate.transpose(0, 1)[None] for gate in (marked, alpha, omega.masked_fill(broken, 1))]
    pooled = accumulate(by_head[0], by_head[1], by_head[2], window_size)[0].transpose(0, 1)
    return pooled[..., :-1].masked_fill(pooled[..., -1:] > 0, torch.nan)


def _as_stored(cache: LayerCache, key: Tensor, value: Tensor) -> list[Tensor]:
    """Bring keys and values [T, H, D] into the form of `cache.entry_pages`."""
    if cache.scales is None:
        return [key.to(cache.key_pages.dtype), value.to(cache.value_pages.dtype)]
    (key, key_scale), (value, value_scale) = quantize(key), quantize(value)
    return [key, value, key_scale, value_scale]


def _store(
    cache: LayerCache, batch: ForwardBatch, entries: list[Tensor], length: Tensor, write_mask: Tensor | None
) -> None:
    """Take the blocks that `length` [T, H] needs and write the states that stay (None: all) into slot length - 1."""
    take_blocks(cache, batch.row_index, length[batch.last].long())
    place = places(cache.block_tables[batch.row_index], (length - 1).clamp_min(0), cache.block_size, batch.sequence)
    if write_mask is not None:  # unused ones repeat the first used: no host sync for their number
        write_mask, place = write_mask.expand_as(place).flatten(), place.flatten()
        first = write_mask.byte().argmax(0, keepdim=True)
        place, is_any = place.where(write_mask, place[first]), write_mask[first, None]
    for pages, states in zip(cache.entry_pages, entries, strict=True):
        flat = pages.flatten(0, 1)
        if write_mask is not None:
            states = states.flatten(0, 1)
            states = states.where(write_mask[:, None], states[first].where(is_any, flat[place[:1]]))
        flat[place] = states


def take_blocks(cache: LayerCache, rows: Tensor, lengths: Tensor) -> None:
    """Grow the lengths of heads to `lengths` [S, H], with blocks off the free list.

    A prefix sum over the heads, in the order (sequence, head), assigns the blocks without a host sync.
    """
    tables = cache.block_tables[rows]
    old = _blocks_of(cache.lengths[rows].long(), cache.block_size)
    new = _blocks_of(lengths, cache.block_size)
    count = (new - old).flatten()
    before = (count.cumsum(0) - count).view_as(old)
    place = torch.arange(tables.shape[-1], device=tables.device)
    rank = before[..., None] + place - old[..., None]
    taken = cache.free_blocks[(cache.num_free - 1 - rank).clamp(0, cache.free_blocks.shape[0] - 1)]
    added = (place >= old[..., None]) & (place < new[..., None])
    cache.block_tables[rows] = torch.where(added, taken, tables)
    cache.lengths[rows] = lengths.to(cache.lengths.dtype)
    cache.num_free -= count.sum().to(cache.num_free.dtype)


def _blocks_of(lengths: Tensor, block_size: int) -> Tensor:
    return -(-lengths // block_size)


def compact(cache: LayerCache, rows: Tensor, keep: Tensor) -> None:
    """Evict slots: those that stay move together, in order, with all their data; in place.

    Blocks that a head no longer needs go onto the free stack in the order (sequence, head, block). Table entries beyond
    the new length stay as they are.

    Args:
        cache: pages, free list and lengths are updated.
        rows: cache row of each sequence, int64 [S].
        keep: which slots stay, bool [S, H, K], K at least the longest head's length; not read beyond a head's length.
    """
    old = cache.lengths[rows].long()
    keep = keep & slots_below(old, keep.shape[-1])
    lengths, tables = keep.sum(-1), cache.block_tables[rows].long()
    place = places(tables, torch.arange(keep.shape[-1], device=keep.device)[None, None], cache.block_size)
    sequence, head, _ = keep.nonzero(as_tuple=True)
    target = place[sequence, head, (keep.cumsum(-1) - 1)[keep]]
    for pages in cache.slot_pages:
        flat = pages.flatten(0, 1)
        flat[target] = flat[place[keep]]
    cache.lengths[rows] = lengths.to(cache.lengths.dtype)
    _give_back_blocks(cache, tables, old, lengths)


def evict(cache: LayerCache, rows: Tensor, slots: Tensor) -> None:
    """Evict at most one slot of each head, in place: the last slot's entry moves there; no host sync.

    Args:
        cache: pages, free list and lengths are updated.
        rows: cache row of each sequence, int64 [S].
        slots: the slot to evict; negative: none; int64 [S, H].
    """
    old, tables = cache.lengths[rows].long(), cache.block_tables[rows].long()
    last, chosen = (old - 1).clamp_min(0), (slots >= 0).flatten()
    source, target = (
        places(tables, index[..., None], cache.block_size).flatten() for index in (last, slots.where(slots >= 0, last))
    )
    first = chosen.byte().argmax(0, keepdim=True)  # a head that evicts nothing repeats the move of one that does
    source, target = (index.where(chosen, index.gather(0, first)) for index in (source, target))
    for pages in cache.slot_pages:
        flat = pages.flatten(0, 1)
        flat[target] = flat[source]
    new = old - (slots >= 0).long()
    cache.lengths[rows] = new.to(cache.lengths.dtype)
    _give_back_blocks(cache, tables, old, new)


def _give_back_blocks(cache: LayerCache, tables: Tensor, old: Tensor, new: Tensor) -> None:
    """Push the blocks that lengths `new` [S, H] no longer need onto the free stack, in their order."""
    place = torch.arange(tables.shape[-1], device=tables.device)
    first, end = _blocks_of(new, cache.block_size), _blocks_of(old, cache.block_size)
    is_free = ((place >= first[..., None]) & (place < end[..., None])).flatten()
    count = is_free.sum()
    rank = (is_free.cumsum(0) - 1).where(is_free, is_free.numel())  # others go to an extra, unread index
    blocks = tables.new_zeros(is_free.numel() + 1).scatter_(0, rank, tables.flatten())
    height = torch.arange(len(cache.free_blocks), device=tables.device) - cache.num_free
    pushed = blocks[height.clamp(0, is_free.numel())].to(cache.free_blocks.dtype)
    cache.free_blocks.copy_(torch.where((height >= 0) & (height < count), pushed, cache.free_blocks))
    cache.num_free += count.to(cache.num_free.dtype)


def write_metadata(cache: LayerCache, batch: ForwardBatch, metadata: dict[str, Tensor]) -> None:
    """Write metadata of a batch's slots, right after every token of it was appended, in place.

    Args:
        cache: tables and lengths are read, metadata updated.
        batch: the batch of the tokens.
        metadata: values by name, [T, H] each.
    """
    rows = batch.row_index
    behind = (batch.cu_seqlens[1:, None] - cache.lengths[rows])[batch.sequence]  # of tokens, to the slots
    slots = torch.arange(batch.num_tokens, device=rows.device)[:, None] - behind
    place = places(cache.block_tables[rows], slots, cache.block_size, batch.sequence)
    for name, numbers in metadata.items():
        cache.entry_metadata[name].flatten()[place] = numbers


def read_metadata(cache: LayerCache, rows: Tensor, names: Sequence[str], num_slots: int) -> list[Tensor]:
    """Copy metadata of slots, [S, H, num_slots] each; beyond the length -1 for integers, else 0."""
    tables, held = cache.block_tables[rows], slots_below(cache.lengths[rows], num_slots)
    read = (gather_pages(cache.entry_metadata[name], tables, num_slots) for name in names)
    return [values.where(held, 0 if values.is_floating_point() else -1) for values in read]


def add_attention(cache: LayerCache, rows: Tensor, scores: Tensor, powers: dict[str, int], num_slots: int) -> Tensor:
    """Add the newest query's attention to running sums, in place.

    Args:
        cache: tables and lengths are read, metadata updated.
        rows: cache row of each sequence, int64 [S].
        scores: attention to each slot, from `paged_attention`, float32 [S, H_q, num_slots or more].
        powers: power of the attention that each sum accumulates, 1 or 2.
        num_slots: slots of the longest head.
    Returns:
        The attention, mean over the group, float32 [S, H, num_slots]; 0 beyond the length.
    """
    lengths, tables = cache.lengths[rows], cache.block_tables[rows]
    held = slots_below(lengths, num_slots)
    attention = scores.view(*lengths.shape, -1, scores.shape[-1]).mean(2)[..., :num_slots] * held
    place = places(tables, torch.arange(num_slots, device=rows.device)[None, None], cache.block_size).flatten()
    for name, power in powers.items():  # 0 beyond the length, wherever that leads
        cache.entry_metadata[name].view(-1).index_add_(0, place, (attention**power).flatten())
    return attention


def nth_newest(positions: Tensor, counts: Tensor) -> Tensor:
    """Find the position of the n-th newest entry of each head.

    Args:
        positions: int32 [S, H, N], -1 beyond the length.
        counts: n, int64 [S, H].
    Returns:
        int32 [S, H]; 0 where a head has fewer, the largest int32 where n is 0.
    """
    descending = positions.sort(dim=-1, descending=True).values
    found = descending.gather(-1, (counts - 1).clamp(0, positions.shape[-1] - 1)[..., None])[..., 0].clamp_min(0)
    found = found.masked_fill(counts > positions.shape[-1], 0)
    return found.masked_fill(counts <= 0, torch.iinfo(torch.int32).max)


def eviction_candidate(scores: Tensor, positions: Tensor, lengths: Tensor, limits: Tensor) -> Tensor:
    """Find the entry with the lowest score in each head above its limit; of equal ones the youngest.

    Args:
        scores: float32 [S, H, N]; not read beyond the length.
        positions: int32 [S, H, N].
        lengths: entries of each head, at least 1, int64 [S, H].
        limits: maximum number of entries of a head, int64 [S].
    Returns:
        Its slot, -1 for heads within the limit, int64 [S, H].
    """
    scores = scores.where(slots_below(lengths, scores.shape[-1]), torch.inf)
    lowest = scores.amin(-1, keepdim=True)
    is_lowest = (scores == lowest) & slots_below(lengths, scores.shape[-1])
    slots = positions.masked_fill(~is_lowest, -1).argmax(-1)
    return slots.where(lengths > limits[:, None], -1)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scaling: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    rows: Tensor | None = None,
    recent: Recent | None = None,
    return_scores: bool = False,
    num_scores: int | None = None,
    chunk_ends: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from one query per sequence to the slots of its heads, and to raw recent tokens.

    Args:
        query: rotated, [B, H_q, D].
        key_pages: [N, block, D].
        value_pages: [N, block, D].
        block_tables: int32 [C, H, M].
        lengths: slots held, int32 [C, H]; a head without slots gives zeros.
        scaling: factor on the scores.
        scales: factors of 8-bit keys and values, float32 [N, block, 1] each.
        rows: cache row of each query, int64 [B]; None: query b has row b, and C = B.
        recent: raw tokens, [B W, H, D].
        return_scores: also return each slot's attention probability.
        num_scores: number of slots with scores, at least the longest head's, so that lengths need no host sync; None:
            as many as the tables can name.
        chunk_ends: of `VisibleKeys`, where the same backend has just appended the queries' tokens; None: counted anew.
        sinks: of `LayerCache`.
        bias: of `LayerCache`.
    Returns:
        [B, H_q, D]; with `return_scores` also float32 [B, H_q, num_scores], 0 beyond the length.
    """
    if rows is not None:
        block_tables, lengths = block_tables[rows], lengths[rows]
    capacity, seen = block_tables.shape[-1] * key_pages.shape[1], VisibleKeys(lengths, recent=recent)
    most_slots = int(lengths.max()) if num_scores is None else min(num_scores, capacity)
    pages = key_pages, value_pages, block_tables
    attended, scores, _ = _attend(None, query, *pages, seen, scaling, most_slots, scales, sinks, bias)
    if not return_scores:
        return attended[:, 0]
    missing = (num_scores or capacity) - most_slots
    return attended[:, 0], torch.nn.functional.pad(scores[:, :, 0, :most_slots], (0, missing))


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    batch: ForwardBatch,
    seen: VisibleKeys,
    scaling: float,
    scales: tuple[Tensor, Tensor] | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the queries of a batch to closed slots, to their own running state, and to raw recent tokens.

    Args:
        query: rotated, [T, H_q, D].
        key_pages: [N, block, D].
        value_pages: [N, block, D].
        block_tables: int32 [C, H, M].
        batch: the batch of the queries.
        seen: the keys that each query sees, from `append_or_merge`.
        scaling: factor on the scores.
        scales: factors of 8-bit keys and values, float32 [N, block, 1] each.
        return_lse: also return the log of the sum of exp of each query's scores, and of its sink.
        sinks: of `LayerCache`.
        bias: of `LayerCache`.
    Returns:
        [T, H_q, D], zeros where a query sees nothing; with `return_lse` also float32 [T, H_q], there arbitrary.
    """
    attended, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    delay = 0 if seen.recent is None else (len(seen.recent.exists) - batch.num_tokens) // len(batch.rows) + 1
    for count in sorted(set(batch.num_new)):  # equal counts together: one rectangle for all would be mostly padding
        members = [i for i, new in enumerate(batch.num_new) if new == count]
        part, where = batch.part(members)
        open_slot, recent = seen.open_slot, seen.recent
        if open_slot is not None:
            open_slot = OpenSlotState(open_slot.key[where], open_slot.value[where], open_slot.exists[where])
        if recent is not None:
            _, around = batch.extended(delay - 1).part(members)
            recent = Recent(recent.key[around], recent.value[around], recent.exists[around])
        part_seen, tables = VisibleKeys(seen.slots[where], open_slot, recent), block_tables[part.row_index]
        pages, most_slots = (key_pages, value_pages, tables), int(part_seen.slots.max())
        padded = _attend(part, query[where], *pages, part_seen, scaling, most_slots, scales, sinks, bias)
        attended[where], lse[where] = part.unpad(padded[0]), part.unpad(padded[2])
    return (attended, lse) if return_lse else attended


def _attend(
    batch: ForwardBatch | None,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    seen: VisibleKeys,
    scaling: float,
    most_slots: int,
    scales: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, [S, n, H_q, D], the last queries' probabilities, slots first, and log-sum-exp, [S, n, H_q].

    Args:
        batch: the batch of the queries; None: one query of each sequence.
        query: [T, H_q, D].
        key_pages: [N, block, D].
        value_pages: [N, block, D].
        block_tables: block tables of the sequences, int32 [S, H, M].
        seen: the keys that each query sees.
        scaling: factor on the scores.
        most_slots: an upper bound of the slots that a query sees, within the tables.
        scales: factors of 8-bit keys and values.
        sinks: of `LayerCache`.
        bias: likewise.
    """
    batch, delay = ForwardBatch.of_ones(len(query), query.device) if batch is None else batch, 0
    keys, values = (
        gather_pages(pages, block_tables, most_slots, factors).float()
        for pages, factors in zip((key_pages, value_pages), scales or (None, None), strict=True)
    )
    seen_slots = batch.pad(seen.slots).transpose(1, 2)  # [S, H, n]
    padded = batch.pad(query)
    sequences, num_new, query_heads, head_dim = padded.shape
    grouped = padded.float().transpose(1, 2).reshape(sequences, keys.shape[1], -1, num_new, head_dim) * scaling
    if seen.open_slot is not None:
        open_slot = [batch.pad(states) for states in (seen.open_slot.key, seen.open_slot.value, seen.open_slot.exists)]
    if seen.recent is not None:
        delay = (len(seen.recent.exists) - batch.num_tokens) // sequences + 1
        raw = [
            batch.pad(states, before=delay - 1) for states in (seen.recent.key, seen.recent.value, seen.recent.exists)
        ]
    slots = torch.arange(most_slots, device=query.device)
    added = None if bias is None else gather_pages(bias, block_tables, most_slots)[:, :, None, None]
    outputs, weights, lse = [], query.new_zeros(0), []
    for begin in range(0, num_new, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, num_new)
        block_keys, block_values = [keys], [values]
        visible = [slots < seen_slots[:, :, begin:end, None]]  # [S, H, block, slots]
        if seen.open_slot is not None:
            key, value, exists = (states[:, begin:end] for states in open_slot)
            block_keys.append(key.float().transpose(1, 2))
            block_values.append(value.float().transpose(1, 2))
            diagonal = torch.eye(end - begin, dtype=torch.bool, device=query.device)
            visible.append((diagonal & exists[:, None])[:, None].expand(-1, keys.shape[1], -1, -1))
        if seen.recent is not None:
            key, value, exists = (states[:, begin : end + delay - 1] for states in raw)
            block_keys.append(key.float().transpose(1, 2))
            block_values.append(value.float().transpose(1, 2))
            offset = torch.arange(end - begin + delay - 1, device=query.device)
            offset = offset - torch.arange(end - begin, device=query.device)[:, None]
            band = (offset >= 0) & (offset < delay)
            visible.append((band & exists[:, None])[:, None].expand(-1, keys.shape[1], -1, -1))
        mask = torch.cat(visible, dim=-1)[:, :, None]  # [S, H, 1, block, keys]
        rows = grouped[:, :, :, begin:end]  # [S, H, group, block, D]
        scores = rows @ torch.cat(block_keys, dim=2)[:, :, None].transpose(-1, -2)
        if added is not None:
            scores[..., :most_slots] += added
        scores = scores.masked_fill(~mask, -torch.inf)
        lse.append(scores.logsumexp(-1))
        if sinks is not None:
            lse[-1] = torch.logaddexp(lse[-1], sinks.float().view(1, *scores.shape[1:3], 1))
        weights = softmax_with_sinks(scores, sinks).nan_to_num(0.0)
        # data of other sequences beyond the length may be NaN, and 0 times NaN is NaN
        unseen = ~mask.any(-2)[..., None]
        outputs.append(weights @ torch.cat(block_values, dim=2)[:, :, None].masked_fill(unseen, 0))
    attended = torch.cat(outputs, dim=3).view(sequences, query_heads, num_new, head_dim).transpose(1, 2)
    log_sums = torch.cat(lse, dim=3).view(sequences, query_heads, num_new).transpose(1, 2)
    return attended.to(query.dtype), weights.flatten(1, 2), log_sums
