"""A training step of every experiment file as one of its real number of ranks takes it: torch's fake process group.

Tensors have shapes and no data, collectives return at once. What is shown: the step starts, shapes fit, and every rank
enters the same collectives in the same order. Two layers stand for all: in each model they have all kinds.
"""

import pytest
import torch
import torch.distributed as dist
from composing import ALIKE, composed, on_gpus
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmc.training.planning.fake_step import fake_step

ON_GPUS = on_gpus().keys() - ALIKE
QUICK = ("llama2_7b_cr2", "qwen3_0p6b_cr4", "qwen3_8b_dms_cr8")
"""One for each strategy."""


class Collectives(TorchDispatchMode):
    """Writes down every collective, with what it carries and between how many ranks."""

    def __init__(self):
        super().__init__()
        self.entered = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # what is entered within it is not missed
        if function.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves(arguments)
            name = function.overloadpacket.__name__
            carried = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if name == "scatter_":
                carried = carried[:1]  # who scatters has all parts, who receives one
            groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf)]
            sizes = [dist.ProcessGroup.unbox(group).size() for group in groups]
            self.entered.append((name, *carried, *sizes))
        return function(*arguments, **(keywords or {}))


def test_a_quick_one_stands_for_each_strategy():
    strategies = {name: composed(f"experiment={name}").trainer.strategy for name in ON_GPUS}
    assert sorted(strategies[name] for name in QUICK) == sorted({*strategies.values()})


def collectives_of(config, rank):
    """Return what one rank enters while the model is laid over the ranks, and in a step."""
    collectives = Collectives()
    with fake_step(config, range(2), rank, collectives) as step:
        step.micro_batch()
        step.average_and_decide()
        step.optimizer.step()
    return collectives.entered


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, [], id=name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(ON_GPUS)),
        *(
            pytest.param(name, [f"trainer.{size}_parallel_size=8"], id=f"{name}, {size}", marks=pytest.mark.slow)
            for name, size in (("llama2_70b_cr2", "tensor"), ("llama2_13b_cr2", "context"))
        ),
    ],
)
def test_every_rank_of_an_experiment_enters_the_same_collectives(name, options):
    config = composed(f"experiment={name}", *options)
    num_local = config.trainer.devices
    num_ranks = num_local * config.trainer.num_nodes
    _, shard, tensor = config.trainer.mesh(num_local)
    neighbors = {1, tensor, shard * tensor % num_ranks} if num_ranks > shard else set()  # in one coordinate each
    ranks = sorted({0, num_ranks - 1} | neighbors)
    first, *others = (collectives_of(config, rank) for rank in ranks)
    assert any("all" in entered[0] and "gather" in entered[0] for entered in first) == (num_ranks > 1)
    assert any("reduce_scatter" in entered[0] for entered in first) == (num_ranks > 1)
    for rank, found in zip(ranks[1:], others, strict=True):
        assert found == first, f"rank {rank}"
