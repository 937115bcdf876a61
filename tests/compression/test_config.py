import json
import math

import pytest

from dmc.budget import Budget, achieved_ratio, check_ratio, entry_bytes
from dmc.compression import CompressionConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "evict"}, "action='evict': expected one of merge, drop"),
        ({"delay": -1}, "delay=-1: expected a whole number"),
        ({"delay": 1.5}, "delay=1.5: expected a whole number"),
        ({"delay": True}, "delay=True: expected a whole number"),
        ({"action": "drop"}, "needs delay >= 1"),
        ({"action": "drop", "delay": 0}, "needs delay >= 1"),
        ({"window_size": 0}, "window_size=0: expected a whole number >= 1 (tokens; None: whole segments"),
        ({"window_size": -3}, "window_size=-3"),
        ({"window_size": 2.0}, "window_size=2.0"),
        ({"temperature": 0.0}, "temperature=0.0: expected a number > 0"),
        ({"temperature": math.nan}, "temperature=nan: expected a number > 0"),
        ({"eps": 0.0}, "eps=0.0: expected a number > 0"),
        ({"eps": math.nan}, "eps=nan: expected a number > 0"),
        ({"decisions": "per_token"}, "decisions='per_token': expected one of per_head, per_layer, fixed"),
        ({"weighting": "equal"}, "weighting='equal': expected one of learned, uniform"),
        ({"decisions": "fixed", "action": "drop", "delay": 4}, "decisions='fixed' pools tokens .* use action='merge'"),
        ({"decisions": "fixed"}, "decisions='fixed' borrows no neuron .* use weighting='uniform'"),
        ({"decided_token": "previous"}, "decided_token='previous' needs delay >= 1"),
        ({"target_ratio": 0.5}, "target_ratio=0.5 is not a compression ratio"),
        ({"target_ratio": math.nan}, "target_ratio=nan is not a compression ratio"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        CompressionConfig(**arguments)


@pytest.mark.parametrize(
    "config",
    [
        CompressionConfig(action="drop", delay=16, window_size=None, decision_offset=3.25, target_ratio=8.0),
        CompressionConfig(decisions="fixed", weighting="uniform", target_ratio=2.5),
    ],
)
def test_settings_survive_json(config: CompressionConfig) -> None:
    assert CompressionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_folders_from_before_the_variants_decide_per_head_and_learn_the_weights() -> None:
    config = CompressionConfig.from_dict({"action": "merge", "delay": 16})
    assert (config.decisions, config.weighting, config.borrows_neuron) == ("per_head", "learned", True)


def test_an_unknown_key_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown compression setting windowsize: .*window_size"):
        CompressionConfig.from_dict({"windowsize": 12})


def test_defaults_are_those_of_the_paper_and_its_code() -> None:
    config = CompressionConfig()
    assert (config.action, config.delay, config.window_size, config.neuron_index) == ("merge", 0, 12, -1)
    assert (config.decision_offset, config.omega_offset, config.eps, config.temperature) == (5.0, 5.0, 0.0078125, 0.1)


@pytest.mark.parametrize("ratio", [0.99, 0, -2, math.inf, math.nan, True, "4", None])
def test_a_ratio_below_one_is_no_compression_ratio(ratio: object) -> None:
    with pytest.raises(ValueError, match=r"ratio=.* is not a compression ratio: expected a number >= 1"):
        check_ratio(ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments", [{}, {"ratio": 2.0, "tokens": 4}, {"ratio": 0.5}, {"tokens": 0}, {"tokens": 2.5}, {"tokens": True}]
)
def test_a_budget_is_either_a_ratio_or_a_number_of_tokens(arguments: dict) -> None:
    with pytest.raises(ValueError):
        Budget(**arguments)


@pytest.mark.parametrize(("ratio", "length", "entries"), [(4, 100, 25), (8, 4096, 512), (6, 1000, 166), (8, 3, 1)])
def test_budget_is_the_floored_share_of_the_tokens_but_at_least_one(ratio: float, length: int, entries: int) -> None:
    assert Budget(ratio=ratio).entries(length) == entries
    assert Budget(tokens=entries).entries(length) == entries


def test_ratio_and_byte_arithmetic() -> None:
    assert achieved_ratio(tokens_seen=10, num_layers=2, num_kv_heads=3, total_slots=15) == 4.0
    assert entry_bytes(head_dim=128, bytes_per_number=2) == 512
