"""lm-eval through the engine against lm-eval's own way of running Hugging Face models."""

import re

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

pytest.importorskip("lm_eval", reason="needs the extra eval")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from dmc import Engine, SamplingParams, load_model
from dmc.budget import Budget
from dmc.data import framing_of
from dmc.policies import H2O, SnapKV
from dmc.results.harness import EngineLM
from dmc.results.tasks.voting import VotingOptions

TASKS = ["local_choice", "local_generation", "local_rolling"]
pytestmark = pytest.mark.usefixtures("offline_lm_eval")


def engine_lm(folder, policy=None, **options):
    return EngineLM(Engine(load_model(folder), AutoTokenizer.from_pretrained(folder), policy, **options))


def run(lm, tasks_folder, tasks=TASKS, **options):
    manager = TaskManager(include_path=str(tasks_folder), include_defaults=False)
    return simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options)


def ask(method, *arguments):
    return [Instance(method, {}, argument, index) for index, argument in enumerate(arguments)]


def close(expected):
    """Sums of thousands of nats, such as those of rolling likelihoods, have float32's relative precision."""
    return pytest.approx(expected, abs=1e-4, rel=1e-6)


def likelihoods(sample):
    return [float(reply[0] if isinstance(reply, tuple) else reply) for (reply,) in sample["resps"]]


@pytest.mark.parametrize(
    ("kind", "num_fewshot"),
    [
        ("stock", 2),
        ("compressed", 0),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("stock", 0), ("compressed", 2))),
    ],
)
def test_every_number_is_that_of_hugging_faces_own_adapter(kind, num_fewshot, folders, tasks_folder):
    folder = getattr(folders, kind)
    theirs = HFLM(load_model(folder), tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=3)
    results, expected = (run(lm, tasks_folder, num_fewshot=num_fewshot) for lm in (engine_lm(folder), theirs))
    for task in TASKS:
        for name, value in expected["results"][task].items():
            assert results["results"][task][name] == (value if isinstance(value, str) else close(value))
        for one, other in zip(results["samples"][task], expected["samples"][task], strict=True):
            assert one["arguments"] == other["arguments"]
            if task == "local_generation":
                assert one["resps"] == other["resps"]
            else:
                assert likelihoods(one) == close(likelihoods(other))


def test_a_long_answers_sum_is_hugging_faces_to_the_precision_of_their_float32(folders):
    pair = ("alpha", " line 7 <b>xx</b>" * 29)
    theirs = HFLM(load_model(folders.stock), tokenizer=AutoTokenizer.from_pretrained(folders.stock), batch_size=1)
    our_lm = engine_lm(folders.stock)
    ours, expected = (lm.loglikelihood(ask("loglikelihood", pair), disable_tqdm=True)[0][0] for lm in (our_lm, theirs))
    context, answer = our_lm._encode_pair(*pair)
    with torch.no_grad():
        logits = theirs.model.double()(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
    exact = float(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None]).sum())
    assert len(answer) > 400 and exact < -3000  # float32's neighbors lie 2.4e-4 apart
    assert ours == pytest.approx(exact, abs=1e-4)
    assert ours == close(expected)  # not to 1e-4: theirs is a sum in float32


@pytest.mark.parametrize("policy", [H2O(budget=Budget(ratio=4)), SnapKV(window=4, budget=Budget(tokens=12)), None])
def test_a_compressed_likelihood_is_what_the_engine_scores(policy, folders, tasks_folder):
    folder = folders.compressed if policy is None else folders.stock
    lm = engine_lm(folder, policy)
    result = run(lm, tasks_folder, ["local_choice"])
    alone = engine_lm(folder, policy)
    full = engine_lm(folders.stock)
    differs = False
    for sample in result["samples"]["local_choice"]:
        for (context, continuation), reply in zip(sample["arguments"], likelihoods(sample), strict=True):
            prompt, answer = alone._encode_pair(context, continuation)
            prompt = prompt[-(512 + 1 - len(answer)) :]
            cue = [] if policy is None else prompt[-1:]  # fed when the rest of the prompt has been compressed
            (scoring,) = alone.engine.score_with_stats([prompt[: len(prompt) - len(cue)]], [answer], after=[cue])
            logprobs = scoring.logprobs
            with alone.engine.session() as session:
                session.feed(prompt[: len(prompt) - len(cue)]) if cue else None
                first = session.generate(cue or prompt, SamplingParams(max_new_tokens=1, temperature=0.0))
            assert first.logprobs[0] == close(float(logprobs[0].max()))
            expected = sum(float(row[token]) for row, token in zip(logprobs, answer, strict=True))
            assert reply == close(expected)
            (scored,) = full.engine.score([prompt], [answer])
            differs |= abs(sum(float(row[token]) for row, token in zip(scored, answer, strict=True)) - reply) > 0.01
    assert differs
    assert all(stats.tokens_seen <= 512 for stats in lm.stats)
    assert lm.engine.blocks_in_use == 0


SAMPLED = {"until": [" gamma"], "do_sample": True, "temperature": 0.9, "top_p": 0.95, "max_gen_toks": 12}


def test_results_do_not_depend_on_the_batch(folders):
    pairs = [("alpha beta " * length, " gamma" * (1 + length % 3)) for length in range(1, 9)]
    answers = []
    for size, at_once, order in ((1, 1, 1), (8, 64, -1), (3, 2, 1)):
        lm = engine_lm(folders.stock, H2O(budget=Budget(ratio=2)), max_batch_size=size)
        lm.requests_at_once = at_once
        scores = lm.loglikelihood(ask("loglikelihood", *pairs[::order]), disable_tqdm=True)[::order]
        requests = ask("generate_until", *[(prompt, dict(SAMPLED)) for prompt, _ in pairs[::order]])
        answers.append((scores, lm.generate_until(requests, disable_tqdm=True)[::order]))
    for scores, texts in answers[1:]:
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in answers[0][0]]
        assert [score for score, _ in scores] == close([score for score, _ in answers[0][0]])
        assert texts == answers[0][1]


def test_repeats_of_a_sampled_prompt_differ_and_come_again(folders):
    requests = ask("generate_until", *[("alpha beta", dict(SAMPLED))] * 4)
    texts = engine_lm(folders.stock).generate_until(requests)
    assert texts == engine_lm(folders.stock).generate_until(requests) and len(set(texts)) > 1
    assert not any(" gamma" in text for text in texts)


def test_choices_that_differ_in_their_last_token_share_a_pass_and_cut_prompts_are_counted(folders):
    lm, long = engine_lm(folders.stock), "alpha beta " * 400
    choices = ask("loglikelihood", *[("alpha beta", choice) for choice in "ABCD"])
    scores = lm.loglikelihood(choices, disable_tqdm=True)
    assert len(lm.stats) == 1 and lm.num_cut == 0
    assert scores == [lm.loglikelihood([choice], disable_tqdm=True)[0] for choice in choices]
    lm.loglikelihood(ask("loglikelihood", (long, " gamma"), ("alpha", " gamma")), disable_tqdm=True)
    lm.generate_until(ask("generate_until", (long, {"until": [], "max_gen_toks": 2})), disable_tqdm=True)
    assert lm.num_cut == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "generation setting 'num_beams': expected one of"),
        ({"do_sample": True}, "do_sample=true needs a temperature above 0"),
        ({"max_gen_toks": 512}, "max_gen_toks=512 leaves no room for a prompt: the model has 512 positions"),
    ],
)
def test_generation_settings_that_cannot_be_kept_are_refused(settings, message, folders):
    with pytest.raises(ValueError, match=message):
        engine_lm(folders.stock).generate_until(ask("generate_until", ("alpha", settings)))
    with pytest.raises(ValueError, match="the model's folder has no tokenizer"):
        EngineLM(Engine(load_model(folders.stock)))


def test_a_stop_string_that_is_a_special_token_stops_where_hugging_faces_adapter_does(folders):
    lm = engine_lm(folders.stock)
    request = ask("generate_until", ("alpha beta", {"max_gen_toks": 24}))
    (text,) = lm.generate_until(request, disable_tqdm=True)
    stop = next(letter for letter in text[4:] if letter.isascii() and letter.isalnum())
    lm.tokenizer.add_special_tokens({"additional_special_tokens": [stop]})
    theirs = HFLM(load_model(folders.stock), tokenizer=lm.tokenizer)
    request = ask("generate_until", ("alpha beta", {"max_gen_toks": 24, "until": [stop]}))
    (stopped,) = lm.generate_until(request, disable_tqdm=True)
    assert len(stopped) < len(text)
    assert [stopped] == theirs.generate_until(request, disable_tqdm=True)


def test_the_harness_begins_a_text_as_training_begins_a_document(beginning_tokenizer, folders):
    adapter = EngineLM(Engine(load_model(folders.stock), beginning_tokenizer))
    framing = framing_of(beginning_tokenizer)
    assert framing.begin == (beginning_tokenizer.bos_token_id,)
    text = beginning_tokenizer("alpha beta", add_special_tokens=False)["input_ids"]
    assert adapter.tok_encode("alpha beta") == [*framing.begin, *text]
    assert (adapter.prefix_token_id,) == framing.begin
    assert adapter.eot_token_id == framing.end


@pytest.mark.parametrize("vote", ["majority", "first"])
def test_several_answers_to_a_prompt_vote_and_one_that_was_chosen_is_scored(vote, folders):
    engine = engine_lm(folders.stock).engine
    voting, pattern = VotingOptions(chains=5, vote=vote), "(al|be|ga|de)|(ep)"
    lm = EngineLM(engine, voting=voting, answer_pattern=pattern, temperature=1.5)
    texts = lm.generate_until(
        ask("generate_until", *[(f"alpha {n}", {"until": [], "max_gen_toks": 9}) for n in range(6)])
    )
    assert len(lm.stats) == 30 and len(lm.memory) == 6
    assert lm.mean_memory()["peak_bytes"] > max(stats.peak_bytes_allocated for stats in lm.stats)
    chosen_by_vote = 0
    for number, text in enumerate(texts):
        params = lm._sampling({"until": [], "max_gen_toks": 9}, f"0 1 alpha {number}")
        (found,) = engine.generate([f"alpha {number}"], params)
        chains = [found, *found.alternatives]
        answers = [re.findall("al|be|ga|de|ep", chain.text)[-1:] for chain in chains]
        given = [answer for answer in answers if answer]
        best = max(given, key=lambda answer: (given.count(answer), -given.index(answer)), default=[])
        if vote == "first":
            lengths = [(len(chain.token_ids), place) for place, chain in enumerate(chains) if answers[place]]
            best = answers[min(lengths)[1]] if lengths else []
        assert text == chains[answers.index(best) if best else 0].text
        chosen_by_vote += bool(best) and answers.index(best) > 0
    assert chosen_by_vote or vote == "first"


def test_several_greedy_answers_are_refused(folders):
    lm = EngineLM(engine_lm(folders.stock).engine, voting=VotingOptions(chains=5))
    with pytest.raises(ValueError, match="chains=5, temperature=0: greedy chains are the same"):
        lm.generate_until(ask("generate_until", ("alpha", {"until": [], "max_gen_toks": 9})))


@pytest.fixture
def ending_tokenizer(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders.stock)
    end = tokenizer.eos_token
    template = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def test_an_end_that_the_tokenizer_adds_is_no_part_of_a_prompt_or_an_answer(ending_tokenizer, folders):
    lm = EngineLM(Engine(load_model(folders.stock), ending_tokenizer))
    theirs = HFLM(load_model(folders.stock), tokenizer=AutoTokenizer.from_pretrained(folders.stock))
    pair = ask("loglikelihood", ("line 3", " xx"), ("line 3 ", "yy"), ("", "line"))
    for (got, is_likeliest), expected in zip(lm.loglikelihood(pair), theirs.loglikelihood(pair), strict=True):
        assert (close(got), is_likeliest) == expected
    prompt = ask("generate_until", ("line 3", {"max_gen_toks": 8}))
    assert lm.generate_until(prompt) == theirs.generate_until(prompt)


def test_an_answer_that_begins_inside_a_token_is_encoded_alone(folders):
    lm = engine_lm(folders.stock)
    words = [word for word in lm.tokenizer.get_vocab() if word.isalpha() and word.isascii() and len(word) > 1]
    context, answer = words[0][:1], words[0][1:]
    assert HFLM._encode_pair(lm, context, answer)[1] == []
    assert lm._encode_pair(context, answer) == (lm.tok_encode(context), lm.tok_encode(answer, add_special_tokens=False))
    ((got, _),) = lm.loglikelihood(ask("loglikelihood", (context, answer)))
    (scores,) = lm.engine.score([lm.tok_encode(context)], [lm.tok_encode(answer)])
    tokens = torch.tensor(lm.tok_encode(answer))
    assert got == pytest.approx(float(scores.gather(1, tokens[:, None]).sum()), abs=1e-4)
