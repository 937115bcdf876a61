"""Choosing positions."""

from __future__ import annotations

import pytest
import torch

from dmc.policies.reading import top_positions


@pytest.mark.parametrize("levels", [3, 1000])
def test_highest_come_in_order_and_the_first_of_equals_wins(levels):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(levels, (4, 3, 20), generator=generator).float()
    counts = torch.randint(0, 9, (4, 3), generator=generator)
    found = top_positions(scores, counts, 8)
    assert found.shape == (4, 3, 8)
    for i in range(4):
        for j in range(3):
            ranked = sorted(range(20), key=lambda k: (-float(scores[i, j, k]), k))
            count = int(counts[i, j])
            assert found[i, j].tolist() == sorted(ranked[:count]) + [0] * (8 - count)


def test_all_are_found_where_there_are_no_more():
    scores = torch.tensor([[0.5, -torch.inf, -torch.inf], [0.1, 0.2, 0.3]])
    assert top_positions(scores, torch.tensor([1, 3]), 7).tolist() == [[0, 0, 0], [0, 1, 2]]
