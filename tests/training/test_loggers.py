import shutil
import sys
from io import StringIO

import pytest

from dmc.config import build_config
from dmc.results.provenance import git_commit
from dmc.training import loggers
from dmc.training.config import RunConfig
from dmc.training.run import train

WANDB = {"_target_": "dmc.training.loggers.wandb_logger", "project": "dmc-test"}


def in_folder(values, folder):
    logger = {"wandb": {**values["logger"]["wandb"], "save_dir": str(folder)}}
    return {**values, "logger": logger, "output_dir": str(folder)}


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    """Nobody is logged in, whoever runs the tests; a prompt would fail."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(sys, "stdin", StringIO())


@pytest.mark.parametrize(
    ("environment", "logged_in", "chosen"),
    [(None, False, "offline"), ("offline", True, "offline"), ("disabled", False, "disabled")],
)
def test_wandb_has_nothing_to_ask_for(environment, logged_in, chosen, logged_out, monkeypatch, tmp_path):
    import wandb

    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    if logged_in:
        monkeypatch.setattr(wandb, "login", lambda **options: options == {"prompt": False, "verify": False})
    assert loggers.wandb_logger(str(tmp_path))._wandb_init["mode"] == chosen


@pytest.fixture
def tracked_values(logged_out, pictures, run_values):
    """Settings of a short run that logs to wandb."""
    run_values["logger"] = {"wandb": {**WANDB, "save_dir": run_values["output_dir"]}}
    run_values["training"] |= {"stages": {"retrofit": {"length": "2 steps"}}, "calibrate": False}
    return run_values


def test_every_start_logs_to_the_same_wandb_run_with_settings_and_images(tracked_values):
    config = build_config(RunConfig, tracked_values)
    run = train(config)
    shutil.rmtree(run.final)  # so that the run starts again, at its last step
    train(config)
    ids = {path.name.rpartition("-")[2] for path in (run.folder / "wandb").glob("offline-run-*")}
    assert ids == {(run.folder / loggers.WANDB_ID).read_text()}
    first = min((run.folder / "wandb").glob("offline-run-*"), key=lambda path: path.name)
    assert len(list(first.rglob("*.png"))) == 2
    content = next(first.glob("*.wandb")).read_bytes()
    figures = ("train/loss", "train/gradient_norm", "train/tokens_per_second", "validation/loss")
    for text in (*figures, "learning_rate", "cache_folder", f"commit {git_commit()}"):
        assert text.encode() in content, text


@pytest.mark.slow
def test_runs_of_one_process_are_runs_of_their_own_at_wandb(tracked_values, tmp_path):
    import wandb

    for name in ("one", "other"):
        train(build_config(RunConfig, in_folder(tracked_values, tmp_path / name)))
        assert wandb.run is None
        assert list((tmp_path / name / "wandb").glob("offline-run-*/*.wandb"))
