"""The LightningModule of a retrofit: its model and its losses. What a step does is in `optimizer_step.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor

from dmc.compression import GateMode, GateTrace, compression_loss, hard_decisions, head_agreement_loss, held_fraction
from dmc.models import CompressedCausalLM, next_tokens, with_token_losses
from dmc.models.modeling import for_unpadded
from dmc.models.token_losses import LossWeights, sequence_weights, token_weights
from dmc.ranks import ALONE, Ranks
from dmc.training.checkpoints import GENERATION_CONFIG, MODEL_CONFIG
from dmc.training.compiled_layers import compile_layers
from dmc.training.config import RunConfig
from dmc.training.recompute import recompute
from dmc.training.run_base import base_of
from dmc.training.stages import StepState
from dmc.training.strategies.parallelism import Parallelism
from dmc.training.teacher import Teacher


@dataclass(frozen=True)
class Schedule:
    """What the loss of a step depends on beside the text, as `OptimizerStep.schedule_at` sets it."""

    step: int
    """Number of optimizer steps before it."""
    state: StepState
    """The plan's values."""
    ratio_weight: float | Tensor
    """Weight of the ratio loss."""
    relaxed_target: float | Tensor
    """Compression ratio that relaxed decisions are to meet, >= 1."""


def noise_seeds(seed: int, positions: list[int]) -> list[int]:
    """Seed each sample's noise by the run's seed and the sample's position in the global order of draws."""
    return [seed * 1_000_000_007 + position for position in positions]


def train_gates_only(model: CompressedCausalLM) -> None:
    """Freeze all weights except the adapters, and W_q and W_k for the borrowed neuron's rows: see `keep_rows`."""
    model.requires_grad_(False)
    for adapter in model.adapters():
        adapter.requires_grad_(True)
    for parameter, _ in model.neuron_rows():
        parameter.requires_grad_(True)


class RetrofitModule(LightningModule):
    """Trains a stock model plainly, or a compressed one through zero-out, retrofit and solidify.

    loss = cross-entropy + ratio_weight * one-sided loss on the share of the cache held (DMC eq. 11)
           + head_agreement_weight * difference between the heads of a layer (DMC-C, eq. 14); with distillation part of
    the cross-entropy gives way to the divergence from a teacher.

    Args:
        model: stock or compressed causal LM.
        config: the run.
        strategy: parallelism of the weights.
    """

    def __init__(self, model: Any, config: RunConfig, strategy: Parallelism) -> None:
        super().__init__()
        self.model, self.config, self.strategy = with_token_losses(model), config, strategy
        self.automatic_optimization = False  # `OptimizerStep` takes the steps
        self.teacher: Teacher | None = None
        """Set before training if the run distills."""
        self._is_parallel = False
        recompute(model, config.training.activation_checkpointing)
        if config.training.gates_only and self.has_gates:
            train_gates_only(model)
        for_unpadded(self.model)

    @property
    def has_gates(self) -> bool:
        """Whether the model has gates."""
        return isinstance(self.model, CompressedCausalLM)

    @property
    def ranks(self) -> Ranks:
        """The ranks that share each layer's heads."""
        return getattr(self.model, "ranks", ALONE)

    def configure_model(self) -> None:
        """Parallelize the model once; Lightning may call this several times."""
        if not self._is_parallel:
            self._is_parallel = True
            teacher = self.teacher if self.teacher is not None and self.teacher.owns_weights else None
            if self.config.trainer.compiles_layers:
                compile_layers(self.model, self.config.training.activation_checkpointing)
                if teacher is not None:
                    compile_layers(teacher.model, False)
            self.strategy.parallelize(self.model, str(self.config.model))
            if teacher is not None:
                self.strategy.parallelize_teacher(teacher.model, teacher.path)

    def forward(self, schedule: Schedule, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return `training_step`: what DistributedDataParallel and DeepSpeed wrap."""
        return self.training_step(schedule, batch)

    def training_step(  # type: ignore[override]
        self, schedule: Schedule, batch: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch, and its metrics: losses, and shares of the cache held.

        Args:
            schedule: of the optimizer step.
            batch: result of `host_batch`: input_ids [B, T], global positions as B numbers, documents, and, if given,
                loss_mask [B, T] and num_predicted, see `token_mean`, and token_mask [B, T], True at what ratios count.
        """
        state = schedule.state
        input_ids = batch["input_ids"]
        targets = next_tokens(input_ids, batch.get("loss_mask"))
        weights = self._weights(targets, batch)
        counted = {"documents": batch["documents"], "token_mask": batch.get("token_mask")}
        if not self.has_gates:
            losses = self.model(
                input_ids, use_cache=False, targets=targets, loss_weights=LossWeights(weights), **counted
            )
            loss = losses.total
            metrics = {"train/loss": loss.detach()}
            if losses.aux_loss is not None:
                metrics["train/router_loss"] = losses.aux_loss.detach()
                loss = loss + losses.aux_loss
            return loss, metrics
        trace, distillation = GateTrace(ranks=self.ranks), self.config.training.distillation
        share = 0.0 if self.teacher is None or distillation is None else distillation.weight
        losses = self.model(
            input_ids,
            use_cache=False,
            gate_mode=self._gate_mode(state, batch["position"]),
            gate_trace=trace,
            targets=targets,
            loss_weights=LossWeights((1 - share) * weights, share * weights if share else None),
            **counted,
            teacher_output=None if self.teacher is None else self.teacher.read(input_ids, batch["documents"]),
        )
        if self.teacher is not None:
            self.teacher.release()
        loss = losses.total
        metrics = {"train/loss": (losses.cross_entropy.detach() * weights).sum()}
        if losses.divergence is not None and share:
            metrics["train/distillation_loss"] = (losses.divergence.detach() * weights).sum()
        if losses.aux_loss is not None:
            metrics["train/router_loss"] = losses.aux_loss.detach()
            loss = loss + losses.aux_loss
        if state.neuron_multiplier is None:
            ratio_loss, held = self._ratio_loss(trace, schedule, batch.get("token_mask"))
            metrics |= {"train/ratio_loss": ratio_loss.detach(), **held}
            loss = loss + torch.as_tensor(schedule.ratio_weight, dtype=ratio_loss.dtype) * ratio_loss
            if self.config.training.head_agreement_weight > 0:
                agreement_loss = head_agreement_loss(trace.stacked_alpha(), self.config.training.head_agreement)
                metrics["train/head_agreement_loss"] = agreement_loss.detach()
                loss = loss + self.config.training.head_agreement_weight * agreement_loss
        return loss, metrics

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the model's configurations, so that the checkpoint can be exported; and of gates alone the base."""
        checkpoint[MODEL_CONFIG] = json.loads(self.model.config.to_json_string(use_diff=False))
        settings = self.model.generation_config.to_json_string(keys_to_pop=["compile_config"])
        checkpoint[GENERATION_CONFIG] = json.loads(settings)
        if self.config.learns_gates_alone(self.trainer.max_steps):
            checkpoint[MODEL_CONFIG] |= base_of(self.config).named

    def _weights(self, targets: Tensor, batch: dict[str, Any]) -> Tensor:
        """Weigh tokens, [B, T], so that the mean of their sums over micro-batches and ranks is the step's."""
        if self.config.training.loss_average == "token":
            return token_weights(targets, batch.get("loss_mask"), batch.get("num_predicted"))
        return sequence_weights(targets, batch.get("loss_mask")) / len(targets)

    def _gate_mode(self, state: StepState, positions: list[int]) -> GateMode:
        if state.neuron_multiplier is not None:
            return GateMode(neuron_multiplier=state.neuron_multiplier)
        # A sample's noise follows its place in the global order of draws, whatever the batch.
        return GateMode(
            noise_seeds=noise_seeds(self.config.seed, positions),
            fixed_ratio=state.target_ratio,
            skip_below=self.config.training.skip_below,
        )

    def _ratio_loss(
        self, trace: GateTrace, schedule: Schedule, token_mask: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the ratio loss and shares of the tokens, of those of a mask.

        Those are what the target counts under the noisy decisions, and, under thresholded ones, what is held at the end
        and what is decided to be.
        """
        compression, training = self.model.compression, self.config.training
        alpha = trace.stacked_alpha()
        loss = compression_loss(
            alpha,
            schedule.relaxed_target,
            soft=training.soft_ratio_loss,
            delay=compression.counted_delay,
            token_mask=token_mask,
            prior=training.ratio_prior,
        )
        with torch.no_grad():
            hard, noisy = hard_decisions(trace.stacked_logits()).float(), (alpha > 0.5).float()
            counted = {
                "relaxed_cache_fraction": (noisy, compression.counted_delay),
                "hard_cache_fraction": (hard, compression.delay),
                "decided_fraction": (hard, 0),
            }
            shares = {
                name: held_fraction(decisions, delay=delay, token_mask=token_mask).mean()
                for name, (decisions, delay) in counted.items()
            }
        return loss, shares

    def configure_optimizers(self) -> Any:
        """Make AdamW with decay on matrices only."""
        training = self.config.training
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        decay = 0.0 if training.gates_only else training.weight_decay  # decay needs no gradient: it would change all
        is_matrix = {p: len(getattr(p, "ds_shape", p.shape)) >= 2 for p in parameters}  # ZeRO-3's own are empty
        groups = [
            {"params": [p for p in parameters if is_matrix[p]], "weight_decay": decay},
            {"params": [p for p in parameters if not is_matrix[p]], "weight_decay": 0.0},
        ]
        # Fused: it takes `found_inf`. `OptimizerStep` sets both that and the learning rate at each step.
        rate, betas, eps = training.learning_rate, training.betas, training.adam_eps
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)
