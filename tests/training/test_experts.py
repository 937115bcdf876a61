"""Models with experts: trained with their routers' loss, over ranks as one process does, and planned."""

import pytest
import torch
from launching import logged_losses, train_ranks
from planned import plan, run

from dmc.config import build_config
from dmc.models import load_model
from dmc.models.token_losses import with_token_losses
from dmc.training.config import RunConfig
from dmc.training.run import fresh_model, train

EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "mlp_only_layers": [0], "router_aux_loss_coef": 0.5,
}  # fmt: skip


@pytest.fixture
def values(run_values, corpus):
    run_values["base"]["shape"] |= EXPERTS
    run_values["training"] |= {
        "stages": {"zero_out": {"length": "1 steps"}, "retrofit": {"length": "2 steps"}},
        "batch_size": 4, "micro_batch_size": 1, "validate_every_steps": 3, "checkpoint_every_steps": 3,
        "document_masking": True, "whole_documents": True,
    }  # fmt: skip
    run_values["compression"] |= {"gate_input": "hidden"}
    base = fresh_model(build_config(RunConfig, run_values), 300, seed=3)
    base.config.output_router_logits = True
    base.save_pretrained(corpus / "experts")
    return run_values | {"model": str(corpus / "experts")}


@pytest.fixture
def alone(values, corpus):
    """Folder of the run of one process, made once."""
    return train(build_config(RunConfig, dict(values, output_dir=str(corpus / "experts alone")))).folder


LAYOUTS = {
    "fsdp2": {"strategy": "fsdp2"},
    "tensor": {"strategy": "fsdp2", "tensor_parallel_size": 2},
    "context": {"strategy": "fsdp2", "context_parallel_size": 2},
    "zero2": {"strategy": "deepspeed_zero2"},
    "zero3": {"strategy": "deepspeed_zero3"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_learn_what_one_does(values, alone, layout, tmp_path):
    folder = tmp_path / layout
    trainer = values["trainer"] | {"devices": 2} | LAYOUTS[layout]
    train_ranks(values | {"output_dir": str(folder), "trainer": trainer}, 2, tmp_path / "log")
    expected, found = logged_losses(alone), logged_losses(folder)
    assert found == pytest.approx(expected, abs=1e-5)
    model, same = (load_model(run / "final").state_dict() for run in (alone, folder))
    assert model.keys() == same.keys()
    for name, weight in model.items():
        torch.testing.assert_close(same[name], weight, rtol=0, atol=2e-6)


def test_what_sequences_are_filled_up_with_does_not_count_for_the_balance_of_experts(values):
    model = with_token_losses(load_model(values["model"]))
    input_ids = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([24, 9])
    token_mask = torch.arange(24) < lengths[:, None]
    filled = {"input_ids": input_ids.where(token_mask, 7), "targets": input_ids}
    found = model(**filled, token_mask=token_mask).aux_loss
    shares = torch.cat([
        model.model(row[None, :length], output_router_logits=True).router_logits[0].softmax(-1)
        for row, length in zip(input_ids, lengths, strict=True)
    ])  # fmt: skip
    chosen = torch.nn.functional.one_hot(shares.topk(2, -1).indices, 4).float().sum(1)  # [tokens, experts]
    torch.testing.assert_close(found, 0.5 * 4 * (chosen.mean(0) * shares.mean(0)).sum())
    assert (found - model(**filled).aux_loss).abs() > 1e-4


def test_a_plan_counts_all_experts_as_weights_and_the_chosen_ones_as_operations():
    shape = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 256, "num_experts": 8, "moe_intermediate_size": 32,
    }  # fmt: skip
    for chosen in (2, 4):
        found = plan(run(shape | {"num_experts_per_tok": chosen}, trainer__strategy="fsdp2"))
        attention, experts, router = 2 * 64 * 16 * (4 + 2), 3 * 64 * 32, 64 * 8
        of_layer = attention + 8 * experts + router + 2 * 64 + 2 * 16
        assert found.num_weights == 3 * of_layer + 2 * 256 * 64 + 64
