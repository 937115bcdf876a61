import copy
import functools
import math
import re
from pathlib import Path

import pytest
import torch
from launching import Ranks, logged, spoil_loss

from dmc.config import build_config
from dmc.models import load_model
from dmc.training.checkpoints import load_checkpoint_model, read_header, saved_checkpoints
from dmc.training.config import RunConfig
from dmc.training.module import RetrofitModule
from dmc.training.optimizer_step import NonFiniteError
from dmc.training.run import train


@pytest.fixture
def spoil_gradients(monkeypatch):
    """Make the gradients of some steps not a number, by their first micro-batch; tell what each step saw."""
    plain = RetrofitModule.training_step

    def arrange(*steps):
        seen = {}

        def training_step(self, schedule, batch):
            step = schedule.step
            is_first = step not in seen
            if is_first:
                state = self.trainer.optimizers[0].state_dict()["state"]
                seen[step] = copy.deepcopy((self.model.state_dict(), state))
            loss, metrics = plain(self, schedule, batch)
            return loss * (float("nan") if step in steps and is_first else 1.0), metrics

        monkeypatch.setattr(RetrofitModule, "training_step", training_step)
        return seen

    yield arrange
    monkeypatch.setattr(RetrofitModule, "training_step", plain)


@pytest.fixture
def run_values(run_values):
    run_values["training"] |= {"calibrate": False, "validate_every_steps": 1000}
    return run_values


def same(one, other) -> bool:
    """Whether weights and optimizer state are equal."""
    (weights, state), (others, other_state) = one, other
    return (
        state.keys() == other_state.keys()
        and all(torch.equal(weights[name], others[name]) for name in weights)
        and all(torch.equal(state[i][name], other_state[i][name]) for i in state for name in state[i])
    )


def checkpoint_step(folder: Path) -> int:
    return read_header(saved_checkpoints(folder / "checkpoints")[0]).global_step


def test_skipped_step_changes_neither_weights_nor_optimizer_but_counts(run_config, spoil_gradients, caplog):
    seen = spoil_gradients(0, 3, 5)
    run = train(run_config)
    assert all(torch.equal(seen[0][0][name], value) for name, value in seen[1][0].items())
    assert not any(value.any() for state in seen[1][1].values() for value in state.values())  # as before any step
    assert same(seen[3], seen[4]) and same(seen[5], seen[6])
    assert not any(same(seen[step], seen[step + 1]) for step in (1, 2, 4, 6))
    assert sorted(seen) == list(range(8))
    assert list(logged(run.folder, "train/skipped_steps").values()) == [1, 1, 1, 2, 2, 3, 3, 3]
    assert caplog.text.count(" is skipped (") == 3
    line = r"step 3 is skipped \(loss [\d.]+, gradient_norm nan\); rank 0 had the samples "
    assert re.search(line + r"\[12, 13\] with loss [\d.]+; \[14, 15\] with loss [\d.]+", caplog.text)


def test_too_many_in_a_row_end_the_run_with_its_state_saved_and_it_can_go_on(run_values, spoil_gradients):
    run_values["training"] |= {"max_nonfinite_steps": 2, "checkpoint_every_steps": 100}
    config = build_config(RunConfig, run_values)
    folder = Path(config.output_dir)
    seen = spoil_gradients(1, 3, 4)
    with pytest.raises(NonFiniteError, match=r"last 2 steps up to step 5 .* goes on after step 6"):
        train(config)
    assert checkpoint_step(folder) == 6  # the host hears of step 4 when step 5 is queued: that one is skipped too
    saved = load_checkpoint_model(saved_checkpoints(folder / "checkpoints")[0]).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in seen[3][0].items())
    spoil_gradients()
    train(config)
    assert list(logged(folder, "train/skipped_steps").values()) == [0, 1, 1, 2, 3, 4, 4, 4]


def test_all_ranks_skip_where_the_loss_of_one_is_not_finite(run_values, tmp_path):
    run_values["trainer"] |= {"devices": 2, "strategy": "ddp"}
    folder = Path(run_values["output_dir"])
    log = tmp_path / "ranks.log"
    with Ranks(run_values, 2, log, functools.partial(spoil_loss, step=3, on_rank=1)) as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-4000:]
    assert list(logged(folder, "train/skipped_steps").values()) == [0, 0, 0, 1, 1, 1, 1, 1]
    assert re.search(r"rank 0 had the samples \[12, 14\] with loss [\d.]+$", log.read_text(), re.MULTILINE)
    assert re.search(r"rank 1 had the samples \[13, 15\] with loss nan$", log.read_text(), re.MULTILINE)
    assert all(value.isfinite().all() for value in load_model(folder / "final").state_dict().values())


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero3"])
def test_no_sharded_strategy_steps_where_the_gradient_of_one_rank_is_not_finite(run_values, tmp_path, strategy):
    run_values["trainer"] |= {"devices": 2, "strategy": strategy}
    run_values["training"] |= {"micro_batch_size": 1}
    folder = Path(run_values["output_dir"])
    log = tmp_path / "ranks.log"
    with Ranks(run_values, 2, log, functools.partial(spoil_loss, step=3, on_rank=1, gradient=True)) as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-4000:]
    assert list(logged(folder, "train/skipped_steps").values()) == [0, 0, 0, 1, 1, 1, 1, 1]
    norms = logged(folder, "train/gradient_norm")
    assert [step for step, norm in norms.items() if not math.isfinite(norm)] == [3]
    assert all(value.isfinite().all() for value in load_model(folder / "final").state_dict().values())
