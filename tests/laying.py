"""A model and its optimizer laid over ranks as a run's strategy lays them, without a trainer."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from serving import serve_folders
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmc.models import load_model, retrofit
from dmc.models.attention import Documents
from dmc.models.build import assemble
from dmc.ranks import Ranks
from dmc.training import export
from dmc.training.checkpoints import MODEL_CONFIG, WEIGHTS, read_tensors
from dmc.training.config import RunConfig
from dmc.training.module import RetrofitModule
from dmc.training.optimizer_step import OptimizerStep
from dmc.training.run import fresh_model
from dmc.training.stages import Plan
from dmc.training.strategies.mesh import MeshStrategy
from dmc.training.teacher import Teacher


def lay_out(config: RunConfig, seed: int, backend: str = "gloo") -> MeshStrategy:
    """Make the strategy of a run with a model and AdamW, on the ranks that were launched."""
    strategy = MeshStrategy(config)
    size = int(torch.tensor(strategy.mesh_shape).prod())
    strategy.parallel_devices = [torch.device("cpu")] * size
    strategy.cluster_environment = LightningEnvironment() if size == 1 else TorchElasticEnvironment()
    model = retrofit(fresh_model(config, 300, seed), config.compression).train()
    plan = Plan(config.training, config.target_ratio, config.compression)
    module: Any = SimpleNamespace(model=model, plan=plan)
    strategy.connect(module)
    if size > 1:
        if not dist.is_initialized():
            dist.init_process_group(backend)
        strategy.make_mesh("cpu")
        strategy.parallelize(model, "")
    strategy.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)]
    return strategy


def write_tensors(rank: int, configs: dict[str, RunConfig], folders: list[Path]) -> None:
    """Take two steps, save, and export: as all ranks do together, and as a single process would; for each layout."""
    for (layout, config), folder in zip(configs.items(), folders, strict=True):
        export.MAX_SHARD_SIZE = "50GB" if layout == "fsdp2 on 2" else "20KB"
        strategy = lay_out(config, seed=1)
        model = strategy._lightning_module.model  # type: ignore[union-attr]
        for step in range(2):
            model(torch.arange(24).view(1, 24) + step, use_cache=False).logits.square().mean().backward()
            strategy.optimizers[0].step()
            strategy.optimizers[0].zero_grad()
        config_of_model = model.config.to_dict()
        checkpoint = {"global_step": 2, MODEL_CONFIG: config_of_model, "lr_schedulers": [{"_last_lr": [1e-3]}]}
        strategy.save_checkpoint(checkpoint, folder)
        strategy.saver.wait()
        if strategy.exports_parts:
            export.write_parts(strategy, model, folder.with_suffix(".together"))
            if rank == 0:
                gathered = assemble(model.config, read_tensors(folder, WEIGHTS))
                gathered.save_pretrained(folder.with_suffix(".alone"), max_shard_size=export.MAX_SHARD_SIZE)


def compare_tensors(rank: int, configs: dict[str, RunConfig], folders: list[Path]) -> None:
    """Load each checkpoint into other weights, at each layout, and compare all of it with what one process reads."""
    for layout, folder in itertools.product(configs, folders):
        strategy = lay_out(configs[layout], seed=2)
        strategy.load_checkpoint(folder)
        expected = read_tensors(folder, "")
        found: dict[str, Tensor] = strategy.tensors()
        assert found.keys() == expected.keys()
        for name, value in found.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(full, expected[name]), f"{layout} of {folder.name}: {name}"
        assert any(name.endswith(".exp_avg") and value.any() for name, value in expected.items())


def write_gradients(rank: int, runs: dict[str, tuple[RunConfig, int]], texts: Tensor, out: Path) -> None:
    """Write the loss and the gradients of one step of each run, averaged as its strategy does, from the first rank.

    Args:
        rank: this process.
        runs: config and step, by name; all of as many ranks.
        texts: sequences, [N, T], of which each data parallel rank reads its share.
        out: folder of `NAME.pt`.
    """
    for name, (config, step) in runs.items():
        strategy = MeshStrategy(config)
        num_ranks = torch.Size(strategy.mesh_shape).numel()
        strategy.parallel_devices = [torch.device("cpu")] * num_ranks
        strategy.cluster_environment = LightningEnvironment() if num_ranks == 1 else TorchElasticEnvironment()
        if num_ranks > 1:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            strategy.make_mesh("cpu")
        base = fresh_model(config, 300, seed=0) if config.model is None else load_model(config.model)
        model = _with_strong_gates(base, config)
        module = RetrofitModule(model.train(), config, strategy)
        plan = Plan(config.training, config.target_ratio, config.compression)
        strategy.connect(module)
        if config.distillation is not None:
            module.teacher = Teacher(fresh_model(config, 300, seed=1), "", config.distillation.temperature)
        module.configure_model()
        chunks = torch.arange(len(texts)).chunk(num_ranks // config.trainer.devices_per_sequence)
        rows = chunks[rank // config.trainer.devices_per_sequence]
        starts = torch.rand(texts.shape, generator=torch.Generator().manual_seed(1)) < 0.1
        starts[:, 0] = True
        documents = Documents.from_starts(starts[rows]) if config.training.document_masking else None
        schedule = OptimizerStep(plan, config.training).schedule_at(step)
        loss, _ = module(schedule, {"input_ids": texts[rows], "position": rows.tolist(), "documents": documents})
        loss.backward()
        ranks, found = Ranks.world(), {"loss": Ranks.world().all_reduce(loss.detach(), "avg")}
        for key, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, key
            found[key] = gradient.full_tensor() if isinstance(gradient, DTensor) else ranks.all_reduce(gradient, "avg")
        if rank == 0:
            torch.save(found, out / f"{name}.pt")


def serve_and_differentiate(rank: int, served: tuple[Any, ...], trained: tuple[Any, ...]) -> None:
    """Call `serve_folders`, then `write_gradients`, in one start of the ranks."""
    serve_folders(*served)
    write_gradients(rank, *trained)


def _with_strong_gates(model: Any, config: RunConfig) -> Any:
    """Retrofit a model, its adapters not zero, so that the gates differ between heads and tokens."""
    if config.gates is None:
        return model
    model = retrofit(model, config.gates)
    torch.manual_seed(3)
    for adapter in model.adapters():
        torch.nn.init.normal_(adapter.weight, std=0.5)
        torch.nn.init.normal_(adapter.bias)
    return model
