import os
import signal
from pathlib import Path

import pytest
import torch
from launching import logged

from dmc.config import build_config
from dmc.training.callbacks.preemption import PreemptedError
from dmc.training.callbacks.validation import RATIOS_NAME, Validation, append_ratios, draw_heatmap, read_ratios
from dmc.training.config import RunConfig
from dmc.training.run import train


def test_history_outlives_a_restart_and_agrees_with_what_is_logged(run_values, monkeypatch, pictures):
    run_values["training"] |= {"validate_every_steps": 2, "checkpoint_every_steps": 100}
    config = build_config(RunConfig, run_values)
    plain = Validation.log_score

    def stop_at_four(self, trainer, score):
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        plain(self, trainer, score)

    monkeypatch.setattr(Validation, "log_score", stop_at_four)
    with pytest.raises(PreemptedError):
        train(config)
    folder = train(config).folder
    steps, held = read_ratios(folder / "heatmaps" / RATIOS_NAME)
    assert steps == [2, 4, 6, 8] and held.shape == (4, 2, 2)
    ratios = logged(folder, "validation/achieved_ratio")
    assert [1 / float(slots.mean()) for slots in held] == pytest.approx([ratios[step] for step in steps], rel=1e-6)
    assert (folder / "heatmaps" / "evolution.png").stat().st_size > 0


def test_step_validated_again_counts_as_the_later_line_says(tmp_path):
    for step, share in ((4, 0.9), (8, 0.8), (4, 0.5)):
        append_ratios(tmp_path / RATIOS_NAME, step, torch.full((3, 2), share))
    steps, held = read_ratios(tmp_path / RATIOS_NAME)
    assert steps == [4, 8]
    torch.testing.assert_close(held[:, 0, 0], torch.tensor([0.5, 0.8]))


def test_long_histories_of_large_models_are_drawn(tmp_path):
    held = torch.rand(300, 80, 8, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.1
    path = tmp_path / "evolution.png"
    draw_heatmap(1 / held.mean(-1).T, path, "CR of each layer", "training step", range(0, 3000, 10))
    assert path.stat().st_size > 10_000
    assert Path(path).read_bytes()[:4] == b"\x89PNG"


def test_a_line_that_was_torn_stops_no_run(tmp_path, caplog):
    path = tmp_path / RATIOS_NAME
    append_ratios(path, 4, torch.full((3, 2), 0.9))
    with path.open("a") as file:
        file.write('{"step": 8, "held": [[0.')  # by a full disk
    append_ratios(path, 8, torch.full((3, 2), 0.8))
    steps, held = read_ratios(path)
    assert steps == [4, 8] and held.shape == (2, 3, 2)
    assert f"{path}, line 2 is damaged" in caplog.text
