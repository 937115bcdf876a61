"""What backward computes again: nothing, what is cheap, or whole layers; results are the same."""

from collections import Counter

import pytest
import torch
from planned import gpus
from torch.utils._python_dispatch import TorchDispatchMode

from dmc.compression import GateMode, GateTrace
from dmc.training.planning.fake_step import fake_step
from dmc.training.recompute import recompute

LAYERS = 3
GATES = {"gate_input": "hidden", "delay": 4}


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count[function.overloadpacket.__name__] += 1
        return function(*arguments, **(keywords or {}))


def calls(how, action):
    """Operations of a GPU's micro-batch, by name, without those of one of no layers' loss."""
    compression = {**GATES, "action": action, "target_ratio": 2.0}
    config = gpus(compression=compression, training__activation_checkpointing=how, trainer__precision="bf16-mixed")
    with fake_step(config, range(LAYERS)) as step, Calls() as counted:
        step.micro_batch()
    return counted.count


@pytest.mark.parametrize("action", ["merge", "drop"])
def test_attention_and_products_run_once_where_only_the_rest_is_computed_again(action):
    never, cheap, whole = (calls(how, action) for how in (False, "selective", True))
    assert never["masked_attention"] == cheap["masked_attention"] == LAYERS
    assert whole["masked_attention"] == 2 * LAYERS
    assert never["masked_attention_backward"] == cheap["masked_attention_backward"] == LAYERS
    assert never["mm"] == cheap["mm"] <= whole["mm"] - 6 * LAYERS
    assert never["rsqrt"] < cheap["rsqrt"] == whole["rsqrt"]


def test_a_step_is_the_same_whatever_is_computed_again(make_compressed, make_prompts):
    input_ids = torch.tensor(make_prompts(24, 24))
    results = []
    for how in (False, "selective", True):
        model = make_compressed(gates=GATES).train()
        recompute(model, how)
        options = {"gate_mode": GateMode(noise_seeds=[11, 12]), "gate_trace": (trace := GateTrace())}
        loss = model(input_ids, labels=input_ids, use_cache=False, **options).loss + trace.stacked_alpha().sum()
        loss.backward()
        results.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
