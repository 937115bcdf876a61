"""Protected tokens: where the bounds are, and what must not change; `test_every_method.py` has the oracles."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.data import train_tokenizer
from dmc.policies.protection import BEYOND, nearness
from dmc.results.policies import policy_from_config

CONFIGS = Path(__file__).parents[2] / "configs" / "policy"
EVICTING = [
    path.stem
    for path in sorted(CONFIGS.glob("*.yaml"))
    if "protect" in OmegaConf.load(path) and path.stem != "kvpop"  # which needs a file
]
ANSWER = SamplingParams(max_new_tokens=6, temperature=0)
TEMPLATE = "{% for message in messages %}<|a|>{{ message.role }} {{ message.content }}<|b|>{% endfor %}"


def ranks_of(prompts, tokens, bounds):
    """Rank token by token."""
    distances = {}
    for begin, end in prompts:
        marks = [t for t in range(begin, end) if t in (begin, end - 1) or tokens[t] in bounds]
        distances |= {t: min(abs(t - mark) for mark in marks) for t in range(begin, end)}
    order = sorted(distances, key=lambda t: (distances[t], t))
    return [order.index(t) if t in distances else BEYOND for t in range(len(tokens))]


@pytest.mark.parametrize("prompts", [[(0, 30)], [(0, 1)], [(0, 9), (14, 15), (15, 17), (20, 30)], [(0, 8), (9, 25)]])
@pytest.mark.parametrize("bounds", [(), (3,), (3, 5)])
def test_tokens_are_ranked_by_their_distance_to_the_bounds_of_their_prompt(prompts, bounds):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(9, (30,), generator=generator).tolist()[: max(prompts[-1][1], 1)]
    assert nearness(prompts, tokens, bounds).tolist() == ranks_of(prompts, tokens, bounds)


def positions_by_head(session):
    return [set(head.tolist()) for layer in session.positions_held() for head in layer]


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")
def test_bounds_of_turns_and_instructions_stay_in_equal_memory(name, make_stock, make_prompts):
    model, mark = make_stock(), 79
    first, second = ([token % mark for token in prompt] for prompt in make_prompts(90, 60))
    first[25] = second[11] = mark
    settings = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    if name == "kvzip":
        settings["instruction"] = [4, 8]
    stats = []
    for options in ({}, {"protect": 0.1, "bounds": (mark,)}):
        engine = Engine(model, policy=policy_from_config(settings | options, Budget(ratio=4)))
        with engine.session() as session:
            stats.append([session.generate(first, ANSWER).stats])
            after_first = positions_by_head(session)
            stats[-1].append(session.generate(second, ANSWER).stats)
            after_second = positions_by_head(session)
    for before, protected in zip(*stats, strict=True):
        assert protected.tokens_seen == before.tokens_seen
        # what layers get of a second turn depends on what is held: less than one entry per head goes missing
        is_rounded = name in ("lava", "d2o") and protected.tokens_seen > 100
        assert abs(protected.bytes_used - before.bytes_used) <= (0.05 * before.bytes_used if is_rounded else 0)
    # 4 of 22 entries, then 6 of 39, nearest to a bound; layers that get few entries protect fewer
    equal_layers = name not in ("pyramidkv", "ada_pyramidkv", "cake", "d2o", "lava")
    assert all({0} <= held for held in after_second)
    if equal_layers:
        assert all({0, 1, 25, 89} <= held for held in after_first)
        assert all({0, 25, 89, 95, 107, 155} <= held for held in after_second)


def test_at_least_the_first_and_the_last_and_at_most_half_are_protected():
    policy = policies.H2O(budget=Budget(ratio=2), protect=0.1)
    assert [policy.num_protected(budget) for budget in (1, 2, 3, 4, 19, 20, 29, 30, 512)] == [
        *(0, 1, 1, 2, 2, 4, 4, 6, 102)
    ]
    assert policies.H2O(budget=Budget(ratio=2)).num_protected(512) == 0


def test_the_chat_templates_special_tokens_are_bounds(make_stock, tmp_path):
    tokenizer = train_tokenizer(["some text of users and assistants\n"], 270, tmp_path)
    policy = policies.KVzip(budget=Budget(ratio=2), protect=0.1)
    assert policy.tokenized(tokenizer).bounds == () == policy.tokenized(None).bounds
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>", "<|unused|>"]})
    tokenizer.chat_template = TEMPLATE
    marks = tuple(sorted(tokenizer.convert_tokens_to_ids(["<|a|>", "<|b|>"])))
    assert policy.tokenized(tokenizer).bounds == marks
    assert policy.tokenized(tokenizer).instruction == tuple(
        tokenizer(policies.KVzip.instruction, add_special_tokens=False)["input_ids"]
    )
    given = policies.KVzip(budget=Budget(ratio=2), protect=0.1, bounds=(5,))
    assert given.tokenized(tokenizer).bounds == (5,)
    assert policies.H2O(budget=Budget(ratio=2)).tokenized(tokenizer).bounds is None


@pytest.mark.parametrize(
    ("method", "options", "error"),
    [
        ("H2O", {"protect": 0.3}, "protect=0.3: expected less than or equal to 0.25"),
        ("Quest", {"protect": 0.1}, "unknown setting protect"),
        ("StreamingLLM", {"protect": 0.1, "rerotate": True}, "rerotate=True gives new positions to the sinks alone"),
    ],
)
def test_what_cannot_be_protected_is_refused(method, options, error):
    with pytest.raises(ValueError, match=error):
        getattr(policies, method)(budget=Budget(ratio=2), **options)


def test_merged_tokens_have_no_bounds(make_compressed):
    with pytest.raises(ValueError, match="the gates of"):
        Engine(make_compressed(), policy=policies.SnapKV(budget=Budget(ratio=2), protect=0.1))
