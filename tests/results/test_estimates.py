"""What the statistics claim, checked by simulation: where nothing differs, and where something does."""

import math

import numpy
import pytest
from scipy.special import stdtrit

from dmc.results.estimates import POWER, Estimate, difference, estimate, mean_of
from dmc.results.statistics import MARGIN

COMPARISONS = 1000
DESIGNS = {
    "independent samples": {"contexts": range(32)},
    "few samples": {"contexts": range(6)},
    "even contexts": {"contexts": [i // 4 for i in range(32)], "of_context": 1.0},
    "uneven contexts": {"contexts": [0] * 12 + [1] * 8 + [2] * 4 + list(range(3, 11)), "of_context": 1.0},
    "seeds": {"contexts": range(32), "seeds": 3, "of_seed": 0.5},
    "contexts and seeds": {"contexts": [i // 3 for i in range(24)], "of_context": 1.0, "seeds": 3, "of_seed": 0.5},
    "seeds that do not matter": {"contexts": range(16), "seeds": 5},
    "seeds that answer differently": {"contexts": [i // 2 for i in range(16)], "seeds": 3, "of_both": 1.0},
}
FEW = {
    "two seeds": {"contexts": range(30), "seeds": 2, "of_seed": 1.0},
    "two contexts": {"contexts": [0] * 8 + [1] * 8, "of_context": 1.0},
}
"""Too few for a claim: no power is asked of them."""


def compare(draw, shift, size, **design):
    """Compare two methods on samples whose difference has a part of the context, of the seed, of both, and its own."""
    contexts = list(design["contexts"])
    seeds, groups = design.get("seeds", 1), max(contexts) + 1
    samples = draw.normal(0, 1, (seeds, len(contexts)))
    samples += design.get("of_context", 0.0) * draw.normal(0, 1, groups)[contexts]
    samples += design.get("of_seed", 0.0) * draw.normal(0, 1, (seeds, 1))
    samples += design.get("of_both", 0.0) * draw.normal(0, 1, (seeds, groups))[:, contexts]
    base = draw.normal(3, 1, len(contexts))
    return difference(base + shift + size * samples, [base] * seeds, contexts)


@pytest.mark.parametrize("name", [*DESIGNS, *FEW])
def test_what_does_not_differ_is_seldom_called_worse(name):
    draw = numpy.random.default_rng(0)
    found = [compare(draw, 0.0, 1.0, **(DESIGNS | FEW)[name]) for _ in range(COMPARISONS)]
    assert sum(comparison.standing(0.0) == "worse" for comparison in found) <= 0.065 * COMPARISONS


@pytest.mark.parametrize("name", DESIGNS)
def test_what_is_worse_by_two_margins_is_found_and_what_is_worse_by_one_is_not_as_good(name):
    draw = numpy.random.default_rng(1)
    unit = numpy.std([compare(draw, 0.0, 1.0, **DESIGNS[name]).value for _ in range(500)])
    size = MARGIN / 3 / unit  # the standard error is a third of the margin
    found = [compare(draw, 2 * MARGIN, size, **DESIGNS[name]).standing(MARGIN) for _ in range(COMPARISONS)]
    assert found.count("worse") >= 0.9 * COMPARISONS and "as good" not in found
    found = [compare(draw, MARGIN, size, **DESIGNS[name]).standing(MARGIN) for _ in range(COMPARISONS)]
    assert found.count("as good") <= 0.065 * COMPARISONS


@pytest.mark.parametrize(("samples", "rate"), [(10, 0.25), (40, 0.07), (40, 0.5)])
def test_answers_that_agree_by_chance_are_seldom_called_as_good(samples, rate):
    """A method that loses a share of the answers above the margin is not taken for as good."""
    draw, margin = numpy.random.default_rng(2), 0.06
    right = numpy.ones((1, samples))
    answers = [right * (draw.random(samples) > rate) for _ in range(COMPARISONS)]
    found = [difference(left, right, higher_is_better=True).standing(margin) for left in answers]
    assert found.count("as good") <= 0.065 * COMPARISONS
    for scores in (right, 0.75 * right):  # of lm-eval's F1, too
        same = difference(scores, scores, higher_is_better=True)
        assert same.upper == pytest.approx(3 / samples) and same.error == 0.0  # a bound is no standard error
        mean = mean_of([same, difference(scores[:, :5], scores[:, :5], higher_is_better=True)])
        assert mean.upper == pytest.approx(3 / 5 / 2)  # three questions of the smaller task may differ
    assert difference(right, right).upper == 0.0  # losses that agree do


@pytest.mark.parametrize("evenness", [1, 5, 50])
@pytest.mark.parametrize(("texts", "asked"), [(16, 8), (40, 8), (100, 2), (60, 1)])
def test_a_margin_of_answers_that_texts_lose_unevenly_is_seldom_called_as_good(texts, asked, evenness):
    """Down to texts of which a few lose nearly all answers, and most none."""
    draw, margin, gained = numpy.random.default_rng(6), 0.05, 0.01
    contexts, found = [index // asked for index in range(texts * asked)], []
    for _ in range(COMPARISONS // 2):
        rate = draw.beta((margin + gained) * evenness, (1 - margin - gained) * evenness, (texts, 1))
        full, left = (draw.random((texts, asked)) >= share for share in (gained, rate))
        comparison = difference(left.reshape(1, -1), full.reshape(1, -1), contexts, higher_is_better=True)
        found.append(comparison.standing(margin))
    assert found.count("as good") <= 0.065 * len(found)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("texts", [36, 50, 100])
def test_answers_that_a_few_texts_lose_wholly_are_seldom_called_as_good(texts, noise):
    """Which a sample may lack, whatever the others lose and gain."""
    draw, margin, found = numpy.random.default_rng(8), 0.05, []
    contexts = [index // 8 for index in range(texts * 8)]
    for _ in range(COMPARISONS // 2):
        full, left = (draw.random((texts, 8)) >= noise for _ in range(2))
        left &= draw.random((texts, 1)) >= margin / (1 - noise) + 1e-3
        comparison = difference(left.reshape(1, -1), full.reshape(1, -1), contexts, higher_is_better=True)
        found.append(comparison.standing(margin))
    assert found.count("as good") <= 0.065 * len(found)


def test_as_many_contexts_as_are_needed_show_a_difference_with_their_power():
    draw = numpy.random.default_rng(9)
    pilot = Estimate(0.05, 0.04 / 40, 39, num_contexts=40, by_seed=(0.05,))
    needed = pilot.contexts_needed(0.05, POWER)
    again = [estimate(draw.normal(0.05, 0.2, (1, needed))).upper <= 0.1 for _ in range(COMPARISONS)]
    assert 0.76 < sum(again) / COMPARISONS < 0.86 and needed > 2 * pilot.contexts_needed(0.05)


@pytest.mark.parametrize("num", [2, 8, 16])
def test_the_best_of_several_is_seldom_called_as_good_although_all_are_worse_by_the_margin(num):
    draw, found = numpy.random.default_rng(10), []
    for _ in range(COMPARISONS // 2):
        losses = [estimate([values]) for values in draw.normal(MARGIN, 0.06, (num, 40))]
        best = min(losses, key=lambda loss: loss.value)
        found.append(best.value + best.reach_of_best(num) <= MARGIN)
    assert sum(found) <= 0.065 * len(found)
    assert best.reach_of_best(1) == best.reach


def test_the_contexts_that_are_needed_are_the_fewest_that_carry_a_margin():
    for size in (1, 8):
        draw = numpy.random.default_rng(7)
        right = draw.random((2, 1, 16 * size)) < 0.9
        found = difference(right[0], right[1], [index // size for index in range(16 * size)], higher_is_better=True)
        margin, needed = found.reach / 3, found.contexts_needed(found.reach / 3)
        scaled = [
            max(stdtrit(num - 1, 0.95) * found.error * (16 / num) ** 0.5 + 2 / num, 3 / num)
            for num in (needed - 1, needed)
        ]
        assert scaled[1] <= margin < scaled[0]
        assert found.contexts_needed(found.reach) == 16
    assert estimate([[0.1], [0.3]]).contexts_needed(1.0) is None
    assert (
        found.contexts_needed(0.0) is found.contexts_needed(1e-17) is None
    )  # a difference at its margin but for rounding
    assert estimate([[0.1, 0.3], [0.8, 0.9]]).contexts_needed(0.1) is None  # the seeds are too far apart


@pytest.mark.parametrize("design", [(16, 1, 0.9), (8, 4, 0.7), (100, 5, 0.9)], ids=str)
def test_answers_that_are_as_often_right_are_seldom_called_worse(design):
    """Questions of one context are alike, and every seed has its own level."""
    groups, size, rate = design
    draw, contexts = numpy.random.default_rng(4), [i // size for i in range(groups * size)]

    def answers(hard):
        return draw.random((3, groups * size)) < rate + hard + draw.normal(0, 0.05, (3, 1))

    found = []
    for _ in range(COMPARISONS):
        hard = draw.normal(0, 0.1, groups)[contexts]
        found.append(difference(answers(hard), answers(hard), contexts, higher_is_better=True).standing(MARGIN))
    assert found.count("worse") <= 0.065 * COMPARISONS


def test_the_seeds_of_several_tasks_are_the_same():
    """A seed that is bad on all tasks of a benchmark is one seed: their mean is no surer of it than each."""
    draw, worse = numpy.random.default_rng(5), 0
    for _ in range(COMPARISONS):
        of_seed, parts = draw.normal(0, 1, (3, 1)), []
        for _ in range(6):
            samples = draw.normal(0, 1, (3, 16)) + of_seed
            parts.append(difference(samples, 0 * samples))
        worse += mean_of(parts).standing(0.0) == "worse"
    assert worse <= 0.065 * COMPARISONS


def test_tasks_with_unlike_seeds_are_no_surer_than_their_fewest_seeds():
    draw, worse = numpy.random.default_rng(11), 0
    for _ in range(COMPARISONS):
        parts = [estimate(draw.normal(0, 0.3, (seeds, 16)) + draw.normal(0, 1, (seeds, 1))) for seeds in (2, 3)]
        worse += mean_of(parts).standing(0.0) == "worse"
    assert worse <= 0.065 * COMPARISONS


def test_samples_of_one_context_count_once():
    values = numpy.random.default_rng(3).normal(0, 1, 8)
    once, thrice = estimate([values]), estimate([numpy.repeat(values, 3)], [i // 3 for i in range(24)])
    assert (thrice.value, thrice.error) == pytest.approx((once.value, once.error))
    assert once.error == pytest.approx(values.std(ddof=1) / math.sqrt(8))
    assert (once.degrees, thrice.degrees, thrice.num_contexts) == pytest.approx((7, 7, 8))


def test_nothing_is_claimed_without_its_spread():
    for found in (estimate([[1.0]]), estimate([[1.0, 2.0]], ["file", "file"]), estimate([[1.0], [2.0]])):
        assert math.isnan(found.error) and found.standing(math.inf) == "unknown"
        assert (found.lower, found.upper) == (-math.inf, math.inf)
    assert math.isnan(mean_of([estimate([[1.0, 2.0]]), estimate([[1.0]])]).error)


def test_every_seed_is_told():
    found = estimate([[0.5, 0.7], [0.1, 0.1], [-0.2, -0.3]])
    assert found.by_seed == mean_of([found, found]).by_seed == pytest.approx((0.6, 0.1, -0.25))
    assert found.num_seeds_above == 2
    apart = [estimate([[0.5, 0.7]]), estimate([[0.1, 0.1]])]
    assert mean_of(apart).error == pytest.approx(math.hypot(*(group.error for group in apart)) / 2)
