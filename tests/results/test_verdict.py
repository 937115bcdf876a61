"""The verdict's sentences: their numbers beside a naive oracle, and what is true of small stores."""

import itertools
import statistics

import numpy
import pytest
import scipy.stats
from report_rows import plain_row

from dmc.results.measurement import to_frame
from dmc.results.statistics import beside_baselines, summarize
from dmc.results.verdict import verdicts_of


def row(model, policy, budget, size, values, *, learned=False, answers=False, **changes):
    """A finished cell over texts of one sample each, unless `contexts` says otherwise."""
    row = plain_row(policy, budget, values, key=f"{model} {policy} {budget}", model=model, method=f"{model}, {policy}")
    row |= {"learned": learned, "reference": "control", "mean_bytes_allocated_per_token": size}
    row |= {"requested_ratio": 1000 / size if learned else float(budget or 1)}
    if answers:
        row |= {"main_metric": "exact_match", "higher_is_better": True, "question": "hidden"}
        row |= {"metrics": {"exact_match": statistics.fmean(values)}}
    row["settings"] = {"model": {"variant": model[:-3], "seed": int(model[-1])} if "-s" in model else {}}
    return row | changes


def around(mean, spread, count=16):
    """Values of samples on both sides of a mean."""
    return [mean + spread * (-1) ** index for index in range(count)]


def full(mean=3.0, **changes):
    return row("control", "full", None, 1000, around(mean, 0.0, changes.pop("count", 16)), **changes)


def retrofit(mean=3.1, spread=0.02, size=250, model="retrofit", **changes):
    return row(model, "full", None, size, around(mean, spread, changes.pop("count", 16)), learned=True, **changes)


def policy(name, mean, size=250, spread=0.02, model="control", budget="4", **changes):
    return row(model, name, budget, size, around(mean, spread), **changes)


def verdicts(rows, reference=None):
    frame = to_frame(rows)
    return [*verdicts_of(summarize(frame, reference), beside_baselines(frame, reference))]


def test_the_numbers_are_those_of_naive_paired_means():
    draw, texts, asked = numpy.random.default_rng(0), 16, 8
    skill = {"control": 0.95, "retrofit": 0.93, "snapkv": 0.4, "tova": 0.3}
    answers = {name: (draw.random((texts, asked)) < share).astype(float) for name, share in skill.items()}
    shared = {"answers": True, "contexts": [index // asked for index in range(texts * asked)]}
    flat = {name: right.ravel().tolist() for name, right in answers.items()}
    rows = [row("control", "full", None, 1000, flat["control"], **shared)]
    rows.append(row("retrofit", "full", None, 250, flat["retrofit"], learned=True, **shared))
    rows += [row("control", name, "4", 252, flat[name], **shared) for name in ("tova", "snapkv")]

    def percent(found):
        """Mean and standard error over texts, which are independent."""
        of_texts = 100 * found.mean(1)
        return of_texts.mean(), of_texts.std(ddof=1) / texts**0.5

    values = {name: "{:.1f} ± {:.1f} %".format(*percent(right)) for name, right in answers.items()}
    lost, error = percent(answers["control"] - answers["retrofit"])
    gap, gap_error = percent(answers["retrofit"] - answers["snapkv"])
    deviation = error * texts**0.5

    def carried(count):
        """3 texts of the number may be lost wholly, or 2 more than a Student's bound says."""
        return max(scipy.stats.t.ppf(0.95, count - 1) * deviation / count**0.5 + 200 / count, 300 / count)

    needed = next(count for count in itertools.count(2) if carried(count) <= 2)
    up = [numpy.ceil(10 * bound) / 10 for bound in (lost + carried(texts), carried(texts))]
    assert 0 < lost < carried(texts) and needed > texts
    assert verdicts(rows) == [
        f"text: retrofit at CR 4: {values['retrofit']} of hidden questions in 25 % of the bytes; control with a full "
        f"cache: {values['control']}; best training-free method in as many bytes: snapkv, {values['snapkv']} (128 "
        f"samples of 16 texts, one model). Against the full cache it is {lost:.1f} ± {error:.1f} points worse, and at "
        f"most {up[0]:.1f} points worse with 95 % confidence: 16 texts carry a margin of {up[1]:.1f} points; 2 points "
        f"would need {needed}. Against snapkv it is {gap:.1f} ± {gap_error:.1f} points better."
    ]


BESIDE_FULL = "control with a full cache: 3.000 ± 0.000 nats"
ALONE = "no training-free method is compared in as many bytes (16 samples, one model)."
AGAINST = "Against the full cache"
LOST = f"{AGAINST} it is 0.1000 ± 0.0052 nats worse."


def reached(loss, error=0.005):
    return f"text: retrofit at CR 4: loss {loss:.3f} ± {error:.3f} nats in 25 % of the bytes"


CASES = {
    "shown to be worse than the full cache and better than a method": (
        [full(), retrofit(), policy("h2o", 3.3, 255), policy("tova", 3.4)],
        f"{reached(3.1)}; {BESIDE_FULL}; best training-free method in as many bytes: h2o, 3.300 ± 0.005 nats (16 "
        f"samples, one model). {LOST} Against h2o it is 0.20 ± 0.00 nats better.",
    ),
    "a method in the next whole page is ahead": (
        [full(), retrofit(), policy("h2o", 3.05, 275, spread=0.01)],
        f"{reached(3.1)}; {BESIDE_FULL}; best training-free method in as many bytes (+10 %): h2o, 3.050 ± 0.003 nats "
        f"(16 samples, one model). {LOST} Against h2o it is 0.0500 ± 0.0026 nats worse.",
    ),
    "a method that cannot be told from it": (
        [full(), retrofit(), policy("h2o", 3.101, spread=-0.02)],
        f"{reached(3.1)}; {BESIDE_FULL}; best training-free method in as many bytes: h2o, 3.101 ± 0.005 nats (16 "
        f"samples, one model). {LOST} Against h2o it is 0.001 ± 0.010 nats better, which is not significant.",
    ),
    "the best of several methods is ahead by luck": (
        [full(), retrofit(3.101, spread=0.02),
         *(policy(f"p{index}", 3.09 + 0.01 * (index > 0), spread=0.0) for index in range(9))],
        f"{reached(3.101)}; {BESIDE_FULL}; best training-free method in as many bytes: p0, 3.090 ± 0.000 nats (16 "
        f"samples, one model). {AGAINST} it is 0.1010 ± 0.0052 nats worse. Against p0 it is 0.0110 ± 0.0052 nats "
        "worse, which is not significant.",
    ),
    "a method in other bytes is no baseline": (
        [full(), retrofit(), policy("h2o", 3.3, 500)], f"{reached(3.1)}; {BESIDE_FULL}; {ALONE} {LOST}",
    ),
    "as good": (
        [full(), retrofit(3.001)],
        f"{reached(3.001)}; {BESIDE_FULL}; {ALONE} {AGAINST} it is "
        "0.0010 ± 0.0052 nats worse, and at most 0.011 nats worse with 95 % confidence.",
    ),
    "better than the full cache": (
        [full(), retrofit(2.9)],
        f"{reached(2.9)}; {BESIDE_FULL}; {ALONE} {AGAINST} it is "
        "0.1000 ± 0.0052 nats better.",
    ),
    "too few samples": (
        [full(), retrofit(3.0, spread=0.1)],
        f"{reached(3.0, 0.026)}; {BESIDE_FULL}; {ALONE} {AGAINST} it is "
        "neither better nor worse (0.000 ± 0.026 nats), and at most 0.046 nats worse with 95 % confidence: "
        "16 samples carry a margin of 0.046 nats; 0.02 nats would need 75.",
    ),
    "a single text": (
        [full(contexts=["file"] * 16), retrofit(contexts=["file"] * 16)],
        "text: retrofit at CR 4: loss 3.100 nats in 25 % of the bytes; control with a full cache: 3.000 nats; no "
        "training-free method is compared in as many bytes (16 samples of 1 text, one model). "
        f"{AGAINST} it is 0.10 nats worse: a single text carries no margin.",
    ),
    "no values of samples": (
        [full() | {"sample_values": [], "samples": 0}, retrofit() | {"sample_values": [], "samples": 0}],
        "text: retrofit at CR 4: loss 3.100 nats in 25 % of the bytes; control with a full cache: 3.000 nats; no "
        "training-free method is compared in as many bytes. Against the full cache it is 0.10 nats worse: without its "
        "samples no margin is known.",
    ),
    "no full cache": (
        [retrofit(), policy("h2o", 3.3)],
        "text: retrofit at CR 4: loss 3.100 ± 0.005 nats in 250 bytes per token; it is compared with no full cache (16 "
        "samples, one model).",
    ),
    "several retrofits": (
        [full(), retrofit(3.0), retrofit(3.1, size=125, model="cr8"), retrofit(3.2, size=120, model="near"),
         retrofit(3.5, size=62.5, model="cr16"), retrofit(3.6, size=200, model="beaten")],
        f"{reached(3.0)}; {BESIDE_FULL}; {ALONE} {AGAINST} it is "
        "neither better nor worse (0.0000 ± 0.0052 nats), and as the best of 5 at most 0.014 nats worse with 95 % "
        "confidence. In fewer bytes: cr8 at CR 8: 3.100 ± 0.005 nats in 12 % of the bytes; cr16 at CR 16: 3.500 ± "
        "0.005 nats in 6.2 % of the bytes.",
    ),
    "no learned model": (
        [full(), policy("h2o", 3.1), policy("tova", 3.2), policy("h2o", 3.5, 125, budget="8"),
         policy("quest", 3.0, 1000)],
        f"text: h2o at CR 4: loss 3.100 ± 0.005 nats in 25 % of the bytes; {BESIDE_FULL} (16 samples, one model). "
        f"{LOST} In fewer bytes: h2o at CR 8: 3.500 ± 0.005 nats in 12 % of the bytes.",
    ),
    "two stock models": (
        [full(), policy("h2o", 3.2), policy("h2o", 3.1, model="base"),
         row("base", "full", None, 1000, around(3.0, 0.0))],
        "text: h2o on base at CR 4: loss 3.100 ± 0.005 nats in 25 % of the bytes; base with a full cache: 3.000 ± "
        f"0.000 nats (16 samples, one model). {LOST}",
    ),
    "only full caches": ([full()], None),
    "nothing to lose": (
        [full(0.05, answers=True), policy("h2o", 0.0, spread=0.0, answers=True)],
        "text: says nothing about compression: even a full cache reaches only 5.0 ± 0.0 % of hidden questions.",
    ),
    "no quality": ([full(main_metric="share_held"), policy("h2o", 0.2, main_metric="share_held")], None),
    "a metric above 1": (
        [full(40.0, main_metric="perplexity"), policy("h2o", 41.0, spread=2.0, main_metric="perplexity")],
        "text: h2o at CR 4: perplexity 41.00 ± 0.52 in 25 % of the bytes; control with a full cache: 40.00 ± 0.00 (16 "
        "samples, one model). Against the full cache it is 1.00 ± 0.52 worse.",
    ),
    "a score": (
        [full(0.5, answers=True, question=None), policy("h2o", 0.5, answers=True, question=None, spread=0.0)],
        "text: h2o at CR 4: 50.0 ± 0.0 % accuracy in 25 % of the bytes; control with a full cache: 50.0 ± 0.0 % (16 "
        "samples, one model). Against the full cache it is neither better nor worse (0.0 ± 0.0 points), and at most "
        "18.8 points worse with 95 % confidence: 16 samples carry a margin of 18.8 points; 2 points would need 150.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_words_are_true_of_a_small_store(name):
    rows, sentence = CASES[name]
    for metric in {row["main_metric"] for row in rows} - {"exact_match"}:
        for changed in rows:
            changed["metrics"] = {metric: changed["metrics"].get(metric, changed["metrics"].get("loss"))}
    assert verdicts(rows) == ([] if sentence is None else [sentence])


def test_seeds_that_are_too_far_apart_are_told():
    rows = [row(f"control-s{seed}", "full", None, 1000, around(3.0, 0.0)) for seed in range(3)]
    rows += [
        row(f"merge-s{seed}", "full", None, 250, around(3.0 + 0.1 * (seed - 1), 0.01), learned=True)
        for seed in range(3)
    ]
    reach = scipy.stats.t.ppf(0.95, 2) * 0.1 / 3**0.5
    (verdict,) = verdicts(rows, "control")
    assert "(16 samples, 3 seeds)" in verdict and "merge at CR 4: loss 3.000 ± 0.058 nats" in verdict
    assert verdict.endswith(
        f"carry a margin of {numpy.ceil(100 * reach) / 100:.2f} nats; 0.02 nats would need more seeds."
    )


def test_the_tasks_of_a_benchmark_stand_beside_the_baselines_of_all_of_them():
    rows = []
    for task, shift in (("a", 0.0), ("b", 0.5)):
        shared = {"task": task, "benchmark": "both", "members": ["a", "b"]}
        rows += [full(3.0 + shift, **shared), retrofit(3.1 + shift, **shared), policy("h2o", 3.3 + shift, **shared)]
        rows += [policy("tova", 3.2, **shared)] if task == "a" else []
    for index, found in enumerate(rows):
        found["key"] += f" {index}"
    (verdict,) = verdicts(rows)
    assert verdict.startswith("both: retrofit at CR 4: loss 3.350 ± 0.004 nats in 25 % of the bytes; control")
    assert "bytes: h2o, 3.550 ± 0.004 nats (32 samples, one model)" in verdict  # tova lacks a task


def test_of_a_spread_too_large_to_tell_the_texts_needed_are_said_and_no_bound():
    rows = [full(), retrofit(3.1, spread=1.0)]
    deviation = numpy.std(around(3.1, 1.0), ddof=1)

    def carried(count):
        return scipy.stats.t.ppf(0.95, count - 1) * deviation / count**0.5

    needed = next(count for count in itertools.count(16) if carried(count) <= 0.02)
    (verdict,) = verdicts(rows)
    assert carried(16) > 10 * 0.02 and "with 95 % confidence" not in verdict
    assert verdict.endswith(
        f"it is 0.10 ± {deviation / 4:.2f} nats worse: 16 samples cannot tell; by their spread {needed:,} would."
    )
    (line,) = summarize(to_frame(rows)).query("learned").to_dict("records")
    assert line["carried"] == pytest.approx(carried(16)) and line["upper_of_best"] == pytest.approx(0.1 + carried(16))
