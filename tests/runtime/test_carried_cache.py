"""Sessions in files: they go on as those that were saved, and are refused where they do not belong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from evicting import write_scorer
from runtime.test_laws import TOLERANCE, layers_of, of
from runtime.test_prefix_cache import count_fed
from runtime.test_recurrent import recurrent
from runtime.test_windows import hybrid
from safetensors.torch import load_file, save_file

from dmc import Engine, SamplingParams, load_model, policies
from dmc.budget import Budget
from dmc.ranks import Ranks
from dmc.runtime import carried_cache
from dmc.runtime.carried_cache import file_hash, fingerprint
from dmc.training.export import export
from dmc.training.model_folder import ModelCard

METHODS = ["full cache", "merge", "merge, exact, delay 1", "drop, delay 4", "query for the previous, drop, delay 5"]
METHODS += ["fixed, window, delay 4", "H2O", "H2O, protected", "SnapKV", "StreamingLLM, rerotate", "CAKE", "D2O"]
METHODS += ["KVzip", "merge, SnapKV", "drop, delay 4, AdaKV", "AttentionMatching", "OmniKV", "Quest"]
"""One for each kind of state that is carried."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "full cache": [{"kv_cache_dtype": "int8"}, {"prefix_cache": True}, {"block_size": 32, "prefill_chunk_size": 7}],
    "merge": [{"kv_cache_dtype": "int8", "prefix_cache": True}],
    "drop, delay 4": [{"prefix_cache": True}],
    "H2O": [{"kv_cache_dtype": "int8"}],
}
LATER = ("full cache", "merge", "drop, delay 4", "H2O", "SnapKV", "fixed, window, delay 4", "drop, delay 4, AdaKV")
"""Without options they are slow: what they carry, another case carries too."""
CASES = [pytest.param(method, {}, marks=[pytest.mark.slow] * (method in LATER)) for method in METHODS]
CASES += [pytest.param(method, options) for method, several in OPTIONS.items() for options in several]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
TURNS = (9, 3, 40)


def assert_alike(one, other, tolerance=TOLERANCE):
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)
    assert torch.equal(one.stats.slots, other.stats.slots)
    assert one.stats.tokens_seen == other.stats.tokens_seen
    torch.testing.assert_close(one.stats.mean_slots, other.stats.mean_slots)


def check_carried(make_model, policy, options, texts, folder):
    """Save a session after a context and a turn, and compare what goes on from the files with it."""
    context, first, *turns = texts
    tolerance = 2e-2 if "kv_cache_dtype" in options else TOLERANCE  # beside others a number is rounded otherwise
    engine = Engine(make_model(), policy=policy, **options)
    with engine.session() as session:
        session.feed(context)
        session.generate(first, GREEDY)
        engine.save(session, folder)
        expected = [session.generate(turn, GREEDY) for turn in turns]
        tokens = session.tokens
    assert engine.blocks_in_use == 0
    engine = Engine(make_model(), policy=policy, **options)
    engine.generate([first], GREEDY)  # pages and rows are used, and other sequences are there
    with engine.session() as other, engine.load(folder) as loaded, engine.load(folder) as again:
        other.generate(context[::-1], GREEDY)
        fed, seen = count_fed(engine), len(context) + len(first) + 6 - 1
        with loaded.fork() as fork:
            sessions = [loaded, again, fork]
            for turn, theirs in zip(turns, expected, strict=True):
                requests = [engine.submit(turn, GREEDY, session) for session in sessions]
                engine.run(requests)
                for request in requests:
                    assert_alike(request.generation, theirs, tolerance)
            assert [session.tokens for session in sessions] == [tokens] * 3
        assert sum(fed) == 3 * (len(tokens) - 1 - seen)
        with engine.load(folder) as lost:
            while lost.sequence.row is not None:
                assert engine._scheduler._evict_another(other.sequence)
            assert_alike(lost.generate(turns[0], GREEDY), expected[0], tolerance)
            assert sum(fed) > len(tokens)
    assert engine.blocks_in_use == 0
    engine.clear_prefix_cache()
    assert engine.cache.allocator.num_in_use == 0 and not engine.cache.allocator.extra.any()


@pytest.mark.parametrize(("method", "options"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_a_loaded_session_goes_on_as_the_one_that_was_saved(
    method, options, make_stock, make_compressed, make_prompts, tmp_path
):
    (gates, policy), layers = of(method), layers_of(method)

    def make_model():
        return make_stock(num_layers=layers) if gates is None else make_compressed(gates=gates, num_layers=layers)

    check_carried(make_model, policy, options, make_prompts(80, 5, *TURNS), tmp_path / "cache")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3_text", {"kv_cache_dtype": "int8", "prefix_cache": True}),
        ("gpt_oss", {}),
        ("mistral", {}),
        ("qwen3_next", {}),
        ("qwen3_next", {"kv_cache_dtype": "int8", "prefix_cache": True}),
    ],
    ids=str,
)
def test_layers_with_a_window_and_without_attention_are_carried(family, options, make_prompts, tmp_path):
    build = recurrent if family == "qwen3_next" else hybrid
    check_carried(lambda: build(family), None, options, make_prompts(80, 5, *TURNS), tmp_path / "cache")


def saved(engine, context, folder, **options):
    with engine.session() as session:
        session.feed(context)
        engine.save(session, folder, **options)
    return folder


OTHERS = {
    "policy.method was 'dmc.policies.h2o.H2O' there, it is None here": {"policy": None},
    "policy.budget.ratio was 4 there, it is 3.0 here": {"policy": policies.H2O(budget=Budget(ratio=3.0))},
    "policy.recent was None there, it is 5 here": {"policy": policies.H2O(budget=Budget(ratio=4), recent=5)},
    "pages.block_size was 16 there, it is 32 here": {"block_size": 32},
    "pages.dtype was 'torch.float32' there, it is 'torch.int8' here": {"kv_cache_dtype": "int8"},
}


def test_what_belongs_to_another_engine_is_refused_in_one_line(make_stock, make_compressed, make_prompts, tmp_path):
    model, (context,), h2o = make_stock(), make_prompts(40), policies.H2O(budget=Budget(ratio=4))
    folder = saved(Engine(model, policy=h2o), context, tmp_path / "cache")
    engines = [(message, Engine(model, **{"policy": h2o, **options})) for message, options in OTHERS.items()]
    changed, turned = make_stock(), make_stock(rope_parameters={"rope_type": "default", "rope_theta": 200.0})
    changed.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1e-6
    swapped = make_stock()
    swapped.lm_head.weight.data[[3, 4]] = swapped.lm_head.weight.data[[4, 3]]
    engines += [("weights was ", Engine(other, policy=h2o)) for other in (changed, swapped, make_stock(seed=3))]
    engines += [("config.rope_parameters.rope_theta was 100.0", Engine(turned, policy=h2o))]
    engines += [("pages.layers was [2] there, it is [3] here", Engine(make_stock(num_layers=3), policy=h2o))]
    engines += [("model_type was 'llama' there, it is 'qwen3' here", Engine(make_stock("qwen3"), policy=h2o))]
    engines += [("model_type was 'llama' there, it is 'dmc_llama' here", Engine(make_compressed()))]
    for message, engine in engines:
        with pytest.raises(ValueError) as raised:
            engine.load(folder)
        assert str(raised.value).startswith(f"{folder} is the cache of another engine: ")
        assert message in str(raised.value) and "\n" not in str(raised.value)
        assert engine.blocks_in_use == 0
    gates = saved(Engine(make_compressed(gates={"delay": 4})), context, tmp_path / "gates")
    with pytest.raises(ValueError, match=r"gates\.delay was 4 there, it is 5 here"):
        Engine(make_compressed(gates={"delay": 5})).load(gates)


def test_what_is_damaged_is_refused_in_one_line(make_stock, make_prompts, tmp_path):
    engine, (context,) = Engine(make_stock()), make_prompts(40)
    folder = saved(engine, context, tmp_path / "cache")
    tensors, description = folder / "cache.safetensors", folder / "cache.json"
    whole, said = tensors.read_bytes(), description.read_text()
    values = json.loads(said)

    def refusal(error=ValueError):
        with pytest.raises(error) as raised:
            engine.load(folder)
        tensors.write_bytes(whole)
        description.write_text(said)
        assert "\n" not in str(raised.value) and engine.blocks_in_use == 0
        return str(raised.value)

    for damaged in (whole[:-1], whole[:100], b"", whole[:-9] + b"x" + whole[-8:], whole + b" "):
        tensors.write_bytes(damaged)
        assert refusal() == f"{tensors} is damaged or cut off: copy it again, or save the session again"
    for changes in ({"tokens": torch.tensor([1, 2])}, {"row.lengths": torch.full((2, 2), 99, dtype=torch.int32)}):
        save_file({**load_file(tensors), **changes}, tensors)
        description.write_text(json.dumps({**values, "sha256": file_hash(tensors)}))
        assert "is damaged or cut off" in refusal()
    description.write_text(said[:-30])
    assert "is damaged, or is no JSON file" in refusal()
    description.write_text(json.dumps({**values, "format": 3}))
    assert "has format 3, expected 1: save the session again" in refusal()
    description.write_text(json.dumps({"format": 1}))
    assert "is missing" in refusal()
    description.unlink()
    assert "holds no saved cache: there is no cache.json" in refusal(FileNotFoundError)
    with engine.load(folder) as session:
        assert session.tokens == context


def test_only_what_was_saved_is_replaced(make_stock, make_prompts, tmp_path):
    engine, (context, other) = Engine(make_stock()), make_prompts(40, 50)
    folder = saved(engine, context, tmp_path / "cache")
    with pytest.raises(FileExistsError, match="is not empty"):
        saved(engine, other, folder)
    saved(engine, other, folder, overwrite=True)
    with engine.load(folder) as session:
        assert session.tokens == other
    (folder / "notes").write_text("of a person")
    with pytest.raises(FileExistsError, match="holds notes"):
        saved(engine, context, folder, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}


def test_no_model_is_replaced_by_a_cache_and_no_cache_by_a_model(make_stock, make_prompts, tmp_path):
    model, (context,), card = make_stock(), make_prompts(40), ModelCard("tiny", base="none", data="none")
    export(model, tmp_path / "model", tokenizer=None, card=card)
    with pytest.raises(FileExistsError, match=r"model holds no cache.json, so it is something else"):
        saved(Engine(model), context, tmp_path / "model", overwrite=True)
    folder = saved(Engine(model), context, tmp_path / "cache")
    with pytest.raises(FileExistsError, match=r"cache holds no config.json, so it is something else"):
        export(model, folder, tokenizer=None, card=card, overwrite=True)
    load_model(tmp_path / "model")
    Engine(model).load(folder)


def test_ranks_do_not_write_into_what_is_something_else(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r"model holds config\.json, which is no rank's cache"):
            carried_cache.check_can_save(tmp_path / "model", overwrite, Ranks(1, 2), None)


def test_each_rank_looks_at_its_own_folder(make_stock, make_prompts, tmp_path):
    engine, (context,) = Engine(make_stock()), make_prompts(40)
    for rank in range(2):
        saved(engine, context, tmp_path / "cache" / f"rank-{rank}-of-2")
        carried_cache.check_can_save(tmp_path / "cache", True, Ranks(rank, 2), None)
        with pytest.raises(FileExistsError, match=f"rank-{rank}-of-2 is not empty"):
            carried_cache.check_can_save(tmp_path / "cache", False, Ranks(rank, 2), None)
    carried_cache.check_can_save(tmp_path / "cache", False, Ranks(2, 3), None)


def test_another_scorer_in_the_same_file_is_another_policy(make_stock, make_prompts, tmp_path):
    model, (context,), scorer = make_stock(), make_prompts(60), tmp_path / "scorer"

    def engine():
        return Engine(model, policy=policies.KVpop(budget=Budget(ratio=2), scorer=write_scorer(scorer)))

    folder = saved(engine(), context, tmp_path / "cache")
    engine().load(folder).close()
    write_scorer(scorer, seed=1)
    with pytest.raises(ValueError, match=r"policy.files was \['\w+'\] there"):
        Engine(model, policy=policies.KVpop(budget=Budget(ratio=2), scorer=str(scorer))).load(folder)


def test_a_session_that_holds_nothing_whole_is_not_saved(make_stock, make_prompts, tmp_path):
    (context, more), folder = make_prompts(40, 9), tmp_path / "cache"
    engine = Engine(make_stock(), policy=policies.H2O(budget=Budget(ratio=4)), prefill_chunk_size=8)
    session = engine.session()
    with pytest.raises(ValueError, match="the session holds nothing"):
        engine.save(session, folder)
    request = engine.submit(context, GREEDY, session)
    engine.step()
    with pytest.raises(ValueError, match="last turn has not finished"):
        engine.save(session, folder)
    engine.abort(request)
    with pytest.raises(ValueError, match="aborted halfway"):
        engine.save(session, folder)
    session.generate(more, GREEDY)
    with pytest.raises(ValueError, match="another engine's"):
        Engine(make_stock()).save(session, folder)
    session.close()
    with pytest.raises(ValueError, match="closed"):
        engine.save(session, folder)
    reading = Engine(make_stock(num_layers=6), policy=of("OmniKV, offload")[1])
    with pytest.raises(ValueError, match="policy=OmniKV: it keeps a part of its state outside the pages"):
        saved(reading, context, folder)
    assert not folder.exists()


def test_a_prompt_aborted_halfway_is_carried_where_nothing_depends_on_it(make_compressed, make_prompts, tmp_path):
    model, (context, more) = make_compressed(), make_prompts(40, 9)
    engine = Engine(model, prefill_chunk_size=8)
    (expected,) = engine.generate([context + more], GREEDY)
    with engine.session() as session:
        request = engine.submit(context, GREEDY, session)
        engine.step()
        engine.abort(request)
        engine.save(session, tmp_path / "cache")
    with engine.load(tmp_path / "cache") as loaded:
        assert loaded.generate(more, GREEDY).token_ids == expected.token_ids


def test_other_sequences_leave_no_trace_in_the_files(make_stock, make_prompts, tmp_path):
    model, (context, secret) = make_stock(), make_prompts(37, 90)
    saved(Engine(model), context, tmp_path / "alone")
    engine = Engine(model)
    engine.generate([secret], GREEDY)
    saved(engine, context, tmp_path / "after")
    one, other = (load_file(tmp_path / name / "cache.safetensors") for name in ("alone", "after"))
    assert one.keys() == other.keys()
    for name, states in one.items():
        torch.testing.assert_close(states, other[name], atol=1e-5, rtol=0)


def test_where_there_is_no_room_a_loaded_session_is_computed_again(make_stock, make_prompts, tmp_path):
    model, (context, question, long) = make_stock(), make_prompts(90, 5, 150)
    folder = saved(Engine(model), context, tmp_path / "cache")
    (expected,) = Engine(model).generate([context + question], GREEDY)
    block = Engine(model).cache.block_bytes
    engine = Engine(model, memory=4 * 11 * block, max_batch_size=2)
    running = engine.submit(long, SamplingParams(max_new_tokens=9, temperature=0))
    engine.step()
    with engine.load(folder) as session:
        assert session.sequence.row is None and session.tokens == context
        engine.run([running])
        assert session.generate(question, GREEDY).token_ids == expected.token_ids
    with engine.load(folder) as session, engine.load(folder) as other, engine.load(folder) as third:
        assert [one.sequence.row is None for one in (session, other, third)] == [True, True, False]
        assert third.generate(question, GREEDY).token_ids == expected.token_ids
    assert engine.blocks_in_use == 0


def test_a_model_from_a_folder_is_the_one_that_was_written(folders, make_compressed, make_prompts, tmp_path):
    built, read = make_compressed(vocab_size=300), load_model(folders.compressed)
    assert fingerprint(built) == fingerprint(read) == fingerprint(load_model(folders.stock))
    folder = saved(Engine(built), make_prompts(40)[0], tmp_path / "cache")
    with Engine(read, memory=2**20, max_batch_size=3).load(folder) as session:
        assert len(session.tokens) == 40


def test_weights_that_are_offloaded_tell_models_apart(make_stock):
    prints = []
    for seed in (0, 0, 1):
        model = make_stock(seed=seed)
        cpu_offload(model, torch.device("cpu"))
        assert all(weight.is_meta for weight in model.parameters())
        prints.append(fingerprint(model))
    assert prints[0] == prints[1] == fingerprint(make_stock()) != prints[2]


@pytest.mark.parametrize("method", ["full cache", "merge", "drop, delay 4", "H2O", "merge, SnapKV"])
def test_many_go_on_from_a_frozen_session_that_takes_no_row(
    method, make_stock, make_compressed, make_prompts, tmp_path
):
    gates, policy = of(method)
    model = make_stock() if gates is None else make_compressed(gates=gates)
    context, *questions = make_prompts(90, 5, 9, 30, 2)
    with Engine(model, policy=policy).session() as session:
        session.feed(context)
        forks = [session.fork() for _ in questions]
        expected = [fork.generate(question, GREEDY) for fork, question in zip(forks, questions, strict=True)]
    engine = Engine(model, policy=policy, max_batch_size=2, prefix_cache=True)
    session = engine.session()
    session.feed(context)
    frozen = session.freeze()
    blocks, fed = engine.blocks_in_use, count_fed(engine)
    assert session.is_closed and frozen.tokens == context and engine.cache.num_free_rows == 2

    def ask():
        sessions = [frozen.session() for _ in questions]
        pairs = zip(questions, sessions, strict=True)
        requests = [engine.submit(question, GREEDY, session) for question, session in pairs]
        engine.run(requests)
        for request, theirs, session in zip(requests, expected, sessions, strict=True):
            assert_alike(request.generation, theirs)
            session.close()

    ask()
    assert sum(fed) == sum(map(len, questions)) + len(questions) * 5 and engine.blocks_in_use == blocks
    engine._scheduler.reset()  # as a pass that fails does
    assert frozen.is_lost
    ask()
    frozen.close()
    assert engine.blocks_in_use == 0
    engine.clear_prefix_cache()
    assert engine.cache.allocator.num_in_use == 0


@pytest.mark.parametrize("method", ["full cache", "H2O"])
def test_what_goes_on_from_a_frozen_session_waits_for_room_and_is_preempted(method, make_stock, make_prompts, tmp_path):
    (_, policy), model = of(method), make_stock()
    context, *questions = make_prompts(120, *[30] * 4)
    folder = saved(Engine(model, policy=policy), context, tmp_path / "cache")
    long = SamplingParams(max_new_tokens=40, temperature=0)
    free = Engine(model, policy=policy).load(folder).freeze()
    expected = [free.session().generate(question, long).token_ids for question in questions]
    block = Engine(model, policy=policy).cache.block_bytes
    held = 4 * (8 if policy is None else 2)
    engine = Engine(model, policy=policy, memory=(held + 4 * (9 if policy is None else 7)) * block, max_batch_size=4)
    frozen = engine.load(folder).freeze()
    assert engine.blocks_in_use == held
    fed, sessions = count_fed(engine), [frozen.session() for _ in questions]
    requests = [engine.submit(question, long, one) for question, one in zip(questions, sessions, strict=True)]
    engine.run(requests)
    assert [request.generation.token_ids for request in requests] == expected
    assert sum(fed) < 4 * len(context)
    for session in sessions:
        session.close()
    assert engine.blocks_in_use == held
    with pytest.raises(ValueError, match="a sequence of 400 tokens may need"):
        engine.submit(questions[0], SamplingParams(max_new_tokens=251), frozen.session())
    with pytest.raises(ValueError, match="the session holds nothing"):
        engine.session().freeze()
    frozen.close()
    assert engine.blocks_in_use == 0


def test_a_session_that_was_fed_everything_predicts_nothing_further(make_stock, make_prompts):
    engine, (context, more) = Engine(make_stock()), make_prompts(40, 9)
    with engine.session() as session:
        session.feed(context)
        with pytest.raises(ValueError, match="the session has been fed all of its tokens: give after= the next ones"):
            engine.score_with_stats([session], [more])
        (found,) = engine.score_with_stats([session], [more[1:]], after=[more[:1]])
    (expected,) = engine.score([context + more[:1]], [more[1:]])
    torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)
