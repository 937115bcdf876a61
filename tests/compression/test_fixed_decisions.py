import math

import pytest
import torch

from dmc.compression import CompressionConfig, Compressor, GateMode, fixed_decisions
from dmc.compression.gates import positions_since


@pytest.mark.parametrize(
    ("ratio", "pattern"),
    [
        (4.0, "01110111"),
        (2.5, "0110101101"),
        (1.0, "00000000"),
        (2.0, "010101"),
        (1.5, "010010010"),
        (100.0, "01111111"),
    ],
)
def test_pattern_of_every_ratio_is_the_papers(ratio, pattern):
    merged = fixed_decisions(torch.arange(len(pattern)), ratio)
    assert "".join(str(int(decision)) for decision in merged) == pattern


@pytest.mark.parametrize("ratio", [1.0, 1.1, 1.37, 2.0, 2.5, 3.3, 4.0, 7.9, 12.0])
def test_slots_are_the_tokens_over_the_ratio_at_every_length(ratio):
    merged = fixed_decisions(torch.arange(3000), ratio)
    for length in (1, 2, 9, 100, 1024, 3000):
        slots = length - int(merged[:length].sum())
        assert slots == math.floor((length - 1) / ratio) + 1
    assert merged.tolist()[1:] == [math.floor(t / ratio) == math.floor((t - 1) / ratio) for t in range(1, 3000)]


def test_positions_count_from_the_last_start():
    starts = torch.tensor([[1, 0, 0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0]]).bool()
    assert positions_since(starts).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 0, 1, 2, 3, 4, 5]]


def fixed(**settings):
    options = {"decisions": "fixed", "weighting": "uniform", "target_ratio": 2.0, **settings}
    return Compressor(CompressionConfig(**options), 8)


@pytest.mark.parametrize("mode", [GateMode(), GateMode(noise_seeds=[1, 2]), None])
def test_nothing_is_read_relaxed_or_removed(mode):
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    starts[:, 0] = starts[1, 3] = True
    gated = fixed().gate(query, key, mode, 0, starts)
    assert gated.query is query
    assert gated.key is key
    assert gated.alpha[0].tolist() == [[0, 1, 0, 1, 0, 1]] * 2
    assert gated.alpha[1].tolist() == [[0, 1, 0, 0, 1, 0]] * 2
    assert torch.equal(gated.log_append.exp(), 1 - gated.alpha)
    assert torch.equal(gated.logits > 0, gated.alpha > 0)
    assert (gated.omega == 1).all()


def test_a_pass_may_have_a_ratio_of_its_own():
    query, key, starts = torch.randn(1, 2, 8, 8), torch.randn(1, 1, 8, 8), torch.arange(8)[None] == 0
    gated = fixed().gate(query, key, GateMode(noise_seeds=[1], fixed_ratio=4.0), 0, starts)
    assert gated.alpha.flatten().tolist() == [0, 1, 1, 1, 0, 1, 1, 1]
