"""The cache of a compressed model in vLLM's block pool: blocks are credit for pages of single heads."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

RESERVE = 0.05
"""Share of the entries expected at the calibrated ratio by which a prompt is taken to hold more."""
LATE_STEPS = 2
"""Steps whose tokens are taken to be unreported when a prompt is admitted; a longer wait costs room, never a page."""


class HeapManager(SingleTypeKVCacheManager):
    """Gives each request blocks enough for the next step, whatever its gates decide, and takes back what they spared.

    A block is credit for pages of any heads, which the worker hands out as heads append. Lengths are known only from
    the worker's reports, which come late. Before a step every head is taken to append all tokens that no report has
    seen, and no request needs more than without compression:

        pages needed = min(heads * ceil(n / page), pages held at the report + heads * ceil(tokens since / page))

    When a report has seen the whole prompt, blocks above this go back to the pool, once. The first block of a request
    stays, as its name on the device.
    """

    kv_cache_spec: HeapSpec

    def __init__(self, kv_cache_spec: HeapSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.held: dict[str, RequestBlocks] = {}
        """What is known of each request that has blocks."""
        self.started: dict[str, int] = {}
        """First block of each request that got blocks since the last `take_changes`."""
        self.ended: list[str] = []
        """Requests that gave all blocks back since the last `take_changes`."""

    @override
    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the blocks that the request lacks for `num_tokens`; to admit it, what it and others are expected to.

        A prompt is expected to hold what the calibrated ratio leaves of it, and `RESERVE` more. It must fit beside
        what the prompts of others are still expected to take.
        """
        held = self.held.get(request_id, NOTHING)
        has = len(self.req_to_blocks.get(request_id, ()))
        if not apply_admission_cap:
            return max(self._needed(held, num_tokens) - has, 0)
        growing = sum(max(other.expected - len(self.req_to_blocks[name]), 0) for name, other in self.held.items())
        return self.kv_cache_spec.most_expected(num_tokens) - has + growing

    @override
    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Give a request the blocks that it lacks for `num_tokens` tokens in all."""
        blocks = self.req_to_blocks[request_id]
        held = self.held.setdefault(request_id, RequestBlocks())
        held.num_tokens = max(held.num_tokens, num_tokens)
        new = self.block_pool.get_new_blocks(max(self._needed(held, num_tokens) - len(blocks), 0))
        if not blocks:
            self.started[request_id] = new[0].block_id
        blocks.extend(new)
        return new

    @override
    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request that finished, was aborted or preempted; returns its blocks."""
        if self.held.pop(request_id, None) is not None and self.started.pop(request_id, None) is None:
            self.ended.append(request_id)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    @override
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find nothing: prefix caching is off."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def admit(self, request_id: str, num_tokens: int) -> None:
        """Note how many tokens a request that got its first blocks computes before it generates."""
        held = self.held[request_id]
        held.prompt, held.expected = num_tokens, self.kv_cache_spec.expected(num_tokens)

    def take_changes(self) -> tuple[dict[str, int], list[str]]:
        """Return `started` and `ended`, and begin anew."""
        changes = self.started, self.ended
        self.started, self.ended = {}, []
        return changes

    def note_step(self, step: int, request_ids: Iterable[str]) -> None:
        """Note the step in which these requests compute all tokens that they have blocks for."""
        for request_id in request_ids:
            held = self.held[request_id]
            held.steps.append((step, held.num_tokens))

    def report(self, step: int, pages: Mapping[str, int]) -> None:
        """Learn how many pages requests held right after a step, and take back what none of their steps can need."""
        for request_id, num_pages in pages.items():
            held = self.held.get(request_id)
            if held is None or not held.learn(step, num_pages):
                continue  # it ended, or began again, since
            if not held.trimmed and held.reported_tokens >= held.prompt > 0:
                held.trimmed, held.expected, blocks = True, 0, self.req_to_blocks[request_id]
                kept = max(self._needed(held, held.num_tokens), 1)
                spare = blocks[kept:]
                del blocks[kept:]
                self.block_pool.free_blocks(reversed(spare))

    def _needed(self, held: RequestBlocks, num_tokens: int) -> int:
        spec = self.kv_cache_spec
        since = spec.most_pages(num_tokens - held.reported_tokens)
        return cdiv(min(spec.most_pages(num_tokens), held.pages + since), spec.pages_per_block)


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM registers its own only while there are no others


@register_kv_cache_spec(manager_class=HeapManager)
@dataclass(frozen=True, kw_only=True)
class HeapSpec(AttentionSpec):
    """All heads of all layers of one rank as one layer of vLLM, whose `num_kv_heads` are (layer, KV head) pairs.

    A block has the bytes of `block_size` slots of every head. It is credit for as many bytes in pages, each of some
    slots of one head. Prefix caching is off.

    Raises:
        ValueError: the block is not made of whole pages.
    """

    dcp_sharded: bool = False
    ratio: float
    """Compression ratio that the gates were calibrated for."""
    delay: int = 0
    """Tokens that every head keeps beside its pages."""
    step_tokens: int
    """Most tokens of a step."""
    page_slots: int | None = None
    """Slots of a page; None: those of a block."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size % self.slots:
            raise ValueError(f"page_slots={self.page_slots}: expected a divisor of vLLM's block_size={self.block_size}")

    @property
    def slots(self) -> int:
        """Slots of a page."""
        return self.page_slots or self.block_size

    @property
    def pages_per_block(self) -> int:
        """Pages that a block is credit for."""
        return self.num_kv_heads * (self.block_size // self.slots)

    def most_pages(self, num_tokens: int) -> int:
        """Return the pages that so many tokens take if all heads append them."""
        return self.num_kv_heads * cdiv(num_tokens, self.slots)

    @property
    @override
    def prefix_cacheable(self) -> bool:
        return False

    @property
    @override
    def uses_slot_mapping(self) -> bool:
        return False

    @override
    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of the longest request if its gates keep all: one request always fits alone."""
        return cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes

    @override
    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Return the length of the worker's row of blocks, to which those given after blocks went back are appended."""
        return 2 * cdiv(max_len, self.block_size)

    def expected(self, num_tokens: int) -> int:
        """Return the blocks that a request of so many tokens is expected to have, for its next step too."""
        return self._blocks(num_tokens, self._expected_pages(num_tokens) + self.most_pages(1))

    def most_expected(self, num_tokens: int) -> int:
        """Return the most blocks that a request is expected to have until its prompt of so many tokens is reported."""
        unreported = min(num_tokens, LATE_STEPS * self.step_tokens)
        most = self._expected_pages(num_tokens - unreported) + self.most_pages(unreported)
        return max(self.expected(num_tokens), self._blocks(num_tokens, most))

    def _blocks(self, num_tokens: int, num_pages: int) -> int:
        return min(cdiv(num_tokens, self.block_size), cdiv(num_pages, self.pages_per_block))

    def _expected_pages(self, num_tokens: int) -> int:
        slots = max((1 + RESERVE) * num_tokens / self.ratio - self.delay, 0)
        return math.ceil(self.num_kv_heads * (slots / self.slots + 0.5))  # a head's last page is half full


@dataclass
class RequestBlocks:
    """What the scheduler knows of one request."""

    num_tokens: int = 0
    """Tokens that it has blocks for: those of all its steps."""
    reported_tokens: int = 0
    """Tokens that the last report had seen."""
    pages: int = 0
    """Pages that all its heads held then."""
    prompt: int = 0
    """Tokens that it computes before it generates; 0: not known yet."""
    expected: int = 0
    """Blocks that it is expected to have then."""
    trimmed: bool = False
    """Whether blocks went back after its prompt."""
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """Number of each step that no report has seen, and its tokens after it."""

    def learn(self, step: int, pages: int) -> bool:
        """Take a report of the pages held after a step; False: it is about another life of the request, or not new."""
        seen = [*itertools.takewhile(lambda noted: noted[0] <= step, self.steps)]
        for noted in seen:
            self.steps.popleft()
            self.reported_tokens = noted[1]
        if seen:
            self.pages = pages
        return bool(seen)


NOTHING = RequestBlocks()
