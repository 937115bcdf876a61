"""However the weights lie over the ranks: the same losses, the same exported folder, and resuming at any number."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from launching import Ranks, expect_exact_angles, logged_losses, note_positions, train_ranks

from dmc.config import ModelConfig, RunConfig, build_config
from dmc.models import load_model
from dmc.training import EXIT_PREEMPTED, train
from dmc.training.checkpoints.generations import remove
from dmc.training.checkpoints.reading import check_fits, find_checkpoint, read_header
from dmc.training.exporter import export_checkpoint
from dmc.training.run import fresh_model

STEPS = 20
STRATEGIES = ("ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")


@pytest.fixture
def values(run_values):
    run_values["training"] |= {
        "stages": {"zero_out": {"steps": 5}, "retrofit": {"steps": STEPS - 5}},
        "batch_size": 6, "micro_batch_size": 6, "snapshot_ratios": [], "validate_every_steps": 10,
        "checkpoint_every_steps": 10,
    }  # fmt: skip
    return run_values


def on_ranks(values, count, folder, trainer, check=None, **training):
    """Train with `count` processes; `trainer` is a strategy or more settings of the trainer."""
    trainer = {"strategy": trainer} if isinstance(trainer, str) else trainer
    values = {
        **values,
        "output_dir": str(folder),
        "training": values["training"] | training,
        "trainer": values["trainer"] | {"devices": count} | trainer,
    }
    log = folder.with_suffix(".log")
    with Ranks(values, count, log, check) as ranks:
        assert ranks.join() == [0] * count, log.read_text()[-4000:]
    return folder


def forget_the_end(folder: Path) -> None:
    """Leave a run as if it had been killed between its two checkpoints."""
    for path in (folder / "checkpoints" / "last.ckpt", folder / "final"):
        remove(path)


@pytest.fixture(scope="session")
def alone_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def alone(values, alone_folder):
    """The run of one process, made once."""
    return train(build_config(RunConfig, dict(values, output_dir=str(alone_folder)))).folder


def assert_same_losses(one: Path, other: Path) -> None:
    expected, got = logged_losses(one), logged_losses(other)
    assert sorted(expected) == sorted(got) == list(range(STEPS))
    assert max(abs(got[step] - expected[step]) for step in expected) <= 1e-5


def assert_same_folder(one: Path, other: Path) -> None:
    model, same = load_model(one), load_model(other)
    assert model.compression == same.compression
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, same.state_dict()[name], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_learn_what_one_does_and_their_checkpoints_resume_on_one_and_three(values, alone, strategy, tmp_path):
    accumulating = {"micro_batch_size": 1, "activation_checkpointing": True}
    folder = on_ranks(values, 2, tmp_path / strategy, strategy, **accumulating)
    assert_same_losses(alone, folder)
    assert_same_folder(alone / "final", folder / "final")
    assert_same_folder(alone / "final", export_checkpoint(folder, tmp_path / "exported"))
    forget_the_end(folder)
    for count in (1, 3):
        resumed = tmp_path / f"on_{count}"
        shutil.copytree(folder, resumed)
        on_ranks(values, count, resumed, strategy, **accumulating | {"micro_batch_size": 3 // count})  # 2 a step, not 3
        assert [json.loads(line)["step"] for line in (resumed / "starts.jsonl").read_text().splitlines()] == [0, 10]
        assert_same_losses(alone, resumed)
        assert_same_folder(alone / "final", resumed / "final")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero1", "deepspeed_zero3"])
def test_bfloat16_stays_near_float32(values, alone, strategy, tmp_path):
    trainer = {"strategy": strategy, "precision": "bf16-mixed"}
    options = {"micro_batch_size": 1, "activation_checkpointing": True}
    folder = on_ranks(values, 2, tmp_path / strategy, trainer, expect_exact_angles, **options)
    expected, got = logged_losses(alone), logged_losses(folder)
    assert max(abs(got[step] - expected[step]) for step in expected) <= 0.02
    model, same = load_model(alone / "final"), load_model(folder / "final")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(same.state_dict()[name].to(value.dtype), value, atol=0.02, rtol=0)
    again = load_model(export_checkpoint(folder, tmp_path / "exported"), dtype="auto").state_dict()
    for name, value in load_model(folder / "final", dtype="auto").state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, again[name]), name  # as model.dtype says


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count", "decisions"), [("llama", 4, "per_head"), ("qwen3", 2, "per_layer")])
def test_cut_heads_learn_what_whole_layers_do(values, family, count, decisions, tmp_path):
    values["model"]["fresh"]["model_type"] = family
    values["compression"]["decisions"] = decisions
    values["compression"]["gate_input"] = "both" if decisions == "per_layer" else "neuron"
    alone = train(build_config(RunConfig, dict(values, output_dir=str(tmp_path / "alone")))).folder
    trainer = {"strategy": "fsdp2", "tensor_parallel_size": 2}
    folder = on_ranks(values, count, tmp_path / "cut", trainer, micro_batch_size=3, activation_checkpointing=True)
    assert_same_losses(alone, folder)
    assert_same_folder(alone / "final", folder / "final")
    assert_same_folder(alone / "final", export_checkpoint(folder, tmp_path / "exported"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero3"])
def test_preempted_ranks_go_on_and_a_damaged_shard_is_found(values, alone, strategy, tmp_path):
    folder = tmp_path / "run"
    values = dict(values, output_dir=str(folder), trainer=values["trainer"] | {"devices": 2, "strategy": strategy})
    values["training"]["micro_batch_size"] = 1
    sabotage = partial(note_positions, log=tmp_path / "positions", stop=(4, 2), on_rank=1)  # within the fifth step
    with Ranks(values, 2, log := tmp_path / "ranks.log", sabotage) as ranks:
        assert ranks.join() == [EXIT_PREEMPTED] * 2, log.read_text()[-4000:]
    checkpoint = folder / "checkpoints" / "last.ckpt"
    assert (read_header(checkpoint).global_step, read_header(checkpoint).num_ranks) == (4, 2)
    values["training"]["micro_batch_size"] = 3
    train_ranks(values, 2, log)
    assert_same_losses(alone, folder)
    assert_same_folder(alone / "final", folder / "final")
    shard = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"last.ckpt is cut off: .*{shard.name} has 100 bytes"):
        export_checkpoint(folder, tmp_path / "damaged")
    model = load_model(folder / "final")
    with pytest.raises(ValueError, match="use_previous_checkpoint=true to go on from step 10"):
        find_checkpoint(checkpoint.parent, model, strategy)
    with pytest.raises(ValueError, match=f"was written as '{strategy}', this run reads 'file'"):
        check_fits(checkpoint.with_name("previous.ckpt"), model, "file")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num_cuts", "merge_kv_heads"), [("fsdp2", 2, None), ("fsdp2", 2, 2), ("deepspeed_zero3", 1, 2)]
)
def test_each_rank_reads_its_own_part_of_a_base(values, strategy, num_cuts, merge_kv_heads, tmp_path):
    shape = ModelConfig(fresh=values["model"]["fresh"] | {"num_key_value_heads": 4, "attention_bias": True})
    fresh_model(shape, 300, seed=3).save_pretrained(tmp_path / "base", max_shard_size="40KB")
    values["model"] = {"path": str(tmp_path / "base"), "merge_kv_heads": merge_kv_heads}
    values["training"]["stages"] = {"retrofit": {"steps": STEPS}}
    expected = train(build_config(RunConfig, dict(values, output_dir=str(tmp_path / "one")))).folder
    trainer = {"strategy": strategy, "tensor_parallel_size": num_cuts}
    folder = on_ranks(values, 2, tmp_path / "two", trainer, micro_batch_size=3)
    assert_same_losses(expected, folder)
    assert_same_folder(expected / "final", folder / "final")


@pytest.mark.slow
def test_offloaded_states_learn_the_same(values, alone, tmp_path):
    trainer = {"strategy": "deepspeed_zero3", "offload_optimizer": True, "offload_parameters": True}
    folder = on_ranks(values, 2, tmp_path / "run", trainer, micro_batch_size=3)
    assert_same_losses(alone, folder)
    assert_same_folder(alone / "final", folder / "final")
