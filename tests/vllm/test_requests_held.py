"""Requests that vLLM's block pool holds at once by compression ratio, heads of unequal lengths, reports a step late.

Beside stock vLLM's, and what `dmc plan` says of a request's bytes.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.core.kv_cache_manager", reason="vLLM is not installed here")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from dmc.compression import CompressionConfig
from dmc.kernels.layout import CacheLayout
from dmc.runtime.capacity import request_bytes
from dmc.vllm.spec import HeapSpec

pytestmark = pytest.mark.vllm

LAYERS, HEADS, DIM, TOKENS, CHUNK = 32, 8, 128, 8448, 2048


def pool(spec, num_blocks):
    """vLLM's manager of so many blocks, of which it keeps one."""
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["dmc"], spec)])
    block = spec.block_size
    return KVCacheManager(config, 2 * TOKENS, block, block, max_in_flight_tokens=2 * CHUNK, enable_caching=False)


def num_held(manager, lengths_after):
    """Admit one request after the other, in chunks, until one does not fit; then all of them decode as one more."""
    (heap,) = manager.coordinator.single_type_managers
    step, waiting = 0, []

    def run(request, num_new, first):
        nonlocal step
        if manager.allocate_slots(request, num_new, full_sequence_must_fit=first) is None:
            return False
        if lengths_after is None:
            return True
        if first:
            heap.admit(request.request_id, request.num_tokens)
        step += 1
        heap.note_step(step, [request.request_id])
        while waiting:  # what the worker counted after the step before
            heap.report(*waiting.pop())
        waiting.append((step, {request.request_id: lengths_after(request, request.num_computed_tokens + num_new)}))
        request.num_computed_tokens += num_new
        return True

    for count in range(10_000):
        request = Request(str(count), [0] * TOKENS, SamplingParams(max_tokens=9), None)
        while request.num_computed_tokens < TOKENS:
            before = request.num_computed_tokens
            if not run(request, min(CHUNK, TOKENS - before), before == 0):
                return count
            request.num_computed_tokens = min(before + CHUNK, TOKENS)
        request.status = RequestStatus.RUNNING
        request.append_output_token_ids(0)
        assert run(request, 1, first=False)
    raise AssertionError("nothing is ever full")


@pytest.mark.parametrize(("num_blocks", "block_size"), [(2048, 64), (8192, 16)])  # the same bytes
def test_as_many_more_requests_are_held_as_the_cache_is_smaller(num_blocks, block_size):
    rng = np.random.default_rng(0)
    stock = FullAttentionSpec(block_size=block_size, num_kv_heads=LAYERS * HEADS, head_size=DIM, dtype=torch.float16)
    most = num_held(pool(stock, num_blocks), None)
    assert most == 15
    for ratio in (1, 4, 8):
        spec = HeapSpec(
            block_size=block_size, num_kv_heads=LAYERS * HEADS, head_size=DIM, dtype=torch.float16,
            ratio=float(ratio), step_tokens=CHUNK, page_slots=16,
        )  # fmt: skip
        assert spec.page_size_bytes == stock.page_size_bytes
        lanes = LAYERS * HEADS  # which keep shares of the tokens that differ by more than a factor of 5
        shares = rng.dirichlet(np.full(lanes, 4)) * lanes / ratio if ratio > 1 else np.ones(lanes)
        assert ratio == 1 or 5 * shares.min() < shares.max() <= 1

        def pages(request, num_tokens):
            return int(np.ceil(np.ceil(shares * num_tokens) / 16).sum())

        found = num_held(pool(spec, num_blocks), pages)
        layout = CacheLayout(LAYERS, HEADS, DIM, torch.float16, torch.device("cpu"), CompressionConfig())
        planned = num_blocks * spec.page_size_bytes / request_bytes(layout, TOKENS, float(ratio))
        print(f"CR {ratio}, {num_blocks} blocks of {block_size}: {found} requests, stock {most}, planned {planned:.1f}")
        assert found == pytest.approx(ratio * most, rel=0.1)
        assert 0.85 * planned < found <= planned
