"""Pooling against lists."""

import math

import pytest
import torch

from dmc.policies.scores import pool, pool_before


def naive_pool(scores, kernel_size, pooling):
    pooled = []
    for centre in range(len(scores)):
        inside = [
            scores[i] for i in range(centre - kernel_size // 2, centre + kernel_size // 2 + 1) if 0 <= i < len(scores)
        ]
        pooled.append(max(inside) if pooling == "max" else sum(inside) / kernel_size)
    return pooled


def test_a_peak_spreads_to_its_neighbors():
    scores = torch.tensor([0, 0, 1, 0, 0, 0, 0.8, 0])
    assert pool(scores, 3, "max").tolist() == pytest.approx([0, 1, 1, 1, 0, 0.8, 0.8, 0.8])
    expected = [0, 1 / 3, 1 / 3, 1 / 3, 0, 0.8 / 3, 0.8 / 3, 0.8 / 3]
    assert pool(scores, 3, "avg").tolist() == pytest.approx(expected)


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("window", [1, 3, torch.tensor([4, 2])])
def test_only_what_lies_before_the_last_entries_is_pooled(make_entries, pooling, kernel_size, window):
    scores = torch.rand(2, 3, 11, generator=torch.Generator().manual_seed(0))
    entries = make_entries(3, 11)
    entries.lengths = torch.tensor([[11, 5, 9], [7, 8, 6]])
    numbers = torch.arange(11, dtype=torch.int32)
    entries.positions = numbers.where(numbers < entries.lengths[..., None], -1)
    pooled = pool_before(entries, scores, window, kernel_size, pooling)
    for sequence, lengths in enumerate(entries.lengths.tolist()):
        last = window if isinstance(window, int) else int(window[sequence])
        for head, length in enumerate(lengths):
            before = length - last
            row = pooled[sequence, head].tolist()
            expected = naive_pool(scores[sequence, head, :before].tolist(), kernel_size, pooling)
            assert row[:before] == pytest.approx(expected)
            assert row[before:length] == [math.inf] * last
