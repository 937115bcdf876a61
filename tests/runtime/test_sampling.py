import dataclasses
import math

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from dmc import SamplingParams
from dmc.runtime.request import Request, Sequence
from dmc.runtime.sampling import CANDIDATES, History, Sampling, TokenCounts, distributions

LOG_PROBS = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()


def next_uniform(params, generator):
    return 0.0 if params.temperature == 0 else torch.rand(1, dtype=torch.float64, generator=generator).item()


def choose_or_fail(logits, params, generators, histories=None):
    uniforms = [next_uniform(sampling, generator) for sampling, generator in zip(params, generators, strict=True)]
    found, errors = distributions(logits, params, histories)
    return found.choose(Sampling.of(params, uniforms, logits.shape[-1])), errors


def choose(*arguments):
    choice, errors = choose_or_fail(*arguments)
    assert errors == {}
    return choice


def frequencies(count=5_000, **settings):
    params = SamplingParams(**settings)
    generator = torch.Generator().manual_seed(0)
    drawn, *_ = choose(LOG_PROBS.expand(count, 5), [params] * count, [generator] * count)
    return (drawn.bincount(minlength=5) / count).tolist()


def test_zero_temperature_is_greedy():
    tokens, log_probs, *_ = choose(3 + LOG_PROBS[None], [SamplingParams(temperature=0)], [None])
    assert tokens.tolist() == [1]
    assert log_probs.tolist() == pytest.approx([LOG_PROBS[1].item()])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.5}, [0.035, 0.561, 0.009, 0.316, 0.079]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-46}, [0, 1, 0, 0, 0]),
        ({"top_p": 5e-324}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-46, "top_k": 3}, [0, 1, 0, 0, 0]),
        ({"top_p": 1 - 1e-16}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 1e-45}, [0, 1, 0, 0, 0]),
        ({"temperature": 5e-324, "top_p": 5e-324}, [0, 1, 0, 0, 0]),
        ({"temperature": 1e300}, [0.2] * 5),
        ({"temperature": 1e300, "top_k": 2}, [0, 0.5, 0, 0.5, 0]),
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.4}, [0, 0.4 / 0.7, 0, 0.3 / 0.7, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.1, "temperature": 0.5}, [0, 0.16 / 0.2725, 0, 0.09 / 0.2725, 0.0225 / 0.2725]),
    ],
)
def test_tokens_come_with_the_probabilities_asked_for(settings, expected):
    assert frequencies(**settings) == pytest.approx(expected, abs=0.025)


def choose_naively(logits, params, uniform):
    """Walk along the cumulative distribution of one row, in double precision."""
    if params.temperature == 0:
        return logits.index(max(logits))
    weights = [math.exp((logit - max(logits)) / params.temperature) for logit in logits]
    if params.top_k is not None:
        lowest = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [weight if weight >= lowest else 0.0 for weight in weights]
    kept, lowest = 0.0, 0.0
    for weight in sorted(weights, reverse=True):
        if kept < params.top_p * sum(weights):
            kept, lowest = kept + weight, weight
    weights = [weight if weight >= lowest else 0.0 for weight in weights]
    weights = [weight if weight >= params.min_p * max(weights) else 0.0 for weight in weights]
    reached = 0.0
    for token, weight in enumerate(weights):
        reached += weight
        if reached > uniform * sum(weights):
            return token
    raise AssertionError("unreachable")


SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=2.0, top_p=0.8, min_p=0.05),
    SamplingParams(),
    SamplingParams(temperature=1e-40),
    SamplingParams(temperature=3.0, top_k=7),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=0.3, top_k=20, top_p=0.9),
    SamplingParams(temperature=0),
    SamplingParams(top_k=20, top_p=0.2),
]


def test_every_row_of_a_mixed_batch_is_what_it_is_alone():
    logits = 3 * torch.randn(15, len(SETTINGS), 50, generator=torch.Generator().manual_seed(0))
    for trial, rows in enumerate(logits):
        seeds = [100 * trial + row for row in range(len(SETTINGS))]
        tokens, log_probs, *_ = choose(rows, SETTINGS, [torch.Generator().manual_seed(seed) for seed in seeds])
        for row, params in enumerate(SETTINGS):
            generator = torch.Generator().manual_seed(seeds[row])
            alone, *_ = choose(rows[row : row + 1], [params], [generator])
            assert tokens[row] == alone
            uniform = torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(seeds[row])).item()
            assert int(tokens[row]) == choose_naively(rows[row].tolist(), params, uniform)
        expected = rows.log_softmax(-1)[torch.arange(len(SETTINGS)), tokens]
        torch.testing.assert_close(log_probs, expected)


def test_top_p_looks_at_few_tokens_and_leaves_flat_rows_open():
    size, generator = 3 * CANDIDATES, torch.Generator().manual_seed(0)
    peaked, flat = 3 * torch.randn(2, size, generator=generator), 0.1 * torch.randn(2, size, generator=generator)
    logits = torch.stack((peaked[0], flat[0], peaked[1], flat[1], flat[1]))
    params = [SamplingParams(top_p=0.8)] * 3 + [SamplingParams(top_p=0.8, temperature=0), SamplingParams(top_k=60)]
    uniforms = torch.rand(5, generator=generator).tolist()
    found, _ = distributions(logits, params)
    sampling = Sampling.of(params, uniforms, size)
    naive = [choose_naively(*row) for row in zip(logits.tolist(), params, uniforms, strict=True)]
    assert sampling.width == CANDIDATES
    assert found.choose(sampling).tokens.tolist() == [naive[0], -1, *naive[2:]]
    chosen = found.choose_among_all([1], sampling)
    assert chosen.tokens.tolist() == [naive[1]]
    assert chosen.logprobs.item() == pytest.approx(logits[1].log_softmax(-1)[naive[1]].item())


def test_few_widths_and_numbers_occur():
    wishes = ({}, {"min_p": 0.1}, {"top_k": 3}, {"top_k": 65}, {"top_p": 0.9}, {"top_k": 2000, "top_p": 0.5})
    combined = [Sampling.of([SamplingParams(**settings)], [0.5], 5000) for settings in wishes]
    assert [sampling.width for sampling in combined] == [0, 64, 64, CANDIDATES, CANDIDATES, 5000]
    asked = [Sampling.of([SamplingParams(top_logprobs=count)], [0.5], 5000).num_top for count in (0, 1, 20, 21)]
    assert asked == [0, 20, 20, 5000]


def test_an_impossible_token_is_never_drawn():
    logits = torch.tensor([0.0, -math.inf, 1.0]).expand(300, 3)
    for temperature in (1e-45, 1.0, 1e39, 1e300):
        params = [SamplingParams(temperature=temperature, top_p=0.99)] * 300
        tokens, *_ = choose(logits, params, [torch.Generator().manual_seed(0)] * 300)
        assert set(tokens.tolist()) == ({2} if temperature < 1 else {0, 2})


def test_a_request_draws_as_one_by_one_and_a_greedy_one_nothing():
    generators = [torch.Generator().manual_seed(1) for _ in range(3)]
    greedy, sampled = (
        Request(Sequence([], 0), [], SamplingParams(temperature=temperature, max_new_tokens=99), generator)
        for temperature, generator in zip((0.0, 1.0), generators, strict=False)
    )
    for _ in range(70):
        assert greedy.uniform() == 0
        assert sampled.uniform() == sampled.uniform() == next_uniform(sampled.params, generators[2])
        sampled.accept(1, 0.0, {})
    assert torch.equal(generators[0].get_state(), torch.Generator().manual_seed(1).get_state())


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too():
    logits = torch.tensor([2.0, 1.0, 2.0, 1.0, 1.0, 0.0]).expand(600, 6)
    tokens, *_ = choose(logits, [SamplingParams(top_k=3)] * 600, [torch.Generator().manual_seed(0)] * 600)
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_summed_in_float32(dtype):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens, log_probs, *_ = choose(logits, [SamplingParams(temperature=0)] * 3, [None] * 3)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, logits.float().log_softmax(-1).amax(-1))
    assert torch.equal(tokens, logits.argmax(-1))


HISTORIES = [([3, 7, 7, 11], [7, 2]), ([5], []), ([], [9, 9, 9, 1]), ([], [])]


def warped(scores, history, params):
    """Do what transformers' own sampling does with a row [vocab]."""
    processors = transformers.LogitsProcessorList()
    if params.repetition_penalty != 1 and history:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logits_processor is not None:
        processors.append(params.logits_processor)
    processors.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        processors.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(transformers.MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([history], dtype=torch.long), scores[None].clone())[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.4, "temperature": 0.6},
        {"min_p": 0.1, "temperature": 1.3},
        {"min_p": 0.02, "top_k": 8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"logits_processor": transformers.SuppressTokensLogitsProcessor(list(range(10)), device="cpu")},
        {"logits_processor": transformers.NoRepeatNGramLogitsProcessor(1), "repetition_penalty": 1.3, "top_k": 5},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_distributions_are_those_of_transformers(settings):
    params, uniforms = SamplingParams(**settings), 200
    for trial, history in enumerate(HISTORIES):
        (logits,) = 2 * torch.randn(1, 40, generator=torch.Generator().manual_seed(trial)) + 1
        expected = warped(logits, history[0] + history[1], params).softmax(-1)
        generator = torch.Generator().manual_seed(trial)
        rows = [
            logits.expand(uniforms, -1),
            [params] * uniforms,
            [generator] * uniforms,
            [History(history[0] + history[1], len(history[0]))] * uniforms,
        ]
        choice = choose(*rows)
        generator.manual_seed(trial)
        uniform = torch.stack([torch.rand(1, dtype=torch.float64, generator=generator) for _ in range(uniforms)])
        cumulative = expected.double().cumsum(0).expand(uniforms, -1)
        naive = torch.searchsorted(cumulative.contiguous(), uniform * cumulative[:, -1:], right=True)[:, 0]
        assert (choice.tokens == naive).float().mean() > 0.98  # but for roundings at the edges
        assert (expected[choice.tokens] > 0).all()
        torch.testing.assert_close(choice.logprobs, logits.log_softmax(-1)[choice.tokens])


def test_penalties_and_processors_act_on_their_own_rows():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, presence_penalty=1.25),
        SamplingParams(temperature=0, logits_processor=lambda tokens, scores: -scores, top_logprobs=3),
        SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=-0.25, logit_bias={9: 0.125, 11: -3}),
    ]
    many = (([1, 2], [3]), ([4], []), ([1, 2], [5, 5, 6]), ([7], [8]), ([5], [9, 9, 9, 11]))
    histories = [History(before + since, len(before)) for before, since in many]
    seen = []
    params[4] = dataclasses.replace(params[4], logits_processor=lambda tokens, scores: seen.append(scores) or scores)
    choice = choose(logits, params, [None] * 5, histories)
    naive = logits[4].clone()  # how often a token came, and once for all, of the continuation alone; then the bias
    naive[9] += -3 * 0.5 + 0.25 + 0.125
    naive[11] += -1 * 0.5 + 0.25 - 3
    torch.testing.assert_close(seen[0][0], naive)
    for row in range(5):
        before, since = many[row]
        history = History(before + since, len(before))
        alone = choose(logits[row : row + 1], params[row : row + 1], [None], [history])
        assert alone.tokens[0] == choice.tokens[row]
    expected = logits[2].clone()
    expected[[5, 6]] -= 1.25  # once, and not the prompt's
    assert choice.tokens[2] == expected.argmax()
    assert choice.tokens[3] == logits[3].argmin()
    best = logits.log_softmax(-1).topk(20)
    assert torch.equal(choice.top_tokens, best.indices) and torch.equal(choice.top_logprobs, best.values)


def test_counts_follow_histories_that_come_grow_and_go():
    generator, counts = torch.Generator().manual_seed(0), TokenCounts(40)
    histories = [History(before + since, len(before)) for before, since in HISTORIES]
    for trial in range(30):
        for found, is_generated in zip(counts.of(histories), (False, True), strict=True):
            parts = [history.tokens[history.begin * is_generated :] for history in histories]
            expected = [torch.tensor(part, dtype=torch.long).bincount(minlength=40) for part in parts]
            assert torch.equal(found, torch.stack(expected).int())
        for history in histories[trial % 2 :]:
            history.tokens += torch.randint(40, (trial % 3,), generator=generator).tolist()
        if trial % 5 == 4:
            counts.close(histories.pop(0))
            histories += [History([trial, trial, 3], 1)] * (1 + trial % 2)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += not function.is_view
        return function(*arguments, **(keywords or {}))


def test_penalties_launch_the_same_for_any_number_of_rows():
    found = []
    for rows in (1, 16):
        histories, counts = [History([1, 2, row]) for row in range(rows)], TokenCounts(40)
        params = [SamplingParams(repetition_penalty=1.2)] * rows
        distributions(torch.randn(rows, 40), params, histories, counts)
        for history in histories:
            history.tokens.append(3)
        with Operations() as operations:
            distributions(torch.randn(rows, 40), params, histories, counts)
        found.append(operations.count)
    assert found[0] == found[1]


def test_a_processor_that_fails_or_leaves_nothing_fails_its_row_alone():
    def fail(tokens, scores):
        raise KeyError("lost")

    processors = [fail, lambda tokens, scores: scores[0], lambda tokens, scores: scores - torch.inf, None]
    params = [SamplingParams(temperature=1, logits_processor=processor) for processor in processors]
    choice, errors = choose_or_fail(torch.zeros(4, 9), params, [None] * 4)
    assert [type(errors.get(row)) for row in range(4)] == [RuntimeError, RuntimeError, type(None), type(None)]
    assert isinstance(errors[0].__cause__, KeyError)
    assert "gave (9,): expected (1, 9)" in str(errors[1])
    assert choice.logprobs.isfinite().tolist() == [True, True, False, True]
