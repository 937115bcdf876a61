"""Replay of a skipped step's batch on the last checkpoint, to find the first non-finite output."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils._pytree import tree_leaves

from dmc.training.checkpoints import load_last_model
from dmc.training.config import RunConfig
from dmc.training.module import RetrofitModule
from dmc.training.record import read_foreign_config
from dmc.training.stages import Plan
from dmc.training.strategies import Parallelism


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    step: int
    """Step of the batch; 10: the one after 10 optimizer steps."""
    weights_step: int
    """Number of optimizer steps of the weights."""
    losses: list[tuple[float, float]]
    """Cross-entropy of each micro-batch, in the run and in the replay."""
    gradient_norms: dict[str, float]
    """Gradient norm of each layer, and of each module outside the layers, in the model's order."""
    first_nonfinite: str | None
    """First module with a non-finite output; None: all outputs were finite."""

    def __str__(self) -> str:
        lines = [f"batch of step {self.step}, weights after step {self.weights_step}"]
        lines += [f"micro-batch {i}: loss {then:g} then, {now:g} now" for i, (then, now) in enumerate(self.losses)]
        lines += [f"gradient norm {norm:12g}  {name}" for name, norm in self.gradient_norms.items()]
        return "\n".join([*lines, f"first output that is not finite: {self.first_nonfinite or 'none'}"])


def replay(run_folder: Path, file: Path, trust_run: bool = False) -> Replay:
    """Run the micro-batches that one rank kept of a skipped step, with the same noise.

    Args:
        run_folder: output folder of the run.
        file: a file of its folder `nonfinite`.
        trust_run: let the run's record name any code as its text.
    Raises:
        FileNotFoundError, ValueError: there is no run or no file, or one of them is damaged.
    """
    config = read_foreign_config(run_folder, trust_run)
    step, batches = _read_kept(file, run_folder)
    model, weights_step = load_last_model(run_folder)
    plan = Plan(config.training, config.target_ratio, config.compression)
    module = RetrofitModule(model, config, plan, Parallelism(config))
    cuda = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
    module.to("cuda" if cuda else "cpu").train()
    nonfinite = _watch_outputs(model)
    losses = [(batch["loss"], _run(module, config, step, batch, len(batches))) for batch in batches]
    return Replay(step, weights_step, losses, _norms(model), nonfinite[0] if nonfinite else None)


def _read_kept(file: Path, run_folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return a skipped step and its micro-batches."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: file= is one of {run_folder / 'nonfinite'}")
    try:
        kept = torch.load(file, map_location="cpu", weights_only=True)
        step, batches = kept["step"], kept["micro_batches"]
        if isinstance(step, int) and all({"input_ids", "position", "loss"} <= {*batch} for batch in batches):
            return step, batches
        reason = "other content"
    except (RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError, ValueError) as error:
        reason = type(error).__name__
    raise ValueError(f"{file} is cut off or is no batch kept by a run ({reason})")


def _run(module: RetrofitModule, config: RunConfig, step: int, batch: dict[str, Any], count: int) -> float:
    """Add one micro-batch's gradients and return its cross-entropy."""
    module.prepare(step)
    given = move_data_to_device(module.on_before_batch_transfer(batch, 0), module.device)
    with torch.autocast(module.device.type, torch.bfloat16, enabled=config.trainer.precision == "bf16-mixed"):
        loss = module.loss_at(step, given)
    (loss / count).backward()
    return float(module.micro_batch_metrics[-1]["train/loss"])


def _watch_outputs(model: Any) -> list[str]:
    """Return a list that collects the names of modules with non-finite outputs, in the order they run."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def check(module: Any, inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]
            if not all(tensor.isfinite().all() for tensor in tensors):
                found.append(name)

        return check

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name or type(model).__name__))
    return found


def _norms(model: Any) -> dict[str, float]:
    """Return the gradient norm of each layer, and of each module outside the layers."""
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = re.match(r".*layers\.\d+", name)
            part = layer[0] if layer else name.rpartition(".")[0]
            squares[part] = squares.get(part, 0.0) + float(parameter.grad.double().square().sum())
    return {part: square**0.5 for part, square in squares.items()}
