"""Memory under policies, compression layer by layer, and what the engine refuses or warns of."""

import dataclasses
import re
import warnings

import pytest
import torch

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.policies.budgets import warn_once
from dmc.policies.protection import positions_held

HEADS, HEAD_DIM, BLOCK = 2, 16, 16
GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
HALF = Budget(ratio=2)


def num_blocks(slots):
    return int((-(-slots // BLOCK)).sum())


@pytest.mark.parametrize(
    ("policy", "metadata", "memory"),
    [
        (policies.LocalWindow(budget=HALF), 1, 0),  # position
        (policies.StreamingLLM(budget=HALF, rerotate=True, sinks=3), 1, 3 * HEADS * HEAD_DIM),
        (policies.H2O(budget=HALF), 2, 0),
        (policies.H2O(budget=HALF, evict_decoding=False), 2, 0),
        (policies.VATP(budget=HALF), 3, 0),
        (policies.RoCo(budget=HALF), 3, 0),
        (policies.D2O(budget=HALF), 2, 1),
        (policies.CAKE(budget=HALF, window=4), 1, 0),
        (policies.SnapKV(budget=HALF, window=4), 1, 0),
        (policies.LAVa(budget=HALF, window=4), 1, 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_count_whole_pages_metadata_and_state(policy, metadata, memory, make_stock, make_prompts):
    layers, engine = 3, Engine(make_stock(num_layers=3), policy=policy)
    prompts = make_prompts(90, 41)
    for prompt, generation in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        stats = generation.stats
        assert stats.slots.sum() <= (len(prompt) // 2 + 5) * layers * HEADS
        entry = 2 * HEAD_DIM * 4 + metadata * 4
        tables = layers * HEADS * (engine.cache.block_tables.shape[-1] + 1) * 4  # and lengths
        state = tables + layers * (2 + memory) * 4  # both limits, and the policy's own numbers
        assert stats.bytes_used == int(stats.slots.sum()) * entry + state
        assert stats.bytes_allocated == num_blocks(stats.slots) * BLOCK * entry + state


@pytest.mark.parametrize(
    "policy",
    [
        policies.LAVa(budget=HALF, window=4),
        policies.LAVa(budget=Budget(tokens=20)),
        policies.LAVa(budget=HALF, floor=0.3),
    ],
)
@pytest.mark.filterwarnings("ignore:window=")
def test_layers_compressed_again_and_again_hold_what_one_shot_with_the_last_budgets_holds(
    policy, make_stock, make_prompts
):
    model, (prompt,), held = make_stock(num_layers=6), make_prompts(120), []
    for tested in (policy, OneShot(**{name.name: getattr(policy, name.name) for name in dataclasses.fields(policy)})):
        engine = Engine(model, policy=tested)
        request = engine.submit(prompt, GREEDY)
        engine.step()
        cache = engine.cache
        positions = [head.tolist() for layer in positions_held(cache, 0) for head in layer]
        engine.run([request])
        held.append((positions, request.generation))
    (positions, generation), (expected_positions, expected) = held
    assert positions == expected_positions
    assert len({len(head) for head in positions}) > 3
    assert generation.token_ids == expected.token_ids
    assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


class OneShot(policies.LAVa):
    """LAVa that looks at all layers first."""

    recompresses = False


LAYERS, LENGTH, LIMIT = 8, 800, 48


@pytest.mark.parametrize(
    ("policy", "held_before"),
    [
        (policies.LAVa(budget=Budget(tokens=LIMIT)), "budget"),
        (policies.CAKE(budget=Budget(tokens=LIMIT), cascading=True), "budget"),
        (policies.SnapKV(budget=Budget(tokens=LIMIT)), "budget"),
        (policies.H2O(budget=Budget(tokens=LIMIT)), "budget"),
        (policies.CAKE(budget=Budget(tokens=LIMIT)), "all"),
    ],
    ids=["LAVa", "CAKE, cascading", "SnapKV", "H2O", "CAKE"],
)
@pytest.mark.filterwarnings("ignore:window=")
def test_a_prompt_takes_no_more_than_the_budget_and_one_layer(
    policy, held_before, make_stock, make_prompts, monkeypatch
):
    monkeypatch.setattr("dmc.runtime.block_pool.FIRST_POOL_BLOCKS", 4)
    engine, in_use = Engine(make_stock(num_layers=LAYERS), policy=policy), []
    attention = engine._runner._attention
    append = attention.append

    def watched(layer_index, *given):
        seen = append(layer_index, *given)
        in_use.append(engine.blocks_in_use)
        return seen

    attention.append = watched
    one_layer = HEADS * -(-LENGTH // BLOCK)
    budget = LAYERS * HEADS * (LIMIT // BLOCK + 1)  # every head may leave a block half empty
    for _ in range(2):
        engine.generate(make_prompts(LENGTH), SamplingParams(max_new_tokens=1))
    if held_before == "budget":
        assert one_layer < max(in_use) <= budget + one_layer
        assert engine.cache.allocator.num_blocks <= 2 * (budget + one_layer) < LAYERS * one_layer
    else:
        assert max(in_use) == LAYERS * one_layer
    assert engine.blocks_in_use == 0


@pytest.mark.filterwarnings("ignore:kernels.cpu has no compiled code")
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (policies.StreamingLLM(budget=HALF, rerotate=True), torch.bfloat16),
        (policies.VATP(budget=HALF), torch.float16),
        (policies.RoCo(budget=HALF), torch.bfloat16),
        (policies.CAKE(budget=HALF, window=4), torch.float16),
        (policies.CaM(budget=HALF), torch.bfloat16),
        (policies.D2O(budget=HALF, allocation="uniform"), torch.float16),
        (policies.LAVa(budget=HALF, window=4, layer_budget="uniform"), torch.bfloat16),
    ],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else type(value).__name__,
)
def test_models_of_half_precision_hold_as_many_entries(policy, dtype, make_stock, make_prompts):
    prompts = make_prompts(40, 19)
    full, half = (Engine(make_stock().to(dtype), policy=policy) for dtype in (torch.float32, dtype))
    assert half.cache.fields["key_pages"].dtype == dtype
    for expected, generation in zip(full.generate(prompts, GREEDY), half.generate(prompts, GREEDY), strict=True):
        assert generation.stats.slots.sum() == expected.stats.slots.sum()
        assert torch.tensor(generation.logprobs).isfinite().all()


@pytest.mark.parametrize(
    "policy",
    [
        *(policies.H2O(budget=HALF), policies.H2O(budget=HALF, evict_decoding=False), policies.CAKE(budget=HALF)),
        *(policies.Quest(budget=HALF), policies.OmniKV(budget=HALF, filter_layers=(0,)), policies.InfLLM(budget=HALF)),
    ],
)
def test_a_policy_that_acts_on_tokens_is_refused_for_a_model_whose_gates_do(policy, make_compressed):
    with pytest.raises(ValueError, match="the gates of DMCLlamaForCausalLM decide token by token what its cache keeps"):
        Engine(make_compressed(), policy=policy)


@pytest.mark.parametrize(
    ("budget", "error"),
    [
        ({"tokens": 0}, r"Budget\(tokens=0\): expected a whole number >= 1"),
        ({"tokens": -4}, r"Budget\(tokens=-4\): expected a whole number >= 1"),
        ({"tokens": 2.5}, r"Budget\(tokens=2.5\): expected a whole number >= 1"),
        ({"ratio": 0.5}, "ratio=0.5 is not a compression ratio: expected a number >= 1"),
        ({"ratio": float("inf")}, "ratio=inf is not a compression ratio"),
        ({}, "give exactly one, ratio=4.0 or tokens=128"),
        ({"ratio": 2, "tokens": 9}, "give exactly one, ratio=4.0 or tokens=128"),
    ],
)
def test_budgets_that_hold_nothing_or_more_than_all_are_refused(budget, error):
    with pytest.raises(ValueError, match=error):
        Budget(**budget)


SMALL = Budget(tokens=6)


@pytest.mark.parametrize(
    ("policy", "warning"),
    [
        (policies.SnapKV(budget=SMALL), "window=32 is more than half of a budget of 6 .* a window of 3 is used"),
        (policies.PyramidKV(budget=SMALL), "window=8 is more than half of a budget of 6 .* a window of 3 is used"),
        (policies.AdaKV(budget=SMALL), "window=32 is more than half of a budget of 6 .* a window of 3 is used"),
        (policies.CAKE(budget=SMALL), "window=32 is more than half of a budget of 6 .* a window of 3 is used"),
        (policies.LAVa(budget=SMALL), "window=32 is more than half of a budget of 6 .* a window of 3 is used"),
        (policies.StreamingLLM(budget=SMALL, sinks=9), "sinks=9 do not fit a budget of 6 entries: 5 are kept"),
        (
            policies.VATP(budget=SMALL, sinks=9),
            "sinks=9 do not fit the heavy half of a budget of 6 entries: 3 are kept",
        ),
        (policies.D2O(budget=SMALL, sinks=9, allocation="uniform"), "sinks=9 do not fit a budget of 6 entries: 4 stay"),
        (policies.H2O(budget=Budget(tokens=1)), None),
        (policies.TOVA(budget=Budget(tokens=1)), None),
        (policies.SnapKV(budget=SMALL, window=3), None),
        (policies.StreamingLLM(budget=SMALL), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_window_or_sinks_beyond_the_budget_bring_one_warning(policy, warning, make_stock, make_prompts):
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine = Engine(make_stock(num_layers=3), policy=policy)
        for generation in engine.generate(make_prompts(30, 21), GREEDY):
            most = policy.budget.tokens + (0 if policy.evicts_decoding else 5)
            assert generation.stats.slots.float().mean() <= most
    assert len(seen) == (warning is not None)
    if warning is not None:
        assert re.match(warning, str(seen[0].message))


@pytest.mark.parametrize(
    "policy", [policies.TOVA(budget=Budget(ratio=4.0)), policies.OmniKV(budget=HALF, filter_layers=(1,))]
)
def test_scores_are_no_wider_than_what_is_held(policy, make_stock, make_prompts):
    engine = Engine(make_stock(num_layers=4), policy=policy)
    backend, widths = engine._runner._attention.backend, []

    class Watching:
        def __getattr__(self, name):
            return getattr(backend, name)

        def paged_attention(self, *arguments, **options):
            answer = backend.paged_attention(*arguments, **options)
            if options.get("return_scores"):
                widths.append(answer[1].shape[-1])
            return answer

    engine._runner._attention.backend = Watching()
    engine.generate(make_prompts(130), SamplingParams(max_new_tokens=4, temperature=0))
    held = 133 if isinstance(policy, policies.OmniKV) else 133 // 4 + 1
    assert widths and set(widths) == {-(-held // 16) * 16}  # whole pages; the table has more places
