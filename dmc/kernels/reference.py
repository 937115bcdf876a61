"""The reference backend: what every kernel must compute, written for reading. Other backends are tested against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.compression import CompressionConfig, accumulate, rotate
from dmc.kernels.base import LayerCache, NewTokens, Recent, Seen, Top
from dmc.kernels.layout import history_size
from dmc.kernels.pages import gather_pages, places, slots_below
from dmc.kernels.probabilities import QUERY_BLOCK
from dmc.kernels.probabilities import attention_received as attention_received


def supports(dtype: torch.dtype, head_dim: int, block_size: int, device: torch.device) -> str | None:
    """Say why this backend cannot serve such a cache, None if it can: the reference serves all."""
    return None


def append_or_merge(cache: LayerCache, tokens: NewTokens, config: CompressionConfig | None) -> Seen:
    """Let the next n tokens of each sequence into the cache (DMC, algorithm 1), in place.

    With delay W the tokens that enter the compressed stream are the ones W positions behind the new ones. A merge
    gate's state after each token is the windowed closed form of eq. 10 over the raw history; exact accumulation goes on
    from the open slot's mean.

    Args:
        cache: pages, free list, tables, lengths, history and means are updated.
        tokens: what enters.
        config: the gate's action, delay and window; None appends every token.
    Returns:
        What the queries of the new tokens see.
    """
    if config is None:
        appended = torch.ones(tokens.key.shape[:3], dtype=torch.bool, device=tokens.key.device)
        length = _lengths_after(cache, tokens, appended)
        _store(cache, tokens.rows, tokens.key, tokens.value, length, appended)
        return Seen(length)
    assert tokens.cos is not None and tokens.sin is not None
    num_new, delay = tokens.key.shape[2], config.delay
    raw = _with_history(cache, tokens, history_size(config))
    end = raw.key.shape[2] - delay
    entering = raw.part(end - num_new, end)
    exists = entering.positions >= 0
    merged = entering.merged & (entering.positions > 0)[:, None]  # nothing precedes the first token
    appended = exists[:, None] & ~merged
    length = _lengths_after(cache, tokens, appended)
    if config.action == "drop":
        key, value, stays = entering.key, entering.value, appended
    else:
        key, value = _running_states(cache, tokens.rows, raw.part(0, end), num_new, config.window_size)
        closes = torch.cat((appended[..., 1:], torch.ones_like(appended[..., :1])), dim=-1)
        stays = exists[:, None] & closes  # a state that a later token of this call overwrites is not written
    key = rotate(key, tokens.cos[:, :num_new], tokens.sin[:, :num_new]).to(tokens.key.dtype)
    value = value.to(tokens.value.dtype)
    _store(cache, tokens.rows, key, value, length, stays)
    _remember(cache, tokens.rows, raw, history_size(config))
    seen = Seen(length)
    if config.action == "merge" and num_new > 1:
        seen = Seen((length - 1).clamp_min(0), Top(key, value, exists))
    if delay > 0:
        recent = raw.part(end - num_new + 1, end + delay)
        key = rotate(recent.key, tokens.cos[:, 1:], tokens.sin[:, 1:])
        seen.recent = Recent(key, recent.value, recent.positions >= 0)
    return seen


@dataclass
class RawTokens:
    """Tokens before compression, in the order of their positions: R of history, n new ones."""

    key: Tensor
    value: Tensor
    merged: Tensor
    omega: Tensor
    positions: Tensor
    """Negative: there is no such token, [S, R + n]."""

    def part(self, begin: int, end: int) -> RawTokens:
        """Tokens begin..end-1."""
        time = slice(begin, end)
        return RawTokens(
            self.key[:, :, time],
            self.value[:, :, time],
            self.merged[..., time],
            self.omega[..., time],
            self.positions[:, time],
        )


def _lengths_after(cache: LayerCache, tokens: NewTokens, appended: Tensor) -> Tensor:
    return cache.lengths[tokens.rows].long()[..., None] + appended.cumsum(-1)


def _with_history(cache: LayerCache, tokens: NewTokens, size: int) -> RawTokens:
    """Join the ring of each row, in time order, with the new tokens."""
    assert tokens.merged is not None and tokens.omega is not None
    past = tokens.positions[:, :1] + torch.arange(-size, 0, device=tokens.positions.device)
    raw = RawTokens(tokens.key, tokens.value, tokens.merged, tokens.omega, torch.cat((past, tokens.positions), dim=-1))
    if size > 0:
        place = _ring_index(cache, tokens.rows, past, size)
        raw.key = torch.cat((cache.history_key[place], raw.key), dim=2)
        raw.value = torch.cat((cache.history_value[place], raw.value), dim=2)
        raw.merged = torch.cat((cache.history_merged[place], raw.merged), dim=2)
        raw.omega = torch.cat((cache.history_omega[place], raw.omega), dim=2)
    return raw


def _remember(cache: LayerCache, rows: Tensor, raw: RawTokens, size: int) -> None:
    """Keep the last R raw tokens for the next call."""
    if size > 0:
        last = raw.part(raw.key.shape[2] - size, raw.key.shape[2])
        place = _ring_index(cache, rows, last.positions, size)
        cache.history_key[place], cache.history_value[place] = last.key, last.value
        cache.history_merged[place], cache.history_omega[place] = last.merged, last.omega


def _ring_index(cache: LayerCache, rows: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = torch.arange(cache.lengths.shape[1], device=rows.device)
    return rows[:, None, None], heads[None, :, None], positions[:, None] % size


def _running_states(
    cache: LayerCache, rows: Tensor, past: RawTokens, num_new: int, window_size: int | None
) -> tuple[Tensor, Tensor]:
    """Pool unrotated keys and values up to each of the last `num_new` tokens; float32 [S, H, n, D] each."""
    states = torch.cat((past.key, past.value), dim=-1).float()
    alpha = (past.merged & (past.positions > 0)[:, None]).float()
    omega = past.omega.where((past.positions >= 0)[:, None], 1.0)
    if window_size is not None:
        pooled = accumulate(states, alpha, omega, window_size)[:, :, -num_new:]
    else:
        assert cache.mean is not None and cache.weight is not None
        mean, weight = cache.mean[rows], cache.weight[rows]
        begin = states.shape[2] - num_new
        states = torch.cat((mean[:, :, None], states[:, :, begin:]), dim=2)
        alpha = torch.cat((torch.zeros_like(alpha[..., :1]), alpha[..., begin:]), dim=-1)
        omega = torch.cat((weight[..., None].where(weight[..., None] > 0, 1.0), omega[..., begin:]), dim=-1)
        pooled = accumulate(states, alpha, omega, None)[:, :, 1:]
        merges = torch.cat((alpha[..., 1:], torch.ones_like(alpha[..., :1])), dim=-1)
        in_open_slot = merges.flip(-1).cumprod(-1).flip(-1)
        started = (past.positions[:, -1] >= 0)[:, None]
        cache.weight[rows] = (in_open_slot * omega).sum(-1).where(started, 0.0)
        cache.mean[rows] = pooled[:, :, -1].where(started[..., None], 0.0)
    key, value = pooled.chunk(2, dim=-1)
    return key, value


def _store(cache: LayerCache, rows: Tensor, key: Tensor, value: Tensor, length: Tensor, stays: Tensor) -> None:
    """Take the blocks that `length` [S, H, n] needs and write the states that stay into slot length - 1."""
    take_blocks(cache, rows, length[..., -1])
    tables = cache.block_tables[rows]
    sequence, head, token = stays.nonzero(as_tuple=True)
    slot = length[sequence, head, token] - 1
    block = tables[sequence, head, slot // cache.block_size].long()
    cache.key_pages[block, slot % cache.block_size] = key[sequence, head, token]
    cache.value_pages[block, slot % cache.block_size] = value[sequence, head, token]


def take_blocks(cache: LayerCache, rows: Tensor, lengths: Tensor) -> None:
    """Set the lengths of heads to `lengths` [S, H], not below what they are, with blocks off the free list.

    A prefix sum over the heads, in the order (sequence, head), says who takes which: nothing waits for the device.
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
    """Evict slots: those that stay move together, in order, with all that is kept for them; in place.

    Blocks that a head no longer needs go onto the free stack in the order (sequence, head, block). Table entries beyond
    the new length stay as they are.

    Args:
        cache: pages, free list and lengths are updated.
        rows: cache row of each sequence, int64 [S].
        keep: which slots stay, bool [S, H, K], K no less than any head has; beyond its length it is not read.
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
    """Evict at most one slot of each head, in place: what lies in the last one moves there; nothing waits.

    Args:
        cache: pages, free list and lengths are updated.
        rows: cache row of each sequence, int64 [S].
        slots: which one goes; negative: none; int64 [S, H].
    """
    old, tables = cache.lengths[rows].long(), cache.block_tables[rows].long()
    last, chosen = (old - 1).clamp_min(0), (slots >= 0).flatten()
    source, target = (
        places(tables, each[..., None], cache.block_size).flatten() for each in (last, slots.where(slots >= 0, last))
    )
    first = chosen.byte().argmax(0, keepdim=True)  # a head that loses nothing repeats the move of one that does
    source, target = (each.where(chosen, each.gather(0, first)) for each in (source, target))
    for pages in cache.slot_pages:
        flat = pages.flatten(0, 1)
        flat[target] = flat[source]
    new = old - (slots >= 0).long()
    cache.lengths[rows] = new.to(cache.lengths.dtype)
    _give_back_blocks(cache, tables, old, new)


def _give_back_blocks(cache: LayerCache, tables: Tensor, old: Tensor, new: Tensor) -> None:
    """Push the blocks that lengths `new` [S, H] need no more onto the free stack, in their order."""
    place = torch.arange(tables.shape[-1], device=tables.device)
    first, end = _blocks_of(new, cache.block_size), _blocks_of(old, cache.block_size)
    is_free = ((place >= first[..., None]) & (place < end[..., None])).flatten()
    count = is_free.sum()
    rank = (is_free.cumsum(0) - 1).where(is_free, is_free.numel())  # what is not free goes where nobody looks
    blocks = tables.new_zeros(is_free.numel() + 1).scatter_(0, rank, tables.flatten())
    height = torch.arange(len(cache.free_blocks), device=tables.device) - cache.num_free
    pushed = blocks[height.clamp(0, is_free.numel())].to(cache.free_blocks.dtype)
    cache.free_blocks.copy_(torch.where((height >= 0) & (height < count), pushed, cache.free_blocks))
    cache.num_free += count.to(cache.num_free.dtype)


def write_notes(cache: LayerCache, rows: Tensor, notes: dict[str, Tensor]) -> None:
    """Write what is kept of the slots that have just been appended, in place.

    Args:
        cache: tables and lengths are read, notes updated.
        rows: cache row of each sequence, int64 [S].
        notes: of the n newest slots of each head, [S, H, n] each.
    """
    for name, numbers in notes.items():
        num_new = numbers.shape[-1]
        slots = cache.lengths[rows].long()[..., None] + torch.arange(-num_new, 0, device=rows.device)
        place = places(cache.block_tables[rows], slots, cache.block_size)
        cache.notes[name].flatten()[place] = numbers


def read_notes(cache: LayerCache, rows: Tensor, names: Sequence[str], num_slots: int) -> list[Tensor]:
    """Copy what is kept of slots, [S, H, num_slots] each; -1 of whole numbers, 0 of others beyond the length."""
    tables, held = cache.block_tables[rows], slots_below(cache.lengths[rows], num_slots)
    read = (gather_pages(cache.notes[name], tables, num_slots) for name in names)
    return [each.where(held, 0 if each.is_floating_point() else -1) for each in read]


def add_attention(cache: LayerCache, rows: Tensor, scores: Tensor, powers: dict[str, int], num_slots: int) -> Tensor:
    """Add what the newest query attends to to running sums, in place.

    Args:
        cache: tables and lengths are read, notes updated.
        rows: cache row of each sequence, int64 [S].
        scores: of each slot, from `paged_attention`, float32 [S, H_q, num_slots or more].
        powers: for each sum, which power of the attention is added, 1 or 2.
        num_slots: of the longest head.
    Returns:
        The attention, mean over the group, float32 [S, H, num_slots]; 0 beyond the length.
    """
    lengths, tables = cache.lengths[rows], cache.block_tables[rows]
    held = slots_below(lengths, num_slots)
    attention = scores.view(*lengths.shape, -1, scores.shape[-1]).mean(2)[..., :num_slots] * held
    place = places(tables, torch.arange(num_slots, device=rows.device)[None, None], cache.block_size).flatten()
    for name, power in powers.items():  # 0 beyond the length, wherever that leads
        cache.notes[name].view(-1).index_add_(0, place, (attention**power).flatten())
    return attention


def nth_newest(positions: Tensor, counts: Tensor) -> Tensor:
    """Find the position of the n-th newest entry of each head.

    Args:
        positions: int32 [S, H, N], -1 beyond the length.
        counts: n, int64 [S, H].
    Returns:
        int32 [S, H]; 0 where there are not as many, the largest number where none is asked for.
    """
    descending = positions.sort(dim=-1, descending=True).values
    found = descending.gather(-1, (counts - 1).clamp(0, positions.shape[-1] - 1)[..., None])[..., 0].clamp_min(0)
    found = found.masked_fill(counts > positions.shape[-1], 0)
    return found.masked_fill(counts <= 0, torch.iinfo(torch.int32).max)


def eviction_candidate(scores: Tensor, positions: Tensor, lengths: Tensor, limits: Tensor) -> Tensor:
    """Find the entry with the lowest score of each head that holds too many; of equal ones the youngest.

    Args:
        scores: float32 [S, H, N]; what it says beyond the length is not read.
        positions: int32 [S, H, N].
        lengths: entries of each head, at least 1, int64 [S, H].
        limits: how many are not too many, int64 [S].
    Returns:
        Its slot, -1 for heads that do not hold too many, int64 [S, H].
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
    rows: Tensor | None = None,
    recent: Recent | None = None,
    return_scores: bool = False,
    num_scores: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from one query per sequence to the slots of its heads, and to raw recent tokens.

    Args:
        query: rotated, [B, H_q, D].
        key_pages: [N, block, D].
        value_pages: [N, block, D].
        block_tables: int32 [C, H, M].
        lengths: slots held, int32 [C, H]; a head without slots gives zeros.
        scaling: factor on the scores.
        rows: cache row of each query, int64 [B]; None: query b has row b, and C = B.
        recent: raw tokens, with n = 1.
        return_scores: also return each slot's attention probability.
        num_scores: of how many slots, no fewer than the longest head has; None: as many as the tables can name.
    Returns:
        [B, H_q, D]; with `return_scores` also float32 [B, H_q, num_scores], 0 beyond the length.
    """
    if rows is not None:
        block_tables, lengths = block_tables[rows], lengths[rows]
    seen = Seen(lengths[..., None].long(), recent=recent)
    attended, scores = _attend(query[:, :, None], key_pages, value_pages, block_tables, seen, scaling)
    if not return_scores:
        return attended[:, :, 0]
    num_slots = num_scores or block_tables.shape[-1] * key_pages.shape[1]
    own = scores[:, :, 0, : int(seen.slots.max())]
    assert own.shape[-1] <= num_slots, "a head has more slots than scores are wanted"
    return attended[:, :, 0], torch.nn.functional.pad(own, (0, num_slots - own.shape[-1]))


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    seen: Seen,
    scaling: float,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """Attend from n queries per sequence to closed slots, to their own running state, and to raw recent tokens.

    Args:
        query: rotated, [S, H_q, n, D].
        key_pages: [N, block, D].
        value_pages: [N, block, D].
        block_tables: int32 [C, H, M].
        seen: what each query sees, from `append_or_merge`.
        scaling: factor on the scores.
        rows: cache row of each sequence, int64 [S]; None: sequence s has row s, and C = S.
    Returns:
        [S, H_q, n, D]; zeros where a query sees nothing.
    """
    if rows is not None:
        block_tables = block_tables[rows]
    return _attend(query, key_pages, value_pages, block_tables, seen, scaling)[0]


def _attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, block_tables: Tensor, seen: Seen, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the last block of queries' probabilities, [S, H_q, <= QUERY_BLOCK, keys], slots first."""
    sequences, _, num_new, head_dim = query.shape
    kv_heads = block_tables.shape[1]
    num_slots = int(seen.slots.max())
    slot_key = gather_pages(key_pages, block_tables, num_slots).float()
    slot_value = gather_pages(value_pages, block_tables, num_slots).float()
    grouped = query.float().view(sequences, kv_heads, -1, num_new, head_dim) * scaling
    slots = torch.arange(num_slots, device=query.device)
    outputs, weights = [], query.new_zeros(0)
    for begin in range(0, num_new, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, num_new)
        keys, values = [slot_key], [slot_value]
        visible = [slots < seen.slots[:, :, begin:end, None]]  # [S, H, block, slots]
        if seen.top is not None:
            keys.append(seen.top.key[:, :, begin:end].float())
            values.append(seen.top.value[:, :, begin:end].float())
            own = torch.eye(end - begin, dtype=torch.bool, device=query.device)
            visible.append((own & seen.top.exists[:, begin:end, None])[:, None].expand(-1, kv_heads, -1, -1))
        if seen.recent is not None:
            delay = seen.recent.key.shape[2] - num_new + 1
            recent = slice(begin, end + delay - 1)
            keys.append(seen.recent.key[:, :, recent].float())
            values.append(seen.recent.value[:, :, recent].float())
            offset = torch.arange(end - begin + delay - 1, device=query.device)
            offset = offset - torch.arange(end - begin, device=query.device)[:, None]
            band = (offset >= 0) & (offset < delay)
            visible.append((band & seen.recent.exists[:, None, recent])[:, None].expand(-1, kv_heads, -1, -1))
        mask = torch.cat(visible, dim=-1)[:, :, None]  # [S, H, 1, block, keys]
        rows = grouped[:, :, :, begin:end]  # [S, H, group, block, D]
        scores = rows @ torch.cat(keys, dim=2)[:, :, None].transpose(-1, -2)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
        # what another sequence has left beyond the length may be no number, and 0 times it none either
        unseen = ~mask.any(-2)[..., None]
        outputs.append(weights @ torch.cat(values, dim=2)[:, :, None].masked_fill(unseen, 0))
    return torch.cat(outputs, dim=3).view(query.shape).to(query.dtype), weights.flatten(1, 2)
