import csv
import json

import pytest

from dmc.training.collect import Result, collect, format_table, write_results


@pytest.fixture
def sweep(tmp_path):
    """Two finished runs, one with a snapshot, and one that has not finished."""
    for run, ratio, loss in (("cr8", 8.0, 2.5), ("cr2", 2.0, 2.0), ("cr4", None, None)):
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.json").write_text("{}")
        for name, target in (("final", ratio), ("snapshots/cr3", 3.0 if run == "cr8" else None)):
            if target is not None:
                folder = tmp_path / run / name
                folder.mkdir(parents=True)
                metrics = {"achieved_ratio": target - 0.125, "validation_loss_nats_per_token": loss}
                if run == "cr8":  # has test text: nothing was chosen on that
                    metrics |= {"test_achieved_ratio": target - 0.125, "test_loss_nats_per_token": loss}
                    metrics |= {"achieved_ratio": 1.0, "validation_loss_nats_per_token": 0.1}
                record = {"metrics": metrics, "compression": {"target_ratio": target}}
                (folder / "retrofit.json").write_text(json.dumps(record))
    return tmp_path


def test_every_exported_model_is_collected_by_ratio(sweep):
    results, unfinished = collect(sweep)
    assert results == [
        Result("cr2", "final", 2.0, 1.875, 2.0, "validation"),
        Result("cr8", "cr3", 3.0, 2.875, 2.5, "test"),
        Result("cr8", "final", 8.0, 7.875, 2.5, "test"),
    ]
    assert unfinished == ["cr4"]


def test_results_are_written_as_table_csv_and_plot(sweep):
    results, _ = collect(sweep)
    write_results(results, sweep)
    assert (sweep / "results.md").read_text() == format_table(results) + "\n"
    assert "| cr8 | final | 8 | 7.88 | 2.5000 | test |" in format_table(results)
    with (sweep / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["model"], float(row["loss"])) for row in rows] == [
        ("cr2", "final", 2.0), ("cr8", "cr3", 2.5), ("cr8", "final", 2.5),
    ]  # fmt: skip
    assert (sweep / "results.png").read_bytes().startswith(b"\x89PNG")


def test_folder_without_runs_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        collect(tmp_path)
