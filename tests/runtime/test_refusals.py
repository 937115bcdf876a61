"""What no entry of the runtime can take: one clear error, before anything runs."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from conftest import build_stock

from dmc import Engine, SamplingParams

GREEDY = SamplingParams(max_new_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def engine():
    return Engine(build_stock(num_layers=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: SamplingParams(max_new_tokens=0), "max_new_tokens=0: expected greater than or equal to 1"),
        (lambda _: SamplingParams(temperature=math.nan), "temperature=nan: expected a finite number"),
        (lambda _: SamplingParams(top_p=0), "top_p=0: expected greater than 0"),
        (lambda _: SamplingParams(top_k=2.5), "top_k=2.5: expected a valid integer"),
        (lambda _: SamplingParams(seed=2**64), "seed=18446744073709551616: expected less than"),
        (lambda _: SamplingParams(stop="end"), "stop='end': expected a valid tuple"),
        (lambda _: SamplingParams(stop=("",)), r"stop\[0\]='': expected at least 1 character"),
        (lambda _: SamplingParams(stop_token_ids=(-1,)), r"stop_token_ids\[0\]=-1: expected greater"),
        (lambda _: SamplingParams(logit_bias={1: 101}), "logit_bias.*=101: expected less than or equal to 100"),
        (lambda _: SamplingParams(logit_bias={-1: 1}), "logit_bias=-1: expected greater than or equal to 0"),
        (lambda _: SamplingParams(logits_processor="none"), "logits_processor='none': expected callable"),
        (lambda _: SamplingParams(top_n=3), "unknown setting top_n"),
        (lambda it: Engine(it.model, block_size=48), "block_size=48: expected 16, 32, 64, 128 or 256"),
        (lambda it: Engine(it.model, memory=1.5), "memory=1.5: expected"),
        (lambda it: Engine(it.model, memory="lots"), r"memory='lots': expected .*auto"),
        (lambda it: Engine(it.model, kernels="magic"), "kernels='magic'"),
        (lambda it: Engine(it.model, kv_cache_dtype="fp8"), "kv_cache_dtype='fp8': expected 'auto' or 'int8'"),
        (lambda it: Engine(it.model, prefix_cache=1), "prefix_cache=1: expected a valid boolean"),
        (lambda it: Engine(it.model, policy="h2o"), "policy='h2o': expected an object such as"),
        (lambda it: Engine("folder"), "model='folder': expected a causal LM"),
        (lambda it: it.generate("text", GREEDY), "'text': expected a list of texts"),
        (lambda it: it.generate([[1]], [GREEDY, GREEDY]), "2 sampling parameters for 1 prompts"),
        (lambda it: it.generate([[1], []], GREEDY), "a prompt or continuation is empty"),
        (lambda it: it.generate([[1], "text"], GREEDY), "the engine has no tokenizer"),
        (lambda it: it.generate([[1], [2.5]], GREEDY), "expected a text, or token ids"),
        (lambda it: it.generate([[1], None], GREEDY), "expected a text, or token ids"),
        (lambda it: it.submit([83], GREEDY), "tokens from 83 to 83 were given: the model knows 0 to 82"),
        (lambda it: it.stream([-1], GREEDY), "tokens from -1 to -1 were given"),
        (lambda it: it.session().feed([[1, 2]]), "expected a text, or token ids"),
        (lambda it: it.session().generate([], GREEDY), "a prompt or continuation is empty"),
        (lambda it: it.submit([1], SamplingParams(stop_token_ids=(83,))), "stop_token_ids=.*the model knows 0 to 82"),
        (lambda it: it.submit([1], SamplingParams(logit_bias={83: 1})), "logit_bias=.*the model knows 0 to 82"),
        (lambda it: it.submit([1], SamplingParams(stop=("a",))), "the engine has no tokenizer"),
        (lambda it: it.submit([1], SamplingParams(n=2), it.session()), "n=2: a session goes on from one"),
        (lambda it: it.score([[1]], "a"), "'a': expected a list of texts"),
        (lambda it: it.score([[1], [2]], [[1], []]), "a prompt or continuation is empty"),
        (lambda it: it.score([[1]], [[1], [2]]), "1 prompts and 2 continuations"),
    ],
)
def test_bad_values_are_refused_in_one_line(call, message, engine):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call(engine)
    assert "\n" not in str(caught.value)
    assert engine.step() == [] and engine.blocks_in_use == 0


def test_prompts_of_other_libraries_are_taken(engine):
    for prompt in (np.array([1, 2]), torch.tensor([1, 2]), (1, 2), [np.int64(1), 2]):
        assert len(engine.generate([prompt], GREEDY)[0].token_ids) == 6


def test_another_engines_requests_and_sessions_are_refused(engine, make_prompts):
    other, prompts = Engine(engine.model), make_prompts(20, 30)
    request, session = engine.submit(prompts[0], GREEDY), engine.session()
    theirs = other.submit(prompts[1], GREEDY)
    for call in (
        lambda: other.abort(request),
        lambda: other.run([theirs, request]),
        lambda: other.submit(prompts[0], GREEDY, session),
        lambda: other.feed(prompts[0], session),
    ):
        with pytest.raises(ValueError, match="another engine"):
            call()
    engine.run([request])
    other.run([theirs])
    other.abort(request)  # has finished: nothing is left to do
    assert engine.blocks_in_use == other.blocks_in_use == 0


def test_text_beyond_the_models_positions_is_warned_of_once(make_stock, make_prompts):
    engine = Engine(make_stock(num_layers=1, max_position_embeddings=32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(make_prompts(27), GREEDY)  # 27 + 6 - 1 tokens are fed
    with pytest.warns(UserWarning, match=r"33 tokens.*32 positions.*max_position_embeddings") as warned:
        engine.generate(make_prompts(28, 29, 30), GREEDY)
    assert len(warned) == 1


def test_an_engine_refuses_gates_that_were_changed_behind_its_back(make_compressed):
    model = make_compressed()
    engine = Engine(model)
    before = engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
    settings = model.compression
    model.compression = dataclasses.replace(settings, decision_offset=-3.0)
    for call in (lambda: engine.generate([[1, 2, 3]], GREEDY), lambda: engine.score([[1, 2, 3]], [[4]])):
        with pytest.raises(ValueError, match=r"model\.compression has changed since this engine was made"):
            call()
    model.compression = settings
    assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == before
