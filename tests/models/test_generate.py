import itertools

import pytest
import torch

from dmc import Engine, SamplingParams
from dmc.runtime import PagedGenerationCache

GATES = [
    {},
    {"window_size": None, "delay": 2},
    {"action": "drop", "delay": 4},
    {"decisions": "per_layer"},
    {"decisions": "fixed", "weighting": "uniform", "window_size": None, "delay": 2, "target_ratio": 2.5},
]
LENGTHS = (5, 19, 12)
NEW = 12


def name_of(gates):
    return "-".join(f"{key}={value}" for key, value in gates.items()) or "merge"


def padded(prompts, side, pad=0):
    longest = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        filler, ones = [pad] * (longest - len(prompt)), [1] * len(prompt)
        zeros = [0] * len(filler)
        rows.append(filler + prompt if side == "left" else prompt + filler)
        masks.append(zeros + ones if side == "left" else ones + zeros)
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def greedy(model, prompt, count=NEW):
    """Continue by the parallel form: no cache at all."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("gates", "side"),
    [*zip(GATES, itertools.cycle(("left", "right")), strict=False), (GATES[0], "right"), (GATES[1], "left")],
    ids=str,
)
def test_padded_batch_equals_engine_and_parallel_form(gates, side, make_compressed, make_prompts):
    model = make_compressed(gates=gates)
    prompts = make_prompts(*LENGTHS)
    out = model.generate(**padded(prompts, side), max_new_tokens=NEW, do_sample=False)
    expected = [greedy(model, prompt) for prompt in prompts]
    assert out[:, max(LENGTHS) :].tolist() == expected
    engine = Engine(model).generate(prompts, SamplingParams(max_new_tokens=NEW, temperature=0))
    assert [generation.token_ids for generation in engine] == expected


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {"prefill_chunk_size": 7}),
        ("llama", {"use_cache": False}),
    ],
)
def test_every_family_generates_and_so_do_chunks_and_a_model_without_a_cache(
    family, options, make_compressed, make_prompts
):
    model, prompts = make_compressed(family), make_prompts(*LENGTHS)
    out = model.generate(**padded(prompts, "left"), max_new_tokens=5, do_sample=False, **options)
    assert out[:, max(LENGTHS) :].tolist() == [greedy(model, prompt, 5) for prompt in prompts]


def test_right_padded_prompts_come_back_moved_to_the_left(make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(3, 7)
    out = model.generate(**padded(prompts, "right", pad=9), max_new_tokens=1, do_sample=False)
    assert out[:, :7].tolist() == [[9] * 4 + prompts[0], prompts[1]]


def test_generate_without_a_mask_and_by_position(make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(8, 8)
    out = model.generate(torch.tensor(prompts), max_new_tokens=NEW, do_sample=False)
    assert out[:, 8:].tolist() == [greedy(model, prompt) for prompt in prompts]


def test_logits_are_those_of_the_parallel_form(make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(*LENGTHS)
    out = model.generate(
        **padded(prompts, "right"),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(out.logits, dim=1)
    for row, prompt in enumerate(prompts):
        tokens = prompt + out.sequences[row, max(LENGTHS) :].tolist()
        with torch.no_grad():
            expected = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-4)


def test_returned_sequences_of_one_prompt_are_greedy_copies(make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(*LENGTHS)
    out = model.generate(
        **padded(prompts, "right"), max_new_tokens=NEW, num_beams=3, num_return_sequences=3, do_sample=False
    )
    assert out.shape[0] == 9
    prompts_back = out[:, : max(LENGTHS)]
    for row in range(3):
        assert (prompts_back[3 * row : 3 * row + 3] == prompts_back[3 * row]).all()


def beam_search(next_logprobs, width, length):
    """Return the most likely continuation, every step computed anew by `next_logprobs(tokens)`."""
    beams = [(0.0, [])]
    for _ in range(length):
        every = [
            (total + float(logprob), [*tokens, token])
            for total, tokens in beams
            for token, logprob in enumerate(next_logprobs(tokens))
        ]
        beams = sorted(every, key=lambda beam: -beam[0])[:width]
    return beams[0][1]


@pytest.mark.parametrize(
    "gates", [*GATES[:3], *(pytest.param(gates, marks=pytest.mark.slow) for gates in GATES[3:])], ids=name_of
)
def test_beam_search_equals_brute_force_over_the_parallel_form(gates, make_compressed, make_prompts):
    model, prompts = make_compressed(gates=gates), make_prompts(*LENGTHS)
    out = model.generate(**padded(prompts, "right"), max_new_tokens=8, num_beams=2, do_sample=False)

    def best(prompt):
        def next_logprobs(tokens):
            with torch.no_grad():
                return model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].log_softmax(-1)

        return beam_search(next_logprobs, 2, 8)

    expected = [best(prompt) for prompt in prompts]
    assert out[:, max(LENGTHS) :].tolist() == expected
    assert expected != [greedy(model, prompt, 8) for prompt in prompts]  # the beams crossed


def test_sampling_runs_and_copies_of_a_prompt_diverge(make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(*LENGTHS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = model.generate(
            **padded(prompts, "left"), max_new_tokens=NEW, do_sample=True, top_k=20, top_p=0.9, num_return_sequences=4
        )
    assert out.shape == (12, max(LENGTHS) + NEW)
    assert len({tuple(row) for row in out[:4].tolist()}) == 4


@pytest.mark.parametrize(("side", "whole_history"), [("left", True), ("right", False)])
def test_turns_go_on_from_the_users_cache(side, whole_history, make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(*LENGTHS)
    cache = PagedGenerationCache(model)
    first = padded(prompts, side)
    out = model.generate(**first, max_new_tokens=4, do_sample=False, past_key_values=cache)
    assert cache.get_seq_length() == max(LENGTHS) + 3
    answers = out[:, max(LENGTHS) :].tolist()

    turn = padded(make_prompts(4, 1, 6, seed=8), side)
    seen = padded(prompts, "left")["attention_mask"]
    mask = torch.cat((seen, torch.ones(3, 4, dtype=torch.long), turn["attention_mask"]), dim=1)
    new = turn["input_ids"]
    history = torch.cat((out, new), dim=1)
    # The last answered token has not been fed yet.
    input_ids = history if whole_history else history[:, cache.get_seq_length() :]
    out = model.generate(
        input_ids=input_ids, attention_mask=mask, max_new_tokens=5, do_sample=False, past_key_values=cache
    )
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        said = new[row][turn["attention_mask"][row].bool()].tolist()
        assert out[row, -5:].tolist() == greedy(model, prompt + answer + said, 5)


def test_a_finished_cache_counts_tokens_not_slots(make_compressed, make_prompts):
    model, prompts = make_compressed(), make_prompts(*LENGTHS)
    cache = PagedGenerationCache(model)
    model.generate(**padded(prompts, "left"), max_new_tokens=NEW, do_sample=False, past_key_values=cache)
    engine = Engine(model).generate(prompts, SamplingParams(max_new_tokens=NEW, temperature=0))
    assert cache.paged is not None
    for row, generation in enumerate(engine):
        assert torch.equal(cache.paged.slots(row), generation.stats.slots)
        assert int(cache.paged.tokens_seen[row]) == generation.stats.tokens_seen
    lengths = cache.paged.lengths
    assert cache.paged.allocator.num_in_use == int((-(-lengths // 16)).sum())


def test_assisted_decoding_is_refused_before_anything_runs(make_compressed, make_prompts):
    model, prompt = make_compressed(), torch.tensor(make_prompts(6))
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(prompt, max_new_tokens=4, do_sample=False, assistant_model=make_compressed(seed=1))
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(prompt, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)
    with pytest.raises(NotImplementedError, match="without an assistant model"):
        PagedGenerationCache(model).crop(3)


def test_other_cache_implementations_are_refused(make_compressed, make_prompts):
    with pytest.raises(ValueError, match="cache_implementation='static' cannot hold a compressed cache"):
        make_compressed().generate(torch.tensor(make_prompts(6)), max_new_tokens=4, cache_implementation="static")


def test_stock_layers_cannot_use_the_compressed_cache(make_compressed, make_stock, make_prompts):
    cache = PagedGenerationCache(make_compressed())
    with pytest.raises(TypeError, match=r"of a compressed model.s cache: give it"):
        make_stock()(torch.tensor(make_prompts(6)), past_key_values=cache)
