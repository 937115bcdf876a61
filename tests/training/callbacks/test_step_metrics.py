import pytest
import torch
from launching import CONTEXT, logged, train_ranks
from oracles.sharded_gradients import compare_norms

from dmc.config import build_config
from dmc.training.config import RunConfig
from dmc.training.run import train

FIGURES = (
    "train/loss", "train/ratio_loss", "train/noisy_ratio", "train/achieved_ratio", "train/gradient_norm",
    "train/target_ratio", "train/learning_rate", "train/neuron_multiplier",
)  # fmt: skip


def figures(folder):
    return {name: logged(folder, name) for name in FIGURES}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("deepspeed_zero3", marks=pytest.mark.slow)])
def test_logged_figures_do_not_depend_on_how_the_batch_is_split(run_values, corpus, tmp_path, strategy):
    run_values["training"] |= {"calibrate": False, "validate_every_steps": 1000}
    found = []
    for size in (1, 4):
        run_values["training"]["micro_batch_size"] = size
        run_values["output_dir"] = str(corpus / f"micro-batches of {size}")  # once for all strategies
        found.append(figures(train(build_config(RunConfig, run_values)).folder))
    run_values["training"]["micro_batch_size"] = 1
    run_values["trainer"] |= {"devices": 2, "strategy": strategy}
    run_values["output_dir"] = str(tmp_path / "ranks")
    train_ranks(run_values, 2, tmp_path / "ranks.log")
    found.append(figures(tmp_path / "ranks"))
    for other in found[1:]:
        for name in FIGURES:
            assert other[name] == pytest.approx(found[0][name], rel=1e-4), name
    assert sorted(found[0]["train/loss"]) == list(range(8))
    assert {0, 1} <= set(found[0]["train/neuron_multiplier"])
    assert sorted(found[0]["train/target_ratio"]) == sorted(found[0]["train/achieved_ratio"]) == list(range(2, 8))


def test_norm_of_sharded_gradients_is_that_of_the_whole():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [CONTEXT.Process(target=compare_norms, args=(rank, 2, store.port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
