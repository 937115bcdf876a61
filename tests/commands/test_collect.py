"""Curves and tables of runs, whatever version of the program they are of."""

import json

from dmc.commands.report import collect

LOG = "step,train/loss,train/target_ratio,train/achieved_ratio\n1,2.0,1.0,1.0\n2,1.9,2.0,1.8\n3,1.8,4.0,3.5\n"


def test_a_run_with_settings_of_another_version_does_not_stop_the_others(tmp_path):
    for name, compression in {"old": {"target_ratio": 4.0, "forgotten": True}, "control": None}.items():
        log = tmp_path / name / "logs" / "version_0"
        log.mkdir(parents=True)
        (log / "metrics.csv").write_text(LOG)
        (tmp_path / name / "run.json").write_text(json.dumps({"config": {"compression": compression, "gone": 1}}))
    assert "not finished: control, old" in collect(tmp_path)
    assert all((tmp_path / name / "curves.png").stat().st_size > 10_000 for name in ("old", "control"))
