import csv
import re
import statistics
from html import unescape

import pytest
from report_rows import PROVENANCE, benchmark_rows, compare_row, write_rows
from scripts_here import run_script

from dmc.results.plots import draw_places, draw_quality
from dmc.results.report import read_folders, write_page
from dmc.results.verdict import verdicts_of


def read(rows, folder):
    return read_folders([write_rows(rows, folder / "cells.jsonl")])


def constant_row(policy, ratio, quality, noise=0.0, **changes):
    """A row whose samples alternate around a quality."""
    values = [quality + noise * (-1) ** index for index in range(32)]
    return compare_row(policy, ratio, sample_values=values, metrics={"loss": statistics.fmean(values)}, **changes)


def test_a_model_stands_beside_the_best_baseline(tmp_path):
    rows = [constant_row("full", 1.0, 3.0), constant_row("good", 4.0, 3.1), constant_row("bad", 4.0, 3.4, noise=0.1)]
    rows.append(constant_row("full", 4.0, 3.05, model="retrofit", learned=True, noise=0.01))
    findings = read(rows, tmp_path)
    best = findings.baselines[findings.baselines["is_best"]].iloc[0]
    assert (best["variant"], best["baseline"], best["gap"]) == ("retrofit", "good", pytest.approx(0.05))
    text = write_page(findings, tmp_path / "report").read_text()
    assert re.search(r">0\.0500 ± 0\.00\d\d better than good<", text)


def test_questions_known_and_hidden_stand_side_by_side(tmp_path):
    rows = []
    for question, right in (("known", 30), ("hidden", 4)):
        for policy, ratio, count in (("full", 1.0, 32), ("h2o", 4.0, right)):
            values = {"sample_values": [1.0] * count + [0.0] * (32 - count), "metrics": {"exact_match": count / 32}}
            rows.append(compare_row(policy, ratio, f"needle:{question}", question=question, **values))
    text = write_page(read(rows, tmp_path), tmp_path / "report").read_text()
    columns = re.findall(r"<button type=\"button\">([^<]*)", text[text.index("<h2>All tasks</h2>") :])
    assert columns[2:4] == ["needle:known (exact_match)", "needle:hidden (exact_match)"]
    assert "0.9375 ± " in text and "0.1250 ± 0.0594 ✗" in text
    assert len(re.findall(">known</td>", text)) == len(re.findall(">hidden</td>", text)) == 2


def test_jobs_of_a_benchmarks_sweep_stand_apart_and_the_same_again_counts_once(tmp_path):
    rows = [row for kernels in ("cpu", "reference") for row in benchmark_rows(kernels=kernels)]
    findings = read([*rows, *rows[:10]], tmp_path)
    assert len(findings.speeds) == 20 and findings.speeds["largest_batch"].notna().sum() == 2
    assert set(findings.speeds["task"]) == {"speed (kernels=cpu)", "speed (kernels=reference)"}
    gains = findings.speeds[findings.speeds["batch"] == 16].set_index("policy")["gain"]
    big = {row["policy"]: row["metrics"]["tokens_per_second"] for row in rows[:9] if row["coordinates"]["batch"] == 16}
    gain = big["engine CR 4"] / big["hugging face, static cache"]
    assert gains["engine CR 4"].tolist() == [pytest.approx(gain)] * 2
    text = write_page(findings, tmp_path / "report").read_text()
    assert text.count("Tokens/s against latency") >= 2 and "speed (kernels=cpu)" in text


def test_a_far_outlier_is_drawn_at_the_edge_and_told(tmp_path):
    rows = [constant_row(f"p{index}", 4.0, 3.0 + 0.01 * index) for index in range(8)]
    summary = read([*rows, constant_row("lost", 4.0, 90.0)], tmp_path).summary
    plot = draw_quality(summary)
    assert plot.caption.endswith("Outliers, drawn as triangles at the edge: lost at CR 4 (90).")
    assert plot.axes.get_ylim()[1] < 4
    assert "Outliers" not in draw_quality(summary[:-1]).caption


def test_errors_are_drawn_and_fit_on_the_plot(tmp_path):
    summary = read([constant_row(f"p{index}", 4.0, 3.0 + 0.01 * index) for index in range(4)], tmp_path).summary
    summary["value_error"] = [0.5, None, 0.0, 0.1]
    plot = draw_quality(summary)
    bars = sorted(bar.get_segments()[0][:, 1].tolist() for bar in plot.axes.collections)
    assert bars == [pytest.approx([2.5, 3.5]), pytest.approx([2.93, 3.13])]
    assert plot.axes.get_ylim()[0] < 2.5 and plot.axes.get_ylim()[1] > 3.5 and "Bars: standard errors." in plot.caption


def test_names_of_users_are_escaped_and_nothing_is_loaded(tmp_path):
    name = "<script>alert('$x_1$')</script>&\"]]>"
    rows = [compare_row("full"), *(compare_row(name, ratio, "<b>task</b>") for ratio in (2.0, 4.0))]
    rows.append(compare_row("full", 4.0, "<b>task</b>", model=name, learned=True))
    rows.append({**rows[1], "key": "x", "budget": "8", "status": "failed", "error": "<img src=x onerror=alert(1)>"})
    page = write_page(read(rows, tmp_path), tmp_path / "report", title=f"{name}").read_text()
    assert page.count("<script") == 1 and "<img" not in page and "<b>" not in page
    assert name in unescape(page)
    loads = re.findall(r"""<[^>]*\s(?:src|href|xlink:href|action)="([^"]*)"|url\(([^)]+)\)|(@import)""", page)
    assert {"".join(parts) for parts in loads if not "".join(parts).startswith("#")} == {"data:,"}


def test_plots_and_data_lie_beside_the_page(small_grid_page):
    findings, folder = read_folders([small_grid_page.parent.parent / "cells"]), small_grid_page.parent
    pictures, text = sorted(path.name for path in (folder / "plots").iterdir()), unescape(small_grid_page.read_text())
    assert len(pictures) == text.count("<figure>") == 7
    assert pictures[0] == "001-loss-quality-against-bytes.png"
    assert all((folder / "plots" / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))  # of all drawings together
    with (folder / "results.csv").open() as file:
        assert [float(line["value"]) for line in csv.DictReader(file)] == list(findings.summary["value"])
    sentences = [*verdicts_of(findings.summary, findings.baselines)]
    assert len(sentences) == 2 and all(words in text for words in sentences) and len(findings.summary) == 15
    assert all(f"{value:.4f}" in text for value in findings.summary["value"])
    assert PROVENANCE["command"] in text
    assert "failed: base, tova, CR 8, needle: ValueError: a budget of 1 entry has no room for the newest token" in text


def test_the_script_replaces_an_earlier_page_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page/plots").mkdir(parents=True)
    for name in ("2024-holiday.png", "mine.png"):
        (tmp_path / "page/plots" / name).touch()
    rows, counts = [compare_row("full", task=task) for task in ("loss", "needle")], []
    for shown in (rows, rows[:1]):
        folder = write_rows(shown, tmp_path / "compare" / "cells.jsonl")
        assert run_script("report.py", f"folders=[{folder}]", "output=page") == ""
        assert capsys.readouterr().out.startswith("page/report.html") and (tmp_path / "page/report.html").is_file()
        names = {path.name for path in (tmp_path / "page/plots").iterdir()}
        counts.append(len(names - {"mine.png", "2024-holiday.png"}))
    assert {"mine.png", "2024-holiday.png"} < names and counts[1] < counts[0]
    error = run_script("report.py", f"folders=[{folder}]", f"output={folder}")
    assert "holds measurements, whose results.csv would be replaced: choose another folder" in error
    assert not (folder / "report.html").exists()
    (tmp_path / "page/files.json").write_text("[]")
    error = run_script("report.py", f"folders=[{folder}]", "output=page", "leaderboard=board")
    assert "page/files.json is not of a page that was written here" in error and not (tmp_path / "board").exists()


def test_files_of_others_are_not_replaced_by_a_page(tmp_path):
    findings, folder = read([compare_row("full")], tmp_path), tmp_path / "paper"
    (folder / "plots").mkdir(parents=True)
    for name in ("results.csv", "report.html", "files.json"):
        (folder / name).write_text("[]")
        with pytest.raises(FileExistsError, match=f"{name} is not of a page"):
            write_page(findings, folder)
        assert [path.name for path in folder.iterdir() if path.is_file()] == [name]
        (folder / name).unlink()
    (folder / "plots" / "001-mine.png").write_text("mine")
    for _ in range(2):
        write_page(findings, folder)
        assert (folder / "plots" / "001-mine.png").read_text() == "mine"
    (folder / "files.json").unlink()  # as earlier versions have left it
    write_page(findings, folder)


def test_a_page_that_cannot_be_drawn_leaves_the_earlier_one(tmp_path, monkeypatch):
    findings, folder = read([compare_row("full"), compare_row("h2o", 4.0)], tmp_path), tmp_path / "page"
    write_page(findings, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr("dmc.results.report.page._draw_all", lambda _: [1 // 0])
    with pytest.raises(ZeroDivisionError):
        write_page(findings, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_loss_of_every_method_is_drawn_by_position(tmp_path):
    rows = [compare_row("full"), compare_row("h2o", 4.0)]
    places = read(rows, tmp_path).places
    places = places[places["by"] == "position"]
    (plot,) = draw_places(places)
    drawn = {line.get_gid(): list(line.get_ydata()) for line in plot.axes.lines}
    assert [drawn[mark] for mark in plot.tips] == [row["by_position"]["loss"] for row in reversed(rows)]
    assert "h2o at CR 4: loss" in " ".join(text for _, text in plot.tips.values())


def test_rows_of_something_else_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no results: expected a folder"):
        read([compare_row("h2o", 2.0, metrics=7)], tmp_path)
