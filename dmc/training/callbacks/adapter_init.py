"""Initialization of adapters from held-out text, by each KV head's sensitivity or by a regression; no gradient."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from tqdm.auto import tqdm, trange

from dmc.compression import GateMode
from dmc.models import CompressedCausalLM
from dmc.ranks import ALONE, Ranks
from dmc.training.attention_targets import second_pass_scores
from dmc.training.callbacks.validation import draw_heatmap
from dmc.training.config import RegressionInitConfig, SensitivityInitConfig
from dmc.training.logit_histogram import LogitHistogram
from dmc.training.measure import evaluating, score_text
from dmc.training.stages import Plan

SENSITIVITY_NAME = "head_sensitivity.json"
SMALLEST_SCORE = 1e-12


class AdapterInit(Callback):
    """Initializes the adapters from held-out text, once before the first step of a new run.

    Args:
        settings: which initialization, with its options and the number of `sequences`.
        open_batches: called once the text is there, with `at_least` so many sequences; returns held-out text, see
            `score_text`.
        folder: folder of the written results.
    """

    def __init__(
        self,
        settings: SensitivityInitConfig | RegressionInitConfig,
        open_batches: Callable[..., list[dict[str, Any]]],
        folder: Path,
    ) -> None:
        self.settings, self.open_batches, self.folder = settings, open_batches, folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the text and set the adapters, on all ranks together; do nothing if a run resumes."""
        if trainer.ckpt_path is not None:
            return
        batches = self.open_batches(at_least=self.settings.sequences)
        batches = batches[: max(1, self.settings.sequences // len(batches[0]["input_ids"]))]
        if isinstance(self.settings, RegressionInitConfig):
            _set_fitted(trainer, pl_module, batches, self.settings)
            return
        costs = _set_measured(trainer, pl_module, batches, self.settings)
        if trainer.is_global_zero:
            (self.folder / SENSITIVITY_NAME).write_text(json.dumps({"nats_per_token": costs.tolist()}) + "\n")
            picture, title = self.folder / "heatmaps" / "head_sensitivity.png", "sensitivity to compressing one head"
            heads, label = range(costs.shape[1]), "nats per 1,000 tokens"
            draw_heatmap(1000 * costs, picture, title, "KV head", heads, label, lowest=0.0)


def _set_measured(trainer: Trainer, module: Any, batches: list[Any], settings: SensitivityInitConfig) -> Tensor:
    """Set the decision biases of the adapters by the cost of each head; return the costs, [L, H] nats per token."""
    model = module.model
    with trainer.precision_plugin.forward_context():
        costs = measure_head_sensitivity(model, batches, "sensitivity of each head", Ranks.world())
    wanted = decision_biases(costs, settings.spread, settings.floor) / model.compression.decision_scale
    for adapter, biases in zip(model.adapters(), wanted, strict=True):
        module.strategy.set_rows(adapter.bias, adapter.decision_rows, biases)
    return costs


def measure_head_sensitivity(
    model: CompressedCausalLM,
    batches: Sequence[Mapping[str, Any]],
    title: str | None = None,
    sharing: Ranks = ALONE,
) -> Tensor:
    """Measure the increase in loss when one head merges (or drops) every token it can and all others none.

    Args:
        model: this rank has all of its layers.
        batches: see `score_text`.
        title: title of a progress bar; None: no bar.
        sharing: ranks that divide the batches; all of them call this, with the same result.
    Returns:
        Nats per token, [L, H], on the CPU; noise makes some of them negative.
    """
    layers, heads = len(model.compressed_layers), model.config.num_key_value_heads
    indices = [layer.self_attn.layer_idx for layer in model.compressed_layers]

    def loss(compressed: tuple[tuple[int, int], ...]) -> float:
        return score_text(model, batches, sharing=sharing, gate_mode=GateMode(compressed_heads=compressed)).loss

    uncompressed, costs = loss(()), torch.zeros(layers, heads)
    for place in trange(layers * heads, desc=title, leave=False, disable=title is None or sharing.rank > 0):
        head = divmod(place, heads)
        costs[head] = loss(((indices[head[0]], head[1]),)) - uncompressed
    return costs


def decision_biases(costs: Tensor, spread: float, floor: float) -> Tensor:
    """Turn costs into decision biases: spread * (max z - z), z the standardized log(max(cost, floor * largest cost)).

    The costliest head keeps its initial logit: with a lower one it would hardly ever be sampled, and never learn.

    Args:
        costs: cost of each head, [L, H].
        spread: logits for each standard deviation.
        floor: share of the largest cost below which all count as equal.
    Returns:
        [L, H], >= 0; zeros where no head costs more than another.
    """
    largest = float(costs.max())
    if largest <= 0:
        return torch.zeros_like(costs)
    logs = costs.clamp(min=floor * largest).log()
    deviation = logs.std(correction=0)
    return spread * (logs.max() - logs) / deviation if deviation > 0 else torch.zeros_like(costs)


def _set_fitted(trainer: Trainer, module: Any, batches: list[Any], settings: RegressionInitConfig) -> None:
    """Fit the adapters to a second pass over the text, each rank some layers, for the sums of all are large."""
    model, ranks = module.model, Ranks.world()
    layers = range(ranks.rank, len(model.compressed_layers), ranks.size)
    with trainer.precision_plugin.forward_context():
        fitted = fit_scores(model, batches, settings.ridge, layers, None if ranks.rank else "second pass")
    found = {index: fit for part in ranks.all_gather_object(fitted) for index, fit in part.items()}
    fits = decision_rows([found[index] for index in sorted(found)])
    offset, scale = model.compression.decision_offset, model.compression.decision_scale
    for adapter, rows in zip(model.adapters(), fits, strict=True):
        module.strategy.set_rows(adapter.weight, adapter.decision_rows, settings.logit_scale * rows[:, :-1] / scale)

    def set_biases(offset: float) -> None:
        for adapter, rows in zip(model.adapters(), fits, strict=True):
            biases = (settings.logit_scale * rows[:, -1] + offset) / scale
            module.strategy.set_rows(adapter.bias, adapter.decision_rows, biases)

    set_biases(offset)
    plan = Plan(module.config.training, module.config.target_ratio, module.config.compression)
    if plan.total_steps:  # what trains begins near the ratio of its first step; a calibration follows it all
        histogram = LogitHistogram(offset)
        with trainer.precision_plugin.forward_context():
            score_text(model, batches, "decisions", ranks, histogram=histogram)
        # Before a ramp from CR 1 no more closed than an adapter that nothing has fitted: beyond that none would learn.
        set_biases(max(0.0, 2 * offset - histogram.offset_for(1 / plan.at(0).target_ratio)))


@dataclass
class ScoreFit:
    """A layer's linear fit of the score to its input with an appended 1, float64 on the CPU."""

    rows: Tensor
    """Coefficients, [H, hidden + 1]."""
    mean: Tensor
    """Mean of the predictions, [H]."""
    square: Tensor
    """Mean of the predictions' squares, [H]."""


def decision_rows(fits: Sequence[ScoreFit]) -> list[Tensor]:
    """Turn fits into decision rows, [H, hidden + 1] of each layer: a score's distance below the mean of all heads.

    The unit is the standard deviation over all heads, so one offset is one threshold; a logit of 0 drops about half.
    """
    mean = torch.stack([fit.mean for fit in fits]).mean()
    deviation = (torch.stack([fit.square for fit in fits]).mean() - mean**2).sqrt()
    rows = [-fit.rows / deviation for fit in fits]
    for row in rows:
        row[:, -1] += mean / deviation
    return rows


@torch.no_grad()
def fit_scores(
    model: CompressedCausalLM,
    batches: Sequence[Mapping[str, Any]],
    ridge: float,
    layers: Collection[int],
    title: str | None = None,
) -> dict[int, ScoreFit]:
    """Fit each token's `second_pass_scores` from its layer's input by ridge regression.

    A layer takes 8 (hidden + 1)^2 bytes on the model's device.

    Args:
        model: this rank has all of its layers.
        batches: see `score_text`; of each sequence the first half is read, twice.
        ridge: penalty on squared weights, in units of the inputs' mean square.
        layers: the layers to fit, by their number among those with gates.
        title: of a progress bar; None: none.
    Returns:
        The fit of each of the layers.
    """
    sums: dict[int, tuple[Tensor, ...]] = {}
    residual: dict[int, Tensor] = {}

    def keep_residual(layer: Any, args: Any, kwargs: Any) -> None:
        residual[layer.self_attn.layer_idx] = args[0] if args else kwargs["hidden_states"]

    def add(attention: Any, args: Any, kwargs: Any) -> None:
        states, index = kwargs["hidden_states"], attention.layer_idx
        scores = second_pass_scores(attention, states, kwargs["position_embeddings"], residual.pop(index))
        half = scores.shape[-1]
        inputs = torch.nn.functional.pad(states[:, 1:half], (0, 1), value=1.0).flatten(0, 1).double()
        wanted = scores[..., 1:].clamp_min(SMALLEST_SCORE).log().transpose(1, 2).flatten(0, 1).double()  # [n, H]
        new = inputs.T @ inputs, inputs.T @ wanted
        for total, part in zip(sums.setdefault(index, tuple(map(torch.zeros_like, new))), new, strict=True):
            total += part

    hooks = []
    compressed = model.compressed_layers
    for layer in [compressed[number] for number in layers]:
        hooks.append(layer.register_forward_pre_hook(keep_residual, with_kwargs=True))
        hooks.append(layer.self_attn.register_forward_pre_hook(add, with_kwargs=True))
    try:
        with evaluating(model):
            for batch in tqdm(batches, desc=title, leave=False, disable=title is None):
                ids = batch["input_ids"][:, : batch["input_ids"].shape[1] // 2].to(model.device)
                twice, mode = torch.cat((ids, ids), dim=1), GateMode(compressed_heads=())
                model(twice, use_cache=False, gate_mode=mode, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return {index: _solve(total, ridge) for index, total in sums.items()}


def _solve(sums: Sequence[Tensor], ridge: float) -> ScoreFit:
    """Solve the normal equations, without a penalty on the constant."""
    inputs, wanted = (total.cpu() for total in sums)
    count = inputs[-1, -1]
    penalty = torch.full((len(inputs),), ridge * float(inputs.diagonal()[:-1].mean()), dtype=torch.float64)
    penalty[-1] = 0
    rows = torch.linalg.solve(inputs + penalty.diag(), wanted).T
    return ScoreFit(rows, rows @ inputs[-1] / count, ((rows @ inputs) * rows).sum(-1) / count)
