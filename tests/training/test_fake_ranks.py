"""A training step of every experiment file as one of its real number of ranks takes it: torch's fake process group.

Tensors have shapes and no data, collectives return at once. What is shown: the step starts, shapes fit, and every rank
enters the same collectives in the same order. Layers are alike, so two stand for all of them.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_configs import composed, names
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from dmc.config import RunConfig
from dmc.models import retrofit
from dmc.training.callbacks import step_metrics
from dmc.training.callbacks.nonfinite import NonFiniteGuard
from dmc.training.callbacks.step_metrics import StepMetrics
from dmc.training.module import RetrofitModule
from dmc.training.planning.memory_trace import with_values
from dmc.training.planning.model_shape import model_shape
from dmc.training.stages import Plan
from dmc.training.strategies import build_strategy
from dmc.training.strategies.mesh import MESH_NAMES

SHARDED = sorted(name for name in names("experiment") if name.startswith("llama"))
GPUS_OF_A_NODE = "trainer.devices=8"
REPEATS = dict.fromkeys(("llama2_7b_cr4", "llama2_7b_cr8"), pytest.mark.slow)
"""Have the shapes and ranks of `llama2_7b_cr2`."""


class Collectives(TorchDispatchMode):
    """Writes down every collective, with what it carries and between how many ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves(arguments)
            name = function.overloadpacket.__name__
            carried = [(tuple(each.shape), each.dtype) for each in leaves if isinstance(each, torch.Tensor)]
            if name == "scatter_":
                carried = carried[:1]  # who scatters has all parts, who receives one
            groups = [each for each in leaves if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each)]
            sizes = [dist.ProcessGroup.unbox(each).size() for each in groups]
            self.entered.append((name, *carried, *sizes))
        return function(*arguments, **(keywords or {}))


@contextmanager
def fake_rank(rank: int, num_ranks: int) -> Any:
    """Let this process be one of many, whose others answer at once and with nothing."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def take_step(config: RunConfig, rank: int, num_layers: int, monkeypatch: Any, tmp_path: Any) -> list[tuple[Any, ...]]:
    """Build, shard and train a step of a run as one rank; return the collectives that it enters."""
    num_ranks = int(config.trainer.devices) * config.trainer.num_nodes
    training, plan = config.training, Plan(config.training, config.target_ratio, config.compression)
    monkeypatch.setattr(step_metrics, "LateNumbers", lambda numbers: None)
    with ExitStack() as modes:
        modes.enter_context(fake_rank(rank, num_ranks))
        strategy = build_strategy(config)
        strategy._device_mesh = init_device_mesh("cpu", strategy.mesh_shape, mesh_dim_names=MESH_NAMES)
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        collectives = modes.enter_context(Collectives())
        shape = with_values(model_shape(config), num_hidden_layers=num_layers)
        model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, config.model.dtype))
        module = RetrofitModule(retrofit(model, config.compression).train(), config, plan, strategy)
        # Meshes of several dimensions are cut by reading them.
        with nullcontext() if strategy.mesh_shape[1] == num_ranks else unset_fake_temporarily():
            strategy.parallelize(module)
        optimizer = module.configure_optimizers()["optimizer"]
        metrics = StepMetrics(NonFiniteGuard(None, tmp_path, 2), training.gradient_clip, 1)
        size = training.micro_batch_size
        input_ids = torch.zeros(size, training.sequence_length, dtype=torch.long)
        batch = {"input_ids": input_ids, "position": list(range(size)), "documents": None}
        module.loss_at(plan.total_steps - 1, batch).backward()
        trainer: Any = SimpleNamespace(global_step=plan.total_steps - 1)
        metrics.on_before_optimizer_step(trainer, module, optimizer)
        optimizer.step()
    return collectives.entered


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, [], id=name, marks=REPEATS.get(name, ())) for name in SHARDED),
        pytest.param("llama2_70b_cr2", ["trainer.tensor_parallel_size=8"], id="llama2_70b_cr2, cut heads"),
        pytest.param("llama2_13b_cr2", ["trainer.strategy=hsdp"], id="llama2_13b_cr2, copies"),
    ],
)
def test_every_rank_of_an_experiment_enters_the_same_collectives(name, options, monkeypatch, tmp_path):
    config = composed(f"experiment={name}", GPUS_OF_A_NODE, *options)
    num_ranks = 8 * config.trainer.num_nodes
    _, shard, tensor = config.trainer.mesh(8)
    ranks = sorted({0, num_ranks - 1, *({1, tensor} if tensor > 1 else ()), shard * tensor % num_ranks})
    first, *others = (take_step(config, rank, 2, monkeypatch, tmp_path) for rank in ranks)
    assert any("all" in entered[0] and "gather" in entered[0] for entered in first)
    assert any("reduce_scatter" in entered[0] for entered in first)
    for rank, found in zip(ranks[1:], others, strict=True):
        assert found == first, f"rank {rank}"
