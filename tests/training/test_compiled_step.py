"""Compiled layers of a step: one graph for all that are alike, nothing compiled anew after the first two steps."""

from collections import Counter

import pytest
import torch
from planned import gpus
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition

from dmc.compression import CompressionConfig, GateMode, GateTrace
from dmc.models import next_tokens, retrofit
from dmc.training.compiled_layers import compile_layers
from dmc.training.planning.fake_step import fake_step
from dmc.training.recompute import recompute
from dmc.training.teacher import OwnBase

GATES = {
    "merge": {"gate_input": "hidden", "window_size": 3},
    "drop": {"gate_input": "hidden", "action": "drop", "delay": 3},
    "neuron": {"delay": 2, "window_size": 3},
}


@pytest.fixture
def default_backend():
    """Set what compiles where nothing is named."""
    torch._dynamo.reset()
    yield torch.compiler.set_default_backend
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


@pytest.fixture
def graphs(default_backend):
    """Graphs that are compiled, and then run as they are."""
    default_backend(counter := CompileCounter())
    return counter


def losses_and_graphs(model, graphs, compiled, distils):
    """Losses of 4 steps whose seeds and targets differ, and the number of graphs after each."""
    ids, losses, counts = torch.arange(32).view(2, 16), [], []
    if compiled:
        compile_layers(model, False)
    for step in range(4):
        trace = GateTrace()
        options = {
            "targets": next_tokens(ids), "gate_trace": trace,
            "gate_mode": GateMode(noise_seeds=[step, 7 * step + 1], fixed_ratio=1.0 + step),
            "teacher_output": OwnBase(model, "", 1.0).read(ids) if distils else None,
        }  # fmt: skip
        total = model(ids, use_cache=False, **options).cross_entropy.sum()
        (total + trace.stacked_alpha().sum()).backward()
        losses.append(total.detach())
        counts.append(graphs.frame_count)
    return losses, counts


@pytest.mark.parametrize("name", [pytest.param("merge", marks=pytest.mark.slow), "drop", "neuron"])
def test_layers_share_what_is_compiled_and_no_later_step_compiles(make_stock, graphs, name):
    found = {}
    for layers in (2, 4):
        torch._dynamo.reset()
        graphs.clear()
        model = retrofit(make_stock(num_layers=layers), CompressionConfig(**GATES[name])).train()
        distils = name != "neuron"  # where a channel is borrowed the base is another model
        expected, none = losses_and_graphs(model, graphs, False, distils)
        losses, found[layers] = losses_and_graphs(model, graphs, True, distils)
        torch.testing.assert_close(losses, expected)
        assert none == [0] * 4
    assert found[2] == found[4] and found[2][0] > 0 and found[2][1] == found[2][3]


@pytest.mark.parametrize(
    "how", ["selective", pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_compiled_step_is_the_one_as_written_whatever_is_computed_again(
    make_compressed, make_prompts, default_backend, how
):
    default_backend("aot_eager")
    input_ids, results = torch.tensor(make_prompts(24, 24)), []
    for compiled in (False, True):
        model = make_compressed(gates={"gate_input": "hidden", "delay": 4}).train()
        recompute(model, how)
        if compiled:
            compile_layers(model, how)
        options = {"gate_mode": GateMode(noise_seeds=[11, 12]), "gate_trace": (trace := GateTrace())}
        loss = model(input_ids, labels=input_ids, use_cache=False, **options).loss + trace.stacked_alpha().sum()
        loss.backward()
        results.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=5e-6)


def test_adapters_learn_in_float32_under_autocast_compiled_or_not(make_compressed, make_prompts, default_backend):
    default_backend("aot_eager")
    input_ids, gradients = torch.tensor(make_prompts(24, 24)), []
    for compiled in (False, True):
        model = make_compressed(gates={"gate_input": "hidden", "delay": 4}, num_layers=1).train()
        if compiled:
            compile_layers(model, False)
        options = {"gate_mode": GateMode(noise_seeds=[11, 12]), "gate_trace": (trace := GateTrace())}
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids, use_cache=False, **options)
        trace.stacked_alpha().sum().backward()
        assert not trace.stacked_logits().requires_grad
        gradients.append([weight.grad for adapter in model.adapters() for weight in adapter.parameters()])
    assert all(gradient.abs().max() > 0.1 for gradient in gradients[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "action"),
    [
        ("selective", "drop"),
        *(pytest.param(how, "merge", marks=pytest.mark.slow) for how in (False, "selective")),
    ],
)
def test_a_gpus_layer_is_one_graph_each_way_that_attends_and_multiplies_once(default_backend, how, action):
    seen = []

    def count(graph, _):
        seen.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph

    given = {"fw_compiler": count, "bw_compiler": count, "partition_fn": min_cut_rematerialization_partition}
    default_backend(aot_autograd(**given))
    compression = {"gate_input": "hidden", "action": action, "delay": 4, "target_ratio": 2.0}
    config = gpus(compression=compression, training__activation_checkpointing=how, trainer__precision="bf16-mixed")
    at_once = functorch.patch(force_non_lazy_backward_lowering=True)  # later constants have no data
    with fake_step(config, range(3)) as step, at_once:
        compile_layers(step.module.model, how)
        step.micro_batch()
        forward, backward = seen
        step.micro_batch()
    assert len(seen) == 2
    attention = "dmc.masked_attention.default"
    assert forward[attention] == 1 and backward[attention] == 0
    assert backward["dmc.masked_attention_backward.default"] == 1
    products = sum(forward[f"aten.{name}.default"] for name in ("mm", "addmm"))
    assert backward["aten.mm.default"] == 2 * products
