"""What a run may add to the paper's recipe: a teacher, a led weight, gates alone, delays that shrink."""

import copy
import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from launching import Ranks, logged, logged_losses, note_positions, train_ranks

from dmc.config import build_config
from dmc.data import Shuffled, TextSource, build_packed, framing_of, train_tokenizer
from dmc.models import load_model, retrofit
from dmc.training.callbacks.preemption import EXIT_PREEMPTED
from dmc.training.checkpoints import read_tensors, remove, saved_checkpoints
from dmc.training.config import RatioControlConfig, RunConfig
from dmc.training.micro_batches import StepLoader
from dmc.training.optimizer_step import RatioControl
from dmc.training.run import fresh_model, train
from dmc.training.stages import Plan
from dmc.training.text_data import fetched

LED = {"gain": 0.5, "max_weight": 50.0}


@pytest.fixture
def base(run_values, corpus):
    """Folder of a trained stock model, made once."""
    folder = corpus / "base"
    values = copy.deepcopy(run_values) | {"output_dir": str(folder), "compression": None}
    values["training"] |= {"stages": {"pretrain": {"length": "10 steps"}}}
    return train(build_config(RunConfig, values)).final


@pytest.fixture
def recipe(run_values, base):
    """Plain values of a retrofit of `base` with a teacher and a led weight."""
    run_values["model"] = str(base)
    run_values["data"]["tokenizer"] = {}
    run_values["training"] |= {"distillation": {"weight": 0.75, "temperature": 2.0}, "ratio_control": dict(LED)}
    run_values["training"] |= {"checkpoint_every_steps": 100, "validate_every_steps": 100, "calibrate": False}
    return run_values


@pytest.fixture
def chats(run_values, tmp_path):
    """Let a run learn the completions of prompts, of different lengths; return their source and the tokenizer."""
    rows = [{"question": f"what is {i} and {i}? ", "answer": f"{i} and {i} is {i + i}." * (i % 4)} for i in range(99)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = train_tokenizer([row["question"] + row["answer"] for row in rows], 300, str(tmp_path / "tokenizer"))
    source = {"_target_": "dmc.data.TextSource", "name": str(tmp_path / "rows.jsonl")}
    source |= {"prompt": "question", "completion": "answer"}
    run_values["data"] |= {"train": {"rows": source}, "tokenizer": {"path": str(tmp_path / "tokenizer")}}
    run_values["data"]["cache_folder"] = str(tmp_path / "cache")
    return source, tokenizer


def trained(values, folder: Path) -> Path:
    return train(build_config(RunConfig, dict(values, output_dir=str(folder)))).folder


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_of_prompts_and_completions_only_the_completions_are_learned(run_values, chats, tmp_path, average):
    source, tokenizer = chats
    run_values["training"] |= {"stages": {"pretrain": {"length": "2 steps"}}, "loss_average": average}
    run_values["base"]["shape"]["initializer_range"] = 0.5
    run_values["compression"] = None
    config = build_config(RunConfig, run_values)
    divided = [trained(run_values, tmp_path / "as it is")]
    for size in (1, 4):
        run_values["training"]["micro_batch_size"] = size
        divided.append(trained(run_values, tmp_path / str(size)))
    run_values["training"]["micro_batch_size"] = 1
    run_values |= {"trainer": run_values["trainer"] | {"devices": 2}, "output_dir": str(tmp_path / "ranks")}
    train_ranks(run_values, 2, tmp_path / "log")
    divided.append(tmp_path / "ranks")
    losses = [logged(folder, "train/loss") for folder in divided]
    weights = [load_model(folder / "final").state_dict() for folder in divided]
    for other, values in zip(losses[1:], weights[1:], strict=True):  # however the batch of 4 is divided
        assert sorted(other) == [0, 1] and other == pytest.approx(losses[0], rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, weights[0][name], atol=2e-5, rtol=0)

    packed = build_packed(
        TextSource(**{key: source[key] for key in source if key != "_target_"}),
        tokenizer,
        32,
        config.data.cache_folder,
        framing=framing_of(tokenizer, config.data.tokenizer.bos, config.data.tokenizer.eod_token),
    )
    shuffled = Shuffled(packed, config.seed)
    items = [shuffled[position] for position in range(4)]
    assert len({int(item["loss_mask"].sum()) for item in items}) > 1
    model = fresh_model(config, len(tokenizer), config.seed)
    found = []
    for item in items:
        ids, learned = item["input_ids"], item["loss_mask"][1:]
        logits = model(ids[None]).logits[0, :-1][learned].detach()
        found.append(torch.nn.functional.cross_entropy(logits, ids[1:][learned], reduction="none"))
    by_sequence, by_token = torch.stack([losses.mean() for losses in found]).mean(), torch.cat(found).mean()
    assert abs(by_sequence - by_token) > 1e-2
    assert losses[0][0] == pytest.approx(float(by_token if average == "token" else by_sequence), rel=1e-5)


def test_a_run_that_averages_over_tokens_goes_on_at_the_step_that_it_left(run_values, chats, tmp_path):
    run_values["data"] |= {"streaming": True, "stream_shards": 2}
    run_values["training"] |= {"loss_average": "token", "checkpoint_every_steps": 5, "micro_batch_size": 1}
    uninterrupted = trained(run_values, tmp_path / "whole")
    resumed = shutil.copytree(uninterrupted, tmp_path / "resumed")
    for path in (saved_checkpoints(resumed / "checkpoints")[0], resumed / "final"):
        remove(path)
    trained(run_values, resumed)
    assert logged_losses(uninterrupted) == logged_losses(resumed)
    assert json.loads((resumed / "starts.jsonl").read_text().splitlines()[1])["step"] == 5


@pytest.mark.slow
def test_the_average_over_tokens_is_the_same_where_ranks_divide_sequences_for_some_steps(run_values, chats, tmp_path):
    run_values["data"] |= {"streaming": True, "stream_shards": 2}
    run_values["training"] |= {"loss_average": "token", "micro_batch_size": 1}
    uninterrupted = trained(run_values, tmp_path / "whole")
    folder = tmp_path / "divided"
    layouts = (
        (1, {}, 2),
        (2, {"strategy": "ddp", "context_parallel_size": 2}, 4),
        (4, {"strategy": "fsdp2", "context_parallel_size": 2}, 6),
        (2, {"strategy": "fsdp2", "tensor_parallel_size": 2}, 7),
        (1, {}, None),
    )
    for count, trainer, stop in layouts:
        part = run_values | {"output_dir": str(folder), "trainer": run_values["trainer"] | {"devices": count} | trainer}
        positions = tmp_path / f"positions {count} {stop} of rank "
        sabotage = partial(note_positions, log=positions, stop=None if stop is None else (stop, 0), on_rank=count - 1)
        with Ranks(part, count, log := tmp_path / "log", sabotage) as ranks:
            assert ranks.join() == [0 if stop is None else EXIT_PREEMPTED] * count, log.read_text()[-4000:]
    assert logged_losses(folder) == pytest.approx(logged_losses(uninterrupted), rel=1e-4)
    weights, found = (load_model(folder / "final").state_dict() for folder in (uninterrupted, folder))
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=0)


def test_a_step_is_counted_before_its_first_micro_batch_and_no_later_one_is_read():
    read = []

    def micro_batches():
        for number in range(5):
            read.append(number)
            mask = torch.tensor([[1.0, 0.5 * number, 9.0], [1.0, 1.0, 0.0]])
            yield {"input_ids": mask.long(), "position": torch.tensor([number, number]), "loss_mask": mask}

    steps = iter(StepLoader(micro_batches(), 2, counts_tokens=True))
    assert [float(micro_batch["num_predicted"]) for micro_batch in next(steps)] == [10.25, 10.25] and read == [0, 1]
    assert [float(micro_batch["num_predicted"]) for micro_batch in next(steps)] == [11.25, 11.25]
    assert read == [0, 1, 2, 3]


def test_a_retrofit_learns_from_its_frozen_base(recipe, base, tmp_path):
    before = load_model(base).state_dict()
    run = trained(recipe, tmp_path / "run")
    taught = logged(run, "train/distillation_loss")
    assert sorted(taught) == list(range(8))
    assert 0 <= taught[0] < 1e-5  # before the first step model and teacher are one
    assert max(taught.values()) > 1e-4
    after = load_model(base).state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    saved = read_tensors(saved_checkpoints(run / "checkpoints")[0], "model.")
    assert saved.keys() == dict(load_model(run / "final").named_parameters()).keys()


def test_a_control_does_not_fetch_the_teacher(run_values, monkeypatch):
    asked = []
    monkeypatch.setattr("dmc.training.text_data.local_copy", lambda name, *_, **__: asked.append(name) or name)
    run_values["training"]["distillation"] = {"path": "teacher"}
    fetched(build_config(RunConfig, run_values | {"control": True}))
    assert "teacher" not in asked
    fetched(build_config(RunConfig, run_values))
    assert "teacher" in asked


def test_distilled_run_with_a_led_weight_resumes_bit_identically(recipe, tmp_path):
    recipe["training"]["checkpoint_every_steps"] = 5
    uninterrupted = trained(recipe, tmp_path / "whole")
    resumed = shutil.copytree(uninterrupted, tmp_path / "resumed")
    weights = logged(uninterrupted, "train/ratio_weight")
    assert len(set(weights.values())) == len(weights) == 6  # it moves at every step of the gates
    for path in (saved_checkpoints(resumed / "checkpoints")[0], resumed / "final"):
        remove(path)
    trained(recipe, resumed)
    assert logged_losses(uninterrupted) == logged_losses(resumed)
    assert logged(uninterrupted, "train/ratio_weight") == logged(resumed, "train/ratio_weight")


@pytest.mark.parametrize(
    "trainer",
    [
        {"strategy": "fsdp2", "tensor_parallel_size": 2},
        pytest.param({"strategy": "fsdp2", "context_parallel_size": 2}, marks=pytest.mark.slow),
        {"strategy": "deepspeed_zero3"},
    ],
    ids=lambda trainer: "-".join(map(str, trainer.values())),
)  # fmt: skip
def test_two_ranks_train_an_adapter_with_the_teacher_as_one_does(recipe, trainer, corpus, tmp_path):
    recipe["compression"]["gate_input"] = "both"
    heads_are_cut = not trainer.keys().isdisjoint({"tensor_parallel_size", "context_parallel_size"})
    if not heads_are_cut:
        recipe["training"]["sensitivity_init"] = {"sequences": 2}
    alone = trained(recipe, corpus / f"adapter {heads_are_cut}")  # once for all that are compared with it
    values = recipe | {"output_dir": str(tmp_path / "two"), "trainer": recipe["trainer"] | {"devices": 2} | trainer}
    with Ranks(values, 2, tmp_path / "log") as ranks:
        assert ranks.join() == [0, 0], (tmp_path / "log").read_text()[-4000:]
    near = 1e-5
    for name in ("train/loss", "train/distillation_loss", "train/ratio_weight"):
        expected, got = logged(alone, name), logged(tmp_path / "two", name)
        assert sorted(expected) == sorted(got)
        assert max(abs(got[step] - expected[step]) for step in expected) <= near, name
    adapters = [load_model(folder / "final").adapters()[0].weight for folder in (alone, tmp_path / "two")]
    assert adapters[0].abs().max() > 1e-4
    torch.testing.assert_close(adapters[1].float(), adapters[0], atol=near, rtol=0)


def test_the_weight_integrates_the_relative_excess():
    control = RatioControl(2.0, RatioControlConfig(gain=0.1, max_weight=8.0))
    control.update(held=torch.tensor(0.5, dtype=torch.float64), target_ratio=4.0)  # twice the size asked for
    assert float(control.weight) == pytest.approx(2.0 * math.exp(0.1))
    control.update(held=torch.tensor(0.125, dtype=torch.float64), target_ratio=4.0)  # half of it
    assert float(control.weight) == pytest.approx(2.0 * math.exp(0.05))
    control.update(held=torch.tensor(math.nan), target_ratio=4.0)
    assert float(control.weight) == pytest.approx(2.0 * math.exp(0.05))
    for held, bound in ((1.0, 8.0), (1e-3, 1 / 8)):
        for _ in range(1000):
            control.update(torch.tensor(held), 16.0)
        assert control.weight == bound
    steady = RatioControl(2.0, None)
    steady.update(torch.tensor(1.0), 16.0, thresholded=torch.tensor(1.0))
    assert steady.weight == 2.0 and steady.target(16.0) == 16.0


@pytest.mark.parametrize("gap", [0.8, 1.25])
def test_in_the_last_stage_relaxed_decisions_settle_where_thresholded_ones_meet_the_target(gap):
    control = RatioControl(2.0, RatioControlConfig(gain=0.1))
    for _ in range(400):  # relaxed decisions meet what is asked for, thresholded ones hold another share
        relaxed = torch.as_tensor(1 / control.target(4.0), dtype=torch.float64)
        control.update(relaxed, 4.0, thresholded=gap * relaxed)
    assert float(gap * relaxed) == pytest.approx(1 / 4)
    assert float(control.weight) == pytest.approx(2.0)
    before = float(control.target_factor)
    control.update(relaxed, 4.0)
    control.update(relaxed, 4.0, thresholded=torch.tensor(math.nan))
    assert float(control.target_factor) == before == pytest.approx(gap)
    for held, bound in ((1.0, 2.0), (1e-3, 0.5)):
        for _ in range(1000):
            control.update(torch.tensor(0.25), 4.0, thresholded=torch.tensor(held))
        assert float(control.target_factor) == bound
    assert float(control.target(1.5)) == 1  # no ratio is below 1


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        *(
            pytest.param(trainer, marks=pytest.mark.slow)
            for trainer in (
                {"devices": 2, "strategy": "fsdp2", "tensor_parallel_size": 2},
                {"devices": 4, "strategy": "hsdp", "shard_size": 2, "accumulate_locally": True},
            )
        ),
    ],
    ids=lambda trainer: "-".join(map(str, trainer.values())),
)
def test_gates_alone_change_no_other_weight(recipe, base, corpus, tmp_path, trainer):
    recipe["training"] |= {"gates_only": True, "weight_decay": 0.5, "stages": {"retrofit": {"length": "6 steps"}}}
    recipe["training"]["micro_batch_size"] = 1
    before, after = load_model(base), load_model(trained(recipe, corpus / "gates alone") / "final")
    if trainer:
        values = recipe | {"output_dir": str(tmp_path / "ranks"), "trainer": recipe["trainer"] | trainer}
        train_ranks(values, trainer["devices"], tmp_path / "log")
        alone, after = after, load_model(tmp_path / "ranks" / "final")
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(after.state_dict()[name], value, atol=1e-6, rtol=0)
    changed = 0
    for name, value in before.state_dict().items():
        new = after.state_dict()[name]
        rows = torch.zeros(len(value), dtype=torch.bool)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows[7::8] = True
            changed += not torch.equal(new[rows], value[rows])
        assert torch.equal(new[~rows], value[~rows]), name
    assert changed == 4


def test_delays_shrink_in_equal_parts_of_the_ramp(recipe, tmp_path):
    recipe["training"] |= {
        "stages": {
            "zero_out": {"length": "1 steps"},
            "retrofit": {"length": "6 steps"},
            "solidify": {"length": "1 steps"},
        },
        "delays": [5, 3, 2],
        "snapshot_ratios": [2.0],
    }
    config = build_config(RunConfig, recipe)
    plan = Plan(config.training, 4.0)
    assert [plan.at(step).delay for step in range(8)] == [None, 5, 5, 3, 3, 2, 2, 2]
    run = trained(recipe, tmp_path / "run")
    assert load_model(run / "snapshots" / "cr2").compression.delay == 5
    assert load_model(run / "final").compression.delay == 2


def test_a_scaled_gate_is_the_gate_of_scaled_rows(run_config):
    import dataclasses

    from dmc.compression import GateMode

    stock = fresh_model(run_config, 300, 0)
    scaled = retrofit(copy.deepcopy(stock), dataclasses.replace(run_config.compression, decision_scale=8.0)).eval()
    plain = retrofit(stock, run_config.compression).eval()
    for layer in plain.model.layers:
        layer.self_attn.k_proj.weight.data[7::8] *= 8
    ids = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got, expected = (model(ids, use_cache=False, gate_mode=GateMode()).logits for model in (scaled, plain))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("change", "strategy", "message"),
    [
        ({"distillation": {}}, "auto", "distillation of a fresh model needs a teacher"),
        ({"delays": [4, 1]}, "auto", r"training.delays=\[4, 1\] must end with compression.delay=2"),
        ({"gates_only": True}, "deepspeed_zero1", r"gates_only=true with trainer\.strategy=deepspeed_zero1: rows"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(run_values, change, strategy, message):
    run_values["training"] |= change
    run_values["trainer"]["strategy"] = strategy
    with pytest.raises(ValueError, match=message):
        build_config(RunConfig, run_values)
