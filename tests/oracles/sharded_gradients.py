"""Gradients on two processes, sharded in different ways, against the same gradients in one piece."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_

from dmc.training.strategies.parallelism import gradient_norm


class Holder(torch.nn.Module):
    """Parameters with given gradients."""

    def __init__(self, gradients):
        super().__init__()
        self.values = torch.nn.ParameterList([torch.zeros_like(gradient) for gradient in gradients])
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient


def compare_norms(rank, count, port):
    """Check on every rank that the norm is the whole's, also where it is not finite."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    line, grid = init_device_mesh("cpu", (count,)), init_device_mesh("cpu", (1, count))
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((6, 4), (5, 3), (4,), (3,))]
    for spoiled in (False, True):
        if spoiled:
            gradients[0][5, 0] = float("inf")  # lies in the last rank's shard only
        sharded = [
            distribute_tensor(gradients[0], line, [Shard(0)]),
            distribute_tensor(gradients[1], grid, [Shard(0), Shard(1)]),
            distribute_tensor(gradients[2], line, [Replicate()]),
            gradients[3],
        ]
        module = Holder(sharded)
        expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        torch.testing.assert_close(gradient_norm(module), expected)
        if not spoiled:
            clip_grads_with_norm_(module.parameters(), 0.5, gradient_norm(module), foreach=False)
            torch.testing.assert_close(gradient_norm(module), torch.tensor(0.5))
        module.zero_grad()
        assert gradient_norm(module) == 0
    dist.destroy_process_group()
