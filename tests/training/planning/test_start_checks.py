"""A plan and a start refuse the same runs, and every experiment that is shipped can start on its own ranks."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from composing import CONFIGS, changed, composed, names, opening

from dmc.config import build_config
from dmc.training.config import BaseConfig, PlannerConfig, RunConfig
from dmc.training.planning import planner
from dmc.training.planning.start_checks import check_start
from dmc.training.run import train
from dmc.training.strategies.devices import devices_per_node

GPUS_OF_A_NODE = 8
TEXT = {"_target_": "dmc.data.TextSource", "name": "corpus.txt"}


def shipped(name):
    """Compose an experiment; a base that another experiment trains has the shape of the tiny model it is."""
    config = composed(f"experiment={name}")
    if config.model is None or config.model == config.base.path:
        return config
    if config.base.path is not None and "vocab_size" in config.base.shape:  # a base brought to a folder of ours
        return dataclasses.replace(config, base=BaseConfig(config.model, config.base.shape))
    if name.startswith("reasoning/"):
        return dataclasses.replace(
            config, base=BaseConfig(config.model, composed("experiment=reasoning/base_lesson").base.shape)
        )
    tiny = {"study": "tiny_llama_32_heads", "hybrid": "tiny_gpt_oss"}.get(name.split("/")[0], "tiny_llama")
    shape = {**composed(f"base={tiny}").base.shape, "vocab_size": config.data.tokenizer.train_vocab_size}
    return dataclasses.replace(config, base=BaseConfig(config.model, shape))


@pytest.mark.parametrize("name", [name for name in names("experiment") if "dmc train " in opening(name)[1]])
def test_every_experiment_passes_the_checks_of_its_start_at_its_own_ranks(name, caplog):
    config = shipped(name)
    check_start(config, devices_per_node(config))
    assert not caplog.records


def test_the_70b_experiment_is_the_papers_on_256_ranks():
    config = shipped("llama2_70b_cr2")
    assert devices_per_node(config) * config.trainer.num_nodes == 256
    assert config.data.stream_shards == 256
    assert config.training.learning_rate == 1.5e-5  # 7B and 13B: 3e-5


@pytest.fixture
def startable(run_values, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run_values["base"]["shape"] |= {"vocab_size": 300, "max_position_embeddings": 64}
    return run_values


def configured(values, changes):
    return build_config(RunConfig, changed(values, changes))


RECURRENT = {
    "base.shape.model_type": "qwen3_5_text",
    "base.shape.layer_types": ["linear_attention", "full_attention"],
}
REFUSED = [
    ({"trainer.devices": 3}, r"batch_size=4 is not a multiple of micro_batch_size \* devices = 2 \* 3"),
    (
        {"data.streaming": True, "data.stream_shards": 3, "trainer.devices": 2, "trainer.strategy": "ddp"},
        "stream_shards=3 cannot be shared out evenly to 2 ranks",
    ),
    (
        {"data.streaming": True, "data.train": {"own": {"_target_": "dmc.data.MegatronSource", "prefix": "corpus"}}},
        r"data.train.own is MegatronSource, which cannot be streamed",
    ),
    ({"data.train": {"x": {"_target_": "dmc.data.TextSauce"}}}, r"Are you sure that 'TextSauce' is importable"),
    ({"data.calibration": {"x": {}}}, "data.calibration.x has no _target_"),
    ({"trainer.strategy": "fsdp2", "trainer.tensor_parallel_size": 2}, "does not divide the 1 devices"),
    (
        {"trainer.strategy": "hsdp", "trainer.shard_size": 3, "trainer.devices": 4, "training.batch_size": 8},
        "shard_size=3 does not divide the 4 data parallel ranks",
    ),
    (
        {
            "trainer.strategy": "fsdp2",
            "trainer.tensor_parallel_size": 4,
            "trainer.devices": 4,
            "base.shape.head_dim": 8,
        },
        "num_key_value_heads=2 cannot be divided among 4 ranks evenly",
    ),
    (
        {"trainer.strategy": "fsdp2", "trainer.context_parallel_size": 2, "trainer.devices": 3},
        "tensor_parallel_size=1 [*] context_parallel_size=2 does not divide the 3 devices",
    ),
    (
        {
            "trainer.strategy": "fsdp2",
            "trainer.context_parallel_size": 2,
            "trainer.tensor_parallel_size": 2,
            "trainer.devices": 4,
            "base.shape.head_dim": 8,
        },
        r"num_key_value_heads=2 cannot be divided among 2 \* 2 ranks evenly",
    ),
    (
        {**RECURRENT, "trainer.strategy": "fsdp2", "trainer.tensor_parallel_size": 2, "trainer.devices": 2},
        "layer 0 of this qwen3_5_text model has no attention, and keeps a state that 2 ranks cannot divide",
    ),
    (
        {**RECURRENT, "trainer.strategy": "deepspeed_zero3", "training.document_masking": True},
        "layer 0 of this qwen3_5_text model has no attention and takes documents one by one, which deepspeed_zero3",
    ),
    ({"compression.neuron_index": 8}, "neuron_index=8 does not exist in heads of 8 channels"),
    (
        {"base.shape.model_type": "gpt2"},
        "layer 0 of this gpt2 model cannot be retrofitted: nothing is known of c_attn, c_proj in its attention",
    ),
    (
        {"base.shape.rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type='dynamic' changes",
    ),
    ({"base.shape": {"vocab_size": 9}}, "no model_type"),
    ({"model": "nowhere", "base": {"path": "nowhere", "shape": {"hidden_size": 8}}}, "no model_type"),
    (
        {"training.stages": {"retrofit": {"length": "2 steps"}, "zero_out": {"length": "2 steps"}}},
        "zero_out removes the neuron the gates use",
    ),
    ({"trainer.devices": "auto", "trainer.accelerator": "gpu"}, "this machine has no GPU to count"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: next(iter(value)) if value else "")
def test_plan_and_start_refuse_the_same_with_the_same_words_and_write_nothing(startable, changes, message):
    config = configured(startable, changes)
    said = []
    for begin in (lambda: planner.plan_training(config, PlannerConfig()), lambda: train(config)):
        with pytest.raises((ValueError, NotImplementedError), match=message) as refused:
            begin()
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert not Path(config.output_dir).exists()


def test_a_run_without_a_tokenizer_is_refused_as_it_is_composed(startable):
    with pytest.raises(ValueError, match=r"no tokenizer: set data\.tokenizer\.path"):
        configured(startable, {"data.tokenizer": {}})


def test_a_compressed_base_without_the_adapter_is_refused_by_plan_and_start(startable, make_compressed, tmp_path):
    make_compressed().save_pretrained(tmp_path / "base")
    startable["model"] = str(tmp_path / "base")
    test_plan_and_start_refuse_the_same_with_the_same_words_and_write_nothing(
        startable, {"compression.gate_input": "hidden"}, "gate_input='hidden' cannot replace 'neuron'"
    )


def test_sequences_beyond_the_positions_of_the_model_are_told(startable, caplog):
    check_start(configured(startable, {"training.sequence_length": 64}), 1)
    assert not caplog.records
    check_start(configured(startable, {"training.sequence_length": 65}), 1)
    assert "sequence_length=65 is beyond the 64 positions" in caplog.text


def test_a_vocabulary_that_only_the_tokenizer_knows_stops_no_start(startable):
    del startable["base"]["shape"]["vocab_size"]
    check_start(configured(startable, {"data.tokenizer": {"path": "somewhere"}}), 1)


def test_every_base_with_a_hub_name_can_be_retrofitted():
    for name in names("base"):
        if yaml.safe_load((CONFIGS / "base" / f"{name}.yaml").read_text()).get("path"):
            check_start(composed("experiment=llama2_7b_cr2", f"base={name}"), GPUS_OF_A_NODE)
