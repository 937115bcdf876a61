import json
import math

import pytest

from dmc.budget import achieved_ratio, check_ratio
from dmc.compression import CompressionConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "evict"}, "action='evict': expected 'merge' or 'drop'"),
        ({"action": "drop"}, "needs delay >= 1"),
        ({"action": "drop", "delay": 0}, "needs delay >= 1"),
        ({"decisions": "per_token"}, "decisions='per_token': expected 'per_head', 'per_layer' or 'fixed'"),
        ({"weighting": "equal"}, "weighting='equal': expected 'learned' or 'uniform'"),
        ({"decisions": "fixed", "action": "drop", "delay": 4}, "decisions='fixed' pools tokens .* use action='merge'"),
        ({"decisions": "fixed"}, "decisions='fixed' borrows no neuron .* use weighting='uniform'"),
        ({"gate_input": "keys"}, "gate_input='keys': expected 'neuron', "),
        ({"gate_input": "both", "decisions": "fixed", "weighting": "uniform"}, "decisions='fixed' reads nothing"),
        ({"decided_token": "previous"}, "decided_token='previous' needs delay >= 1"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        CompressionConfig(**arguments)


@pytest.mark.parametrize(
    "config",
    [
        CompressionConfig(action="drop", delay=16, window_size=None, decision_offset=3.25, target_ratio=8.0),
        CompressionConfig(decisions="fixed", weighting="uniform", target_ratio=2.5),
    ],
)
def test_settings_survive_json(config):
    assert CompressionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_folders_from_before_the_variants_decide_per_head_and_learn_the_weights():
    config = CompressionConfig.from_dict({"action": "merge", "delay": 16})
    assert (config.decisions, config.weighting, config.borrows_neuron) == ("per_head", "learned", True)


def test_an_unknown_key_is_named_together_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown setting compression.windowsize: did you mean 'window_size'"):
        CompressionConfig.from_dict({"windowsize": 12})


def test_defaults_are_those_of_the_paper_and_its_code():
    config = CompressionConfig()
    assert (config.action, config.delay, config.window_size, config.neuron_index) == ("merge", 0, 12, -1)
    assert (config.decision_offset, config.omega_offset, config.eps, config.temperature) == (5.0, 5.0, 0.0078125, 0.1)


@pytest.mark.parametrize("ratio", [0.99, 0, -2, math.inf, math.nan, True, "4", None])
def test_a_ratio_below_one_is_no_compression_ratio(ratio):
    with pytest.raises(ValueError, match=r"ratio=.* is not a compression ratio: expected a number >= 1"):
        check_ratio(ratio)


def test_ratio_arithmetic():
    assert achieved_ratio(tokens_seen=10, num_layers=2, num_kv_heads=3, total_slots=15) == 4.0
