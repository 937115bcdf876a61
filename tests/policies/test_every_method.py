"""Every training-free method against its oracle, at each budget, group and option, and what it refuses."""

import pytest
from covering import cover
from evicting import BUDGETS, METHODS, SURE

from dmc import Engine, policies
from dmc.budget import Budget
from dmc.policies import InfLLM, OmniKV, Quest

BLOCKS = {"block_size": 4, "representatives": 2, "initial": 2, "local": 6, "chunk": 8}
AGREE = [*((method, {}) for method in METHODS), ("CaM", SURE)]
AGREE += [("StreamingLLM", {"rerotate": True, "sinks": sinks}) for sinks in (0, 4, 99)]
OPTIONS = {
    ("StreamingLLM", 3): [{"sinks": 0}, {"sinks": 9}, {"sinks": 99}],
    ("StreamingLLM", 2): [{"rerotate": True, "prompt_lengths": (41, 1)}],  # the second has fewer entries than sinks
    ("H2O", 3): [{"recent": 3}, {"recent": 0}, {"recent": 99}, {"normalize": True}],
    ("TOVA", 3): [{"per_head": True}, {"protect_last": True}, {"per_head": True, "protect_last": True}],
    ("VATP", 3): [{"sinks": 0}, {"sinks": 2}, {"sinks": 99}],
    ("RoCo", 2): [{"recent_ratio": 0}, {"recent_ratio": 0.75}, {"recent_ratio": 0.99}],
    ("SnapKV", 3): [{"window": 1}, {"window": 4, "pooling": "avg"}, {"kernel_size": 1}, {"kernel_size": 5}],
    **{
        ("PyramidKV", ratio): [
            *({"decay": "geometric"}, {"decay": "exponential"}),
            *({"beta": 2, "window": 3}, {"beta": 1.5, "pooling": "avg"}),
        ]
        for ratio in (3, 6)
    },
    ("AdaKV", 3): [{"alpha_f": 0}, {"alpha_f": 0.5, "window": 4}, {"alpha_f": 1, "pooling": "avg"}],
    ("CAKE", 3): [
        *({"window": 1}, {"window": 3, "kernel_size": 3}, {"gamma": 0}),
        *({"tau1": 1.6, "tau2": 0.4}, {"tau1": 0.9, "tau2": 2}),
    ],
    ("CaM", 3): [{**SURE, "m": 1}, {**SURE, "m": 3}],
    ("D2O", 3): [
        *({"similarity": "value"}, {"scaled": False}, {"scaled": False, "allocation": "reciprocal"}, {"sinks": 99}),
        *({"allocation": "reciprocal"}, {"allocation": "uniform", "beta": 0}, {"allocation": "exponential", "beta": 1}),
        *({"heavy_to_recent": (1, 1), "sinks": 0}, {"heavy_to_recent": (0, 1), "sinks": 2}),
        {"merge_rule": "average", "oracle": {"merge": "average"}},
    ],
    ("D2O", 12): [{}],
    ("LAVa", 3): [
        *({"window": 4, "pooling": "avg", "kernel_size": 3}, {"layer_budget": "uniform"}, {"layer_budget": "pyramid"}),
        *({"head_budget": "equal"}, {"head_budget": "equal", "layer_budget": "uniform"}, {"floor": 0.2}, {"floor": 1}),
    ],
    ("ExpectedAttention", 3): [
        {"sinks": 0, "future": 7, "epsilon": 0.0},
        {"covariance": False, "alpha_f": 1.0, "sinks": 9},
    ],
    ("AttentionMatching", 3): [
        {"chunk": 10, "lead": 3, "instruction": (4, 8, 15), "queries": 5, "bias_bound": 0.5},
        {"sinks": 0, "ridge": 0.1, "head_budget": "equal"},
    ],
    ("KVzip", 3): [{"chunk": 10, "lead": 3, "instruction": (4, 8, 15)}, {"sinks": 0, "chunk": 1, "lead": 0}],
}


def can_protect(case, budget, group, protect):
    return not protect or "rerotate" not in case[1]


@pytest.mark.parametrize(
    ("case", "budget", "group", "protect"),
    cover(AGREE, BUDGETS, (1, 4), ({}, {"protect": 0.2}), allowed=can_protect),
    ids=str,
)
def test_agrees_with_the_oracle(assert_like_oracle, case, budget, group, protect):
    method, options = case
    assert_like_oracle(method, budget, group, **options, **protect)


@pytest.mark.parametrize(
    ("method", "budget", "options"),
    [
        *((method, {"ratio": ratio}, options) for (method, ratio), every in OPTIONS.items() for options in every),
        ("RoCo", {"tokens": 30}, {"recent_ratio": 0.6, "prompt_lengths": (50,)}),  # ten newest and more: not all safe
    ],
)
def test_options_agree_with_the_oracle(assert_like_oracle, method, budget, options):
    assert_like_oracle(method, budget, **options)


READ_LESS = {
    "InfLLM": ("InfLLM", BLOCKS, 2, (41, 23), (9, 6)),
    "Quest": ("Quest", {}, 4, (63, 41, 23), (4, 9, 6)),
    "OmniKV": ("OmniKV", {"filter_layers": (0, 3)}, 6, (41, 23), (9, 6)),
    "OmniKV, offload": (
        *("OmniKV", {"filter_layers": (0, 3), "offload": True, "oracle": {"filter_layers": (0, 3)}}),
        *(6, (41, 23), (9, 6)),
    ),
}


@pytest.mark.parametrize(("case", "budget", "group"), cover(tuple(READ_LESS), BUDGETS, (1, 4)), ids=str)
def test_what_reads_less_agrees_with_the_oracle(assert_reads_like_oracle, case, budget, group):
    method, options, layers, prompts, steps = READ_LESS[case]
    assert_reads_like_oracle(method, budget, prompts, steps, group=group, num_layers=layers, **options)


@pytest.mark.parametrize(
    ("method", "options", "layers", "prompts", "steps", "budget"),
    [
        *(
            ("InfLLM", BLOCKS | changes, 2, (60, 20), (5, 9), {"ratio": 4})
            for changes in (
                {"block_size": 16, "representatives": 4, "initial": 3, "local": 5},  # as large as the cache's blocks
                {"block_size": 24, "initial": 0, "chunk": 5},  # larger
                {"block_size": 3, "representatives": 1, "chunk": 64},
                {"local": 1, "representatives": 4},
            )
        ),
        ("InfLLM", BLOCKS, 2, (7, 12), (40, 30), {"tokens": 14}),  # generated tokens become blocks
        *(
            ("Quest", options, 3, (41, 30), (7, 9), {"ratio": 3})
            for options in ({"page_size": 4}, {"page_size": 8, "dense_layers": 0}, {"page_size": 1})
        ),
        *(
            ("OmniKV", {"filter_layers": (0,), "selector": selector}, 3, (41, 5), (20, 18), {"ratio": 3})
            for selector in ("uniform", "exponential")
        ),
        ("OmniKV", {}, 10, (41, 23), (9, 6), {"ratio": 4}),
    ],
)
def test_options_of_what_reads_less_agree_with_the_oracle(
    assert_reads_like_oracle, method, options, layers, prompts, steps, budget
):
    assert_reads_like_oracle(method, budget, prompts, steps, num_layers=layers, **options)


REFUSED = [
    ("StreamingLLM", {"sinks": -1}, "sinks=-1: expected "),
    ("CaM", {"recent": 1.5}, "recent=1.5: expected "),
    ("RoCo", {"recent_ratio": 1}, "recent_ratio=1: expected less than 1"),
    ("SnapKV", {"window": 0}, "window=0: expected greater than or equal to 1"),
    ("SnapKV", {"kernel_size": 4}, "kernel_size=4: expected an odd number, such as 7"),
    ("SnapKV", {"pooling": "mean"}, "pooling='mean': expected 'max' or 'avg'"),
    ("PyramidKV", {"beta": float("nan")}, "beta=nan: expected "),
    ("AdaKV", {"alpha_f": 1.5}, "alpha_f=1.5: expected less than or equal to 1"),
    ("CAKE", {"kernel_size": 6}, "kernel_size=6: expected an odd number"),
    ("D2O", {"heavy_to_recent": (0, 0)}, "heavy_to_recent=.0, 0.: expected one number above 0"),
    ("Marked", {"behind": [-1]}, r"behind\[0\]=-1: expected "),
    ("InfLLM", {"block_size": 4, "representatives": 5}, "representatives=5: expected at most block_size=4"),
    ("OmniKV", {"budget": None}, "give exactly one"),
    ("OmniKV", {"memory": 0.3}, "give exactly one"),
    ("OmniKV", {"filter_layers": ()}, r"filter_layers=\(\): expected ascending"),
    ("OmniKV", {"filter_layers": [4, 2]}, r"filter_layers=\(4, 2\): expected ascending"),
    ("OmniKV", {"filter_layers": (2, 3)}, r"filter_layers=\(2, 3\): .* no two adjacent"),
]


@pytest.mark.parametrize(("method", "options", "error"), REFUSED)
def test_options_out_of_range_are_refused(method, options, error):
    with pytest.raises(ValueError, match=error):
        getattr(policies, method)(**{"budget": Budget(ratio=2), **options})


SPARSE = {"memory": 0.7, "filter_layers": (1,), "prefill": "sparse", "chunk": 8}


@pytest.mark.parametrize(
    ("policy", "engine", "error"),
    [
        (Quest(budget=Budget(ratio=2), page_size=6), {}, "page_size=6: expected a divisor of block_size=16"),
        (Quest(budget=Budget(ratio=2), page_size=32), {}, "page_size=32: expected a divisor of block_size=16"),
        (InfLLM(budget=Budget(ratio=2)), {"prefill_chunk_size": 100}, "=100: InfLLM takes 512 tokens of a prompt"),
        (OmniKV(**SPARSE), {"prefill_chunk_size": 12}, "=12: OmniKV takes 8 tokens .* give a multiple of 8, or None"),
        (OmniKV(memory=0.7, filter_layers=(1, 6)), {}, r"filter_layers=\(1, 6\): the model has layers 0 to 5"),
        (OmniKV(memory=0.5, filter_layers=(1,)), {}, "memory=0.5: the layers that read everything hold 0.5 of the"),
    ],
)
def test_what_model_and_engine_cannot_do_is_refused_at_once(make_stock, policy, engine, error):
    with pytest.raises(ValueError, match=error):
        Engine(make_stock(num_layers=6), policy=policy, **engine)
