"""The configuration of a training run as validated dataclasses: one key, one place; derived values are properties."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from dmc.budget import check_ratio
from dmc.compression import CompressionConfig, HeadAgreement

StageName = Literal["pretrain", "zero_out", "retrofit", "solidify"]
Precision = Literal["32-true", "bf16-mixed"]
Strategy = Literal["auto", "ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]


@dataclass(frozen=True)
class StageConfig:
    """One stage of a run; its length is given in steps, in tokens, or in tokens per unit of compression ratio.

    Raises:
        ValueError: not exactly one length is given, or a value is out of range.
    """

    name: StageName
    """pretrain: plain; zero_out: remove the borrowed neuron; retrofit: CR on its ramp; solidify: CR at its target."""
    steps: int | None = None
    """Optimizer steps."""
    tokens: float | None = None
    """Tokens; rounded to whole steps."""
    tokens_per_ratio: float | None = None
    """Tokens for each +1 of target CR: CR 4 at 24e9 is 72e9 tokens."""
    learning_rate: float | None = None
    """None: the run's."""
    warmup_steps: int = 0
    """Steps of a linear rise from 0."""
    final_fraction: float = 1.0
    """Learning rate at the end as a fraction of `learning_rate`, reached by a cosine; 1 is constant."""
    ramp_fraction: float | None = None
    """Of a retrofit stage: share of it in which the target CR climbs; 0: it is there from the first step
    (DMC-immediate); None: 1 for learned decisions, 0 for fixed ones."""

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.tokens, self.tokens_per_ratio) if value is not None]
        if len(given) != 1 or given[0] <= 0:
            raise ValueError(
                f"stage {self.name}: steps={self.steps}, tokens={self.tokens}, "
                f"tokens_per_ratio={self.tokens_per_ratio}; give exactly one of them, > 0"
            )
        if not 0 <= self.final_fraction <= 1 or self.warmup_steps < 0:
            raise ValueError(
                f"stage {self.name}: final_fraction={self.final_fraction} (expected 0..1), "
                f"warmup_steps={self.warmup_steps} (expected >= 0)"
            )
        if self.ramp_fraction is not None and not (self.name == "retrofit" and 0 <= self.ramp_fraction <= 1):
            raise ValueError(
                f"stage {self.name}: ramp_fraction={self.ramp_fraction}; expected 0..1, and of a retrofit stage only"
            )

    def ramp_share(self, decisions: str) -> float:
        """Share of a retrofit stage in which the target CR climbs, for gates with such decisions."""
        if self.ramp_fraction is None:
            return 0.0 if decisions == "fixed" else 1.0
        return self.ramp_fraction

    def num_steps(self, tokens_per_step: int, target_ratio: float) -> int:
        """Optimizer steps of this stage."""
        if self.steps is not None:
            return self.steps
        tokens = self.tokens if self.tokens is not None else (self.tokens_per_ratio or 0) * (target_ratio - 1)
        return max(1, round(tokens / tokens_per_step))


@dataclass(frozen=True)
class DistillationConfig:
    """Logit distillation: loss = (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || model).

    Raises:
        ValueError: a value is out of range.
    """

    weight: float = 1.0
    """Share of the divergence; the rest is cross-entropy."""
    temperature: float = 1.0
    """Both distributions are softened by it."""
    path: str | None = None
    """Folder or hub name of the frozen teacher; None: the model that the run starts from."""

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"training.distillation.weight={self.weight}: expected a share > 0 and <= 1")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"training.distillation.temperature={self.temperature}: expected a number > 0")


@dataclass(frozen=True)
class RatioControlConfig:
    """Integral control of the ratio loss's weight: log(weight) grows by gain * (CR asked for * share held - 1) a step.

    Raises:
        ValueError: a value is out of range.
    """

    gain: float = 0.05
    """A cache 10 % too large at gain 0.05 raises the weight by 0.5 % a step."""
    max_weight: float = 100.0
    """The weight stays between 1 / max_weight and max_weight."""

    def __post_init__(self) -> None:
        if not 0 < self.gain < math.inf:
            raise ValueError(f"training.ratio_control.gain={self.gain}: expected a number > 0")
        if not 1 < self.max_weight < math.inf:
            raise ValueError(f"training.ratio_control.max_weight={self.max_weight}: expected a number > 1")


@dataclass(frozen=True)
class TrainingConfig:
    """Optimisation: stages, batch, AdamW, the compression loss, what is saved when."""

    stages: list[StageConfig]
    sequence_length: int = 4096
    """Tokens per sequence."""
    batch_size: int = 1024
    """Sequences per optimizer step, over all devices."""
    micro_batch_size: int = 1
    """Sequences per forward pass on one device; the rest is accumulated."""
    learning_rate: float = 3e-5
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-5
    weight_decay: float = 0.1
    """Of matrices; norms and biases have none."""
    gradient_clip: float = 1.0
    """Largest gradient norm."""
    ratio_weight: float = 1.0
    """Weight of the compression-ratio loss."""
    ratio_control: RatioControlConfig | None = None
    """Let the weight follow the error, from `ratio_weight` on; None: constant."""
    distillation: DistillationConfig | None = None
    """Learn from the logits of a frozen teacher; None: from the text alone."""
    gates_only: bool = False
    """Train the rows of W_q and W_k that carry the gates and freeze the rest."""
    delays: list[int] = field(default_factory=list)
    """Delays of equal parts of the retrofit stage, the last one the model's own; empty: the model's own throughout."""
    soft_ratio_loss: bool = False
    """Relaxed decisions in the ratio loss; False: straight-through."""
    ratio_prior: Literal["global", "local"] = "global"
    """What the ratio loss holds to the target: the mean over all layers, or each layer by itself."""
    head_agreement_weight: float = 0.0
    """Weight of the loss on heads of a layer that decide differently (DMC-C, eq. 14)."""
    head_agreement: HeadAgreement = "mean"
    """Form of that loss, see `dmc.compression.head_agreement_loss`."""
    reset_at_documents: bool = False
    """Decisions and attention start anew at each document of a packed sequence."""
    activation_checkpointing: bool = False
    """Recompute activations in backward (non-reentrant)."""
    snapshot_ratios: list[float] = field(default_factory=list)
    """Target CRs at which a ready-to-use model is exported along the run."""
    calibrate: bool = True
    """Shift the decision offset at export so that the thresholded CR on held-out text meets the target."""
    calibration_sequences: int = 64
    """Held-out sequences used to calibrate."""
    validation_sequences: int = 64
    """Held-out sequences in each validation."""
    validate_every_steps: int = 1000
    checkpoint_every_steps: int = 100
    log_every_steps: int = 10
    max_nonfinite_steps: int = 10
    """Steps in a row skipped for a loss or gradient that is not finite, after which the run ends."""
    hang_timeout_minutes: float = 30.0
    """Without a micro-batch for so long, the stacks of all threads are written down; 0: never."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("training.stages is empty: give at least one stage")
        for name in (
            "sequence_length", "batch_size", "micro_batch_size", "checkpoint_every_steps", "log_every_steps",
            "max_nonfinite_steps",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)}: expected a whole number >= 1")
        if not 0 <= self.head_agreement_weight < math.inf:
            raise ValueError(f"training.head_agreement_weight={self.head_agreement_weight}: expected a number >= 0")
        if not 0 <= self.hang_timeout_minutes < math.inf:
            raise ValueError(
                f"training.hang_timeout_minutes={self.hang_timeout_minutes}: expected minutes, 0 for never"
            )
        for ratio in self.snapshot_ratios:
            check_ratio(ratio, "training.snapshot_ratios")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.sequence_length

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per optimizer step on each of `world_size` devices.

        Raises:
            ValueError: the batch does not divide.
        """
        per_pass = self.micro_batch_size * world_size
        if self.batch_size % per_pass:
            raise ValueError(
                f"training.batch_size={self.batch_size} is not a multiple of micro_batch_size * devices = "
                f"{self.micro_batch_size} * {world_size}"
            )
        return self.batch_size // per_pass


@dataclass(frozen=True)
class ModelConfig:
    """The model to start from: a folder or hub name, or a fresh one built from a Hugging Face configuration."""

    path: str | None = None
    """Folder or hub name of a pretrained Llama, Mistral, Qwen2 or Qwen3."""
    fresh: dict[str, Any] | None = None
    """Hugging Face configuration values of a randomly initialised model, `model_type` included."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory; bfloat16 trains in it throughout, RoPE angles and the gates excepted."""
    revision: str | None = None
    """Hub revision."""
    architecture: dict[str, Any] | None = None
    """Hugging Face configuration values of `path`, `model_type` included: what a plan needs without the hub."""
    merge_kv_heads: int | None = None
    """KV heads per layer that those of `path` are averaged into before the run (grouped-query attention after the
    fact); None: they stay."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.fresh is None):
            raise ValueError(f"model.path={self.path!r}, model.fresh={self.fresh!r}: give exactly one of them")
        if self.merge_kv_heads is not None and self.path is None:
            raise ValueError(
                f"model.merge_kv_heads={self.merge_kv_heads} merges the heads of a trained model: give model.path, or "
                "a fresh model model.fresh.num_key_value_heads"
            )


@dataclass(frozen=True)
class TokenizerConfig:
    """A pretrained tokenizer, or a byte-level BPE trained on the training text."""

    path: str | None = None
    """Folder or hub name; None: the model's."""
    train_vocab_size: int | None = None
    """Train one of this size and keep it in `folder`."""
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.train_vocab_size is not None and (self.folder is None or self.path is not None):
            raise ValueError("data.tokenizer.train_vocab_size needs data.tokenizer.folder, and no data.tokenizer.path")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from. Sources are mappings with a `_target_`, see `dmc.data`."""

    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    calibration: list[dict[str, Any]] | None = None
    """Held-out text for calibration; None: the validation text."""
    cache_folder: str = "outputs/cache"
    """Where tokenised text is kept."""
    streaming: bool = False
    """Tokenise the training text on the fly."""
    streaming_lanes: int = 16
    """Parts that a stream is read in, one sample of each in turn: a multiple of the ranks of all starts of the run."""
    num_workers: int = 0
    """Processes that read cached text for a rank, or threads that read streams; they change no sample."""
    num_processes: int | None = None
    """Processes that tokenise; None: the cores that the process may use."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def __post_init__(self) -> None:
        for name in ("train", "validation"):
            if not getattr(self, name):
                raise ValueError(f"data.{name} is empty: name at least one source")
        if self.streaming_lanes < 1:
            raise ValueError(f"data.streaming_lanes={self.streaming_lanes}: expected a whole number >= 1")
        if self.num_workers < 0:
            raise ValueError(f"data.num_workers={self.num_workers}: expected a whole number >= 0")
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"data.num_processes={self.num_processes}: expected a whole number >= 1, or null")


@dataclass(frozen=True)
class TrainerConfig:
    """Devices, precision, and how the model is spread over the devices.

    Raises:
        ValueError: a value is out of range, or the strategy does not have what is asked of it.
    """

    accelerator: str = "auto"
    devices: int | str = 1
    """Devices of each node; "auto": all."""
    num_nodes: int = 1
    strategy: Strategy = "auto"
    """auto: one device, or ddp on several."""
    tensor_parallel_size: int = 1
    """Devices that share each layer's heads and neurons; fsdp2 only."""
    offload_optimizer: bool = False
    """Optimizer state in CPU memory; deepspeed only."""
    offload_parameters: bool = False
    """Weights in CPU memory between their uses; deepspeed_zero3 only."""
    precision: Precision = "32-true"
    """bf16-mixed: bfloat16 compute on float32 weights."""
    peak_teraflops: float | None = None
    """What one device could do at best, for MFU; None: looked up for the GPUs of `dmc.training.flops`."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"trainer.num_nodes={self.num_nodes}: expected a whole number >= 1")
        if self.peak_teraflops is not None and self.peak_teraflops <= 0:
            raise ValueError(f"trainer.peak_teraflops={self.peak_teraflops}: expected a number > 0, or null")
        if self.tensor_parallel_size < 1:
            raise ValueError(f"trainer.tensor_parallel_size={self.tensor_parallel_size}: expected a whole number >= 1")
        if self.tensor_parallel_size > 1 and self.strategy != "fsdp2":
            raise ValueError(
                f"trainer.tensor_parallel_size={self.tensor_parallel_size} needs trainer.strategy=fsdp2, "
                f"not {self.strategy}"
            )
        if self.offload_optimizer and not self.uses_deepspeed:
            raise ValueError(
                f"trainer.offload_optimizer=true needs one of the deepspeed strategies, not {self.strategy}"
            )
        if self.offload_parameters and self.strategy != "deepspeed_zero3":
            raise ValueError(
                f"trainer.offload_parameters=true needs trainer.strategy=deepspeed_zero3, not {self.strategy}: the "
                "others keep every weight on its device"
            )

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed owns the optimizer."""
        return self.strategy.startswith("deepspeed_")


@dataclass(frozen=True)
class PlannerConfig:
    """What a plan assumes of the devices.

    Raises:
        ValueError: a value is out of range.
    """

    device: str | None = None
    """Name of the GPU; None: this machine's, or an H100."""
    device_memory_gib: float | None = None
    """Memory of one device; None: of this machine's GPU, or 80; of this machine with accelerator=cpu."""
    utilisation: float = 0.35
    """Model FLOPs per second over the device's peak (MFU); well-tuned runs of this size report 0.35 to 0.45."""

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"planner.utilisation={self.utilisation}: expected a share of the peak, > 0 and <= 1")
        if self.device_memory_gib is not None and self.device_memory_gib <= 0:
            raise ValueError(f"planner.device_memory_gib={self.device_memory_gib}: expected GiB > 0")


@dataclass(frozen=True)
class LoggerConfig:
    """CSV files always; wandb on request, never with a prompt."""

    wandb_project: str | None = None
    """None: no wandb."""
    wandb_mode: Literal["auto", "online", "offline"] = "auto"
    """auto: what WANDB_MODE says, else online if you are logged in, else offline; online: refused without a login."""


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Raises:
        ValueError: a value is out of range or two contradict each other.
    """

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    compression: CompressionConfig | None = None
    """None: train a base, without gates."""
    control: bool = False
    """Train for the steps that `compression` asks for, on the same text, without gates: the fair comparison."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    output_dir: str = "outputs/run"
    use_previous_checkpoint: bool = False
    """Go on from `previous.ckpt` where `last.ckpt` is damaged; False: refuse."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trainer.uses_deepspeed and self.model.dtype != "float32":
            raise ValueError(
                f"model.dtype={self.model.dtype} with trainer.strategy={self.trainer.strategy}: DeepSpeed keeps the "
                "optimizer's weights in float32; set model.dtype=float32 and trainer.precision=bf16-mixed"
            )
        if self.training.distillation is not None and self.training.distillation.path is None and not self.model.path:
            raise ValueError("training.distillation of a fresh model needs a teacher: set training.distillation.path")
        if self.training.gates_only and self.trainer.strategy not in ("auto", "ddp"):
            raise ValueError(
                f"training.gates_only=true with trainer.strategy={self.trainer.strategy}: rows of a weight are frozen "
                "where each rank has it whole; use ddp"
            )
        self._check_delays()
        self._check_variants()
        if self.compression is not None and self.compression.target_ratio == 1 and self.training.snapshot_ratios:
            raise ValueError("compression.target_ratio=1 has no snapshots on the way: empty training.snapshot_ratios")
        if self.compression is not None:
            high = [ratio for ratio in self.training.snapshot_ratios if ratio > self.compression.target_ratio]
            if high:
                raise ValueError(
                    f"training.snapshot_ratios={high} lie above compression.target_ratio={self.target_ratio}"
                )

    def _check_delays(self) -> None:
        delays, compression = self.training.delays, self.compression
        if not delays or compression is None:
            return
        if delays[-1] != compression.delay:
            raise ValueError(f"training.delays={delays} must end with compression.delay={compression.delay}")
        for delay in delays:
            dataclasses.replace(compression, delay=delay)

    def _check_variants(self) -> None:
        if self.training.head_agreement_weight > 0 and self.has_gates and self.decisions != "per_head":
            raise ValueError(
                f"training.head_agreement_weight={self.training.head_agreement_weight} with "
                f"compression.decisions={self.decisions}: heads that share decisions always agree; use weight 0"
            )
        if self.has_gates and self.decisions == "fixed":
            for name in ("gates_only", "ratio_control"):
                if getattr(self.training, name):
                    raise ValueError(f"training.{name} with compression.decisions=fixed: there are no gates to train")
        if self.training.snapshot_ratios and self.compression is not None and not self._climbs:
            raise ValueError(
                f"training.snapshot_ratios={self.training.snapshot_ratios} need a target that climbs through them: "
                "empty them, or give the retrofit stage a ramp_fraction > 0"
            )

    @property
    def has_gates(self) -> bool:
        """Whether the model learns to compress."""
        return self.compression is not None and not self.control

    @property
    def decisions(self) -> str:
        """Who decides in the run's gates; those of a control are not at work."""
        return "per_head" if self.compression is None else self.compression.decisions

    @property
    def _climbs(self) -> bool:
        """Whether no retrofit stage starts at the target."""
        stages = [stage for stage in self.training.stages if stage.name == "retrofit"]
        return all(stage.ramp_share(self.decisions) > 0 for stage in stages)

    @property
    def target_ratio(self) -> float:
        """Compression ratio the stages lead to; 1 for a base."""
        return 1.0 if self.compression is None else self.compression.target_ratio


def build_config(config_class: type, values: Any, name: str = "") -> Any:
    """Build a dataclass from plain nested values.

    Args:
        config_class: the dataclass.
        values: mapping of its fields, as YAML or JSON gives it.
        name: where the values stand, for messages.
    Raises:
        ValueError: a key is unknown or missing, or a value has another type; the message names the key and what was
            expected.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{name or 'the configuration'} is {values!r}: expected a mapping of settings")
    fields = {item.name: item for item in dataclasses.fields(config_class)}
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(fields)}"
            raise ValueError(f"unknown setting {_join(name, key)}: {hint}")
    hints = typing.get_type_hints(config_class)
    for key, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and key not in values:
            raise ValueError(f"setting {_join(name, key)} is missing")
    return config_class(**{key: _convert(hints[key], value, _join(name, key)) for key, value in values.items()})


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Check `value` against a type hint and convert what YAML cannot say (tuples, whole floats, nested classes)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        for option in options[:-1]:
            try:
                return _convert(option, value, name)
            except ValueError:
                continue
        return _convert(options[-1], value, name)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, arguments))}")
        return value
    if dataclasses.is_dataclass(hint):
        return build_config(typing.cast(type, hint), value, name)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name}={value!r}: expected a list")
        return origin(_convert(arguments[0], item, f"{name}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name}={value!r}: expected a mapping")
        return dict(value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{name}={value!r}: expected {hint.__name__}")
    return value
