"""Lines of a table: over seeds, beside the full cache and beside baselines in as many bytes."""

import csv
import math

import numpy
import pandas
import pytest
from report_rows import compare_row, plain_row, write_report

from dmc.results.equal_bytes import asked_of
from dmc.results.measurement import to_frame
from dmc.results.statistics import beside_baselines, pareto_front, summarize
from dmc.results.store import Store
from dmc.results.tables import format_tables

NOISE = numpy.random.default_rng(0).normal(0, 0.002, 16)


def row(model, policy, budget, size, lost, **changes):
    """A finished cell whose 16 samples, two of each file, lose `lost` over the full cache's."""
    values = [2.0 + index / 8 + lost + (NOISE[index] if lost else 0.0) for index in range(16)]
    row = plain_row(policy, budget, values, key=f"{model} {policy} {budget}", model=model, method=f"{model}, {policy}")
    row |= {"learned": model.startswith("merge"), "reference": "control", "provenance": {}}
    row |= {"achieved_ratio": 1100 / size, "mean_achieved_ratio": 1000 / size, "mean_bytes_allocated_per_token": size}
    row |= {"contexts": [index // 2 for index in range(16)], "mean_tokens": 512.0}
    row |= {"metrics": row["metrics"] | {"far_loss": 3.0}, "requested_ratio": float(budget or 1)}
    row |= {"requested_ratio": 1000 / size} if row["learned"] else {}
    row["settings"] = {"model": {"variant": model[:-3], "seed": int(model[-1])} if "-s" in model else {}}
    return row | changes


def study(seeds=3):
    rows = []
    for seed in range(seeds):
        shift = 0.001 * seed
        rows += [
            row(f"control-s{seed}", "full", None, 1000, 0.0),
            row(f"control-s{seed}", "h2o", "2", 500, 0.1 + shift), row(f"control-s{seed}", "h2o", "4", 250, 0.3),
            row(f"control-s{seed}", "snapkv", "4", 900, 0.05),
            row(f"merge-s{seed}", "full", None, 250, 0.05 + shift),
        ]  # fmt: skip
    return to_frame(rows)


def test_seeds_of_a_method_are_one_line_beside_the_full_caches_of_their_own_seeds():
    summary = summarize(study()).set_index("title")
    assert list(summary.index) == [
        "control, full", "control, h2o, CR 2", "control, h2o, CR 4", "control, snapkv, CR 4", "merge, learned, CR 4",
    ]  # fmt: skip
    merge, full = summary.loc["merge, learned, CR 4"], summary.loc["control, full"]
    assert merge["lost"] == pytest.approx(0.051 + NOISE.mean())
    assert (merge["seeds"], merge["seeds_worse"], merge["standing"]) == (3, 3, "worse")
    assert (merge["contexts"], merge["samples"], merge["share"]) == (8, 16, 0.25)
    assert merge["lost_lower"] < merge["lost"] < merge["lost_upper"] and merge["margin"] == 0.02
    assert (full["standing"], bool(full["is_full"]), full["asked"]) == ("", True, "full cache")
    assert math.isnan(full["lost"]) and math.isnan(full["seeds_worse"])
    assert len(merge["keys"]) == 3
    assert pareto_front(summary.reset_index()) == [4, 3, 0]


def test_ratios_of_seeds_are_all_tokens_over_all_entries():
    ratios = {"control-s0": 2.0, "control-s1": 8.0}
    rows = [row(name, "full", None, 1000, 0.0, mean_achieved_ratio=ratio) for name, ratio in ratios.items()]
    (line,) = summarize(to_frame(rows)).to_dict("records")
    assert line["achieved_ratio"] == pytest.approx(2 / (1 / 2 + 1 / 8))


def test_baselines_are_compared_in_as_many_bytes_sample_by_sample():
    beside = beside_baselines(study()).set_index("baseline")
    assert list(beside.index) == ["h2o"]  # snapkv has no budget so small, though it was asked for CR 4
    h2o = beside.loc["h2o"]
    assert bool(h2o["is_best"]) and (h2o["seeds"], h2o["seeds_ahead"]) == (3, 3)
    assert h2o["baseline_lost"] == pytest.approx(0.3 + NOISE.mean())
    assert h2o["gap"] == pytest.approx(0.25 - 0.001) and h2o["gap_error"] < 0.002
    assert h2o["baseline_bytes"] == 1.0


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [((500, 254, 246), 254), ((500, 240), None), ((300, 280), 280), ((251, 249.5, 280), 249.5), ((244, 270), 270)],
)
def test_only_what_was_measured_in_as_many_bytes_is_a_baseline(sizes, chosen):
    """Within 2 %, the nearest; or what pages leave, a little more; never between two budgets, and never in fewer."""
    rows = [row("control", "full", None, 1000, 0.0), row("merge", "full", None, 250, 0.1)]
    rows += [row("control", "h2o", str(index + 2), size, 1 / size) for index, size in enumerate(sizes)]
    beside = beside_baselines(to_frame(rows))
    assert [line["baseline_bytes"] for line in beside.to_dict("records")] == ([chosen / 250] if chosen else [])
    if chosen:
        assert beside["baseline_lost"][0] == pytest.approx(1 / chosen + NOISE.mean())
        words = f" in {chosen / 250 - 1:.0%} more bytes" if chosen > 255 else ""
        assert f" worse than h2o{words} |" in "".join(format_tables(to_frame(rows)))


def test_a_budget_in_bytes_is_met_by_bytes_and_a_ratio_by_a_ratio():
    """A method that grows with what it generates may need a much higher ratio to hold as many bytes."""
    asked = {"requested_ratio": 16.0, "requested_bytes_per_token": 250.0}
    rows = [row("one", "full", None, 1000, 0.0), row("one", "late", "4", 500, 0.1)]
    rows += [row("one", name, "4", size, 0.1, **asked) for name, size in (("met", 252), ("paged", 261))]
    rows.append(row("one", "old", "4", 261, 0.1, requested_ratio=16.0))  # which did not tell what was requested
    for late_row in rows[2:]:
        late_row["budget"] = "bytes:0.25"
    lines = {line.split(" | ")[0]: line for line in format_tables(to_frame(rows))[0].splitlines()}
    assert "↓" in lines["| one, late"] and "| 500 |" in lines["| one, late"]
    assert all("↓" not in lines[f"| one, {name}"] for name in ("met", "paged", "old"))
    assert "| 252 |" in lines["| one, met"] and "| 261 ≠ +4.4% |" in lines["| one, paged"]
    assert "| 261 |" in lines["| one, old"]


def test_a_target_of_decided_tokens_is_not_missed_by_what_a_cache_still_holds():
    """The last `delay` tokens come on top of it, so that a short text holds more than the target says."""
    rows = [row("control", "full", None, 1000, 0.0)]
    for counts in ("held", "decided"):
        rows.append(row(f"merge {counts}", "full", None, 250, 0.1, requested_ratio=8.0, target_counts=counts))
    lines = {line.split(" | ")[0]: line for line in format_tables(to_frame(rows))[0].splitlines()}
    assert "4.00 ↓" in lines["| merge held, learned"]
    assert "4.00" in lines["| merge decided, learned"] and "↓" not in lines["| merge decided, learned"]


def test_a_heading_names_the_full_cache_that_all_lines_are_compared_with():
    rows = [row("control", "full", None, 1000, 0.0), row("merge", "full", None, 250, 0.1)]
    assert "| against control, full | verdict |" in format_tables(to_frame(rows))[0]
    rows += [row("other", "full", None, 1000, 0.0), row("other", "h2o", "4", 250, 0.1)]
    table = format_tables(to_frame(rows))[0]
    assert "| against its full cache |" in table and "(control, full) |" in table and "(other, full) |" in table


def test_the_table_puts_a_compressed_model_beside_its_best_baseline_and_counts_seeds():
    table, legend = format_tables(study())
    (merge,) = [line for line in table.splitlines() if line.startswith("| merge, learned |")]
    assert "worse, 3 of 3 seeds worse" in merge and "better than h2o, 3 of 3 seeds better |" in merge
    assert "nan" not in table and legend.startswith("±")
    asked = study(1).assign(question="hidden", split=None)
    mixed = pandas.concat([study(1), asked.assign(task="other")])
    assert "nan" not in "".join(format_tables(mixed)) and "question hidden" in "".join(format_tables(mixed))


def test_the_table_says_which_margin_too_few_samples_carry():
    right = [float(index % 4 > 0) for index in range(16)]
    scores = {"sample_values": right, "metrics": {"match": 0.75}, "main_metric": "match", "higher_is_better": True}
    scores |= {"contexts": []}
    rows = [row("one", "full", None, 1000, 0.0, **scores), row("one", "h2o", "4", 250, 0.0, **scores)]
    table = format_tables(to_frame(rows))[0]
    error = numpy.std(right, ddof=1) / 4
    assert summarize(to_frame(rows))["value_error"][1] == pytest.approx(error)  # the jackknife's, no bound
    (h2o,) = [line for line in table.splitlines() if line.startswith("| one, h2o |")]
    assert "| +0.0000 ± 0.0000 | 16 samples carry a margin of 18.8 points; 2 points would need 150 |" in h2o


def test_a_model_that_is_measured_again_counts_once_by_its_newest_row():
    rows = [row("control", "full", None, 1000, 0.0), row("merge", "full", None, 250, 0.1)]
    (_, merge) = summarize(to_frame([*rows, row("merge", "full", None, 500, 0.2, key="again")])).to_dict("records")
    assert (merge["seeds"], merge["bytes_per_token"], merge["achieved_ratio"]) == (1, 500, 2.0)
    assert merge["lost"] == pytest.approx(0.2 + NOISE.mean())


def test_the_tasks_of_a_benchmark_are_one_mean_with_its_error():
    rows = [
        row("one", policy, budget, size, lost, task=task, benchmark="both", key=f"{policy}{task}")
        for policy, budget, size, lost in (("full", None, 1000, 0.0), ("h2o", "4", 250, 0.3))
        for task in ("a", "b")
    ]
    summary = summarize(to_frame(rows))
    assert list(summary["task"]) == ["both", "both"] and list(summary["samples"]) == [32, 32]
    alone = summarize(to_frame(rows[::2]))
    assert summary["lost"][1] == pytest.approx(alone["lost"][1])
    assert summary["lost_error"][1] == pytest.approx(alone["lost_error"][1] / 2**0.5)


def test_a_frame_has_a_line_for_each_metric_and_place(tmp_path):
    table = {"length": [8, 16], "depth": [0, 1], "samples": [[2, 2], [2, 0]], "loss": [[1.0, 2.0], [3.0, None]]}
    store = Store(tmp_path / "cells.jsonl")
    assert store.frame().empty
    store.append(row("one", "h2o", "4", 250, 0.3, by_length_and_depth=table))
    store.append(row("one", "tova", "4", 250, 0.3, status="failed"))
    frame = store.frame()
    assert (frame["metric"] + " " + frame["by"]).tolist() == ["loss ", "far_loss ", *["loss length depth"] * 3]
    assert frame[["length", "depth", "value"]][2:].values.tolist() == [[8, 0, 1], [8, 1, 2], [16, 0, 3]]
    assert set(frame["policy"]) == {"h2o"} and set(frame["folder"]) == {str(tmp_path)}
    assert (frame["bytes_per_token"][0], frame["end_ratio"][0], asked_of(frame.iloc[0])) == (250, 4.4, "CR 4")


def test_the_table_ranks_methods_within_each_budget(tmp_path):
    gates = {"key": "gates", "model": "small", "method": "small, learned", "learned": True, "requested_ratio": 4.0}
    rows = [plain_row("full", None, [1.0, 2.0]), plain_row("full", None, [1.0, 2.2], **gates)]
    losses = {"tova 4": [2.0, 2.5], "h2o 4": [1.5, 2.5], "h2o tokens:128": [3.0, 3.0], "h2o tokens:256": [2.5, 2.5]}
    rows += [plain_row(*name.split(), values) for name, values in (losses | {"h2o 2": [1.0, 2.1]}).items()]
    table = write_report(rows, tmp_path)
    assert (tmp_path / "table.md").read_text() == table + "\n"
    *_, heading, verdict = table.split("\n\n")
    assert heading == "### Verdict" and verdict.startswith("text: small at CR 4: ")
    header, _, *lines = [line[2:-2].split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert header[:6] == ["method", "requested", "achieved CR", "loss", "against base, full", "verdict"]
    assert [f"{method} at {asked}: {against}" for method, asked, _, _, against, *_ in lines] == [
        "base, full at full cache: -",
        "base, h2o at CR 2: +0.0500 ± 0.0500",
        "small, learned at CR 4: +0.1000 ± 0.1000",
        "base, h2o at CR 4: +0.5000 ± 0.0000",  # (1.5, 2.5) beside (1, 2)
        "base, tova at CR 4: +0.7500 ± 0.2500",
        "base, h2o at 256 tokens: +1.0000 ± 0.5000",
        "base, h2o at 128 tokens: +1.5000 ± 0.5000",
    ]
    h2o = {"achieved CR": "3.90", "loss": "2.0000", "verdict": "worse", "CR at the end": "3.96"}
    h2o |= {"cache bytes/token": "110", "peak cache bytes": "1,000"}
    assert dict(zip(header, lines[3], strict=True)).items() >= h2o.items()
    with (tmp_path / "results.csv").open() as file:
        written = {row["title"]: row for row in csv.DictReader(file)}
    tova = written["base, tova, CR 4"]
    assert (len(written), tova["value"], tova["lost"], tova["standing"]) == (7, "2.25", "0.75", "unknown")
    assert (tmp_path / "measurements.csv").is_file()


def lost(rows, reference=None):
    """What the first row loses over the full cache; None where there is none for it."""
    found = summarize(to_frame(rows), reference)["lost"][0]
    return None if pandas.isna(found) else found


def test_nothing_is_compared_across_settings_samples_or_models():
    new = plain_row("h2o", "4", [2.0], key="2")
    full = plain_row("full", None, [1.0], key="4")
    assert lost([new, full]) == 1.0
    assert lost([new, {**full, "model": "another"}]) is None
    assert lost([new, {**full, "settings": {"task": {"digits": 4}}}]) is None
    assert lost([new, {**full, "samples_key": "others"}]) is None
    gates = plain_row("full", None, [3.0], learned=True, model="small", key="5")
    control = {**full, "model": "control", "sample_values": [1.5], "key": "6"}
    assert lost([gates, full]) == 2.0
    assert lost([gates, full, control]) is None  # which of them, nothing says
    assert lost([{**gates, "reference": "base"}, full, control]) == 2.0
    assert lost([gates, full, control], "control") == 1.5
    assert lost([full, control, gates], "control") == -0.5  # another full cache, where the user names the yardstick
    assert lost([full, control, gates]) is None and lost([new, full, control], "control") == 1.0


@pytest.mark.parametrize(("right", "says"), [(0.25, True), (0.75, False)])
def test_a_task_that_the_full_cache_does_not_solve_is_marked(right, says):
    answers = [float(index < 16 * right) for index in range(16)]
    rows = [plain_row(policy, budget, answers, key=policy) for policy, budget in (("full", None), ("h2o", "4"))]
    rows = [
        row | {"higher_is_better": True, "main_metric": "exact_match", "metrics": {"exact_match": right}}
        for row in rows
    ]
    title = format_tables(to_frame(rows))[0].partition("\n")[0]
    assert ("solves less than 0.5" in title) == says
    losses = [row | {"main_metric": "loss", "metrics": {"loss": right}} for row in rows]
    assert "solves less" not in format_tables(to_frame(losses))[0]


@pytest.mark.parametrize("names", [("needle:{} (seed=0)", "needle:{} (seed=1)"), ("needle:long:{}", "needle:short:{}")])
def test_known_and_hidden_questions_are_columns_of_a_table_for_each_task(names):
    cells = [(name.format(asked), asked) for name in names for asked in ("known", "hidden")]
    rows = [
        compare_row(policy, ratio, task, question=asked)
        for task, asked in cells
        for policy, ratio in (("full", 1.0), ("h2o", 4.0), ("tova", 4.0))
    ]
    tables = [text for text in format_tables(to_frame(rows)) if "exact_match, known" in text]
    titles = [text.partition(": exact_match")[0] for text in tables]
    assert titles == ["### " + name.replace(":{}", "") for name in names]
    assert all("exact_match, hidden" in text and text.count("| base") == 3 for text in tables)
