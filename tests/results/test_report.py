import csv
import dataclasses
import itertools
import json
import random
import re
import statistics
from html import unescape

import pytest
from report_rows import PROVENANCE, benchmark_rows, compare_grid, compare_row, evaluate_row, write_rows
from scripts_here import run_script

from dmc.results.report import read_folders, write_page
from dmc.results.report.curve_drawing import draw_curves
from dmc.results.report.judgement import is_tied, pareto_front
from dmc.results.report.quality_drawing import draw_quality_over_bytes
from dmc.results.report.verdict import caveats, judge, judge_task

QUICKSTART = {
    **{"base": {"loss": 3.49, "achieved_ratio": 1.0, "bytes_per_token": 2052.0}},
    **{"control": {"loss": 3.28, "achieved_ratio": 1.0, "bytes_per_token": 2052.0}},
    **{"final": {"loss": 3.35, "achieved_ratio": 3.99, "bytes_per_token": 713.0}},
    **{"snapshots": {"2": {"loss": 3.5, "achieved_ratio": 2.01, "bytes_per_token": 1217.0}}, "target_ratio": 4.0},
    **PROVENANCE,
}


def read(rows, folder, name="cells.jsonl"):
    return read_folders([write_rows(rows, folder / name)])


def constant_row(policy, ratio, quality, noise=0.0, **changes):
    """A row whose samples alternate around a quality."""
    values = [quality + noise * (-1) ** index for index in range(32)]
    return compare_row(policy, ratio, sample_values=values, metrics={"loss": statistics.fmean(values)}, **changes)


@pytest.mark.parametrize("task", ["loss", "needle"])
def test_the_front_is_what_no_other_result_dominates(tmp_path, task):
    draw = random.Random(0)
    rows = [compare_row(name, ratio, task) for name in "abcdefgh" for ratio in (2.0, 3.0)]
    for row in rows:
        row["mean_bytes_allocated_per_token"], row["metrics"] = (
            draw.randint(1, 9),
            {row["main_metric"]: draw.randint(1, 9)},
        )
    results = read(rows, tmp_path).results

    def better(one, other):
        sign = 1 if one.higher_is_better else -1
        gains = one.bytes_per_token <= other.bytes_per_token, sign * one.quality >= sign * other.quality
        same = (one.bytes_per_token, one.quality) == (other.bytes_per_token, other.quality)
        return all(gains) and not same

    expected = {(r.bytes_per_token, r.quality) for r in results if not any(better(other, r) for other in results)}
    front = pareto_front(results, lambda each: each.bytes_per_token)
    assert {(r.bytes_per_token, r.quality) for r in front} == expected
    assert len(front) == len(expected)


def test_ties_are_paired_symmetric_and_hold_within_two_standard_errors(tmp_path):
    rows = [compare_row(policy, 4.0) for policy in ("h2o", "tova", "snapkv", "cam", "cake")]
    results = read(rows, tmp_path).results
    for one, other in itertools.combinations(results, 2):
        differences = [a - b for a, b in zip(one.sample_values, other.sample_values, strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        expected = abs(statistics.fmean(differences)) <= 2 * error
        assert is_tied(one, other) is is_tied(other, one) is expected
    alone = dataclasses.replace(results[0], sample_values=[1.0])
    assert is_tied(alone, dataclasses.replace(results[1], sample_values=[2.0])) is None
    assert is_tied(dataclasses.replace(results[0], samples_key=None), results[1]) is None


def test_the_verdict_names_the_smallest_cache_that_is_shown_to_be_as_good(tmp_path):
    rows = [
        constant_row("full", 1.0, 3.0),
        constant_row("small_and_noisy", 8.0, 3.01, noise=0.1),
        constant_row("smallest_and_worse", 16.0, 3.2, noise=0.1),
        constant_row("large", 2.0, 3.0),
        constant_row("small_and_sure", 4.0, 3.01, noise=0.01),
    ]
    headline, detail = judge_task(read(rows, tmp_path).results)
    assert headline == "small_and_sure at CR 4 is the smallest cache shown to be as good as the full one, to 0.02."
    assert "loss 3.01 (+0.01 ± 0.002), 532 bytes/token (26% of the full cache's), CR 4.00 achieved" in detail
    assert "worse than the full cache by up to 0.014" in detail
    headline, _ = judge_task(read([rows[0], rows[2]], tmp_path).results)
    assert headline == "every compressed cache is worse than the full one; smallest_and_worse at CR 16 is the closest."
    headline, _ = judge_task(read(rows[:3], tmp_path).results)  # it may lose 0.046: nothing shows that it does not
    assert headline == (
        "no smaller cache is shown to be as good as the full one, to 0.02; of 1 the samples cannot tell, more of them "
        "would. small_and_noisy at CR 8 is the closest."
    )


def test_few_samples_show_nothing_and_many_do(tmp_path):
    def compared(count):
        values = [1.0] * (count - count // 4) + [0.0] * (count // 4)  # the very same answers right
        rows = [
            compare_row(name, ratio, "needle", sample_values=values, metrics={"exact_match": statistics.fmean(values)})
            for name, ratio in (("full", 1.0), ("h2o", 4.0))
        ]
        rows.append(compare_row("tova", 4.0, "needle", sample_values=[0.0] * count, metrics={"exact_match": 0.0}))
        return judge_task(read(rows, tmp_path).results)[0]

    assert compared(8).startswith("no smaller cache is shown to be as good as the full one, to 0.02; of 1 the samples")
    assert compared(200).startswith("h2o at CR 4 is the smallest cache shown to be as good as the full one")


def test_a_task_that_nobody_answers_is_passed_by_nobody(tmp_path):
    rows = [constant_row("full", 1.0, 3.0), constant_row("h2o", 4.0, 3.5), constant_row("tova", 4.0, 3.0)]
    failed = {"sample_values": [0.0] * 32, "metrics": {"exact_match": 0.0}}
    rows += [
        compare_row(name, ratio, "needle", **failed) for name, ratio in (("full", 1.0), ("h2o", 4.0), ("tova", 4.0))
    ]
    headline = judge(read(rows, tmp_path)).headline
    assert headline.startswith(
        "tova at CR 4 is the smallest cache shown to be as good as the full one on each of the 1"
    )
    assert headline.endswith("Left out, for they tell nothing apart: needle.")
    lucky = compare_row("h2o", 4.0, "needle", sample_values=[1.0] + [0.0] * 31, metrics={"exact_match": 1 / 32})
    headline, _ = judge_task(read([rows[3], lucky], tmp_path).results)
    assert headline == "the full cache has exact_match 0; this task tells nothing about smaller ones."
    few = {"sample_values": [1.0] * 2 + [0.0] * 30, "metrics": {"exact_match": 2 / 32}}
    headline, _ = judge_task(read([compare_row("full", 1.0, "needle", **few), rows[4]], tmp_path).results)
    assert headline == "the full cache has exact_match 0.0625; this task tells nothing about smaller ones."
    headline = judge(
        read([*rows[3:], *(row | {"key": row["key"] + "2", "task": "more"} for row in rows[3:])], tmp_path)
    )
    assert headline.headline.startswith("None of the 2 tasks tells methods apart")


def test_without_standard_errors_nothing_is_said_of_ties(tmp_path):
    (tmp_path / "results.json").write_text(
        json.dumps(QUICKSTART | {"training_free": {"h2o": QUICKSTART["final"] | {"loss": 3.36}}})
    )
    points = dict(judge(read_folders([tmp_path])).points)
    assert "No other is tied with it" not in points["At CR 3.99"]
    assert points["At CR 3.99"].endswith("Without standard errors nothing says whether these tie with it: h2o.")


def test_a_retrofit_is_compared_with_the_reference_it_was_measured_with(tmp_path):
    stock = [compare_row("full", model=name) for name in ("base", "control")]
    for row, loss in zip(stock, (3.0, 2.5), strict=True):
        row |= {"sample_values": [loss] * 32, "metrics": {"loss": loss}}
    values = {"sample_values": [3.25] * 32, "metrics": {"loss": 3.25}}
    retrofit = compare_row("full", 4.0, model="retrofit", own_gates=True, **values)

    def over(rows, reference=None):
        folder = write_rows(rows, tmp_path / "cells.jsonl")
        return next(row.over_full_cache for row in read_folders([folder], reference).results if row.own_gates)

    assert over([*stock, retrofit]) is None  # any stock model is not its base
    assert over([*stock, retrofit | {"reference": "control"}]) == 0.75
    assert over([*stock, retrofit | {"reference": "control"}], "base") == 0.25
    assert over([stock[0], retrofit]) == 0.25


def test_the_verdict_says_what_rows_cannot_tell(tmp_path):
    (alone,) = [judge_task(read([compare_row("h2o", 4.0)], tmp_path).results)]
    assert alone[0].startswith("only h2o at CR 4 has a row")
    without = judge_task(read([compare_row("h2o", 4.0), compare_row("tova", 4.0)], tmp_path).results)
    assert without[0].startswith("without a full cache nothing says what compression costs")
    same = judge_task(read([constant_row(name, 2.0, 3.0) for name in ("h2o", "tova", "cam")], tmp_path).results)
    assert same[0] == "all 3 rows have loss 3; this task tells nothing apart."


def test_the_verdict_of_a_budget_tells_ties_and_who_did_not_hold_it(tmp_path):
    rows = [
        constant_row("full", 1.0, 3.0),
        constant_row("good", 4.0, 3.1),
        constant_row("tied", 4.0, 3.12, noise=0.1),
        constant_row("bad", 4.0, 4.0, noise=0.1),
        constant_row("reader", 4.0, 3.0, mean_achieved_ratio=1.0),
    ]
    points = dict(judge(read(rows, tmp_path)).points)
    assert points["At CR 4"].startswith("good is best of 3 that held it, with loss 3.1 (+0.1 ± 0")
    assert "Tied with it, within noise: tied." in points["At CR 4"]
    assert points["At CR 4"].endswith("Not ranked, for they did not hold it (achieved CR): reader (1.00).")


def test_missing_and_failed_cells_are_counted_and_listed(tmp_path):
    rows = [row for row in compare_grid() if row["key"] != "base quest 8 loss"]
    findings = read(rows, tmp_path)
    assert [(each.method, each.budget, each.task) for each in findings.failures] == [("base, tova", "CR 8", "needle")]
    assert caveats(findings)[0] == "Cells (method x budget x task) without a figure: 2, of which 1 failed."


def test_a_benchmark_of_several_tasks_is_one_result_with_its_full_cache(tmp_path):
    values = {"full": (0.6, 0.8), "h2o": (0.5, 0.7)}
    rows = [
        evaluate_row(policy, 1.0 if policy == "full" else 4.0, "cs", f"cs_{part}", values[policy][index])
        for policy in values
        for index, part in enumerate("ab")
    ]
    rows.append(evaluate_row("tova", 4.0, "cs", "cs_a", 0.6))
    rows.append(evaluate_row("tova", 4.0, "cs", "cs_b", 0.6, status="failed", error="OSError: no data"))
    findings = read(rows, tmp_path)
    full, h2o = findings.results
    assert (full.task, full.quality, h2o.quality) == ("cs", pytest.approx(0.7), pytest.approx(0.6))
    assert h2o.over_full_cache == pytest.approx(-0.1)
    parts = [row["sample_values"] for row in rows[:4]]  # paired: 3 of 32 answers differ in each task
    errors = [
        statistics.stdev([one - other for one, other in zip(full, own, strict=True)]) / 32**0.5
        for full, own in zip(parts[:2], parts[2:], strict=True)
    ]
    assert all(0.04 < error < 0.06 for error in errors)
    assert h2o.over_full_cache_error == pytest.approx((errors[0] ** 2 + errors[1] ** 2) ** 0.5 / 2)
    assert [failure.error for failure in findings.failures] == ["cs_b: OSError: no data"]


def test_of_a_benchmark_the_newest_measurement_of_a_command_counts(tmp_path):
    rows = benchmark_rows()
    findings = read([{**rows[0], "tokens_per_second": 1.0}, *rows], tmp_path, "results.jsonl")
    assert len(findings.speeds) == 9 and len(findings.largest_batches) == 1
    assert findings.speeds[0].measurement.tokens_per_second == rows[0]["tokens_per_second"]
    assert "1 earlier measurements" in findings.notes[0]
    assert "times hugging face, static cache" in judge(findings).headline


def test_jobs_of_a_benchmarks_sweep_stand_apart(tmp_path):
    rows = []
    for kernels, speed in (("cpu", 10.0), ("reference", 1.0)):
        settings = {"kernels": kernels, "model": {"path": None}, "output": f"out/{kernels}"}
        rows += [{**row, "tokens_per_second": speed, "settings": settings} for row in benchmark_rows()]
    findings = read(rows, tmp_path, "results.jsonl")
    assert len(findings.speeds) == 18 and not findings.notes
    commands = [source.command.rpartition("4096 ")[2] for source in findings.sources]
    assert commands == ["(kernels=cpu)", "(kernels=reference)"]
    again = read([*rows, *rows[:10]], tmp_path, "results.jsonl")
    assert len(again.speeds) == 18 and "10 earlier measurements" in again.notes[0]


def test_the_quickstart_is_compared_with_its_control(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(QUICKSTART))
    history = tmp_path / "retrofit/heatmaps/ratios.jsonl"
    history.parent.mkdir(parents=True)
    history.write_text('{"step": 5, "held": [[1.0, 1.0]]}\n{"step": 9, "held": [[0.5, 0.25]]}\n')
    findings = read_folders([tmp_path])
    assert judge(findings).headline.endswith("retrofit at CR 3.99 is the closest.")
    assert findings.head_ratios[0].values == [[2.0, 4.0]]
    assert {result.name: result.requested_ratio for result in findings.results if result.own_gates} == {
        "snapshot 2": 2.0,
        "retrofit": 3.99,  # held over the text, as much as the training-free methods were given
    }


def test_the_same_task_in_two_folders_is_told_apart(tmp_path):
    folders = [write_rows([compare_row("full")], tmp_path / name / "cells.jsonl") for name in ("one", "two")]
    assert list(read_folders(folders).tasks) == ["loss", f"loss ({tmp_path / 'two'})"]


def test_a_damaged_line_is_told_and_left_out(tmp_path):
    folder = write_rows([compare_row("full"), compare_row("h2o", 2.0)], tmp_path / "cells.jsonl")
    with (folder / "cells.jsonl").open("a") as file:
        file.write('{"key": "torn", "meth')
    findings = read_folders([folder])
    assert len(findings.results) == 2
    assert f"{folder}: 1 damaged lines are left out" in findings.notes


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (None, "", "holds no results"),
        ("cells.jsonl", "", "holds no results"),
        ("cells.jsonl", '{"key": 1, "loss": 2}\n', "holds no results"),
        ("cells.jsonl", json.dumps(compare_row("h2o", 2.0, metrics=7)) + "\n", "a row is not of this project"),
        ("results.jsonl", "[1, 2]\n", "a row is not of this project"),
        ("results.json", '{"accuracy": 1}', "a row is not of this project"),
        ("results.json", "no json", "a row is not of this project"),
        ("notes.txt", "hello", "holds no results"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path, file, content, says):
    if file is not None:
        (tmp_path / file).write_text(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=says):
        read_folders([tmp_path])
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(ValueError, match="is no folder"):
        read_folders([tmp_path / "nowhere"])
    assert not (tmp_path / "nowhere").exists()


def test_a_far_outlier_is_drawn_at_the_edge_and_told(tmp_path):
    rows = [constant_row(f"p{index}", 4.0, 3.0 + 0.01 * index) for index in range(8)]
    results = read([*rows, constant_row("lost", 4.0, 90.0)], tmp_path).results
    canvas = draw_quality_over_bytes("loss", results)
    assert canvas.caption.endswith("Far outside, triangles at the edge: lost at CR 4 (90).")
    assert canvas.axes.get_ylim()[1] < 4
    assert "Far outside" not in draw_quality_over_bytes("loss", results[:-1]).caption


def test_names_of_users_are_escaped_and_nothing_is_loaded(tmp_path):
    name = "<script>alert('$x_1$')</script>&\"]]>"
    rows = [compare_row("full"), *(compare_row(name, ratio, "<b>task</b>") for ratio in (2.0, 4.0))]
    rows.append(compare_row("full", 4.0, "<b>task</b>", model=name, own_gates=True))
    rows.append({**rows[1], "key": "x", "budget": "8", "status": "failed", "error": "<img src=x onerror=alert(1)>"})
    page = write_page(read(rows, tmp_path), tmp_path / "report", title=f"{name}").read_text()
    assert page.count("<script") == 1 and "<img" not in page and "<b>" not in page
    assert name in unescape(page)
    loads = re.findall(r"""<[^>]*\s(?:src|href|xlink:href|action)="([^"]*)"|url\(([^)]+)\)|(@import)""", page)
    assert {"".join(parts) for parts in loads if not "".join(parts).startswith("#")} == {"data:,"}


def test_plots_and_data_lie_beside_the_page(grid_page):
    findings, folder = read_folders([grid_page.parent.parent / "cells"]), grid_page.parent
    pictures, text = sorted(path.name for path in (folder / "plots").iterdir()), unescape(grid_page.read_text())
    assert len(pictures) == text.count("<figure>") == 12
    assert pictures[0] == "01-loss-quality-against-bytes.png"
    assert all((folder / "plots" / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)
    with (folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["quality"]) for line in lines] == [result.quality for result in findings.results]
    data = json.loads((folder / "report.json").read_text())
    assert data["verdict"]["headline"] == judge(findings).headline
    assert len(data["results"]) == len(findings.results) == 87
    assert all(f"{row['metrics'][row['main_metric']]:.4f}" in text for row in compare_grid() if row["status"] == "done")
    assert PROVENANCE["command"] in text
    assert "ValueError: a budget of 1 entry has no room for the newest token" in text


def test_plots_of_an_earlier_page_are_replaced(tmp_path):
    folder = tmp_path / "report/plots"
    folder.mkdir(parents=True)
    for name in ("2024-holiday.png", "mine.png"):
        (folder / name).write_bytes(b"")
    write_page(read(compare_grid(), tmp_path / "grid"), tmp_path / "report")
    before = {path.name for path in folder.iterdir()}
    write_page(read([compare_row("full")], tmp_path / "rows"), tmp_path / "report")
    left = {path.name for path in folder.iterdir()}
    assert {"mine.png", "2024-holiday.png"} < left and len(left) < len(before)


def test_the_script_writes_a_page(tmp_path, monkeypatch, capsys):
    folder = write_rows([compare_row("full"), compare_row("h2o", 2.0)], tmp_path / "compare" / "cells.jsonl")
    monkeypatch.chdir(tmp_path)
    assert run_script("report.py", f"folders=[{folder}]", "output=page") == ""
    assert capsys.readouterr().out.startswith("page/report.html")
    assert (tmp_path / "page/report.html").is_file()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["folders=[empty]"], "error: empty holds no results"),
        (["folders=[]"], "error: folders is empty"),
        (["folders=empty,other"], "error: empty holds no results"),
        ([], "error: give a value for folders"),
    ],
)
def test_the_script_refuses_before_it_writes(tmp_path, monkeypatch, settings, says):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run_script("report.py", *settings, "output=other").startswith(says)
    assert not (tmp_path / "other").exists()


def test_the_loss_of_every_method_is_drawn_by_position(tmp_path):
    rows = [compare_row("full"), compare_row("h2o", 4.0), evaluate_row("tova", 4.0, "cs", "cs_a", 0.6)]
    findings = read(rows, tmp_path)
    assert [curve.title for curve in findings.curves] == ["full cache", "h2o at CR 4"]
    for curve, row in zip(findings.curves, rows, strict=False):
        assert (curve.axis, curve.metric) == ("position", "loss")
        assert (curve.places, curve.values) == (row["by_position"]["position"], row["by_position"]["loss"])
    canvas = draw_curves(findings.curves)
    drawn = {line.get_gid(): list(line.get_ydata()) for line in canvas.axes.lines}
    assert [drawn[mark] for mark in canvas.tips] == [findings.curves[1].values, findings.curves[0].values]
    assert "h2o at CR 4: loss" in " ".join(text for _, text in canvas.tips.values())


def test_what_the_page_holds_is_counted_in_words(tmp_path):
    rows = [compare_row("full"), next(row for row in compare_grid() if row["status"] == "failed")]
    assert ">1 result, 1 failed cell ·" in write_page(read(rows, tmp_path), tmp_path / "report").read_text()
