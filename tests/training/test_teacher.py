"""What a run learns from: a second model, or its own base where only gates are added to it."""

import copy
import dataclasses

import pytest
import torch
from planned import gpus, plan

from dmc.compression import CompressionConfig
from dmc.config import build_config
from dmc.models import retrofit
from dmc.models.attention import Documents
from dmc.training.config import RunConfig
from dmc.training.config.training import DistillationConfig
from dmc.training.run import fresh_model, train
from dmc.training.strategies.parallelism import Parallelism
from dmc.training.teacher import OwnBase, Teacher, cast_products
from dmc.training.text_data import build_tokenizer

IDS = torch.randint(80, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("gates", [{}, {"action": "drop", "delay": 3}])
@pytest.mark.parametrize("masks", [False, True])
def test_a_student_without_its_gates_is_its_base_and_goes_on_as_it_was(make_stock, family, gates, masks):
    stock = make_stock(family)
    student = retrofit(copy.deepcopy(stock), CompressionConfig(gate_input="hidden", **gates)).train()
    for adapter in student.adapters():
        torch.nn.init.normal_(adapter.weight)  # gates that decide
    starts = torch.zeros(IDS.shape, dtype=torch.bool)
    starts[:, [0, 7]] = True
    documents = Documents.from_starts(starts) if masks else None
    expected, got = (teacher.read(IDS, documents) for teacher in (Teacher(stock, "", 1.0), OwnBase(student, "", 1.0)))
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-6, atol=1e-6)
    assert torch.equal(got.weight, expected.weight) and not got.hidden_states.requires_grad
    assert student.training and all(parameter.requires_grad for parameter in student.parameters())


def test_products_in_bfloat16_are_those_of_autocast_bit_by_bit(make_stock):
    for tied in (False, True):
        model = make_stock(tie_word_embeddings=tied)
        cast = copy.deepcopy(model)
        cast_products(cast, torch.bfloat16)
        assert cast.model.embed_tokens.weight.dtype == torch.float32
        assert (cast.lm_head.weight.dtype == torch.float32) is tied
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(cast(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("gates", "training", "copies"),
    [
        ({"gate_input": "hidden"}, {"gates_only": True}, 1),
        ({"gate_input": "neuron"}, {"gates_only": True}, 2),
        ({"gate_input": "hidden"}, {}, 2),
    ],
)
def test_a_run_loads_its_base_once_where_it_is_its_own_teacher(
    run_values, tmp_path, monkeypatch, only_trained, gates, training, copies
):
    config = build_config(RunConfig, run_values)
    tokenizer = build_tokenizer(config)
    fresh_model(config, len(tokenizer), seed=3).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run_values["model"], run_values["data"]["tokenizer"] = str(tmp_path / "base"), {}
    run_values["compression"] |= gates
    run_values["training"] |= {"distillation": {}, "stages": {"retrofit": {"length": "1 steps"}}, **training}
    loaded, load = [], Parallelism.load

    def noted(self, *arguments, **options):
        loaded.append(arguments)
        return load(self, *arguments, **options)

    monkeypatch.setattr(Parallelism, "load", noted)
    train(build_config(RunConfig, run_values))
    assert len(loaded) == copies


def test_a_plan_has_no_second_copy_of_a_base_that_stays_and_less_of_a_teacher_in_bfloat16():
    def teacher_of(precision, strategy="auto", **training):
        trainer = {"devices": 1 if strategy == "auto" else 2, "precision": precision, "strategy": strategy}
        trainer = {f"trainer__{name}": value for name, value in trainer.items()}
        config = gpus(compression={"gate_input": "hidden"}, base__path="base", **trainer)
        distilled = build_config(DistillationConfig, {"weight": 1.0})
        training = dataclasses.replace(config.training, distillation=distilled, **training)
        return plan(dataclasses.replace(config, model="base", training=training)).memory.components.get("teacher", 0)

    whole = teacher_of("32-true")
    assert 0.5 * whole <= teacher_of("bf16-mixed") < 0.8 * whole
    assert teacher_of("bf16-mixed", gates_only=True) == 0
    assert teacher_of("bf16-mixed", gates_only=True, strategy="fsdp2") == 0
