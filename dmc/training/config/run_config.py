"""Configuration of a training run: its model, its groups, and checks across them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from dmc.compression import CompressionConfig
from dmc.config.settings import Count, Named, OutputFolder, build_config, checked_dataclass
from dmc.data.config import DataConfig
from dmc.data.numbering import has_tokenizer
from dmc.files import read_mapping
from dmc.gguf import ModelName
from dmc.training.config.trainer import TrainerConfig
from dmc.training.config.training import DistillationConfig, TrainingConfig

ASKS_FOR_TOKENIZER = re.compile(r"\+*data\.tokenizer(\.train_vocab_size=|=.*\btrain_vocab_size\b)")
"""Words of a command line that give the size of a tokenizer."""


@checked_dataclass(frozen=True)
class BaseConfig:
    """A model of configs/base: its name, and the shape by which a fresh one is built and a plan needs no hub."""

    path: str | None = None
    """Folder or hub name of the model that has this shape."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Hugging Face configuration values, `model_type` included."""


@checked_dataclass(frozen=True)
class RunConfig:
    """One training run."""

    data: DataConfig
    training: TrainingConfig
    model: ModelName | None = None
    """Folder, hub name or GGUF file of a pretrained model, see docs/models.md; None: a fresh one of `base.shape`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights; with bfloat16 everything but RoPE angles and the gates is computed in it."""
    revision: str | None = None
    """Hub revision of `model`."""
    merge_kv_heads: Count | None = None
    """KV heads per layer that those of `model` are averaged into before the run (grouped-query attention after the
    fact); None: they stay."""
    base: BaseConfig = field(default_factory=BaseConfig)
    compression: CompressionConfig | None = None
    """Settings of the gates; None: train a base, without gates."""
    control: StrictBool = False
    """Train a control: as many steps as with `compression`, on the same text, without gates."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: Named[dict[str, Any]] = field(default_factory=dict)
    """Loggers of Lightning by name, each a mapping with a `_target_`; CSV files are written without one too."""
    callbacks: Named[dict[str, Any]] = field(default_factory=dict)
    """Further callbacks of Lightning by name, each a mapping with a `_target_`."""
    output_dir: Annotated[str, Field(min_length=1)] = "outputs/run"
    use_previous_checkpoint: StrictBool = False
    """Whether to continue from the previous checkpoint if the last one is damaged; False: refuse."""
    seed: Annotated[StrictInt, Field(ge=0, le=2**32 - 1)] = 0

    def __post_init__(self) -> None:
        for contradiction in self._contradictions():
            raise ValueError(contradiction)

    def _contradictions(self) -> Iterator[str]:
        training, trainer, gates = self.training, self.trainer, self.compression
        strategy = f"trainer.strategy={trainer.strategy}"
        if self.model is None and not self.base.shape:
            yield "no model: give model=DIR, or for a fresh one base=tiny_llama"
        if self.model is None and self.merge_kv_heads is not None:
            merged = f"merge_kv_heads={self.merge_kv_heads}"
            yield f"{merged} merges the heads of a trained model: give model=DIR, or base.shape.num_key_value_heads"
        if self.data.tokenizer.train_vocab_size is None and (self.data.tokenizer.path or self.model) is None:
            yield "no tokenizer: set data.tokenizer.path, or data.tokenizer.train_vocab_size and data.tokenizer.folder"
        if trainer.uses_deepspeed and self.dtype != "float32":
            instead = "set dtype=float32 and trainer.precision=bf16-mixed"
            yield f"dtype={self.dtype} with {strategy}, which updates weights in float32: {instead}"
        if training.distillation is not None and training.distillation.path is None and self.model is None:
            yield "training.distillation of a fresh model needs a teacher: set training.distillation.path"
        if training.gates_only and trainer.uses_deepspeed:
            yield f"training.gates_only=true with {strategy}: rows cannot be frozen; use ddp, fsdp2 or hsdp"
        if (facts := self.data.facts) is not None and training.document_masking:
            yield "training.document_masking with data.facts: a fact would be forgotten where a document ends; use one"
        if training.whole_documents and (facts is not None or self.data.streaming):
            other = "data.streaming" if facts is None else "data.facts"
            yield f"training.whole_documents with {other}: whole documents are packed from cached text without facts"
        if training.whole_documents and (training.head_agreement_weight > 0 or training.regression_init is not None):
            other = "regression_init" if training.head_agreement_weight == 0 else "head_agreement_weight"
            yield f"training.whole_documents with training.{other}, which would count the filling of sequences: use one"
        if training.sequence_length % (shared := self.trainer.devices_per_sequence):
            yield (
                f"training.sequence_length={training.sequence_length} cannot be divided among the {shared} devices of "
                "trainer.context_parallel_size * tensor_parallel_size: use a multiple of it"
            )
        ends = 0
        for lesson in facts.lessons if facts is not None else ():
            ends += lesson.sequences
            if ends % training.batch_size:
                yield f"data.facts.lessons of {ends} sequences end within a step of {training.batch_size}: end with one"
        if training.overfit_sequences is not None and self.data.streaming:
            yield "training.overfit_sequences reads cached text again and again: set data.streaming=false"
        ramp = training.stages.get("retrofit")
        if ramp is not None and ramp.ramp_to is not None and ramp.ramp_to < self.target_ratio:
            target = f"compression.target_ratio={self.target_ratio:g}"
            yield f"training.stages.retrofit.ramp_to={ramp.ramp_to:g} ends below {target}: give the highest CR, or null"
        if gates is not None:
            yield from self._contradictions_of_gates(gates)
            yield from self._contradictions_on_the_way("snapshot_ratios", training.snapshot_ratios)
            yield from self._contradictions_on_the_way("milestones.ratios", training.milestones.ratios)

    def _contradictions_of_gates(self, gates: CompressionConfig) -> Iterator[str]:
        training = self.training
        least, length, cuts = gates.counted_delay + 1, training.sequence_length, self.trainer.devices_per_sequence
        if self.has_gates and least * self.target_ratio > length:
            yield (
                f"compression.target_ratio={self.target_ratio:g} is out of reach: of training.sequence_length={length} "
                f"tokens every head holds at least {least}; use longer ones, compression.delay below {gates.delay}, or "
                "compression.target_counts=decided, which counts decisions alone"
            )
        if training.sensitivity_init is not None and (not gates.has_adapter or gates.decisions != "per_head"):
            yield (
                f"training.sensitivity_init with compression.gate_input={gates.gate_input}, "
                f"decisions={gates.decisions}: set compression.gate_input=hidden (or both) and decisions=per_head"
            )
        if training.sensitivity_init is not None and cuts > 1:
            sizes = "tensor_parallel_size=1 and context_parallel_size=1"
            yield f"training.sensitivity_init with heads divided among {cuts} devices: use {sizes}"
        if training.regression_init is not None:
            wanted = {"action": "drop", "gate_input": "hidden", "decisions": "per_head", "decided_token": "own"}
            wrong = [f"{name}={getattr(gates, name)}" for name in wanted if getattr(gates, name) != wanted[name]]
            if wrong:
                right = ", ".join(f"{name}={value}" for name, value in wanted.items())
                yield f"training.regression_init with compression.{', '.join(wrong)}: set {right}"
            if training.sensitivity_init is not None or cuts > 1:
                yield (
                    "training.regression_init sets the adapters of whole layers: leave out training.sensitivity_init, "
                    "and use trainer.tensor_parallel_size=1 and context_parallel_size=1"
                )
            if self.trainer.strategy == "deepspeed_zero3":
                yield (
                    "training.regression_init with trainer.strategy=deepspeed_zero3: DeepSpeed gathers no weight for "
                    "what reads it outside of the forward pass; use fsdp2"
                )
        if training.delays and training.delays[-1] != gates.delay:
            yield f"training.delays={training.delays} must end with compression.delay={gates.delay}"
        for delay in training.delays:
            dataclasses.replace(gates, delay=delay)
        if training.head_agreement_weight > 0 and self.has_gates and gates.decisions != "per_head":
            weight = f"training.head_agreement_weight={training.head_agreement_weight}"
            yield f"{weight} with compression.decisions={gates.decisions}: heads always agree; use weight 0"
        for name in ("gates_only", "ratio_control"):
            if self.has_gates and gates.decisions == "fixed" and getattr(training, name):
                yield f"training.{name} with compression.decisions=fixed: there are no gates to train; leave it out"

    def _contradictions_on_the_way(self, name: str, ratios: list[float]) -> Iterator[str]:
        stage = self.training.stages.get("retrofit")
        if not ratios:
            return
        if self.target_ratio == 1:
            yield f"compression.target_ratio=1 has no snapshots on the way: empty training.{name}"
        if high := [ratio for ratio in ratios if ratio > self.target_ratio]:
            yield f"training.{name}={high} lie above compression.target_ratio={self.target_ratio}: give lower ones"
        if stage is not None and not stage.ramp_share(self.decisions) > 0:
            yield (
                f"training.{name}={ratios} need a target that climbs through them: empty them, or give the retrofit "
                "stage a ramp_fraction > 0"
            )

    @property
    def gates(self) -> CompressionConfig | None:
        """The gates at work; None: the model is a base or a control."""
        return None if self.control else self.compression

    @property
    def has_gates(self) -> bool:
        """Whether the model learns to compress."""
        return self.gates is not None

    def learns_gates_alone(self, total_steps: int) -> bool:
        """Whether the model that the run starts from keeps all of its weights, and gates are added to them.

        Args:
            total_steps: optimizer steps of the run.
        """
        adds = self.gates is not None and self.gates.gate_input == "hidden" and self.merge_kv_heads is None
        return self.model is not None and adds and (self.training.gates_only or total_steps == 0)

    def learns_from_its_base(self, base_type: str) -> bool:
        """Whether the student without its gates is the teacher, so that no second copy of the weights is needed.

        Args:
            base_type: model type of the run's base, which may have gates already.
        """
        own = self.distillation is not None and self.distillation.path in (None, self.model)
        return own and self.training.gates_only and self.learns_gates_alone(1) and not base_type.startswith("dmc_")

    @property
    def distillation(self) -> DistillationConfig | None:
        """How gates learn from a teacher; None: there are none, or from the text alone."""
        return self.training.distillation if self.has_gates else None

    @property
    def decisions(self) -> str:
        """Decisions of the run's gates; a control counts as learned ones."""
        return "per_head" if self.compression is None else self.compression.decisions

    @property
    def target_ratio(self) -> float:
        """Compression ratio at the end of the stages; 1 for a base."""
        return 1.0 if self.compression is None else self.compression.target_ratio


def run_config(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Build the configuration from settings of configs/train.yaml; those of a plan are left out.

    Args:
        values: the settings.
        overrides: those that were given on the command line.
    Raises:
        ValueError: a setting is unknown, missing or out of range; or the command line asks for a model that has a
            tokenizer, and to train another one.
    """
    values = {name: value for name, value in values.items() if name not in ("plan", "planner")}
    config = build_config(RunConfig, values | {"compression": values.get("compression") or None})
    build_config(OutputFolder, config.output_dir, "output_dir")  # here, for a run that is read may lie anywhere
    _refuse_to_train_tokenizer(config, overrides)
    return config


def _refuse_to_train_tokenizer(config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse the size of a tokenizer for a model that has another; that of a text's settings is for fresh ones."""
    if config.model is None or not any(map(ASKS_FOR_TOKENIZER.match, overrides)) or not has_tokenizer(config.model):
        return
    shape = Path(config.model) / "config.json"
    words = read_mapping(shape).get("vocab_size") if shape.is_file() else None
    if config.data.tokenizer.train_vocab_size not in (None, words):
        raise ValueError(
            f"data.tokenizer.train_vocab_size={config.data.tokenizer.train_vocab_size} with model={config.model}, "
            f"which has a tokenizer{'' if words is None else f' for its {words} words'}: leave the size out to "
            "keep it, or the model to train a fresh one"
        )
