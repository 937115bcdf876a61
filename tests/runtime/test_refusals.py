"""Values that no entry of the runtime can take: one clear error each, before anything runs."""

import math
import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget

NAN, INF = math.nan, math.inf
GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
WHOLE = [2.5, 2.0, True, "3", NAN, INF, -1, 0, [3], torch.tensor([3, 4])]
"""None of these is a whole number >= 1."""
BAD_SETTINGS = {
    "max_new_tokens": [*WHOLE, None],
    "temperature": [-0.1, NAN, INF, "hot", None, True, [1.0], -1e-300, 1j],
    "top_k": WHOLE,
    "top_p": [0, 0.0, -1e-46, 1.1, NAN, INF, "0.9", None, True, [0.5]],
    "seed": [-1, 2**64, 1.0, 0.5, "7", True, NAN, [7]],
    "stop_token_ids": [5, "5", (1.0,), ("5",), (-1,), (True,), None, (None,), "", {3: 4}],
    "ignore_eos": [1, 0, "no", None],
    "n": [*WHOLE, None],
    "min_p": [-0.1, 1.1, NAN, INF, "0.1", None, True],
    "repetition_penalty": [0, 0.0, -1, NAN, INF, "2", None, True],
    "presence_penalty": [-2.1, 2.1, NAN, INF, "1", None, True],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, "1", None, True],
    "logit_bias": [{-1: 1}, {"x": 1}, {1: 101}, {1: NAN}, {1: "x"}, {True: 1}, {1: True}, {1.0: 1}, [1], 3, None],
    "top_logprobs": [-1, 2.0, True, "3", None],
    "logits_processor": ["none", 3, [], {}],
    "stop": ["end", "", ("a", ""), (1,), [None], 5, None, (b"a",), {"a": 1}],
}
BAD_OPTIONS = {
    "block_size": [*WHOLE, 16.0, 48, 17, None, "16"],
    "memory": [*WHOLE, "lots", "1GB", -0.5, 0.0, 1.5, ()],
    "kernels": ["magic", "", None, 3, ["cpu"]],
    "max_batch_size": [*WHOLE, None],
    "prefill_chunk_size": WHOLE,
    "token_budget": WHOLE,
    "kv_cache_dtype": ["fp8", "bfloat16", "", None, 8, torch.int8],
    "prefix_cache": [1, 0, "yes", None],
    "policy": ["h2o", policies.H2O, Budget(ratio=2), {}, 0, False],
    "tokenizer": ["gpt2", 3, {}],
    "model": ["folder", None, torch.nn.Linear, {}, torch.nn.Linear(2, 2)],
}
OUT_OF_VOCABULARY = [[83], [-1], [1, 2, 10**9], [2**63]]
BAD_PROMPTS = [[], "", "text", None, 7, 2.5, [1.0], [2.5], [True], ["1"], [None], [[1, 2]], b"12", {1: 2}]
BAD_PROMPTS += [torch.tensor([[1, 2]]), torch.tensor([1.0]), torch.tensor(3), np.array([1.5]), *OUT_OF_VOCABULARY]


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r}"[:60]) for name in table for value in table[name]]


def one_line(error, *parts):
    text = str(error)
    assert "\n" not in text.strip()
    assert re.search("expected|give|pass|knows|not supported|not support|with a multiple", text), text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(("name", "value"), cases(BAD_SETTINGS))
def test_settings_of_a_request_are_refused(name, value):
    if name == "top_k" and value is None:
        return
    with pytest.raises((ValueError, TypeError)) as caught:
        SamplingParams(**{name: value})
    one_line(caught.value, f"{name}=", "expected")


@pytest.mark.parametrize(("name", "value"), cases(BAD_OPTIONS))
def test_options_of_an_engine_are_refused(name, value, stock):
    with pytest.raises((ValueError, TypeError)) as caught:
        Engine(**{"model": stock, name: value})
    one_line(caught.value, f"{name}=", "expected")


@pytest.fixture(scope="module")
def stock():
    from conftest import build_stock

    return build_stock(num_layers=1)


@pytest.fixture(scope="module")
def engine(stock):
    return Engine(stock)


def entries(engine):
    session = engine.session()
    return {
        "generate": lambda prompt: engine.generate([[1], prompt], GREEDY),
        "submit": lambda prompt: engine.submit(prompt, GREEDY),
        "stream": lambda prompt: engine.stream(prompt, GREEDY),
        "score": lambda prompt: engine.score([[1], prompt], [[1], [2]]),
        "score, continuation": lambda prompt: engine.score([[1], [2]], [[1], prompt]),
        "session.generate": lambda prompt: session.generate(prompt, GREEDY),
        "session.stream": lambda prompt: session.stream(prompt, GREEDY),
        "session.feed": lambda prompt: session.feed(prompt),
    }


ENTRIES = ["generate", "submit", "stream", "score", "score, continuation"]
ENTRIES += ["session.generate", "session.stream", "session.feed"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_prompts_that_are_none_are_refused(entry, engine):
    for prompt in BAD_PROMPTS:
        with pytest.raises((ValueError, TypeError)) as caught:
            entries(engine)[entry](prompt)
        one_line(caught.value)
        assert engine.step() == []
        assert engine.blocks_in_use == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate("text", GREEDY),
        lambda engine: engine.generate([1, 2], GREEDY),
        lambda engine: engine.generate(5, GREEDY),
        lambda engine: engine.generate([[1]], {"max_new_tokens": 3}),
        lambda engine: engine.generate([[1]], []),
        lambda engine: engine.generate([[1]], 3),
        lambda engine: engine.generate([[1]], [GREEDY, GREEDY]),
        lambda engine: engine.submit([1], {"max_new_tokens": 3}),
        lambda engine: engine.submit([1], GREEDY, "session"),
        lambda engine: engine.stream([1], 3),
        lambda engine: engine.stream([1], GREEDY, 3),
        lambda engine: engine.submit([1], SamplingParams(stop_token_ids=(83,))),
        lambda engine: engine.submit([1], SamplingParams(logit_bias={83: 1})),
        lambda engine: engine.submit([1], SamplingParams(stop=("a",))),
        lambda engine: engine.submit([1], SamplingParams(n=2), engine.session()),
        lambda engine: engine.score("text", ["a"]),
        lambda engine: engine.score([[1]], "a"),
        lambda engine: engine.score([[1]], 3),
        lambda engine: engine.score([[1]], [[1], [2]]),
        lambda engine: engine.abort(3),
        lambda engine: engine.run([3]),
        lambda engine: engine.feed([1], 3),
    ],
)
def test_arguments_of_another_kind_are_refused(call, engine):
    with pytest.raises((ValueError, TypeError)) as caught:
        call(engine)
    one_line(caught.value)
    assert engine.step() == []
    assert engine.blocks_in_use == 0


def test_numbers_of_numpy_and_lists_are_taken(stock):
    params = SamplingParams(
        max_new_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.int32(4),
        top_p=np.float64(0.5),
        seed=np.uint8(7),
        stop_token_ids=[np.int64(3)],
        stop=["a", "a"],
    )
    assert params == SamplingParams(3, 0.5, 4, 0.5, 7, (3,), False, ("a", "a"))
    assert [type(each) for each in (params.max_new_tokens, params.top_k, params.seed)] == [int] * 3
    assert hash(params) == hash(SamplingParams(3, 0.5, 4, 0.5, 7, (3,), False, ("a", "a")))
    SamplingParams(temperature=1, top_p=1, seed=2**64 - 1)
    SamplingParams(temperature=Fraction(1, 2))
    engine = Engine(stock, max_batch_size=np.int64(2), token_budget=np.int64(5), prefill_chunk_size=np.int16(3))
    for prompt in (np.array([1, 2]), torch.tensor([1, 2]), (1, 2), [np.int64(1), torch.tensor(2)]):
        (generation,) = engine.generate([prompt], [GREEDY])
        assert len(generation.token_ids) == 6


def test_another_engines_requests_and_sessions_are_refused(stock, make_prompts):
    mine, other = Engine(stock), Engine(stock)
    prompts = make_prompts(20, 30)
    (expected,) = mine.generate(prompts[:1], GREEDY)
    request, session = mine.submit(prompts[0], GREEDY), mine.session()
    mine.step()
    theirs = other.submit(prompts[1], GREEDY)
    other.step()
    blocks = other.blocks_in_use
    for call in (
        lambda: other.abort(request),
        lambda: other.run([theirs, request]),
        lambda: other.submit(prompts[0], GREEDY, session),
        lambda: other.stream(prompts[0], GREEDY, session),
        lambda: other.feed(prompts[0], session),
    ):
        with pytest.raises(ValueError, match="another engine"):
            call()
        assert other.blocks_in_use == blocks
        assert request.generation is theirs.generation is None
    mine.run([request])
    other.run([theirs])
    assert request.generation is not None
    assert request.generation.token_ids == expected.token_ids
    other.abort(request)  # has finished: nothing is left to do
    session.feed(prompts[0])
    session.close()
    assert mine.blocks_in_use == other.blocks_in_use == 0


def test_text_beyond_the_models_positions_is_told_once(make_stock, make_prompts):
    model = make_stock(num_layers=1, max_position_embeddings=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(model)
        engine.generate(make_prompts(27), GREEDY)  # 27 + 6 - 1 tokens are fed
        engine.score(make_prompts(20), make_prompts(13))
    with pytest.warns(UserWarning, match=r"33 tokens.*32 positions.*max_position_embeddings") as told:
        engine.generate(make_prompts(28, 29, 30), GREEDY)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.score(make_prompts(20), make_prompts(14))
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stretched = make_stock(num_layers=1, max_position_embeddings=32, rope_parameters=yarn)
        Engine(stretched).generate(make_prompts(40), GREEDY)
    with pytest.warns(UserWarning, match="40 tokens"):
        Engine(model).session().feed(make_prompts(40)[0])
