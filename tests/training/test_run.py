import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from launching import Ranks, count_scored, logged_losses, note_positions
from transformers.models.llama.modeling_llama import LlamaMLP

from dmc.compression import GateMode, GateTrace
from dmc.config import build_config
from dmc.models import CompressedCausalLM, load_model
from dmc.training.callbacks.preemption import PreemptedError
from dmc.training.config import RunConfig
from dmc.training.export import Exporter, choose_device, export_checkpoint
from dmc.training.measure import score_text
from dmc.training.micro_batches import host_batch
from dmc.training.model_folder import is_final
from dmc.training.module import RetrofitModule, noise_seeds
from dmc.training.optimizer_step import OptimizerStep
from dmc.training.record import read_config, record_run
from dmc.training.run import train
from dmc.training.stages import Plan
from dmc.training.strategies import Parallelism
from dmc.training.text_data import TextData, build_tokenizer, prepare_text, text_digests


def test_run_leaves_loadable_models_and_records(run_values, monkeypatch, pictures):
    run_values["training"]["snapshot_ratios"] = [2.0]
    run_config = build_config(RunConfig, run_values)
    moves, places = [], []
    move, write = CompressedCausalLM.to, Exporter.write
    monkeypatch.setattr(CompressedCausalLM, "to", lambda self, *to, **how: moves.append(to) or move(self, *to, **how))
    monkeypatch.setattr(
        Exporter, "write", lambda self, *what, **how: places.append(moves[-1:]) or write(self, *what, **how)
    )
    run = train(run_config)
    assert places == [[], [(torch.device("cpu"),)]]  # for the final one back to where the strategy computes
    assert set(run.snapshots) == {2.0}
    for folder in (run.final, run.snapshots[2.0]):
        model = load_model(folder)
        assert isinstance(model, CompressedCausalLM)
        metrics = run.metrics(folder)
        assert metrics["achieved_ratio"] >= 1
        assert model.compression.decision_offset == metrics["decision_offset"]
        assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md"}
    assert model.compression.target_ratio == 2.0
    record = json.loads((run.folder / "run.json").read_text())
    assert record["config"]["training"]["batch_size"] == 4
    assert {"versions", "command", "git_commit"} <= set(record)
    assert list((run.folder / "heatmaps").glob("*.png"))
    assert sorted(logged_losses(run.folder)) == list(range(8))
    before = (run.final / "model.safetensors").stat().st_mtime_ns
    assert train(run_config).final == run.final  # which is finished
    assert (run.final / "model.safetensors").stat().st_mtime_ns == before
    run_values["training"]["learning_rate"] = 5e-4
    with pytest.raises(ValueError, match=r"training.learning_rate: 0.001 then, 0.0005 now"):
        train(build_config(RunConfig, run_values))


def test_export_of_an_unfinished_run_does_not_finish_it(run_values):
    run_values["training"] |= {"validate_every_steps": 100}
    config = build_config(RunConfig, run_values)
    folder = Path(config.output_dir)
    with pytest.MonkeyPatch.context() as patch:
        note_positions(0, folder.with_name("positions"), stop=(3, 1), replace=patch.setattr)
        with pytest.raises(PreemptedError, match="after step 3 of 8"):
            train(config)
    export_checkpoint(folder, folder / "final")
    assert not is_final(folder / "final")
    run = train(config)
    assert sorted(logged_losses(folder)) == list(range(8))
    metrics = run.metrics(run.final)
    assert (metrics["steps"], metrics["planned_steps"]) == (8, 8)
    assert is_final(run.final) and run.is_finished


def test_what_is_measured_may_change_so_that_any_run_can_be_exported(run_config, run_values, tmp_path):
    record_run(Path(run_config.output_dir), run_config)
    record = Path(run_config.output_dir) / "run.json"
    content = json.loads(record.read_text())
    content["config"]["training"] |= {"calibration_sequences": 0, "validation_sequences": 0, "validate_every_steps": 0}
    record.write_text(json.dumps(content))
    run = train(run_config)
    again = export_checkpoint(run.folder, tmp_path / "again")
    assert run.metrics(again) == run.metrics(run.final)
    one, other = load_model(run.final), load_model(again)
    assert one.compression == other.compression
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    with pytest.raises(FileExistsError, match="not empty"):
        export_checkpoint(run.folder, again)
    with pytest.raises(ValueError, match="calibration_sequences=0: expected greater than or equal to 1"):
        export_checkpoint(run.folder, tmp_path / "none", overrides={"calibration_sequences": 0})
    plain = export_checkpoint(run.folder, tmp_path / "plain", overrides={"calibrate": False, "validation_sequences": 2})
    assert "decision_offset" not in run.metrics(plain)
    assert (
        run.metrics(plain)["validation_loss_nats_per_token"] != run.metrics(run.final)["validation_loss_nats_per_token"]
    )
    half = export_checkpoint(run.folder, tmp_path / "half", overrides={"export_dtype": "bfloat16"})
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = load_model(half, dtype="auto")
    assert all(torch.equal(value, one.state_dict()[name].bfloat16()) for name, value in rounded.state_dict().items())
    data = TextData(run_config, build_tokenizer(run_config), total_steps=1)
    score = score_text(rounded, data.held_out("validation"))  # what the folder says of itself is what it does
    assert run.metrics(half)["validation_loss_nats_per_token"] == pytest.approx(score.loss, rel=1e-6)
    assert run.metrics(half)["achieved_ratio"] == pytest.approx(score.achieved_ratio, rel=1e-6)
    run_values["training"] |= {"calibrate": False, "validation_sequences": 2, "export_dtype": "bfloat16"}
    run_values["data"]["calibration"] = run_values["data"]["validation"]
    train(other := build_config(RunConfig, run_values))
    assert read_config(run.folder) == run_config  # with which it was exported
    (run.final / "retrofit.json").unlink()
    record_run(run.folder, other)
    assert read_config(run.folder) == other
    assert {**json.loads(record.read_text()), "config": None, "text": None} == {**content, "config": None, "text": None}


@pytest.mark.parametrize("place", ["final", "snapshots/cr2"])
@pytest.mark.parametrize("occupied", ["file", "folder"])
def test_work_that_lies_where_a_model_goes_is_found_before_the_first_step(place, occupied, run_values):
    run_values["training"]["snapshot_ratios"] = [2.0]
    run_config = build_config(RunConfig, run_values)
    folder = Path(run_config.output_dir) / place
    folder.parent.mkdir(parents=True)
    thesis = folder if occupied == "file" else folder / "thesis.txt"
    thesis.parent.mkdir(exist_ok=True)
    thesis.write_text("years of work")
    with pytest.raises(FileExistsError, match=r"is not replaced: give another output|is a file"):
        train(run_config)
    assert thesis.read_text() == "years of work"
    assert not (folder.parent / "starts.jsonl").exists() and not (Path(run_config.output_dir) / "checkpoints").exists()


@pytest.mark.parametrize("split", ["validation", "calibration"])
def test_too_little_text_is_found_before_the_first_step(split, run_values, tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    run_values["data"][split] = {"short": {"_target_": "dmc.data.TextSource", "name": str(tmp_path / "short.txt")}}
    with pytest.raises(ValueError, match="sequence"):
        train(build_config(RunConfig, run_values))
    assert not (Path(run_values["output_dir"]) / "checkpoints").exists()


def test_a_run_is_never_replaced_by_its_own_export(run_config, tmp_path):
    run = train(run_config)
    (tmp_path / "link").symlink_to(run.folder)
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    for output in (run.folder, run.folder.parent, tmp_path / "link", run.folder / "checkpoints"):
        with pytest.raises(FileExistsError, match=r"is or holds .* which is the input|is not replaced"):
            export_checkpoint(run.folder, output, overwrite=True)
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")} == before
    for device in ("abacus", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(ValueError, match=rf"device={device}: .*expected cpu, or cuda with a GPU"):
            export_checkpoint(run.folder, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", "float32"), ("32-true", "bfloat16")])
def test_bf16_with_checkpointing_trains(run_values, precision, dtype):
    run_values["trainer"]["precision"] = precision
    run_values["dtype"] = dtype
    run_values["training"] |= {"activation_checkpointing": True, "document_masking": True}
    run = train(build_config(RunConfig, run_values))
    assert all(loss < 10 for loss in logged_losses(run.folder).values())
    assert load_model(run.final, dtype="auto").dtype == getattr(torch, dtype)


def test_a_loaded_base_recomputes_its_activations(run_values, tmp_path, monkeypatch):
    values = run_values | {"compression": None, "output_dir": str(tmp_path / "base")}
    values["training"] = values["training"] | {"stages": {"pretrain": {"length": "1 steps"}}}
    base = train(build_config(RunConfig, values)).final
    values["training"] |= {"activation_checkpointing": True}
    calls = []
    plain = LlamaMLP.forward
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, *args: (torch.is_grad_enabled() and calls.append(1)) or plain(self, *args)
    )
    train(build_config(RunConfig, values | {"model": str(base), "output_dir": str(tmp_path / "run")}))
    assert len(calls) == 2 * 2 * 2  # forward and again in backward, two layers, two micro-batches


def make_module(run_values) -> tuple[RetrofitModule, list[dict], OptimizerStep]:
    config = build_config(RunConfig, run_values)
    from dmc.models import retrofit
    from dmc.training.run import fresh_model

    tokenizer = build_tokenizer(config)
    plan = Plan(config.training, config.target_ratio)
    model = retrofit(fresh_model(config, len(tokenizer), 0), config.compression)
    data = TextData(config, tokenizer, plan.total_steps)
    batches = [batch | {"position": torch.arange(len(batch["input_ids"]))} for batch in data.held_out("validation")]
    module = RetrofitModule(model, config, Parallelism(config))
    return module, [host_batch(batch) for batch in batches], OptimizerStep(plan, config.training)


def test_noise_follows_the_sample_through_any_batch_split(run_values):
    module, batches, step = make_module(run_values)
    schedule = step.schedule_at(5)
    batch = batches[0] | {"input_ids": torch.cat([b["input_ids"] for b in batches]), "position": [0, 1, 2, 3]}
    parts = [batch | {key: batch[key][i : i + 1] for key in ("input_ids", "position")} for i in range(4)]
    module.train()
    split = torch.stack([module(schedule, part)[0] for part in parts]).mean()
    torch.testing.assert_close(module(schedule, batch)[0], split, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("length", [32, 20])  # of 32: behind the last document a sequence is filled up
@pytest.mark.parametrize("counts", ["held", "decided"])
def test_ratio_loss_and_metrics_count_what_the_target_says(run_values, counts, length):
    run_values["compression"] |= {"delay": 5, "target_counts": counts, "decision_offset": 0.0}
    run_values["training"] |= {"soft_ratio_loss": True}
    module, (batch, *_), step = make_module(run_values)
    if length < 32:
        batch["token_mask"] = torch.arange(32).expand(2, -1) < length
    (_, metrics), trace = module(step.schedule_at(7), batch), GateTrace()
    mode = GateMode(noise_seeds=noise_seeds(0, batch["position"]), fixed_ratio=4.0)
    module.model(batch["input_ids"], use_cache=False, gate_mode=mode, gate_trace=trace)
    alpha, hard = trace.stacked_alpha().detach(), (trace.stacked_logits() > 0).float()

    def share(decisions, delay):  # [L, B, H, T]
        return 1 - decisions[..., 1 : length - delay].sum(-1) / length

    delay = 5 if counts == "held" else 0
    loss = sum(max(0.0, float(share(alpha, delay)[:, row].mean()) - 1 / 4) for row in range(2)) / 2
    assert float(metrics["train/ratio_loss"]) == pytest.approx(loss, rel=1e-5)
    found = {
        "relaxed_cache_fraction": share((alpha > 0.5).float(), delay),
        "hard_cache_fraction": share(hard, 5),
        "decided_fraction": share(hard, 0),
    }
    for name, shares in found.items():
        assert float(metrics[name]) == pytest.approx(float(shares.mean()), rel=1e-5), name


def test_what_whole_documents_are_filled_up_with_comes_marked_to_the_loss(run_values, tmp_path):
    problems = {"_target_": "dmc.data.ChainSource", "smallest": 1, "largest": 1, "problems": 40}  # of 32 tokens
    run_values["data"] |= {split: {"chains": problems | {"split": split}} for split in ("train", "validation")}
    run_values["data"]["tokenizer"] = {"train_vocab_size": 300, "folder": str(tmp_path / "tokenizer")}
    run_values["training"] |= {"whole_documents": True, "document_masking": True, "sequence_length": 48}
    run_values["compression"]["decision_offset"] = 0.0
    module, batches, step = make_module(run_values)
    data = TextData(module.config, build_tokenizer(module.config), step.plan.total_steps)
    data.prepare_data()
    data.setup("fit")
    trained = [host_batch(batch) for batch in islice(data.micro_batches(), 2)]
    for batch in (*batches, *trained):
        last = batch["token_mask"].sum(-1, keepdim=True) - 1
        filled = batch["input_ids"].gather(-1, last).expand(-1, 48)
        assert torch.equal(batch["input_ids"].where(~batch["token_mask"], filled), filled)
        assert not batch["loss_mask"][~batch["token_mask"]].any()
        assert not batch["token_mask"].all()
    without = {name: value for name, value in batches[0].items() if name != "token_mask"}
    marked, unmarked = (module(step.schedule_at(7), batch)[1]["decided_fraction"] for batch in (batches[0], without))
    assert marked != unmarked


def test_two_gloo_ranks_see_the_whole_batch(run_values, tmp_path):
    run_values["trainer"] |= {"devices": 2, "strategy": "ddp"}
    run_values["compression"]["gate_input"] = "both"
    run_values["training"]["sensitivity_init"] = {"sequences": 4}
    with Ranks(run_values, 2, tmp_path / "ranks.log", count_scored) as ranks:
        assert ranks.join() == [0, 0], (tmp_path / "ranks.log").read_text()[-4000:]
    folder = Path(run_values["output_dir"])
    scored = [json.loads((tmp_path / f"scored_{rank}.json").read_text()) for rank in (0, 1)]
    assert scored[0] == scored[1] and set(scored[0]) == {2}  # each pass is half of the four sequences
    metrics = json.loads((folder / "final" / "retrofit.json").read_text())["metrics"]
    alone = export_checkpoint(folder, tmp_path / "alone")
    assert json.loads((alone / "retrofit.json").read_text())["metrics"] == metrics  # of the same weights, to the bit
    two = logged_losses(Path(run_values["output_dir"]))
    run_values["trainer"] |= {"devices": 1, "strategy": "auto"}
    run_values["output_dir"] = str(tmp_path / "one")
    train(build_config(RunConfig, run_values))
    costs = [(tmp_path / name / "head_sensitivity.json").read_text() for name in ("run", "one")]
    assert costs[0] == costs[1]
    final = [load_model(Path(folder) / "final").state_dict() for folder in (tmp_path / "run", tmp_path / "one")]
    assert two == pytest.approx(logged_losses(tmp_path / "one"), rel=1e-5)
    for name, value in final[0].items():
        torch.testing.assert_close(value, final[1][name], atol=1e-4, rtol=1e-3)


def test_text_prepared_ahead_is_what_the_run_reads(run_values, tmp_path):
    run_values["data"] |= {"cache_folder": str(tmp_path / "cache"), "tokenize_num_proc": 1}
    source = dict(run_values["data"]["train"]["text"])
    run_values["data"]["validation"] = {"a": source, "b": dict(source, weight=2)}  # held-out text may be a blend too
    config = build_config(RunConfig, run_values)
    lines = prepare_text(config)
    assert not Path(config.output_dir).exists()
    assert [line.split(":")[0] for line in lines] == ["train", "validation", "validation"]
    assert all("tokens in 60 documents of" in line and line.endswith("0 skipped") for line in lines)
    prepared = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.*")}
    train(config)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.*")} == prepared


def test_reports_are_measured_on_test_text_and_on_validation_text_where_there_is_none(run_values, tmp_path):
    def data_of(values):
        config = build_config(RunConfig, values)
        return TextData(config, build_tokenizer(config), 1), config

    alone, config = data_of(run_values)
    assert config.data.reported_split == "validation"
    assert torch.equal(alone.held_out("test")[0]["input_ids"], alone.held_out("validation")[0]["input_ids"])
    count = sum(len(batch["input_ids"]) for batch in alone.held_out("calibration"))
    assert sum(len(batch["input_ids"]) for batch in alone.held_out("calibration", at_least=count + 3)) == count + 3
    assert sum(len(batch["input_ids"]) for batch in alone.held_out("calibration", at_least=1)) == count
    text = tmp_path / "test.txt"
    text.write_text("words that stand nowhere else, over and over again. " * 40)
    run_values["data"]["test"] = {"test": {"_target_": "dmc.data.TextSource", "name": str(text)}}
    data, config = data_of(run_values)
    assert config.data.reported_split == "test"
    assert not torch.equal(data.held_out("test")[0]["input_ids"], data.held_out("validation")[0]["input_ids"])
    assert "test" in [line.split(":")[0] for line in data.describe()]
    record_run(tmp_path / "run", data_of({**run_values, "data": {**run_values["data"], "test": None}})[1])
    record_run(tmp_path / "run", config)  # a run may go on with another: it is not trained with
    run_values["data"]["test"] = {}
    with pytest.raises(ValueError, match=r"data\.test={}: expected at least 1 item"):
        build_config(RunConfig, run_values)


def test_a_final_model_without_all_of_its_weights_is_not_finished_and_is_written_again(run_values, tmp_path):
    run_values["training"] |= {"stages": {"retrofit": {"length": "1 steps"}}, "calibrate": False}
    config = build_config(RunConfig, run_values)
    run = train(config)
    before = load_model(run.final).state_dict()
    weights = run.final / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    for _ in range(2):
        assert not run.is_finished
        torch.testing.assert_close(load_model(train(config).final).state_dict(), before, rtol=0, atol=0)
        assert run.is_finished
        weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="target_ratio=0 is not a compression ratio"):
        export_checkpoint(run.folder, tmp_path / "out", target_ratio=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("free", "device"), [(3000, "cuda"), (1000, "cpu")])
def test_a_gpu_exports_where_it_has_room_for_the_model_twice(
    free: int, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 4000))
    assert choose_device(torch.nn.Linear(250, 1, bias=False)) == device  # 1,000 bytes
    assert (device == "cpu") == ("the CPU exports" in caplog.text)


def test_a_model_folder_with_folders_in_it_tells_its_tokenizer(run_values, tmp_path):
    (tmp_path / "model" / "tokenizer").mkdir(parents=True)
    run_values["data"]["tokenizer"] = {"path": str(tmp_path / "model")}
    found = []
    for content in ("old", "old", "new"):
        (tmp_path / "model" / "spiece.model").write_text(content)
        found.append(text_digests(build_config(RunConfig, run_values))["data.tokenizer"])
    assert found[0] == found[1] != found[2]


def test_the_models_revision_pins_its_tokenizer_and_no_other(run_values, monkeypatch):
    loaded = []
    monkeypatch.setattr("dmc.training.text_data.load_tokenizer", lambda *arguments: loaded.append(arguments))
    for path in (None, "hub/other"):
        data = run_values["data"] | {"tokenizer": {"path": path}}
        model = {"model": "hub/model", "revision": "v2"}
        config = build_config(RunConfig, run_values | {"data": data, "compression": None} | model)
        build_tokenizer(config)
    assert loaded == [("hub/model", "v2"), ("hub/other", None)]


def test_noise_seeds_differ_by_run_and_position():
    assert noise_seeds(0, [3, 4]) == [3, 4]
    assert len(set(noise_seeds(1, [*range(50)]) + noise_seeds(2, [*range(50)]))) == 100


def test_only_a_run_that_says_so_is_uploaded_and_none_without_a_token_starts(run_values, hub, monkeypatch, tmp_path):
    run_values["training"] |= {"snapshot_ratios": [2.0], "stages": {"retrofit": {"length": "4 steps"}}}
    folder = train(build_config(RunConfig, run_values)).folder
    assert hub.files == {}
    run_values["training"]["push_to_hub"] = "me/tiny"  # of a finished run: the same command, with this
    config = build_config(RunConfig, run_values)
    assert train(config).folder == folder
    (name, files), *others = hub.files.items()
    assert name == "me/tiny" and others == []
    assert files == {path.name: path.read_bytes() for path in (folder / "final").iterdir()}
    export_checkpoint(folder, tmp_path / "here")
    assert hub.commits == 1
    export_checkpoint(folder, tmp_path / "there", push_to_hub="me/other")
    assert b'from_pretrained("me/other")' in hub.files["me/other"]["README.md"] and hub.commits == 2
    monkeypatch.setattr("dmc.training.model_folder.get_token", lambda: None)
    fresh = build_config(RunConfig, run_values | {"output_dir": str(tmp_path / "fresh")})
    with pytest.raises(ValueError, match="push_to_hub=me/tiny: no Hugging Face token"):
        train(fresh)
    assert not (tmp_path / "fresh").exists()
