import copy
import functools
import math
from pathlib import Path

import pytest
import torch
from launching import Ranks, logged, spoil_loss

from dmc.config import build_config
from dmc.models import load_model
from dmc.training.callbacks.step_metrics import NonFiniteError
from dmc.training.checkpoints import load_checkpoint_model, read_header, saved_checkpoints
from dmc.training.config import RunConfig
from dmc.training.module import RetrofitModule
from dmc.training.replay import replay
from dmc.training.run import train


@pytest.fixture
def spoil_gradients(monkeypatch):
    """Make the gradients of some steps not a number, by their first micro-batch; tell what each step saw."""
    plain = RetrofitModule.loss_at

    def arrange(*steps):
        seen = {}

        def loss_at(self, step, batch):
            if self._trainer is not None and not self.micro_batch_metrics:
                state = self.trainer.optimizers[0].state_dict()["state"]
                seen[step] = copy.deepcopy((self.model.state_dict(), state))
            loss = plain(self, step, batch)
            return loss * (float("nan") if step in steps and len(self.micro_batch_metrics) == 1 else 1.0)

        monkeypatch.setattr(RetrofitModule, "loss_at", loss_at)
        return seen

    yield arrange
    monkeypatch.setattr(RetrofitModule, "loss_at", plain)


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
    assert "step 3 is skipped (" in caplog.text and "gradient_norm nan" in caplog.text
    names = sorted(path.name for path in (run.folder / "nonfinite").iterdir())
    assert names == [f"step_000000{step}_rank0.pt" for step in (0, 3, 5)]
    kept = torch.load(run.folder / "nonfinite" / names[1], weights_only=True)
    assert (kept["step"], kept["rank"], len(kept["micro_batches"])) == (3, 0, 2)
    assert all(batch["input_ids"].shape == (2, 32) for batch in kept["micro_batches"])
    assert torch.cat([batch["position"] for batch in kept["micro_batches"]]).tolist() == [12, 13, 14, 15]


def test_too_many_in_a_row_end_the_run_with_its_state_saved_and_it_can_go_on(run_values, spoil_gradients):
    run_values["training"] |= {"max_nonfinite_steps": 2, "checkpoint_every_steps": 100}
    config = build_config(RunConfig, run_values)
    folder = Path(config.output_dir)
    seen = spoil_gradients(1, 3, 4)
    with pytest.raises(NonFiniteError, match=r"last 2 steps up to step 5 .* file=.*step_0000004_rank0.pt"):
        train(config)
    assert checkpoint_step(folder) == 6  # the host hears of step 4 when step 5 is queued: that one is skipped too
    saved = load_checkpoint_model(saved_checkpoints(folder / "checkpoints")[0]).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in seen[3][0].items())
    spoil_gradients()
    train(config)
    assert list(logged(folder, "train/skipped_steps").values()) == [0, 1, 1, 2, 3, 4, 4, 4]


def infinite_weight(checkpoint):
    model = load_checkpoint_model(checkpoint)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("inf")
    return model


def test_kept_batch_replays_to_the_figures_it_would_have_had(run_values, tmp_path, spoil_gradients, monkeypatch):
    run_values["training"] |= {"max_nonfinite_steps": 1}
    whole = train(build_config(RunConfig, dict(run_values, output_dir=str(tmp_path / "whole")))).folder
    config = build_config(RunConfig, run_values)
    spoil_gradients(3)
    with pytest.raises(NonFiniteError):
        train(config)
    spoil_gradients()
    folder = Path(config.output_dir)
    file = folder / "nonfinite" / "step_0000003_rank0.pt"
    found = replay(folder, file)
    assert (found.step, found.weights_step, found.first_nonfinite) == (3, 5, None)
    assert all(then == now for then, now in found.losses)
    norm = sum(norm**2 for norm in found.gradient_norms.values()) ** 0.5
    assert norm == pytest.approx(logged(whole, "train/gradient_norm")[3], rel=1e-5)
    loss = sum(now for _, now in found.losses) / len(found.losses)
    assert loss == pytest.approx(logged(whole, "train/loss")[3], rel=1e-6)
    assert {"model.layers.0", "model.layers.1", "model.norm"} <= set(found.gradient_norms)

    monkeypatch.setattr("dmc.training.checkpoints.load_checkpoint_model", infinite_weight)
    assert replay(folder, file).first_nonfinite == "model.layers.1.mlp.up_proj"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="is cut off"):
        replay(folder, file)
    with pytest.raises(FileNotFoundError, match="file= is one of"):
        replay(folder, folder / "nonfinite" / "other.pt")


def test_batch_that_cannot_be_kept_stops_nothing(run_values, spoil_gradients, caplog):
    run_values["training"]["stages"] = {"retrofit": {"length": "2 steps"}}
    spoil_gradients(1)
    folder = Path(run_values["output_dir"])
    folder.mkdir()
    (folder / "nonfinite").write_text("no folder")
    train(build_config(RunConfig, run_values))
    assert "step 1 is skipped" in caplog.text and "its batch could not be kept" in caplog.text


def test_all_ranks_skip_where_the_loss_of_one_is_not_finite(run_values, tmp_path):
    run_values["trainer"] |= {"devices": 2, "strategy": "ddp"}
    folder = Path(run_values["output_dir"])
    log = tmp_path / "ranks.log"
    with Ranks(run_values, 2, log, functools.partial(spoil_loss, step=3, on_rank=1)) as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-4000:]
    assert list(logged(folder, "train/skipped_steps").values()) == [0, 0, 0, 1, 1, 1, 1, 1]
    kept = [torch.load(folder / "nonfinite" / f"step_0000003_rank{rank}.pt", weights_only=True) for rank in range(2)]
    losses = torch.tensor([[batch["loss"] for batch in each["micro_batches"]] for each in kept])
    assert losses[0].isfinite().all() and losses[1].isnan().all()
    assert all(value.isfinite().all() for value in load_model(folder / "final").state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero3"])
def test_no_strategy_steps_where_a_gradient_of_one_rank_is_not_finite(run_values, tmp_path, strategy):
    run_values["trainer"] |= {"devices": 2, "strategy": strategy}
    run_values["training"] |= {"micro_batch_size": 1}
    folder = Path(run_values["output_dir"])
    log = tmp_path / "ranks.log"
    with Ranks(run_values, 2, log, functools.partial(spoil_loss, step=3, on_rank=1, gradient=True)) as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-4000:]
    assert list(logged(folder, "train/skipped_steps").values()) == [0, 0, 0, 1, 1, 1, 1, 1]
    norms = logged(folder, "train/gradient_norm")
    assert [step for step, norm in norms.items() if not math.isfinite(norm)] == [3]
    assert len(list((folder / "nonfinite").iterdir())) == 2
    assert all(value.isfinite().all() for value in load_model(folder / "final").state_dict().values())
