"""vLLM's own scheduler over the compressed cache: random operations, late reports; its books against a naive model."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed here")

from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dmc.vllm.connector import HeldReport
from dmc.vllm.spec import HeapSpec

pytestmark = pytest.mark.vllm

LANES, BLOCK, SLOTS, LONGEST, BUDGET, NUM_BLOCKS = 8, 32, 16, 640, 128, 32
PER_BLOCK = LANES * BLOCK // SLOTS
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
    "max_position_embeddings": LONGEST, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST, seed=0)


def make_scheduler(kind, model, prefix_caching=False, num_blocks=NUM_BLOCKS, **scheduling):
    """A scheduler of vLLM over one HeapSpec."""
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=32, max_num_batched_tokens=BUDGET, max_model_len=LONGEST, enable_chunked_prefill=True,
            is_encoder_decoder=False, **scheduling,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="DMCConnector", kv_connector_module_path="dmc.vllm.connector", kv_role="kv_producer"
        ),
    )  # fmt: skip
    config.cache_config.num_gpu_blocks = num_blocks
    spec = HeapSpec(
        block_size=BLOCK, num_kv_heads=LANES, head_size=16, dtype=torch.float32,
        ratio=4.0, step_tokens=BUDGET, page_slots=SLOTS,
    )  # fmt: skip
    cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["dmc.0"], spec)])
    return kind(config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=False)


def cdiv(a, b):
    return -(-a // b)


class Books:
    """What each request must have, from all that was said of it."""

    def __init__(self):
        self.lives = {}

    def needed(self, life, num_tokens):
        since = LANES * cdiv(num_tokens - life["reported"], SLOTS)
        return cdiv(min(LANES * cdiv(num_tokens, SLOTS), life["pages"] + since), PER_BLOCK)

    def begin_step(self, meta):
        for name in meta.ended:
            del self.lives[name]
        for name, first in meta.started.items():
            assert name not in self.lives
            self.lives[name] = {"first": first, "steps": [], "reported": 0, "pages": 0, "blocks": 0, "trimmed": False}

    def scheduled(self, step, name, num_tokens, prompt):
        life = self.lives[name]
        life.setdefault("prompt", prompt)
        life["steps"].append((step, num_tokens))
        life["blocks"] = max(life["blocks"], self.needed(life, num_tokens))

    def reported(self, step, pages):
        for name, num_pages in pages.items():
            life = self.lives.get(name)
            known = [tokens for at, tokens in life["steps"] if at <= step] if life else []
            if known and known[-1] > life["reported"]:
                life["reported"], life["pages"] = known[-1], num_pages
                if life["reported"] >= life["prompt"] and not life["trimmed"]:
                    life["trimmed"] = True
                    life["blocks"] = max(1, self.needed(life, life["steps"][-1][1]))


class Worker:
    """Lengths of all heads, one page after the other; what it says of a step comes one to three steps later."""

    def __init__(self, rng):
        self.rng, self.rows, self.history, self.said = rng, {}, [(0, {})], 0

    def run(self, output, credit):
        meta = output.kv_connector_metadata
        for name in meta.ended:
            del self.rows[name]
        for name in meta.started:
            keeps = np.minimum(self.rng.dirichlet(np.ones(LANES)) * LANES / self.rng.choice([1, 2, 4, 8]), 1)
            self.rows[name] = {"position": 0, "keeps": keeps, "lengths": np.zeros(LANES, int)}
        cached = output.scheduled_cached_reqs
        positions = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        positions |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        for name, count in output.num_scheduled_tokens.items():
            row = self.rows[name]
            assert row["position"] == positions[name]
            row["position"] += count
            row["lengths"] += self.rng.binomial(count, row["keeps"])
        pages = {name: int((-(-row["lengths"] // SLOTS)).sum()) for name, row in self.rows.items()}
        assert all(held <= credit[name] * PER_BLOCK for name, held in pages.items()), "a head found no page"
        assert sum(pages.values()) <= (NUM_BLOCKS - 1) * PER_BLOCK
        self.history.append((meta.step, pages))
        self.said = max(self.said, len(self.history) - 1 - int(self.rng.integers(1, 4)))
        return HeldReport(*self.history[self.said])


class Run:
    """A scheduler and a worker that runs each step at once, but whose outputs arrive `overlap` steps later."""

    def __init__(self, scheduler, rng, overlap):
        self.scheduler, self.overlap, self.rng = scheduler, overlap, rng
        self.worker, self.books, self.in_flight, self.preemptions = Worker(rng), Books(), [], 0
        (self.heap,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        self.count, self.arrived, self.steps_without = 0, {}, 0

    def add(self):
        name = f"r{self.count}"
        self.count += 1
        total = int(self.rng.integers(2, LONGEST))
        prompt = int(self.rng.integers(1, total)) if self.rng.random() < 0.7 else max(1, total - 5)
        request = Request(name, [1] * prompt, SamplingParams(max_tokens=total - prompt, ignore_eos=True), None)
        self.scheduler.add_request(request)
        self.arrived[name] = request

    def abort(self):
        if self.arrived:
            name = str(self.rng.choice([*self.arrived]))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self.arrived[name]
            self.check_pool()

    def step(self):
        oldest = next(iter(self.arrived.values()), None)
        before = oldest.num_preemptions if oldest else 0
        output = self.scheduler.schedule()
        meta, requests = output.kv_connector_metadata, self.scheduler.requests
        self.books.begin_step(meta)
        for name in output.num_scheduled_tokens:
            self.books.scheduled(meta.step, name, requests[name].num_computed_tokens, requests[name].num_tokens)
        self.check_pool()
        credit = {name: len(self.heap.req_to_blocks[name]) for name in self.heap.held}
        for name in self.heap.held:
            assert self.heap.req_to_blocks[name][0].block_id == self.books.lives[name]["first"]
        report = self.worker.run(output, credit)
        names = [*output.num_scheduled_tokens]
        tokens = [[] if requests[name].is_prefill_chunk else [1] for name in names]
        at = {name: index for index, name in enumerate(names)}
        result = ModelRunnerOutput(
            names, at, tokens, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=report)
        )
        self.in_flight.append((output, result, report))
        if oldest:  # nothing keeps it from going on, and no younger one takes its blocks
            assert oldest.num_preemptions == before
            self.steps_without = 0 if oldest.request_id in names else self.steps_without + 1
            assert self.steps_without <= 2 + self.overlap
        while len(self.in_flight) > self.overlap:
            self.arrive()

    def arrive(self):
        output, result, report = self.in_flight.pop(0)
        self.scheduler.update_from_output(output, result)
        self.books.reported(report.step, report.sub_pages)
        finished = [name for name, request in self.arrived.items() if request.is_finished()]
        for name in finished:
            request = self.arrived.pop(name)
            assert request.num_output_tokens == request.max_tokens
            self.preemptions += request.num_preemptions
        self.check_pool()

    def check_pool(self):
        blocks = {name: [block.block_id for block in found] for name, found in self.heap.req_to_blocks.items() if found}
        assert blocks.keys() == self.heap.held.keys()
        held = [block for found in blocks.values() for block in found]
        assert len({*held, 0}) == len(held) + 1, "a block has two owners"
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1 - len(held)
        for name, found in blocks.items():
            if name in self.books.lives and name not in self.heap.started:
                assert len(found) == self.books.lives[name]["blocks"]


@pytest.mark.parametrize(
    ("kind", "overlap", "prefix_caching", "scheduling"),
    [
        (Scheduler, 0, False, {}),
        (AsyncScheduler, 1, False, {}),
        (AsyncScheduler, 1, True, {"watermark": 0.05}),
        (AsyncScheduler, 1, False, {"scheduler_reserve_full_isl": False}),
    ],
)
def test_random_operations_leak_nothing_and_starve_nobody(model, kind, overlap, prefix_caching, scheduling):
    rng = np.random.default_rng(overlap)
    run = Run(make_scheduler(kind, model, prefix_caching, **scheduling), rng, overlap)
    for _ in range(2500):  # 10,000 in all
        draw = rng.random()
        if draw < 0.12 and len(run.arrived) < 40:
            run.add()
        elif draw < 0.14:
            run.abort()
        else:
            run.step()
    steps = 0
    while run.arrived:
        run.step()
        steps += 1
        assert steps < 10_000
    while run.in_flight:
        run.arrive()
    run.step()  # tells the worker who ended
    assert not run.heap.held and not run.worker.rows and not run.books.lives
    assert run.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert run.preemptions > 20 and run.count > 100
    print(f"{kind.__name__}: {run.count} requests, {run.preemptions} preemptions")
