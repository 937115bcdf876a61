"""Prefix cache: snapshots of computed sequences, found by the hashes of their blocks of tokens."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator

from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.request import Sequence
from dmc.runtime.snapshot import Snapshot

LEAST_BLOCKS = 4
"""Minimum blocks of a reused prefix: recomputing a shorter one is no slower than finding and copying it."""
CHUNK = 256
"""Unknown prompts that are split are split at multiples of this many tokens."""
MOST_STATES = 0.25
"""Maximum size of the snapshots' states beside their blocks, as a share of the pool."""
MOST_SEEN = 2**16
"""Maximum number of remembered hashes of prompts, with or without a snapshot."""

Key = tuple[bytes, tuple[int, ...]]
"""Key of a prefix: the hash of its whole blocks, and the tokens after them."""


class PrefixCache:
    """Keeps snapshots of sequences after a prefix, for others that begin alike; evicts the least recently used first.

    A gate's decision is a function of the tokens so far, so that a snapshot serves every sequence with the same tokens.
    That of a full cache, within all windows, also serves every shorter prefix of whole blocks; else, as where layers
    without attention hold the states of its end, snapshots are taken where prompts diverge and where chunks end. Blocks
    that only snapshots hold count as free.

    Args:
        cache: cache of the sequences, without a policy.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache, self._block_size = cache, cache.block_size
        self._found: dict[bytes, dict[tuple[int, ...], Snapshot]] = {}
        self._keys: OrderedDict[Snapshot, list[Key]] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # hashes of prompts, and whether others diverge there

    def __iter__(self) -> Iterator[Snapshot]:
        return iter([*self._keys])  # a copy at once: another thread may ask for figures

    @property
    def num_bytes(self) -> int:
        """Bytes that only snapshots hold: their blocks and states."""
        states = sum(snapshot.num_bytes for snapshot in self)
        return self._cache.blocks_only_in(self) * self._cache.block_bytes + states

    def note(self, sequence: Sequence) -> None:
        """Remember a prompt, and where it diverges from earlier ones."""
        hashes, num_shared = self._hashes(sequence, _most(sequence)), 0
        for number, block_hash in enumerate(hashes, 1):
            if block_hash in self._seen:
                num_shared = number
            self._seen.setdefault(block_hash, False)
            self._seen.move_to_end(block_hash)
        if num_shared >= LEAST_BLOCKS:
            self._seen[hashes[num_shared - 1]] = True
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def find(self, sequence: Sequence) -> Snapshot | None:
        """Return the snapshot of a sequence's longest known prefix that leaves a token to predict from."""
        most = _most(sequence)
        hashes = self._hashes(sequence, most)
        for number in range(len(hashes), LEAST_BLOCKS - 1, -1):
            here, begin = self._found.get(hashes[number - 1], {}), number * self._block_size
            for tail in sorted(here, key=len, reverse=True):
                end = begin + len(tail)
                if end <= most and tuple(sequence.tokens[begin:end]) == tail:
                    self._keys.move_to_end(here[tail])
                    return here[tail].first(end)
        return None

    def chunk(self, sequence: Sequence, count: int) -> int:
        """Return how many of the next `count` tokens to feed so that the pass ends where a snapshot may be useful."""
        begin, size = sequence.num_computed_tokens, self._block_size
        if count == 1:
            return count
        hashes = self._hashes(sequence, begin + count)
        for number in range(max(begin // size + 1, LEAST_BLOCKS), len(hashes) + 1):
            if self._seen.get(hashes[number - 1]):
                return number * size - begin
        beyond = (begin + count) % CHUNK
        return count - beyond if begin + count < len(sequence.tokens) and beyond < count else count

    def waits(self, sequence: Sequence, others: list[Sequence]) -> bool:
        """Whether others are about to compute a longer prefix of a sequence than it could reuse now."""
        hashes = self._hashes(sequence, _most(sequence))
        for other in others:
            if other.num_waiting == 1:
                continue
            other_hashes = self._hashes(other, _most(other))
            # a hash covers all earlier blocks too: from the first difference on, all differ
            common = bisect_left(
                range(min(len(hashes), len(other_hashes))), True, key=lambda i: hashes[i] != other_hashes[i]
            )
            if common < LEAST_BLOCKS or not self._seen.get(hashes[common - 1]):
                continue
            if max(other.num_computed_tokens, sequence.num_computed_tokens) < common * self._block_size:
                return True
        return False

    def keep(self, running: list[Sequence]) -> None:
        """Take snapshots of sequences where others may continue, as far as there is room."""
        for sequence in running:
            is_due = self.is_due(sequence, sequence.num_computed_tokens)
            if is_due and self._cache.has_free(self._cache.blocks_to_share()):
                assert sequence.row is not None
                self._add(sequence, self._cache.snapshot(sequence.row))

    def is_due(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether others may continue from where so many tokens of a sequence are computed."""
        if num_tokens % self._block_size or num_tokens < LEAST_BLOCKS * self._block_size:
            return False
        here = self._hashes(sequence, num_tokens)[-1]
        ends_chunk = num_tokens % CHUNK == 0 and num_tokens < sequence.next_logit_position
        return bool(ends_chunk or self._seen.get(here)) and () not in self._found.get(here, {})

    def take(self, sequence: Sequence) -> bool:
        """Take over the cache of an ended sequence and close its row; False: it is not worth it."""
        if sequence.row is None or sequence.num_computed_tokens < LEAST_BLOCKS * self._block_size:
            return False
        self._add(sequence, self._cache.snapshot(sequence.row, moves=True))
        return True

    def reclaim(self, keep: int = 0) -> bool:
        """Drop the least recently used snapshot; False: only the `keep` most recently used are left."""
        if len(self._keys) <= keep:
            return False
        self._forget(next(iter(self._keys)))
        return True

    def shrink(self) -> bool:
        """Drop a snapshot, but not the latest used, if a growing pool would grow mainly for snapshots."""
        cache = self._cache
        most = 2 * cache.blocks_only_in(self) >= cache.allocator.num_blocks
        # each rank's pool grows by itself, but all must decide alike
        return bool(cache.layout.ranks.all_reduce(most, "max")) and self.reclaim(keep=1)

    def empty(self) -> None:
        """Drop all snapshots."""
        while self.reclaim():
            pass

    def clear(self) -> None:
        """Forget all snapshots, whose blocks the cache has taken back."""
        self._found.clear()
        self._keys.clear()

    def _add(self, sequence: Sequence, snapshot: Snapshot) -> None:
        end = snapshot.tokens_seen
        hashes, tail = self._hashes(sequence, end), tuple(sequence.tokens[end - end % self._block_size : end])
        keys: set[Key] = {(hashes[-1], tail)}
        layout = self._cache.layout
        is_whole = layout.compression is None and not layout.state_fields
        if is_whole and all(end <= ring for ring in layout.rings):  # which have overwritten nothing
            keys |= {(block_hash, ()) for block_hash in hashes[LEAST_BLOCKS - 1 :]}
        self._keys[snapshot] = list(keys)
        for here, rest_of_it in keys:
            old = self._found.setdefault(here, {}).get(rest_of_it)
            self._found[here][rest_of_it] = snapshot
            if old is not None:
                self._keys[old].remove((here, rest_of_it))
                if not self._keys[old]:
                    self._forget(old)
        most = MOST_STATES * self._cache.allocator.num_blocks * self._cache.block_bytes
        ranks = self._cache.layout.ranks  # the size of a state differs between ranks, and all must keep the same
        while ranks.all_reduce(int(sum(snapshot.num_bytes for snapshot in self) > most), "max") and self.reclaim():
            pass

    def _forget(self, snapshot: Snapshot) -> None:
        for here, tail in self._keys.pop(snapshot):
            del self._found[here][tail]
            if not self._found[here]:
                del self._found[here]
        self._cache.drop(snapshot)

    def _hashes(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Return the hashes of a sequence's first 1, 2, ... whole blocks within `num_tokens` tokens."""
        size, known = self._block_size, sequence.hashes
        while (len(known) + 1) * size <= len(sequence.tokens):
            block = array("q", sequence.tokens[len(known) * size : (len(known) + 1) * size]).tobytes()
            known.append(hashlib.sha256((known[-1] if known else b"") + block).digest())
        return known[: num_tokens // size]


def _most(sequence: Sequence) -> int:
    """Return how many first tokens may be reused: those before the last, and before the first that needs logits."""
    return min(sequence.next_logit_position, len(sequence.tokens) - 1)
