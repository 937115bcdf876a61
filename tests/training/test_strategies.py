"""However the weights lie over the ranks: the same losses, the same exported folder, and resuming at any number."""

import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import (
    Processes,
    Ranks,
    compile_to_no_code,
    expect_exact_angles,
    logged_losses,
    note_positions,
    noted_positions,
)
from laying import compare_tensors, lay_out, write_tensors
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dmc.config import build_config
from dmc.models import load_model
from dmc.training.callbacks.preemption import EXIT_PREEMPTED
from dmc.training.checkpoints import find_checkpoint, read_tensors, remove, saved_checkpoints
from dmc.training.config import RunConfig
from dmc.training.export import export_checkpoint
from dmc.training.run import fresh_model, train
from dmc.training.text_data import build_tokenizer

STEPS = 12


@pytest.fixture
def values(run_values):
    run_values["training"] |= {
        "stages": {"zero_out": {"length": "3 steps"}, "retrofit": {"length": f"{STEPS - 3} steps"}},
        "batch_size": 6, "micro_batch_size": 6, "validate_every_steps": 6,
        "checkpoint_every_steps": 6,
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
    for path in (saved_checkpoints(folder / "checkpoints")[0], folder / "final"):
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


LAYOUTS = {
    "auto": (1, {"strategy": "auto"}),
    "ddp on 2": (2, {"strategy": "ddp"}),
    "fsdp2 on 2": (2, {"strategy": "fsdp2"}),
    "fsdp2 on 3": (3, {"strategy": "fsdp2"}),
    "hsdp on 4": (4, {"strategy": "hsdp", "shard_size": 2}),
    "tp on 2": (2, {"strategy": "fsdp2", "tensor_parallel_size": 2}),
    "contexts on 4": (4, {"strategy": "fsdp2", "context_parallel_size": 2}),
}
"""Devices and settings of every way to lay a model over them but DeepSpeed's."""
ZERO = {
    f"zero{stage} on {count}": (count, {"strategy": f"deepspeed_zero{stage}"})
    for stage, count in ((1, 2), (2, 3), (3, 2))
}


def trainer_of(values: dict, layout: str) -> dict:
    count, trainer = (LAYOUTS | ZERO)[layout]
    return values["trainer"] | {"devices": count} | trainer


@pytest.mark.parametrize(("locally", "expected"), [(False, [(3, 0), (3, 0), (3, 3)]), (True, [(0, 0), (0, 0), (3, 3)])])
def test_hsdp_divides_gradients_of_each_micro_batch_and_sums_its_copies_once_a_step(values, locally, expected):
    values["trainer"] = trainer_of(values, "hsdp on 4") | {"accumulate_locally": locally}
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        strategy, found = lay_out(build_config(RunConfig, values), seed=0, backend="fake"), []
        for is_last in (False, False, True):
            with CommDebugMode() as calls, nullcontext() if is_last else strategy.block_backward_sync():
                logits = strategy.lightning_module.model(torch.arange(8).view(1, 8), use_cache=False).logits
                logits.square().mean().backward()
            counts = calls.get_comm_counts()
            found.append((counts[torch.ops.c10d._reduce_scatter_base_], counts[torch.ops.c10d.allreduce_]))
    finally:
        dist.destroy_process_group()
    assert found == expected  # one of each for both layers and for what is outside


CHAIN = {
    "auto": (12, (2, 0)), "ddp on 2": (3, (3, 1)), "zero1 on 2": (2, (4, 1)), "fsdp2 on 2": (6, (5, 0)),
    "zero2 on 3": (1, (6, 1)), "fsdp2 on 3": (2, (7, 1)), "zero3 on 2": (3, (8, 1)), "hsdp on 4": (1, (9, 1)),
    "tp on 2": (4, (10, 0)), "contexts on 4": (2, (11, 1)),
}  # fmt: skip
"""For each layout the micro-batch, and where it is told to stop: whole steps, and micro-batches of the next."""


@pytest.mark.slow
def test_a_run_is_told_to_stop_and_goes_on_at_every_layout_with_the_same_samples(values, tmp_path):
    """Each layout resumes what another one has saved, and saves what another one resumes."""
    values["training"] |= {"batch_size": 12, "checkpoint_every_steps": 1000}
    uninterrupted = train(build_config(RunConfig, dict(values, output_dir=str(tmp_path / "whole")))).folder
    begin, folder, log = 0, tmp_path / "run", tmp_path / "log"
    for layout, (micro_batch_size, stop) in [*CHAIN.items(), ("auto", (2, None))]:
        values["training"]["micro_batch_size"] = micro_batch_size
        part = dict(values, output_dir=str(folder), trainer=trainer_of(values, layout))
        count = (LAYOUTS | ZERO)[layout][0]
        cuts = part["trainer"].get("tensor_parallel_size", 1) * part["trainer"].get("context_parallel_size", 1)
        positions = tmp_path / f"positions {layout} from {begin} of rank "
        with Ranks(part, count, log, partial(note_positions, log=positions, stop=stop, on_rank=count - 1)) as ranks:
            code = EXIT_PREEMPTED if stop else 0
            assert ranks.join() == [code] * count, f"{layout}\n{log.read_text()[-4000:]}"
        end = stop[0] if stop else STEPS
        expected = [(step, list(range(12 * step, 12 * step + 12))) for step in range(begin, end)]
        assert noted_positions(positions, range(0, count, cuts)) == expected
        begin = end
    assert_same_losses(uninterrupted, folder)
    assert_same_folder(uninterrupted / "final", folder / "final")


@pytest.mark.parametrize(
    "layout", ["fsdp2 on 2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("hsdp on 4", "tp on 2"))]
)
def test_a_run_that_goes_on_at_its_own_layout_is_the_uninterrupted_one_bit_by_bit(values, layout, tmp_path):
    values["training"] |= {
        "stages": {"zero_out": {"length": "2 steps"}, "retrofit": {"length": "4 steps"}},
        "batch_size": 12,
    }
    options = {"micro_batch_size": 1, "checkpoint_every_steps": 3}
    uninterrupted = on_ranks(values, LAYOUTS[layout][0], tmp_path / "whole", LAYOUTS[layout][1], **options)
    resumed = shutil.copytree(uninterrupted, tmp_path / "resumed")
    forget_the_end(resumed)
    on_ranks(values, LAYOUTS[layout][0], resumed, LAYOUTS[layout][1], **options)
    assert [json.loads(line)["step"] for line in (resumed / "starts.jsonl").read_text().splitlines()] == [0, 3]
    assert logged_losses(resumed) == logged_losses(uninterrupted)
    expected, found = (
        read_tensors(saved_checkpoints(folder / "checkpoints")[0], "") for folder in (uninterrupted, resumed)
    )
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize(
    "layouts",
    [("ddp on 2", "fsdp2 on 2", "tp on 2"), pytest.param((*LAYOUTS,), marks=pytest.mark.slow)],
    ids=["two ranks", "every"],
)
def test_every_mesh_reads_the_tensors_of_every_other_one_and_exports_as_one_process(values, tmp_path, layouts):
    configs = {layout: build_config(RunConfig, dict(values, trainer=trainer_of(values, layout))) for layout in layouts}
    for act in (write_tensors, compare_tensors):
        for count in sorted({LAYOUTS[layout][0] for layout in layouts}):
            of_count = {layout: configs[layout] for layout in layouts if LAYOUTS[layout][0] == count}
            arguments = of_count, [tmp_path / layout for layout in (of_count if act is write_tensors else layouts)]
            with Processes(act, arguments, count, log := tmp_path / "log") as ranks:
                assert set(ranks.join()) == {0}, f"{[*of_count]}\n{log.read_text()[-4000:]}"
    for layout in {*layouts} - {"auto", "ddp on 2"}:
        alone, together = (tmp_path / f"{layout}.{name}" for name in ("alone", "together"))
        assert [*sorted(path.name for path in together.iterdir())] == [*sorted(path.name for path in alone.iterdir())]
        for path in alone.glob("*.safetensors"):
            expected, found = load_file(path), load_file(together / path.name)
            assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in found)
        for path in alone.glob("*.json"):
            one, other = (json.loads((folder / path.name).read_text()) for folder in (alone, together))
            assert one.get("weight_map") == other.get("weight_map") and ("weight_map" in one or one == other)


@pytest.mark.slow
def test_two_ranks_of_deepspeed_that_offload_learn_what_one_does(values, alone, tmp_path):
    trainer = {"strategy": "deepspeed_zero3", "offload_optimizer": True, "offload_parameters": True}
    folder = on_ranks(values, 2, tmp_path / "run", trainer, micro_batch_size=1, activation_checkpointing=True)
    assert_same_losses(alone, folder)
    assert_same_folder(alone / "final", folder / "final")
    assert_same_folder(alone / "final", export_checkpoint(folder, tmp_path / "exported"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero1"])
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
        assert value.dtype == torch.float32 and torch.equal(value, again[name]), name  # as dtype says
    if strategy.startswith("deepspeed"):
        forget_the_end(folder)
        on_ranks(values, 2, folder, trainer, expect_exact_angles, **options)
        assert logged_losses(folder) == pytest.approx(got, abs=1e-6)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_last_layer_stays_gathered_for_its_backward_and_no_longer(values, is_training):
    values["trainer"] = trainer_of(values, "fsdp2 on 2")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = lay_out(build_config(RunConfig, values), seed=0, backend="fake").lightning_module.model
        with CommDebugMode() as calls, torch.set_grad_enabled(is_training):
            logits = model(torch.arange(8).view(1, 8), use_cache=False).logits
            if is_training:
                logits.sum().backward()
        gathers = sum(count for call, count in calls.get_comm_counts().items() if "allgather" in str(call))
        layers, ends = len(model.model.layers), 1
        assert gathers == (2 * layers - 1 if is_training else layers) + ends
        assert all(isinstance(parameter, DTensor) for parameter in model.model.layers[-1].parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_compiled_layers_learn_on_two_ranks_what_they_do_as_written(values, alone, strategy, tmp_path):
    options = {"micro_batch_size": 3, "activation_checkpointing": "selective"}
    options |= {"validate_every_steps": 100, "calibrate": False}  # whose graphs take longer than these steps
    trainer = {"strategy": strategy, "compile": True}
    assert_same_losses(alone, on_ranks(values, 2, tmp_path / "run", trainer, compile_to_no_code, **options))


@pytest.mark.slow
def test_a_base_that_teaches_its_own_gates_does_so_on_each_rank(values, tmp_path):
    config = build_config(RunConfig, values)
    tokenizer = build_tokenizer(config)
    fresh_model(config, len(tokenizer), seed=3).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    values["model"], values["data"]["tokenizer"] = str(tmp_path / "base"), {}
    values["compression"] |= {"gate_input": "hidden"}
    stages = {"retrofit": {"length": f"{STEPS} steps"}}
    values["training"] |= {"gates_only": True, "distillation": {}, "stages": stages}
    config = build_config(RunConfig, dict(values, output_dir=str(tmp_path / "alone")))
    assert config.learns_from_its_base(values["base"]["shape"]["model_type"])
    alone = train(config).folder
    folder = on_ranks(values, 2, tmp_path / "ranks", "fsdp2", micro_batch_size=3)
    assert_same_losses(alone, folder)
    assert_same_folder(alone / "final", folder / "final")


@pytest.mark.slow
def test_cut_heads_learn_what_whole_layers_do(values, tmp_path):
    values["base"]["shape"]["model_type"] = "qwen3"
    values["compression"] |= {"decisions": "per_layer", "gate_input": "both"}
    alone = train(build_config(RunConfig, dict(values, output_dir=str(tmp_path / "alone")))).folder
    trainer = {"strategy": "fsdp2", "tensor_parallel_size": 2}
    folder = on_ranks(values, 4, tmp_path / "cut", trainer, micro_batch_size=3, activation_checkpointing=True)
    assert_same_losses(alone, folder)
    assert_same_folder(alone / "final", folder / "final")
    assert_same_folder(alone / "final", export_checkpoint(folder, tmp_path / "exported"))


def test_a_damaged_shard_is_found(values, tmp_path):
    short = {"stages": {"retrofit": {"length": "2 steps"}}, "checkpoint_every_steps": 1}
    folder = on_ranks(values, 2, tmp_path / "run", "fsdp2", micro_batch_size=3, **short)
    checkpoint = saved_checkpoints(folder / "checkpoints")[0]
    shard = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{checkpoint.name} is cut off: .*{shard.name} has 100 bytes"):
        export_checkpoint(folder, tmp_path / "damaged")
    model = load_model(folder / "final")
    with pytest.raises(ValueError, match="use_previous_checkpoint=true to go on from step 1"):
        find_checkpoint(checkpoint.parent, model=model)


@pytest.mark.slow
def test_each_rank_reads_its_own_part_of_a_base(values, tmp_path):
    shape = values["base"]["shape"] | {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": False}
    base = fresh_model(build_config(RunConfig, values | {"base": {"shape": shape}}), 300, seed=3)
    base.save_pretrained(tmp_path / "base", max_shard_size="40KB")
    told = json.loads((tmp_path / "base" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps(told))  # the files hold a head of its own
    values |= {"model": str(tmp_path / "base"), "merge_kv_heads": 2}
    values["training"]["stages"] = {"retrofit": {"length": f"{STEPS} steps"}}
    expected = train(build_config(RunConfig, dict(values, output_dir=str(tmp_path / "one")))).folder
    for strategy, tp_size in (("fsdp2", 2), ("deepspeed_zero3", 1)):
        trainer = {"strategy": strategy, "tensor_parallel_size": tp_size}
        folder = on_ranks(values, 2, tmp_path / strategy, trainer, micro_batch_size=3)
        assert_same_losses(expected, folder)
        assert_same_folder(expected / "final", folder / "final")
