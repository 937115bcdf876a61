"""A model and its optimizer laid over ranks as a run's strategy lays them, without a trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dmc.config import RunConfig
from dmc.models import retrofit
from dmc.models.build import assemble
from dmc.training.checkpoints.folder import MODEL_CONFIG, WEIGHTS, read_tensors
from dmc.training.run import fresh_model
from dmc.training.strategies import parallelism
from dmc.training.strategies.mesh import MESH_NAMES, MeshStrategy


def lay_out(config: RunConfig, seed: int, backend: str = "gloo") -> MeshStrategy:
    """Make the strategy of a run with a model and AdamW, on the ranks that were launched."""
    strategy = MeshStrategy(config)
    size = int(torch.tensor(strategy.mesh_shape).prod())
    strategy.parallel_devices = [torch.device("cpu")] * size
    strategy.cluster_environment = LightningEnvironment() if size == 1 else TorchElasticEnvironment()
    model = retrofit(fresh_model(config.model, 300, seed), config.compression).train()
    module: Any = SimpleNamespace(model=model)
    strategy._lightning_module = module
    if size > 1:
        if not dist.is_initialized():
            dist.init_process_group(backend)
        strategy._device_mesh = init_device_mesh("cpu", strategy.mesh_shape, mesh_dim_names=MESH_NAMES)
        strategy.parallelize(model, "")
    strategy.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)]
    return strategy


def write_tensors(rank: int, config: RunConfig, folders: list[Path], max_shard_size: str = "50GB") -> None:
    """Take two steps, save, and export: as all ranks do together, and as a single process would."""
    parallelism.MAX_SHARD_SIZE = max_shard_size
    strategy = lay_out(config, seed=1)
    model = strategy._lightning_module.model  # type: ignore[union-attr]
    for step in range(2):
        model(torch.arange(24).view(1, 24) + step, use_cache=False).logits.square().mean().backward()
        strategy.optimizers[0].step()
        strategy.optimizers[0].zero_grad()
    config_of_model = model.config.to_dict()
    checkpoint = {"global_step": 2, MODEL_CONFIG: config_of_model, "lr_schedulers": [{"_last_lr": [1e-3]}]}
    strategy.save_checkpoint(checkpoint, folders[0])
    strategy.saver.wait()
    if strategy.exports_parts:
        strategy.write_weights(model, folders[0].with_suffix(".together"))
        if rank == 0:
            whole = assemble(model.config, read_tensors(folders[0], WEIGHTS))
            whole.save_pretrained(folders[0].with_suffix(".alone"), max_shard_size=parallelism.MAX_SHARD_SIZE)


def compare_tensors(rank: int, config: RunConfig, folders: list[Path]) -> None:
    """Load each checkpoint into other weights and compare all of it with what one process reads."""
    for folder in folders:
        strategy = lay_out(config, seed=2)
        strategy.load_checkpoint(folder)
        expected = read_tensors(folder, "")
        found: dict[str, Tensor] = strategy.tensors()
        assert found.keys() == expected.keys()
        for name, value in found.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(whole, expected[name]), f"{folder.name}: {name}"
        assert any(name.endswith(".exp_avg") and value.any() for name, value in expected.items())
