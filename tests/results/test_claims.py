"""Claims: what they may say, and what recorded samples make of them."""

import re

import numpy
import pytest
from report_rows import plain_row

from dmc.results.claims import Claim, Judgement, NamedMethod
from dmc.results.estimates import Estimate, difference
from dmc.results.measurement import to_frame
from dmc.results.verdict import Scale

WITHIN = "retrofit within 3 points of full at recall"
METHODS = [
    NamedMethod("base", "full", None, True),
    NamedMethod("retrofit", "full", None, False),
    *(NamedMethod("base", policy, budget, False) for policy in ("h2o", "snapkv") for budget in ("4", "bytes:retrofit")),
]


def answers_row(policy, budget, values, **changes):
    row = {
        "main_metric": "exact_match",
        "higher_is_better": True,
        "metrics": {"exact_match": float(numpy.mean(values))},
    }
    return plain_row(policy, budget, values, **row, **{"task": "recall", **changes})


def rows_of(num_contexts, lost):
    """Return rows of a full cache, a retrofit and H2O that lose these shares of the answers to 8 questions a text."""
    right = numpy.ones(8 * num_contexts)
    contexts = [index // 8 for index in range(len(right))]

    def losing(share):
        values, draw = right.copy(), numpy.random.default_rng(0)
        values[draw.choice(len(values), size=round(share * len(values)), replace=False)] = 0
        return values.tolist()

    learned = {"model": "retrofit", "learned": True, "key": "retrofit", "requested_ratio": 4.0, "reference": "base"}
    return [
        answers_row("full", None, right.tolist(), contexts=contexts),
        answers_row("full", None, losing(lost[0]), contexts=contexts, **learned),
        answers_row("h2o", "4", losing(lost[1]), contexts=contexts),
    ]


def judged(text, num_contexts, *lost):
    return Claim.parse(text).judge(to_frame(rows_of(num_contexts, lost)), "base")


def test_a_claim_that_the_samples_carry_is_true():
    found = judged(WITHIN, 150, 0.005, 0.5)
    assert found.standing == "true" and str(found).startswith(f"true: {WITHIN}: 0.5 ± ")
    assert "at most" in str(found) and "(150 texts)" in str(found)
    better = judged("retrofit better than h2o at recall", 150, 0.005, 0.5)
    assert better.standing == "true" and re.search(
        r"points better, at least 4\d(\.\d)? points better with", str(better)
    )
    assert judged("h2o/4 within 60 points of base at recall", 150, 0.005, 0.5).standing == "true"


def test_a_claim_that_the_samples_contradict_is_false():
    found = judged("h2o within 3 points of full at recall", 32, 0.0, 0.5)
    assert found.standing == "false" and "at least" in str(found) and "(32 texts)" in str(found)
    assert judged("base/h2o/4 better than retrofit at recall", 32, 0.0, 0.5).standing == "false"


def test_too_few_samples_carry_no_claim_and_it_says_how_many_would():
    found = judged(WITHIN, 16, 0.01, 0.5)
    assert found.standing == "not carried" and found.lost.value < 0.03 < found.lost.upper
    needed = found.contexts_needed
    assert needed > 16 and f"it would need {needed:,} texts ({8 * needed:,} samples)" in str(found)
    # as many texts of the same spread do carry it
    rows = rows_of(16, (0.01, 0.5))
    more, once = -(-needed // 16), rows[0]["contexts"]
    for row in rows:
        row["sample_values"] = row["sample_values"] * more
        row["contexts"] = [context + 16 * copy for copy in range(more) for context in once]
        row["samples"] *= more
    again = Claim.parse(WITHIN).judge(to_frame(rows), "base")
    assert again.standing == "true" and again.lost.num_contexts >= needed


def test_of_a_spread_too_large_to_tell_no_margin_is_said():
    found = judged(WITHIN, 4, 0.01, 0.5)
    assert found.standing == "not carried" and found.lost.reach > 0.3
    assert "; 4 texts cannot tell; it would need" in str(found) and "margin" not in str(found)


def test_bounds_are_rounded_to_their_safe_side():
    scale = Scale("exact_match", "hidden", True)
    assert scale.bound(0.49961, is_lower=True) == "49.9 points" and scale.bound(0.49961) == "50.0 points"
    assert Scale("loss", None, False).bound(0.1299, is_lower=True) == "0.12 nats"
    lost = Estimate(0.6, (0.1 / 1.64) ** 2, num_contexts=90, by_seed=(0.6,))
    found = Judgement(Claim.parse("full better than h2o at recall"), lost, scale, 90, ())
    assert 0.499 < lost.lower < 0.5 and "at least 49.9 points worse" in str(found)


def test_a_single_text_carries_nothing():
    found = judged(WITHIN, 1, 0.0, 0.5)
    assert found.standing == "not carried" and found.contexts_needed is None and "unknown" in str(found)


def test_a_claim_prints_what_was_held_and_fails_where_that_is_less_than_nine_tenths():
    rows, texts = rows_of(150, (0.005, 0.5)), "retrofit within 3 points of h2o at recall"
    said = str(Claim.parse(texts).judge(to_frame(rows), "base"))
    assert said.startswith("true: ") and said.endswith(
        "; retrofit held CR 3.96 of 4 claimed; h2o held CR 3.96 of 4 claimed."
    )
    for end, mean, standing in ((3.6, 2.0, "true"), (2.0, 3.6, "true"), (3.59, 3.5, "not compressed")):
        rows[1] |= {"achieved_ratio": end, "mean_achieved_ratio": mean}
        assert Claim.parse(WITHIN).judge(to_frame(rows), "base").standing == standing
    one_removed = 4800 / 4799
    rows[1] |= {"achieved_ratio": one_removed, "mean_achieved_ratio": one_removed}
    assert str(Claim.parse(WITHIN).judge(to_frame(rows), "base")) == (
        f"not compressed: {WITHIN}; retrofit held CR 1.00 of 4 claimed; at least 90% of a CR must be held."
    )
    better = Claim.parse("full better than retrofit at recall").judge(to_frame(rows), "base")
    assert better.standing == "not compressed"
    # of three models of one variant the one that compressed least counts
    seeds = [rows[1] | {"key": f"{seed}", "model": f"s{seed}", "achieved_ratio": 4.0} for seed in range(3)]
    for seed, row in enumerate(seeds):
        row["settings"] = {"model": {"path": "", "variant": "retrofit", "seed": seed}}
    assert Claim.parse(WITHIN).judge(to_frame([rows[0], *seeds]), "base").standing == "true"
    seeds[1] |= {"achieved_ratio": 3.0}
    assert "retrofit held CR 3.00 of 4" in str(Claim.parse(WITHIN).judge(to_frame([rows[0], *seeds]), "base"))


def test_a_ratio_in_a_models_name_is_a_claim_of_its_own():
    rows = rows_of(150, (0.005, 0.5))
    for name, standing in (
        ("cr4", "true"),
        ("best_cr4", "true"),
        ("cr8", "not compressed"),
        ("cr8_best", "not compressed"),
    ):
        rows[1] |= {"model": name, "target_counts": "decided"}  # whose own ratio is none of what is held
        assert (
            Claim.parse(f"{name} within 3 points of full at recall").judge(to_frame(rows), "base").standing == standing
        )
    rows[1] |= {"model": "micro8", "achieved_ratio": 1.5, "mean_achieved_ratio": 1.5}
    found = Claim.parse("micro8 within 3 points of full at recall").judge(to_frame(rows), "base")
    assert found.standing == "true" and str(found).endswith("; micro8 held CR 1.50.")


def test_a_budget_in_bytes_is_held_to_whole_pages_and_reading_less_is_no_smaller_cache():
    rows, text = rows_of(150, (0.005, 0.02)), "h2o within 9 points of full at recall"
    rows[2] |= {"budget": "bytes:cr8", "requested_bytes_per_token": 100.0}
    for size, standing in ((114.0, "true"), (116.0, "not compressed")):
        rows[2]["mean_bytes_allocated_per_token"] = size
        found = Claim.parse(text).judge(to_frame(rows), "base")
        assert found.standing == standing and f"h2o held CR 3.96 in {size:.0f}% of the bytes asked for" in str(found)
    rows[2] |= {"budget": "4", "achieved_ratio": 1.0, "mean_achieved_ratio": 1.0, "requested_bytes_per_token": None}
    assert Claim.parse(text).judge(to_frame(rows), "base").standing == "not compressed"
    rows[2]["entries_unread"] = 4800
    found = Claim.parse(text).judge(to_frame(rows), "base")
    assert found.standing == "true" and "of 4 claimed, and left 4,800 entries unread" in str(found)


def test_differences_are_paired_by_sample_and_seed():
    draw, rows = numpy.random.default_rng(1), []
    shared = {"higher_is_better": False, "task": "text"}
    full = [draw.normal(3, 1, 40) for _ in range(2)]
    lost = [draw.normal(0.1, 0.01, 40) for _ in range(2)]
    for seed in range(2):
        for name, values, learned in (("base", full[seed], False), ("cr4", full[seed] + lost[seed], True)):
            settings = {"model": {"path": name, "variant": name, "seed": seed}}
            rows.append(plain_row("full", None, values.tolist(), key=f"{name} {seed}", model=f"{name}-s{seed}"))
            rows[-1] |= {"learned": learned, "settings": settings, "requested_ratio": 4.0 if learned else 1.0, **shared}
    found = Claim.parse("cr4 within 0.15 nats of full at text").judge(to_frame(rows), "base")
    assert found.lost == difference([whole + more for whole, more in zip(full, lost)], full)
    assert found.lost.by_seed == pytest.approx([more.mean() for more in lost]) and found.standing == "true"
    with pytest.raises(ValueError, match="loss is not measured in points"):
        Claim.parse("cr4 within 3 points of full at text").judge(to_frame(rows), "base")


def test_every_seed_counts_on_either_side():
    """A policy on one model beside three retrofits, of which the last alone is worse."""
    draw, shared = numpy.random.default_rng(1), {"higher_is_better": False, "task": "text"}
    values, rows = draw.normal(3, 1, 40), []
    rows.append(plain_row("h2o", "4", values.tolist(), key="h2o") | shared)
    for seed, lost in enumerate((-0.5, -0.5, 0.1)):
        settings = {"model": {"path": "cr4", "variant": "cr4", "seed": seed}}
        learned = {"learned": True, "settings": settings, "requested_ratio": 4.0}
        of_seed = (values + lost + draw.normal(0, 0.01, 40)).tolist()
        rows.append(plain_row("full", None, of_seed, key=f"cr4 {seed}", model=f"cr4-s{seed}") | learned | shared)
    frame = to_frame(rows)
    ahead, behind = (Claim.parse(text).judge(frame, "base") for text in (
        "cr4 better than h2o at text", "h2o better than cr4 at text",
    ))  # fmt: skip
    assert behind.lost.value == pytest.approx(-ahead.lost.value) and behind.lost.value > 0.29
    assert len(behind.lost.by_seed) == 3 and behind.standing == "not carried"


def test_other_metrics_have_their_name_before_the_task():
    rows = rows_of(40, (0.0, 0.5))
    for row in rows:
        row["samples_by_metric"] = {"last": [1.0] * 320}
        row["metrics"]["last"] = 1.0
    frame = to_frame(rows)
    assert Claim.parse("h2o within 10 points of full at last of recall").judge(frame, "base").standing == "true"
    assert Claim.parse("h2o within 10 points of full at recall").judge(frame, "base").standing == "false"
    with pytest.raises(ValueError, match="first was not measured"):
        Claim.parse("h2o within 10 points of full at first of recall").judge(frame, "base")


@pytest.mark.parametrize(
    "text", ["retrofit is good", "a within points of b at c", "a within 3 percent of b at c", "a better than b", ""]
)
def test_what_is_no_claim_gets_the_grammar(text):
    with pytest.raises(ValueError, match="expected 'METHOD within NUMBER points of METHOD at TASK'"):
        Claim.parse(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("retrofit within 3 points of full at recal", "did you mean 'recall'"),
        ("retrofitt within 3 points of full at recall", "did you mean 'retrofit'"),
        ("h2o within 3 points of full at recall", "say base/h2o/4 or base/h2o/bytes:retrofit"),
        ("full better than full at recall", "with itself"),
        ("base better than full at recall", "with itself"),
    ],
)
def test_names_are_checked_before_anything_is_measured(text, error):
    with pytest.raises(ValueError, match=error):
        Claim.parse(text).check(METHODS, {"recall": "exact_match"}, "base")


def test_full_is_the_full_cache_of_the_reference():
    several = [*METHODS, NamedMethod("control", "full", None, True)]
    Claim.parse(WITHIN).check(several, {"recall": None}, "control")
    with pytest.raises(ValueError, match="'full' is not one method"):
        Claim.parse(WITHIN).check(several, {"recall": None}, None)
