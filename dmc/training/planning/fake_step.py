"""A run's training step as one of its ranks takes it, on tensors without data among ranks that answer at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dmc.models import retrofit
from dmc.models.masked_attention import as_on
from dmc.training.config import RunConfig
from dmc.training.layer_kinds import has_experts, with_layers
from dmc.training.module import RetrofitModule
from dmc.training.optimizer_step import OptimizerStep
from dmc.training.planning.start_checks import model_shape
from dmc.training.stages import Plan
from dmc.training.strategies.mesh import MeshStrategy
from dmc.training.teacher import OwnBase, Teacher

FAKE_EXPERTS = "dmc_fake"
NUM_CHUNKS = 3
"""Parts of the vocabulary whose loss is computed: the third one finds what two before it have left."""


class FakeStep:
    """Model, teacher and optimizer of a run, as `fake_step` lays them over its ranks; the plan's last step.

    Args:
        config: of a run without DeepSpeed.
        strategy: of the run, with its mesh.
        layers: numbers of the model's layers, the only ones it has here.
    """

    def __init__(self, config: RunConfig, strategy: MeshStrategy, layers: Sequence[int]) -> None:
        self.config, self.strategy = config, strategy
        plan = Plan(config.training, config.target_ratio, config.compression)
        self.last, self.optimization = plan.total_steps - 1, OptimizerStep(plan, config.training)
        self._metrics: list[dict[str, Tensor]] = []
        shape = with_layers(model_shape(config), layers)
        dtype = getattr(torch, config.dtype)
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
        if config.gates is not None:
            model = retrofit(model, config.gates)
        model = _without_data(model)
        self.module = RetrofitModule(model.train(), config, strategy)
        self.module.model.lm_head.most_chunks = NUM_CHUNKS
        strategy.connect(self.module)
        if config.distillation is not None:
            self.module.teacher = self._teacher(shape, dtype)
        if torch.Size(strategy.mesh_shape).numel() > 1:
            # Meshes of several dimensions are cut by reading them.
            with nullcontext() if strategy.num_copies == strategy.mesh_shape[2] == 1 else unset_fake_temporarily():
                strategy.parallelize(self.module.model, "")
                if self.module.teacher is not None and self.module.teacher.owns_weights:
                    strategy.parallelize(self.module.teacher.model, "")
        self.optimizer = self.module.configure_optimizers()
        strategy.optimizers = [self.optimizer]

    def _teacher(self, shape: Any, dtype: torch.dtype) -> Teacher:
        settings = self.config.distillation
        assert settings is not None
        if self.config.learns_from_its_base(shape.model_type):
            return OwnBase(self.module.model, "", settings.temperature, settings.direction)
        model = _without_data(AutoModelForCausalLM.from_config(shape, dtype=dtype))
        self.strategy.cast_teacher(model)
        return Teacher(model, "", settings.temperature, settings.direction)

    def micro_batch(self, is_first: bool = True, is_last: bool = True) -> None:
        """Forward and backward of a micro-batch.

        Args:
            is_first: of its step.
            is_last: of its step.
        """
        training = self.config.training
        input_ids = torch.zeros(training.micro_batch_size, training.sequence_length, dtype=torch.long)
        batch = {"input_ids": input_ids, "position": list(range(len(input_ids))), "documents": None}
        if is_first:
            self.optimizer.zero_grad()
            self._metrics.clear()
        waits = self.strategy.holds_parts and not is_last
        with self.strategy.block_backward_sync() if waits else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.strategy.precision == "bf16-mixed"):
                loss, metrics = self.module.training_step(self.optimization.schedule_at(self.last), batch)
            loss.backward()
        self._metrics.append(metrics)

    def average_and_decide(self) -> None:
        """Norm and clipping of the gradients, before the optimizer's step."""
        figures = self.optimization.average_and_decide(self.module, self.last, self._metrics)
        self.optimization.clip_or_skip(self.module, self.optimizer, figures)


def _without_data(model: PreTrainedModel) -> PreTrainedModel:
    """Let experts of a model, if it has any, multiply in a way that works without data in every dtype."""
    if has_experts(model.config):
        model.set_experts_implementation(FAKE_EXPERTS)
    return model


def _multiply_in_groups(experts: Any, states: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Make the tensors that transformers' grouped experts make: its product for bfloat16 alone has no fake of others.

    Args:
        experts: a layer's experts.
        states: tokens, [N, hidden].
        chosen: experts of each token, [N, k].
        scores: their weights, [N, k].
    Returns:
        [N, hidden].
    """
    numbers, order = chosen.flatten().sort()
    ends = numbers.float().histc(experts.num_experts, 0, experts.num_experts - 1).cumsum(0, dtype=torch.int32)

    def project(inputs: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)
        weight = weight if experts.is_transposed else weight.transpose(-2, -1)
        outputs = torch.ops.transformers.grouped_mm_fallback(inputs, weight, ends)
        return outputs + getattr(experts, f"{name}_bias")[numbers] if experts.has_bias else outputs

    of_experts = states[order // chosen.shape[-1]].to(experts.gate_up_proj.dtype)
    inner = experts._apply_gate(project(of_experts, "gate_up_proj"))
    weighted = project(inner, "down_proj") * scores.flatten()[order, None]
    return weighted[order.argsort()].view(*chosen.shape, -1).sum(1).to(states.dtype)


ALL_EXPERTS_FUNCTIONS.register(FAKE_EXPERTS, _multiply_in_groups)


@contextmanager
def fake_step(
    config: RunConfig, layers: Sequence[int], rank: int = 0, watch: AbstractContextManager | None = None
) -> Iterator[FakeStep]:
    """Let this process be one rank of a run, and lay the run's model over all of them; attention is the device's.

    Args:
        config: of a run without DeepSpeed.
        layers: numbers of the model's layers, the only ones it has here.
        rank: who this process is.
        watch: entered before the model is made.
    """
    with ExitStack() as stack:
        strategy = MeshStrategy(config)
        num_ranks = torch.Size(strategy.mesh_shape).numel()
        if num_ranks > 1:
            dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            stack.callback(_clear_sharding_prop_cache)  # it holds the mesh, whose groups are gone
            strategy.make_mesh("cpu")
        stack.enter_context(as_on("cpu" if config.trainer.accelerator == "cpu" else "cuda"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if watch is not None:
            stack.enter_context(watch)
        yield FakeStep(config, strategy, layers)
