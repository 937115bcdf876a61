import dataclasses
import json
from pathlib import Path

import measured_memory
import pytest
import torch
import yaml
from composing import composed
from launching import Processes
from planned import SHAPE, gpus, plan, run
from scripts_here import run_script
from transformers import AutoConfig, AutoModelForCausalLM

from dmc.config import build_config
from dmc.training.config import BaseConfig, RunConfig
from dmc.training.planning import peak_memory
from dmc.training.planning.planner import GIB, plan_table
from dmc.training.run import train

ROOT = Path(__file__).parents[3]
STATES, PEAK, SHARDED_PEAK = 0.02, 0.02, 0.2
"""Tolerances: of weights, gradients and optimizer states; of the peak; of a rank's of two that talk to each other."""
STATE_NAMES = ("weights", "gradients", "optimizer states")


def shape_of(config):
    return AutoConfig.for_model(**config.base.shape)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
        ("llama3_8b", 8_030_261_248),
        ("llama32_1b", 1_235_814_400),
        ("mistral_7b", 7_248_023_552),
        ("qwen2_7b", 7_615_616_512),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_0p6b", 596_049_920),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("gpt_oss_20b", 20_914_757_184),
    ],
)
def test_shape_of_every_base_has_the_published_number_of_weights(name, count):
    shape = yaml.safe_load((ROOT / "configs" / "base" / f"{name}.yaml").read_text())["shape"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


HYBRID = {
    **SHAPE, "model_type": "olmo3", "num_hidden_layers": 8, "sliding_window": 16, "max_position_embeddings": 512,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
}  # fmt: skip


PASSING = ("activations", "sums and temporaries")
"""What the passes of a micro-batch hold."""


@pytest.mark.parametrize(
    ("shape", "compression", "precision", "length", "checkpointing"),
    [
        pytest.param(SHAPE, None, "bf16-mixed", 48, True, id="stock"),
        pytest.param(SHAPE, {}, "32-true", 128, False, id="gates"),
        pytest.param(SHAPE, {}, "bf16-mixed", 48, True, id="gates, bf16-mixed", marks=pytest.mark.slow),
        pytest.param(SHAPE, {"delay": 16}, "32-true", 128, True, id="delay", marks=pytest.mark.slow),
        pytest.param(HYBRID, {"delay": 16}, "32-true", 128, False, id="windows", marks=pytest.mark.slow),
    ],
)
def test_planned_peak_is_what_the_allocator_hands_out(shape, compression, precision, length, checkpointing):
    config = run(
        shape, compression=compression, trainer__precision=precision, training__sequence_length=length,
        training__activation_checkpointing=checkpointing,
    )  # fmt: skip
    measured = measured_memory.allocated_peak(lambda: measured_memory.train_steps(config, shape_of(config)))
    planned = plan(config).memory.total
    print(f"planned / measured = {planned / measured:.3f}")
    assert planned == pytest.approx(measured, rel=PEAK)


@pytest.mark.slow
def test_layers_of_kinds_that_repeat_are_planned_by_their_turns():
    """Six layers, every other of which has no attention, from traces of two and of four."""
    kinds = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3, "head_dim": 16}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 4}
    shape = {**SHAPE, "model_type": "qwen3_5_text", **kinds, **sizes, "linear_num_value_heads": 8}
    config = run(shape, training__sequence_length=128)
    measured = measured_memory.allocated_peak(lambda: measured_memory.train_steps(config, shape_of(config)))
    planned = plan(config).memory
    print(f"planned / measured = {planned.total / measured:.3f}")
    assert planned.total == pytest.approx(measured, rel=PEAK)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_of(config))
    assert planned.num_weights == sum(parameter.numel() for parameter in model.parameters())


def test_a_teacher_is_planned_with_its_weights_and_its_logits():
    alone = plan(run()).memory
    config = run(training__distillation={"path": "teacher"})
    planned = plan(config).memory
    assert planned.components["teacher"] == pytest.approx(alone.components["weights"], rel=1e-3)
    assert "teacher" not in alone.components
    assert planned.components["activations"] > alone.components["activations"]


@pytest.mark.slow
def test_the_peak_beside_a_teacher_is_what_the_allocator_hands_out():
    config = run(training__distillation={"path": "teacher"})
    measured = measured_memory.allocated_peak(lambda: measured_memory.train_steps(config, shape_of(config)))
    assert plan(config).memory.total == pytest.approx(measured, rel=PEAK)


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (4, {"trainer__strategy": "hsdp", "trainer__shard_size": 2, "training__activation_checkpointing": True}),
        *(
            pytest.param(2, changes, marks=pytest.mark.slow)
            for changes in (
                {"trainer__precision": "bf16-mixed"},
                {"trainer__accumulate_locally": True},
                {"trainer__tensor_parallel_size": 2},
                {"trainer__context_parallel_size": 2},
            )
        ),
    ],
    ids=str,
)
def test_planned_shards_are_what_a_rank_of_several_holds(devices, changes):
    config = run(**{"trainer__strategy": "fsdp2", "trainer__devices": devices, **changes})
    planned = plan(config).memory
    with measured_memory.rank_of(config, devices) as strategy:
        held, measured = measured_memory.held_and_peak(config, shape_of(config), strategy)
    print(f"planned / measured = {planned.total / measured:.3f}")
    has_copies = config.trainer.precision == "bf16-mixed" and not torch.cpu.get_capabilities().get("avx512_bf16")
    assert planned.total == pytest.approx(measured, rel=0.05 if has_copies else PEAK)  # of matrices, in float32
    named = {name: size for name, size in held.items() if name in planned.components}
    sums = config.trainer.strategy == "hsdp" or config.trainer.accumulate_locally  # of whole gradients, named otherwise
    assert len(named) == (2 if sums else 3)
    assert {name: planned.components[name] for name in named} == pytest.approx(named, rel=STATES)


@pytest.mark.slow
def test_planned_shards_are_what_two_ranks_hold(tmp_path):
    config = run(trainer__strategy="fsdp2", trainer__devices=2, training__activation_checkpointing=True)
    planned = plan(config).memory
    arguments = config, shape_of(config), tmp_path / "held"
    with Processes(measured_memory.write_held_and_peak, arguments, 2, tmp_path / "log") as processes:
        assert processes.join() == [0, 0]
    for rank in range(2):
        held, measured = json.loads((tmp_path / f"held.{rank}").read_text())
        assert planned.total == pytest.approx(measured, rel=SHARDED_PEAK)  # gloo's own buffers are in it
        assert {name: planned.components[name] for name in held} == pytest.approx(held, rel=STATES)


SIX = {**SHAPE, "num_hidden_layers": 6}
EXPERTS = {
    **SHAPE, "model_type": "gpt_oss", "num_hidden_layers": 8, "sliding_window": 16, "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
TP = {"trainer__strategy": "fsdp2", "trainer__tensor_parallel_size": 2}
GATES_ONLY = {"training__gates_only": True}


@pytest.mark.parametrize(
    ("shape", "devices", "changes"),
    [
        pytest.param(SIX, 1, {"trainer__precision": "bf16-mixed"}, id="one device"),
        *(
            pytest.param(shape, devices, changes, id=name, marks=pytest.mark.slow)
            for name, shape, devices, changes in (
                (
                    "gates alone",
                    SIX,
                    1,
                    {"training__batch_size": 2, "training__activation_checkpointing": True, **GATES_ONLY},
                ),
                ("windows, sinks and experts", EXPERTS, 2, {"trainer__strategy": "fsdp2", **GATES_ONLY}),
                (
                    "fsdp2",
                    SIX,
                    4,
                    {
                        "trainer__strategy": "fsdp2",
                        "training__activation_checkpointing": True,
                        "training__distillation": {"path": "teacher"},
                        "trainer__accumulate_locally": True,
                    },
                ),
                ("hsdp, cut heads", SIX, 8, {**TP, "trainer__strategy": "hsdp", "trainer__shard_size": 2}),
            )
        ),
    ],
)
def test_some_layers_tell_what_all_need(shape, devices, changes, monkeypatch):
    config = run(shape, trainer__devices=devices, **changes)
    extrapolated = plan(config).memory
    monkeypatch.setattr(peak_memory, "ENDS", 8)
    monkeypatch.setattr(peak_memory, "SHARDED_ENDS", 8)
    traced = plan(config).memory
    assert (traced.total, traced.num_weights) == (extrapolated.total, extrapolated.num_weights)
    assert traced.num_trained == extrapolated.num_trained
    assert traced.components == extrapolated.components


def test_more_ranks_and_higher_stages_need_less():
    def states(strategy, devices):
        found = plan(gpus(trainer__strategy=strategy, trainer__devices=devices)).memory.components
        return sum(found[name] for name in STATE_NAMES)

    weights = plan(gpus()).num_weights
    assert states("auto", 1) == states("ddp", 8) == pytest.approx(16 * weights, rel=1e-3)
    stages = [states(f"deepspeed_zero{stage}", 8) for stage in (1, 2, 3)]
    assert stages[0] > stages[1] > stages[2]
    assert states("fsdp2", 8) == pytest.approx(16 * weights / 8, rel=1e-3)
    assert states("fsdp2", 4) == pytest.approx(2 * states("fsdp2", 8), rel=1e-3)


def test_tensor_parallelism_divides_layers_and_repeats_the_rest():
    found = plan(gpus(trainer__devices=2, **TP))
    outside = 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"] + 7 * SHAPE["hidden_size"]  # with the norms
    held = 4 * (outside + (found.num_weights - outside) / 2)
    assert found.memory.components["weights"] == pytest.approx(held, rel=1e-3)
    assert found.num_weights == plan(gpus()).num_weights


@pytest.mark.parametrize(
    "size", ["context_parallel_size", pytest.param("tensor_parallel_size", marks=pytest.mark.slow)]
)
def test_ranks_that_share_sequences_have_fewer_activations(size):
    options = {"trainer__devices": 4, "trainer__strategy": "fsdp2", "training__batch_size": 8}
    options |= {"training__activation_checkpointing": True, "training__sequence_length": 512}
    full, halves = (
        sum(plan(gpus(**options, **{f"trainer__{size}": count})).memory.components.get(name, 0) for name in PASSING)
        for count in (1, 2)
    )
    # Residuals are halved. Tables of RoPE and what the loss holds, which count in a tiny model, are not.
    assert halves < 0.85 * full


def test_offloaded_states_move_to_the_host():
    base = {"trainer__strategy": "deepspeed_zero3", "trainer__devices": 4}
    there = plan(gpus(**base, trainer__offload_optimizer=True, trainer__offload_parameters=True))
    here = plan(gpus(**base))
    moved = here.memory.components["optimizer states"] + here.memory.components["weights"]
    assert not there.memory.components.keys() & {"optimizer states", "weights"} and here.memory.cpu == 0
    assert there.memory.cpu >= moved
    assert there.host_bytes - here.host_bytes == 4 * there.memory.cpu


def test_a_plan_says_what_is_no_traced_figure():
    traced, formulas = (plan(gpus(trainer__strategy=name)) for name in ("auto", "deepspeed_zero2"))
    assert traced.memory.formulas == ("context, fragmentation",)
    assert {*STATE_NAMES, "buckets"} < {*formulas.memory.formulas}
    assert "activations" not in formulas.memory.formulas
    (line,) = (line for line in plan_table(formulas).splitlines() if "optimizer states" in line)
    assert line.endswith("by a formula")


def test_gpu_hours_are_operations_over_what_a_gpu_does():
    found = plan(
        gpus(trainer__devices=8, trainer__precision="bf16-mixed"), device="NVIDIA A100-SXM4-80GB", utilization=0.5
    )
    tokens = 7 * 64 * 64
    matrices = 3 * (128 * 16 * (8 + 4) * 2 + 3 * 128 * 352) + 128 * 1024
    operations = tokens * (6 * matrices + 12 * 3 * 128 * 64)
    assert found.assumed_gpu_hours == pytest.approx(operations / (312e12 * 0.5) / 3600)
    assert found.assumed_hours == pytest.approx(found.assumed_gpu_hours / 8)
    assert found.assumed_step_seconds == pytest.approx(found.assumed_hours * 3600 / 7)
    *lines, line = plan_table(found).splitlines()
    assert line.startswith(f"time: {operations / 7:.2g} FLOPs a step; assumed, at 50% of the data sheet's peak")
    assert line.endswith("GPU-hours, without validation, initialization and export")
    assert "step: 4,096 tokens, on each rank 4 micro-batches of 2 sequences" in lines
    assert [(stage.name, stage.steps) for stage in found.stages] == [("zero_out", 2), ("retrofit", 5)]
    assert sum(stage.tokens for stage in found.stages) == tokens


def test_a_plan_tells_both_ratios_of_a_model_with_windows():
    windows = {**HYBRID, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    alike, hybrid = (plan(gpus(base__shape=shape, compression={"target_ratio": 4.0})) for shape in (SHAPE, windows))
    assert alike.target_ratio == alike.sequence_ratio == 4 and "cache:" not in plan_table(alike)
    assert hybrid.target_ratio == 4 and hybrid.sequence_ratio == (64 + 16) / (16 + 16)  # of 64 tokens
    assert "cache: CR 4 of the layers that attend to all tokens, 2.50 of all keys" in plan_table(hybrid)


def test_settings_for_a_gpu_are_planned_for_it_where_this_machine_has_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    device = plan(gpus(), assumed_device="RTX 4090", assumed_memory_gib=24.0).device
    assert (device.name, device.memory_gib) == ("RTX 4090", 24.0)
    device = plan(gpus(), device="H200", device_memory_gib=141.0, assumed_memory_gib=24.0).device
    assert (device.name, device.memory_gib) == ("H200", 141.0)


def test_a_plan_of_a_fresh_model_needs_its_vocabulary():
    with pytest.raises(ValueError, match=r"needs base\.shape\.vocab_size"):
        plan(gpus(base__shape={"model_type": "llama"}))


def test_hub_name_without_a_hub_asks_for_the_shape(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("dmc.training.planning.start_checks.AutoConfig.from_pretrained", unreachable)
    config = dataclasses.replace(gpus(), model="some/name")
    with pytest.raises(ValueError, match=r"some/name is no folder .* give .* base\.shape"):
        plan(config)


def test_folder_says_its_own_shape(tmp_path):
    AutoConfig.for_model(**SHAPE).save_pretrained(tmp_path)
    base = BaseConfig(str(tmp_path), {"model_type": "llama", "vocab_size": 7})
    config = dataclasses.replace(gpus(), model=base.path, base=base)
    assert plan(config).num_weights == plan(gpus()).num_weights


@pytest.mark.parametrize(
    ("changes", "part", "advice"),
    [
        ({}, "context, fragmentation", "micro_batch_size"),
        ({"training__sequence_length": 32768}, "activations", "training.activation_checkpointing=true"),
        (
            {
                "trainer__strategy": "fsdp2",
                "trainer__devices": 16,
                "trainer__accumulate_locally": True,
                "base__shape": {**SHAPE, "hidden_size": 16384, "num_attention_heads": 128, "num_hidden_layers": 8},
                "training__micro_batch_size": 1,
            },
            "gradients on their way",
            "trainer.accumulate_locally=false",
        ),
    ],
)
def test_too_small_a_device_is_refused_with_the_largest_part_and_what_to_change(changes, part, advice):
    config = gpus(**changes)
    found = plan(config, device_memory_gib=0.5)
    with pytest.raises(ValueError, match=f"has 0.5 GiB .* the largest part is {part}.*{advice}"):
        found.refuse_what_does_not_fit(config)
    device = dataclasses.replace(found.device, memory_gib=found.memory.total / GIB + 0.01)
    dataclasses.replace(found, device=device).refuse_what_does_not_fit(config)


def test_command_prints_the_plan_and_leaves_nothing_on_the_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_script("train.py", "experiment=study/base_short", "plan=json") == ""
    found, training = json.loads(capsys.readouterr().out), composed("experiment=study/base_short").training
    assert found["micro_batches"] * found["micro_batch_size"] == training.batch_size
    assert found["num_weights"] > 0 and found["memory"]["total"] > 16 * found["num_weights"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_command_prints_the_plan_of_a_model_on_eight_gpus(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["experiment=qwen3_8b_dms_cr8", "planner.device=H100", "planner.device_memory_gib=80"]
    assert run_script("train.py", *words, "plan=json") == ""
    found = json.loads(capsys.readouterr().out)
    assert found["num_weights"] == 8_190_735_360 + 36 * 8 * 2 * (4096 + 1)  # with the adapter of each KV head
    assert found["micro_batches"] * found["micro_batch_size"] * found["data_parallel_size"] == 32
    assert found["memory"]["total"] < 80 * GIB
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_command_refuses_what_does_not_fit_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["experiment=llama2_70b_cr2", "trainer=ddp", "trainer.devices=8", "trainer.num_nodes=1"]
    line = run_script("train.py", *words, "plan=true", "planner.device_memory_gib=80")
    assert line.startswith("error: ") and "\n" not in line
    assert "the largest part is optimizer states, 513.9 GiB: try a strategy that divides all states" in line
    assert "total" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gate_input", ["neuron", "hidden"])
def test_the_disk_is_told_as_a_run_of_gates_alone_fills_it(run_values, gate_input):
    run_values["base"]["shape"] |= {"hidden_size": 256, "head_dim": 64}
    run_values["compression"] |= {"gate_input": gate_input, "action": "drop"}
    run_values["training"] |= {
        "stages": {"retrofit": {"length": "4 steps"}}, "gates_only": True, "calibrate": False, "snapshot_ratios": [2.0],
        "milestones": {"ratios": [3.0]}, "validate_every_steps": 100,
    }  # fmt: skip
    config = build_config(RunConfig, run_values)
    values = {**run_values, "base": {"shape": run_values["base"]["shape"] | {"vocab_size": 300}}}
    found = plan(build_config(RunConfig, values))
    folder = train(config).folder

    def held(place):
        files = [*(folder / place).rglob("*.safetensors")]
        assert files, place
        return sum(path.stat().st_size for path in files)

    disk = found.disk
    checkpoints = list((folder / "checkpoints").glob("step_*"))
    assert (disk.num_checkpoints, disk.num_milestones, disk.num_snapshots) == (len(checkpoints), 1, 1)
    for checkpoint in (*checkpoints, folder / "milestones" / "cr3"):
        assert disk.checkpoint == pytest.approx(held(checkpoint), rel=0.03)
    assert disk.export == pytest.approx(held("final"), rel=0.03) == pytest.approx(held("snapshots/cr2"), rel=0.03)
    assert disk.largest == 4 * disk.checkpoint + disk.export
    share = {"neuron": 1.8, "hidden": 1.05}[gate_input]  # of W_q and W_k one row a head is trained, and kept whole
    assert disk.checkpoint < share * disk.export


def test_a_checkpoint_of_a_whole_run_holds_every_weight_thrice():
    found = plan(gpus(trainer__strategy="fsdp2", trainer__devices=2))
    disk = found.disk
    assert disk.checkpoint == 3 * disk.export == 12 * found.num_weights
    assert disk.largest == disk.checkpoint + 2 * disk.export  # of 7 steps one is saved
