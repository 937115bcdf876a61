"""Merging and spreading of what goes, against loops over lists."""

import math

import pytest
import torch

from dmc.policies.merging import SIMILARITY_BLOCK, Followers, merge_into, most_similar


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def leaving_and_staying(random, heads=3, length=12, sequences=2):
    """Masks in which every head keeps something, and some entries do not exist."""
    drawn = torch.randint(3, (sequences, heads, length), generator=random)
    drawn[..., 0] = 1
    return drawn == 0, drawn == 1


def positions_of(random, shape):
    """Positions in no order."""
    heads = [torch.randperm(3 * shape[2], generator=random)[: shape[2]] for _ in range(shape[0] * shape[1])]
    return torch.stack(heads).view(shape).int()


@pytest.mark.parametrize("length", [12, SIMILARITY_BLOCK + 40])
def test_each_entry_that_goes_finds_the_most_similar_one_that_stays(random, length):
    states = torch.randn(2, 3, length, 4, generator=random)
    leaving, staying = leaving_and_staying(random, length=length)
    source = torch.arange(length).expand(leaving.shape)
    positions, most = positions_of(random, states.shape[:3]), int(staying.sum(-1).max())
    similarity, target = most_similar(states, source, staying, positions, most)
    normed = states.double() / states.double().norm(dim=-1, keepdim=True)
    for sequence, head, age in leaving.nonzero().tolist():
        cosines = (normed[sequence, head] @ normed[sequence, head, age]).where(staying[sequence, head], -9.0)
        assert target[sequence, head, age] == cosines.argmax()
        assert similarity[sequence, head, age].item() == pytest.approx(cosines.max().item(), abs=1e-5)


def test_of_equally_similar_entries_the_older_is_found():
    states = torch.tensor([[1.0, 0], [2, 2], [0.3, 0.3], [5, 5]]).view(1, 1, 4, 2)
    staying = torch.tensor([True, True, True, False]).view(1, 1, 4)
    similarity, target = most_similar(states, torch.tensor([[[3]]]), staying, torch.tensor([[[0, 7, 3, 9]]]), 3)
    assert target.item() == 2 and similarity.item() == pytest.approx(1)


@pytest.mark.parametrize("rule", ["weighted", "average"])
def test_merges_agree_with_a_loop(random, rule):
    states = torch.randn(2, 3, 12, 4, generator=random)
    leaving, staying = leaving_and_staying(random)
    states[~(leaving | staying)] = torch.nan  # of another sequence
    source = (~leaving).byte().argsort(dim=-1, stable=True)
    similarity, target = most_similar(states, source, staying, positions_of(random, states.shape[:3]), 12)
    merges = leaving.gather(-1, source)
    merged = merge_into(states, source, target, merges, similarity, rule)
    taken = {}
    for sequence, head, index in merges.nonzero().tolist():
        age, into = source[sequence, head, index].item(), target[sequence, head, index].item()
        weight = math.exp(similarity[sequence, head, index]) if rule == "weighted" else 1.0
        taken.setdefault((sequence, head, into), []).append((age, weight))
    expected = states.clone().double()
    for (sequence, head, into), members in taken.items():
        own_weight = math.e if rule == "weighted" else 1.0
        total = own_weight * states[sequence, head, into].double()
        for age, weight in members:
            total = total + weight * states[sequence, head, age].double()
        expected[sequence, head, into] = total / (own_weight + sum(weight for _, weight in members))
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("count", [1, 3, 99])
def test_followers_are_the_next_entries_that_stay(random, count):
    leaving, staying = leaving_and_staying(random)
    numbers = torch.rand(staying.shape, generator=random)
    states = torch.randn(*staying.shape, 2, generator=random) * leaving[..., None]
    positions = positions_of(random, staying.shape)
    followers = Followers(staying, positions, count)
    mean, (received, concerned) = followers.mean(numbers), followers.spread(states)
    for sequence, head in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        place = positions[sequence, head].tolist()
        stays = sorted(staying[sequence, head].nonzero().flatten().tolist(), key=place.__getitem__)
        assert followers.order[sequence, head, : len(stays)].tolist() == stays
        expected = {age: torch.zeros(2) for age in stays}
        follows = set()
        for age in range(12):
            next_ones = [position for position in stays if place[position] > place[age]][:count]
            average = sum(numbers[sequence, head, position].item() for position in next_ones) / max(len(next_ones), 1)
            assert mean[sequence, head, age].item() == pytest.approx(average, abs=1e-6)
            if leaving[sequence, head, age]:
                follows |= set(next_ones)
                for position in next_ones:
                    expected[position] += states[sequence, head, age] / len(next_ones)
        for rank, age in enumerate(stays):
            torch.testing.assert_close(received[sequence, head, rank], expected[age], rtol=0, atol=1e-6)
            assert bool(concerned[sequence, head, rank]) == (age in follows)
