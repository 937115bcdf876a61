"""Models some of whose layers have no attention: their states go with the sequence, through all that happens to it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from runtime.test_prefix_cache import count_fed
from runtime.test_stock_attention import build, difference
from runtime.test_windows import FULL, GREEDY, own_tokens, texts

from dmc import Engine, SamplingParams
from dmc.runtime import pool_size
from dmc.runtime.model_view import layout_of

NONE = "linear_attention"
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": [NONE, FULL, NONE, FULL], "max_position_embeddings": 512,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**SIZES, **EXPERTS},
    "qwen3_5_text": SIZES,
    "qwen3_5_moe_text": {**SIZES, **EXPERTS},
    "olmo_hybrid": SIZES,
}
STATE_BYTES = 2 * 4 * ((2 * 2 * 8 + 4 * 12) * 3 + 4 * 8 * 12)
"""Of one sequence: two layers, float32, three inputs of each convolution and a matrix of each head."""


def recurrent(family: str, **changes: Any) -> Any:
    """Build a tiny model whose states remember hundreds of tokens."""
    model = build(family, **{**FAMILIES[family], **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-7, -3, len(parameter)))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_equals_the_models_own(family: str) -> None:
    for size in (16, 1):  # a chunk may be a token
        assert difference(recurrent(family), Engine(recurrent(family), prefill_chunk_size=size)) < 3e-4


def test_states_remember_what_is_far_back() -> None:
    """Without this the other tests of this file would show little."""
    model, (text,) = recurrent("qwen3_next", layer_types=[NONE, NONE, NONE, FULL]), texts(200)
    other = [text[0] + 1, *text[1:]]
    model.model.layers[3].self_attn.o_proj.weight.data.zero_()  # nothing but the states
    with torch.no_grad():
        found = model(torch.tensor([text, other]), use_cache=False).logits[:, -1].log_softmax(-1)
    assert float((found[0] - found[1]).abs().max()) > 1e-2


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "olmo_hybrid",
        *(pytest.param(f"qwen3_5_{kind}", marks=pytest.mark.slow) for kind in ("text", "moe_text")),
    ],
)
def test_a_crowded_engine_continues_as_the_model_itself(family: str) -> None:
    """In a pool too small for all, with chunks, preemption, prefixes, and continuations of one prompt."""
    model, generator = recurrent(family), random.Random(family)
    prompts = texts(250, 40, 7, 60)
    prompts += [prompts[0][:100] + prompts[3][:30], prompts[0][:96]]
    greedy, several = (SamplingParams(max_new_tokens=20, temperature=0.0, n=n) for n in (1, 2))
    expected = [own_tokens(model, prompt, 20) for prompt in prompts]
    layout = Engine(model).cache.layout
    memory = int(1.05 * layout.most_blocks(270, 16)) * layout.block_bytes(16)
    engine = Engine(model, memory=memory, prefill_chunk_size=50, max_batch_size=6, prefix_cache=True)
    order = [0, *(index for index in range(1, len(prompts)) for _ in range(2))]
    generator.shuffle(order)
    requests = [(index, engine.submit(prompts[index], several if index % 2 else greedy)) for index in order]
    engine.run([request for _, request in requests])
    for index, request in requests:
        for generation in (request.generation, *request.generation.alternatives):
            assert generation.token_ids == expected[index]
    assert sum(request.generation.stats.num_preemptions for _, request in requests) > 0
    assert engine.blocks_in_use == 0
    engine.clear_prefix_cache()
    assert engine.cache.allocator.num_in_use == 0 and not engine.cache.allocator.extra.any()


@pytest.mark.parametrize(("family", "chunk", "second"), [("qwen3_next", None, 340), ("qwen3_5_text", 128, 340 - 256)])
def test_a_prefix_is_reused_up_to_where_its_states_were_kept(family: str, chunk: int | None, second: int) -> None:
    """At ends of chunks, where prompts diverge, and at the end of a text; not at any block, as of a full cache."""
    model, (prefix, one, other, third) = recurrent(family), texts(300, 20, 40, 9)
    prompts = [prefix + one, prefix + other, prefix + third, prefix[:200] + third]
    expected = [own_tokens(model, prompt, 20) for prompt in prompts]
    engine, counts = Engine(model, prefix_cache=True, prefill_chunk_size=chunk), []
    fed = count_fed(engine)
    for prompt, tokens in zip(prompts, expected, strict=True):
        (generation,) = engine.generate([prompt], GREEDY)
        assert generation.token_ids == tokens
        counts.append(sum(fed) - 19)
        fed.clear()
    assert counts == [320, second, 309 - 288, 209]  # the second finds where they part, block 18, for the third
    (again,) = engine.generate([prompts[0] + expected[0] + one], GREEDY)  # a conversation goes on
    assert sum(fed) - 19 == 1 + len(one) and again.token_ids == own_tokens(model, prompts[0] + expected[0] + one, 20)
    snapshots = sum(snapshot.num_bytes for snapshot in engine._scheduler.prefixes)
    assert snapshots >= STATE_BYTES * len(list(engine._scheduler.prefixes))


def test_a_session_goes_on_in_its_states_and_so_does_its_fork() -> None:
    model = recurrent("qwen3_5_text")
    engine, (context, first, second) = Engine(model), texts(120, 5, 40)
    with engine.session() as session:
        session.feed(context)
        fork = session.fork()
        assert session.generate(first, GREEDY).token_ids == own_tokens(model, context + first, 20)
        assert fork.generate(second, GREEDY).token_ids == own_tokens(model, context + second, 20)
        fork.close()
    assert engine.blocks_in_use == 0


def test_states_count_in_the_bytes_of_a_sequence_and_not_in_its_ratio() -> None:
    engine = Engine(recurrent("qwen3_next"), prefill_chunk_size=64)
    assert engine.cache.layout.recurrent_bytes == STATE_BYTES <= engine.cache.state_bytes
    for length in (8, 100, 300):
        (generation,) = engine.generate(texts(length), SamplingParams(max_new_tokens=1, temperature=0.0))
        stats, full = generation.stats, 2 * 2 * length
        assert stats.slots.tolist() == [[length] * 2] * 2 and stats.achieved_ratio == 1
        blocks = 2 * 2 * -(-length // 16)
        assert stats.bytes_allocated == blocks * engine.cache.block_bytes + engine.cache.state_bytes
        assert stats.bytes_ratio == (engine.cache.layout.entry_bytes * full + STATE_BYTES) / stats.bytes_used


def test_memory_auto_leaves_room_for_the_states_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 2**24)
    model = recurrent("qwen3_5_text", max_position_embeddings=8192)
    few, many = (Engine(model, memory="auto", max_batch_size=rows, token_budget=32) for rows in (100, 200))
    assert (few.cache.allocator.num_blocks - many.cache.allocator.num_blocks) * few.cache.block_bytes >= (
        100 * few.cache.layout.recurrent_bytes
    )


def test_recorded_steps_are_those_of_the_model_itself(make_recording: Any) -> None:
    model, prompts = recurrent("qwen3_next"), texts(30, 9, 21)
    engine, recorder = make_recording(model, memory=2**22)
    expected = [own_tokens(model, prompt, 20) for prompt in prompts]
    for _ in range(2):
        assert [generation.token_ids for generation in engine.generate(prompts, GREEDY)] == expected
    assert recorder.num_replayed > 10


def test_layers_without_attention_whose_states_are_unknown_are_refused_in_one_line() -> None:
    for model, reason in (
        (recurrent("qwen3_next", layer_types=[NONE] * 4), "no layer of this qwen3_next model has attention"),
        (build("minimax", num_local_experts=4), "layer 1 of this minimax model is linear_attention: expected"),
    ):
        with pytest.raises(NotImplementedError, match=reason) as refused:
            layout_of(model)
        assert "\n" not in str(refused.value)
