"""A worker's cache under steps as vLLM's runners make them: random ones, a naive model of its pages, waits."""

import contextlib
import copy

import pytest
import torch
from claimed_gpu import COPIES, GPU, claim_model, claimed_gpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("vllm.v1.attention.backend", reason="vLLM is not installed here")

from vllm.v1.attention.backend import CommonAttentionMetadata

from dmc import Engine, SamplingParams
from dmc.kernels import load_backend, reference
from dmc.kernels.batch import ForwardBatch
from dmc.policies.layer_attention import CacheAttention
from dmc.runtime import model_view
from dmc.runtime.paged_forward import PagedForward
from dmc.vllm.attention import AttentionStepBuilder
from dmc.vllm.worker_cache import WorkerCache

pytestmark = pytest.mark.vllm

NUM_BLOCKS, SLOTS, MOST = 60, 4, 4


class Worker:
    """One rank: requests by name, each with the tokens that it has been fed and is yet to be fed."""

    def __init__(self, model, backend):
        layout = model_view.layout_of(model)
        self.cache, self.model = WorkerCache(layout, MOST, SLOTS, max_tokens=8), model
        lanes = layout.num_layers * layout.num_kv_heads
        size = NUM_BLOCKS, lanes, 2 * SLOTS, 2 * layout.head_dim  # a block has two pages of each head
        self.cache.bind_pages(torch.zeros(size, device=layout.device))
        self.attention = CacheAttention(self.cache, backend)
        self.first_block, self.tokens, self.num_fed, self.steps = {}, {}, {}, 0

    def begin(self, names, ended=()):
        free = [block for block in range(1, NUM_BLOCKS) if block not in self.first_block.values()]
        started = dict(zip(names, free[:: max(1, len(free) // MOST)]))
        for name in ended:
            del self.first_block[name], self.num_fed[name]
        self.first_block |= started
        self.num_fed |= dict.fromkeys(started, 0)
        self.steps += 1
        self.cache.begin_step(self.steps, started, list(ended))

    def inputs(self, counts):
        """What a runner has on the device, and on the host."""
        device, begins = self.cache.layout.device, [self.num_fed[name] for name in counts]
        ends = [begin + count for begin, count in zip(begins, counts.values())]
        fed = [self.tokens[name][begin : begin + count] for begin, (name, count) in zip(begins, counts.items())]
        row = torch.tensor([[token for tokens in fed for token in tokens]], device=device)
        positions = torch.cat([torch.arange(b, b + len(f)) for b, f in zip(begins, fed)])[None].to(device)
        last = torch.tensor([len(f) for f in fed], device=device).cumsum(0) - 1
        queries = torch.tensor([0, *counts.values(), 0]).cumsum(0)  # a sequence without tokens pads the step
        common = CommonAttentionMetadata(
            query_start_loc=queries.to(device), query_start_loc_cpu=queries,
            seq_lens=torch.tensor([*ends, 0]).to(device), seq_lens_cpu_upper_bound=torch.tensor([*ends, 0]) + 3,
            block_table_tensor=torch.tensor([[self.first_block[name], 0] for name in counts] + [[0, 0]]).to(device),
            num_reqs=len(counts) + 1, num_actual_tokens=row.numel(), max_query_len=max(counts.values()),
            max_seq_len=max(ends) + 3, slot_mapping=torch.empty(0, device=device),
        )  # fmt: skip
        return row, positions, last, common

    def run(self, counts, row, positions, last, common):
        """A forward pass; it leaves the most likely next token of each request on the device."""
        step = AttentionStepBuilder.build(None, 0, common)
        batch = self.cache.batch(step.first_blocks, step.begins, step.num_new, step.most)
        paged = PagedForward(self.cache, self.attention, batch, self.model.rotary_tables)
        output = self.model(row, position_ids=positions, paged_cache=paged, use_cache=False, logits_to_keep=last)
        paged.finish()
        self.cache.end_step()
        for name, count in counts.items():
            self.num_fed[name] += count
        return output.logits[0].argmax(-1)

    @torch.no_grad()
    def step(self, counts):
        chosen = self.run(counts, *self.inputs(counts)).tolist()
        for name, token in zip(counts, chosen):
            if self.num_fed[name] == len(self.tokens[name]):
                self.tokens[name].append(token)

    def check_pages(self):
        """Every page is on the stack once, or in the table of one head of one request."""
        cache, pages = self.cache, []
        for row in cache._rows.values():
            for tables, lengths in zip(cache.block_tables[:, row], cache.all_lengths[:, row]):
                pages += [page for t, n in zip(tables.tolist(), lengths.tolist()) for page in t[: -(-n // SLOTS)]]
        free = cache.free_pages[: int(cache.num_free)].tolist()
        assert sorted(pages + free) == list(range(len(cache.key_pages)))
        step, held = cache.report()
        assert step == self.steps and sum(held.values()) == len(pages) and held.keys() == self.num_fed.keys()


GATES = [{}, {"window_size": None}, {"delay": 3}, {"action": "drop", "delay": 5},
         {"action": "drop", "delay": 4, "decided_token": "previous", "gate_input": "hidden"}]  # fmt: skip


@pytest.mark.parametrize("gates", GATES, ids=str)
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_random_steps_give_the_engines_tokens_and_lose_no_page(gates, kernels, make_compressed, make_prompts):
    """Requests come, are preempted, begin again and end."""
    if (backend := load_backend(kernels)).supports(torch.float32, 16, SLOTS, torch.device("cpu")):
        pytest.skip("cannot be built here")
    model, prompts = make_compressed(gates=gates), make_prompts(9, 26, 3, 17, 1, 12)
    generations = Engine(model, kernels="reference").generate(
        prompts, SamplingParams(max_new_tokens=12, temperature=0.0)
    )
    worker, generator = Worker(model, backend), torch.Generator().manual_seed(3)
    waiting, ended, num_preempted = [*range(len(prompts))], [], 0
    worker.tokens = {i: [*prompt] for i, prompt in enumerate(prompts)}
    while waiting or worker.num_fed:
        draw = torch.randint(100, (12,), generator=generator).tolist()
        for name in [*worker.num_fed]:
            if len(worker.tokens[name]) >= len(prompts[name]) + 12:
                ended.append(name)
            elif draw[0] < 8 and name not in ended and not ended:
                ended.append(name)
                waiting.append(name)
                num_preempted += 1
        room = MOST - len(worker.num_fed) + len(ended)
        started = [name for name in waiting[: min(room, 1 + draw[1] % 2)] if name not in ended]
        waiting = [name for name in waiting if name not in started]
        worker.begin(started, ended)
        ended = []
        running = [name for name in worker.num_fed if draw[2 + name] < 85]
        missing = {name: len(worker.tokens[name]) - worker.num_fed[name] for name in running}
        if missing:
            worker.step({name: min(left, 1 + draw[9] % 11) for name, left in missing.items()})
            worker.check_pages()
    assert num_preempted >= 2
    for i, generation in enumerate(generations):
        assert worker.tokens[i][len(prompts[i]) : len(prompts[i]) + 12] == generation.token_ids, i
    worker.begin([])
    assert int(worker.cache.num_free) == len(worker.cache.key_pages)


class Waits(TorchDispatchMode):
    """Raises where the host waits for the GPU, but in the reference's functions, which stand for Triton's kernels."""

    READS = ("nonzero", "_local_scalar_dense", "masked_select", "unique2", "_unique2")
    is_paused = False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made, name, keywords = (
            function(*arguments, **(keywords or {})),
            function.overloadpacket.__name__,
            keywords or {},
        )
        if self.is_paused:
            return made
        given, out = (
            [leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor)] for item in (arguments, made)
        )
        if any(tensor.device == GPU for tensor in given):
            masks = arguments[1] if name in ("index", "index_put_", "_index_put_impl_") else []
            assert name not in self.READS and not any(
                mask is not None and mask.dtype == torch.bool for mask in masks
            ), name
        if name in COPIES and len({tensor.device.type for tensor in given + out}) > 1:
            assert keywords.get("non_blocking") or (name == "copy_" and True in arguments[2:]), name
        return made

    def __getattr__(self, name):
        """A backend."""
        function = getattr(reference, name)

        def paused(*arguments, **options):
            self.is_paused = True
            try:
                return function(*arguments, **options)
            finally:
                self.is_paused = False

        return paused


@pytest.mark.parametrize("gates", GATES, ids=str)
def test_a_gpu_is_never_waited_for(gates, make_compressed, make_prompts):
    model, prompts = make_compressed(gates=gates), make_prompts(9, 6, 1)
    waits, found = Waits(), []
    for place in (contextlib.nullcontext(), claimed_gpu()):
        with place as on_gpu:
            worker = Worker(claim_model(copy.deepcopy(model)) if on_gpu else model, waits if on_gpu else reference)
            worker.tokens = {i: [*prompt] for i, prompt in enumerate(prompts)}
            watched = waits if on_gpu else contextlib.nullcontext()
            for started, ended, counts in (([0, 1], [], {0: 5, 1: 6}), ([2], [1], {2: 1, 0: 3}), ([], [0], {2: 1})):
                with watched:
                    worker.begin(started, ended)
                inputs = worker.inputs(counts)
                with watched, torch.no_grad():
                    chosen = worker.run(counts, *inputs)
                    step, held = worker.cache.report()
                found.append((chosen.tolist(), step, held))
                worker.tokens[2].append(3)
    assert found[:3] == found[3:]


def test_a_batch_whose_places_the_device_knows_is_the_batch():
    rows, begins, num_new = [4, 0, 7, 2], [9, 0, 3, 30], [1, 5, 1, 4]
    known = ForwardBatch(rows, begins, num_new)
    unknown = ForwardBatch.of_device(num_new, [b + 2 for b in begins], torch.tensor(rows), torch.tensor(begins))
    for batch in (known, unknown):
        batch.rotary = torch.arange(19.0)[:, None], torch.arange(19.0)[:, None]  # a delay of 2
    pairs = [(known, unknown), *zip([part for part, _ in known.by_count], [part for part, _ in unknown.by_count])]
    for one, other in [*pairs, *((one.extended(3), other.extended(3)) for one, other in pairs)]:
        for name in ("row_index", "begin_index", "positions", "tokens_seen", "cu_seqlens", "sequence", "offset"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert len(pairs) == 3 and not any(other.is_known for _, other in pairs)
