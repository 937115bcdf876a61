"""Memory of one rank by component: a formula for what is there all the time, a trace for what comes and goes.

P weights of a rank (after tensor parallelism) of which R lie outside the decoder layers and B are one layer; N data
parallel ranks; s bytes of a stored weight (4, or 2 with model.dtype=bfloat16), c bytes of a weight that computes (2 in
bf16-mixed, else s). hsdp is fsdp2 with N the ranks that divide one copy; fsdp2 of one rank is auto.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from dmc.config import RunConfig
from dmc.training.planning.memory_trace import StepBytes, StepShape, trace_step, with_values

DEEPSPEED_BUCKET = 200_000_000
"""Weights in one of DeepSpeed's buffers: what Lightning sets for reduce_bucket_size and allgather_bucket_size."""
DEEPSPEED_LIVE = 1_000_000_000
"""Weights that ZeRO-3 keeps gathered at most: DeepSpeed's stage3_max_live_parameters."""
CONTEXT_BYTES = int(1.5 * 2**30)
"""CUDA context, cuBLAS workspaces and NCCL's buffers: 1 to 2 GiB on the GPUs of today."""
FRAGMENTED = 0.05
"""Share of what PyTorch's allocator has reserved that no tensor uses."""

LOSS, LAYER, EMBEDDING = "logits and loss", "backward of a layer", "backward of the embedding"
VALIDATION, UPDATE = "validation", "update of the weights"
"""Moments of a step that may need most."""


@dataclass(frozen=True)
class WeightCounts:
    """Weights of one tensor parallel rank."""

    total: int
    layer: int
    """One decoder layer."""
    outside: int
    """Embedding, last norm, output projection."""
    whole: int
    """The model's, over all ranks."""

    @classmethod
    def of(cls, config: PretrainedConfig, tensor_parallel_size: int) -> WeightCounts:
        """Count on the meta device; tensor parallel ranks share the layers and repeat what is outside."""

        def count(shape: PretrainedConfig) -> tuple[int, int]:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(shape)
            return (
                sum(weight.numel() for weight in model.parameters()),
                sum(weight.numel() for weight in model.model.layers[0].parameters()),
            )

        total, layer = count(rank_config(config, tensor_parallel_size))
        whole, _ = count(config)
        return cls(total, layer, total - layer * config.num_hidden_layers, whole)


def rank_config(config: PretrainedConfig, tensor_parallel_size: int) -> PretrainedConfig:
    """Give the configuration of the model that one tensor parallel rank computes."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return with_values(
        config,
        head_dim=head_dim,
        num_attention_heads=config.num_attention_heads // tensor_parallel_size,
        num_key_value_heads=config.num_key_value_heads // tensor_parallel_size,
        intermediate_size=config.intermediate_size // tensor_parallel_size,
    )


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment when it needs most."""

    weights: int
    gradients: int
    optimizer: int
    teacher: int
    """Weights of the frozen teacher, taken to be one of the model's own shape; 0: there is none."""
    communication: int
    """Gathered weights, gradients on their way, buckets."""
    activations: int
    """Kept from forward to backward; bfloat16 copies of the weights under autocast included."""
    moment: int
    """What the peak's moment adds: logits and loss, one layer's backward, or the optimizer's temporaries."""
    gates: int
    """What of the activations and of the moment is there because of the gates, in addition to the two."""
    headroom: int
    """CUDA context and fragmentation."""
    peak: str
    """When it is."""
    cpu: int
    """In CPU memory: offloaded states."""

    @property
    def components(self) -> dict[str, int]:
        """Name of each part on the device -> bytes."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer states": self.optimizer,
            **({"teacher": self.teacher} if self.teacher else {}),
            "communication": self.communication,
            "activations kept": self.activations,
            self.peak: self.moment,
            "gates": self.gates,
            "context, fragmentation": self.headroom,
        }

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.components.values())


class MemoryModel:
    """Memory of one rank of a run.

    Args:
        config: the run.
        model: configuration of its model.
        num_ranks: data parallel ranks.
        on_gpu: whether the device is a GPU.
        num_shards: ranks that divide one copy of the weights; None: all.
    """

    def __init__(
        self,
        config: RunConfig,
        model: PretrainedConfig,
        num_ranks: int,
        on_gpu: bool,
        num_shards: int | None = None,
    ) -> None:
        self.config, self.model, self.num_ranks, self.on_gpu = config, model, num_ranks, on_gpu
        self.num_shards = num_ranks if num_shards is None else num_shards
        self.strategy = config.trainer.strategy
        self.is_sharded = (
            self.strategy in ("fsdp2", "hsdp") and self.num_shards * config.trainer.tensor_parallel_size > 1
        )
        self.mixed = config.trainer.precision == "bf16-mixed"
        self.counts = WeightCounts.of(model, config.trainer.tensor_parallel_size)
        self.stored = 2 if config.model.dtype == "bfloat16" else 4
        self.computed = 2 if self.mixed else self.stored

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage; 0: another strategy."""
        return int(self.strategy[-1]) if self.config.trainer.uses_deepspeed else 0

    def weights(self) -> int:
        """auto, ddp: s P. fsdp2: s P / N. ZeRO-1, 2: c P. ZeRO-3: c P / N; their float32 copy is the optimizer's."""
        if self.zero_stage:
            return self.computed * self._share(self.counts.total, self.zero_stage == 3)
        return self.stored * self._share(self.counts.total, self.is_sharded)

    def gradients(self) -> int:
        """auto, ddp: s P. fsdp2: s P / N, and 4 P where they are summed whole. ZeRO-1: c P. ZeRO-2, 3: c P / N."""
        if self.zero_stage:
            return self.computed * self._share(self.counts.total, self.zero_stage > 1)
        summed_whole = 4 * self.counts.total if self.config.trainer.accumulate_locally else 0
        return summed_whole + self.stored * self._share(self.counts.total, self.is_sharded)

    def optimizer(self) -> int:
        """Adam's two states. auto, ddp: 2 s P. fsdp2: 2 s P / N. ZeRO: 12 P / N, float32 copies of the weights too."""
        if self.zero_stage:
            return 12 * self._share(self.counts.total, True)
        return 2 * self.stored * self._share(self.counts.total, self.is_sharded)

    def teacher(self) -> int:
        """auto, ddp: s P. fsdp2: s P / N. ZeRO: c P."""
        if not self.config.distils:
            return 0
        if self.zero_stage:
            return self.computed * self.counts.total
        return self.stored * self._share(self.counts.total, self.is_sharded)

    def communication(self, moment: str) -> int:
        """Count buffers between ranks at a moment of the step.

        ddp: s P, its buckets. fsdp2: 2 c R, for the embedding and the output projection stay gathered from the forward
        to the end of the backward, with their gradients; in the layers' backward 2 c B of this layer and the one
        prefetched, c B its gradients, 2 * 4 B their sums on the way; at the end 4 R of the same.
        ZeRO: 2 buckets of 2e8 weights, c bytes each; ZeRO-3 also c bytes of at most 1e9 gathered weights.
        """
        counts, computed = self.counts, self.computed
        if self.is_sharded:
            root = 2 * computed * counts.outside
            return {
                LOSS: root,
                LAYER: root + (3 * computed + 2 * 4) * counts.layer,
                EMBEDDING: root + 4 * counts.outside,
                VALIDATION: computed * (counts.outside + 2 * counts.layer),
            }.get(moment, 0)
        if self.zero_stage:
            buckets = 2 * self.computed * min(DEEPSPEED_BUCKET, counts.total)
            return buckets + (computed * min(DEEPSPEED_LIVE, counts.total) if self.zero_stage == 3 else 0)
        return self.stored * counts.total if self.num_ranks > 1 else 0

    def optimizer_step(self) -> int:
        """Temporaries of the update: none, for AdamW is fused; ZeRO has float32 gradients, 4 P / N."""
        if not self.zero_stage or self.config.trainer.offload_optimizer:
            return 0
        return 4 * self._share(self.counts.total, True)

    def trace(self, gates: bool) -> StepBytes:
        """Trace a micro-batch, with or without gates."""
        training = self.config.training
        computes_whole = self.zero_stage or self.is_sharded
        dtype = self.computed if computes_whole else self.stored
        shape = StepShape(
            training.micro_batch_size,
            training.sequence_length,
            torch.bfloat16 if dtype == 2 else torch.float32,
            self.mixed and not computes_whole,
            training.activation_checkpointing,
            self.config.distils,
        )
        model = rank_config(self.model, self.config.trainer.tensor_parallel_size)
        return trace_step(model, self.config.compression if gates else None, shape)

    def memory(self) -> Memory:
        """Find the moment of the highest sum and take the components there."""
        states = {
            "weights": self.weights(), "gradients": self.gradients(), "optimizer": self.optimizer(),
            "teacher": self.teacher(),
        }  # fmt: skip
        cpu = 0
        if self.config.trainer.offload_optimizer:  # DeepSpeed then sums the gradients there too, in float32
            cpu += states["optimizer"] + 4 * self._share(self.counts.total, True)
            states["optimizer"] = 0
        if self.config.trainer.offload_parameters:
            cpu, states["weights"] = cpu + states["weights"], 0
        plain = self.trace(gates=False)
        without = self._moments(plain)
        needed = self._moments(self.trace(gates=True)) if self.config.has_gates else without
        needed = {moment: max(needed[moment], without[moment]) for moment in needed}  # zero-out trains without gates
        peak = max(needed, key=lambda moment: needed[moment] + self.communication(moment))
        kept = min(plain.kept, without[peak]) if peak in (LOSS, LAYER) else 0
        communication = self.communication(peak)
        used = sum(states.values()) + communication + needed[peak]
        return Memory(
            **states,
            communication=communication,
            activations=kept,
            moment=without[peak] - kept,
            gates=needed[peak] - without[peak],
            headroom=CONTEXT_BYTES + round(FRAGMENTED * used) if self.on_gpu else 0,
            peak=peak,
            cpu=cpu,
        )

    def _moments(self, traced: StepBytes) -> dict[str, int]:
        return {
            LOSS: traced.loss,
            LAYER: traced.layers,
            EMBEDDING: traced.embedding,
            VALIDATION: traced.validation,
            UPDATE: self.optimizer_step(),
        }

    def _share(self, count: int, is_sharded: bool) -> int:
        return -(-count // self.num_shards) if is_sharded else count
