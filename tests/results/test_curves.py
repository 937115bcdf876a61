"""What is drawn of a run's log: each step once, and the ratio that its target counts."""

from matplotlib import image

from dmc.results.curves import draw_curves, read_log

FIRST = "step,train/loss,train/target_ratio,validation/loss\n0,3.0,1.0,\n1,2.5,1.5,\n1,,,2.9\n2,2.4,2.0,\n"
SECOND = "step,train/loss,train/target_ratio,train/decided_ratio\n2,2.3,2.0,1.8\n3,2.2,2.0,1.9\n"


def test_a_log_has_each_step_once_with_what_the_last_start_wrote(tmp_path):
    for version, text in ((2, ""), (10, SECOND), (9, FIRST)):
        (tmp_path / f"logs/version_{version}").mkdir(parents=True)
        (tmp_path / f"logs/version_{version}/metrics.csv").write_text(text)
    log = read_log(tmp_path)
    assert log["train/loss"].to_dict() == {0: 3.0, 1: 2.5, 2: 2.3, 3: 2.2}
    assert log["validation/loss"].dropna().to_dict() == {1: 2.9}
    assert log["train/decided_ratio"].dropna().to_dict() == {2: 1.8, 3: 1.9}
    (tmp_path / "curves.png").write_bytes(draw_curves(log, "decided_ratio"))
    (tmp_path / "other.png").write_bytes(draw_curves(log, "achieved_ratio"))
    drawn, other = (image.imread(tmp_path / name) for name in ("curves.png", "other.png"))
    assert (drawn[:, : drawn.shape[1] // 2] == other[:, : drawn.shape[1] // 2]).all()  # the loss
    assert (drawn != other).any()


def test_a_run_that_has_logged_nothing_has_no_curves(tmp_path):
    assert read_log(tmp_path).empty
