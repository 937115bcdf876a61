"""Compiled regions of a step: one code for all layers, nothing compiled anew after the first two steps."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dmc.compression import CompressionConfig, GateMode, GateTrace
from dmc.models import next_tokens, retrofit
from dmc.training.module import compile_regions
from dmc.training.teacher import OwnBase

GATES = {
    "merge": {"gate_input": "hidden", "window_size": 3},
    "drop": {"gate_input": "hidden", "action": "drop", "delay": 3},
    "neuron": {"delay": 2, "window_size": 3},
}


@pytest.fixture
def graphs():
    """Graphs that are compiled, and then run as they are."""
    counter = CompileCounter()
    torch._dynamo.reset()
    torch.compiler.set_default_backend(counter)
    yield counter
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


def losses_and_graphs(model, graphs, compiled, distils):
    """Losses of 4 steps whose seeds and targets differ, and the number of graphs after each."""
    ids, losses, counts = torch.arange(32).view(2, 16), [], []
    if compiled:
        compile_regions(model)
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
