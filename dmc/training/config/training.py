"""Training settings of a run: stages, losses, recipe and bookkeeping."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt

from dmc.compression import HeadAgreement
from dmc.config.settings import Count, NonNegative, Ratio, Share, checked_dataclass
from dmc.gguf import ModelName

StageName = Literal["pretrain", "zero_out", "retrofit", "solidify"]


Rate = Annotated[StrictFloat, Field(gt=0, le=1)]
Average = Annotated[StrictFloat, Field(ge=0, lt=1)]
LossWeight = Annotated[StrictFloat, Field(ge=0, le=1e6)]


LENGTH = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)([KMBT]?) (steps|tokens|tokens_per_ratio)")
THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def read_length(length: str) -> tuple[float, str]:
    """Read a stage's length as a number and its unit.

    Raises:
        ValueError: it is none, or not of full steps.
    """
    match = LENGTH.fullmatch(length)
    number = float(match[1]) * THOUSANDS[match[2]] if match else 0.0
    if not match or not 0 < number <= 1e15 or (match[3] == "steps" and number % 1):
        raise ValueError("expected a number and its unit: '250 steps', '8B tokens' or '24B tokens_per_ratio'")
    return number, match[3]


def _check_length(length: Any) -> Any:
    read_length(str(length))
    return length


@checked_dataclass(frozen=True)
class StageConfig:
    """One stage of a run."""

    length: Annotated[str, BeforeValidator(_check_length)]
    """A number and its unit: `250 steps`; `8B tokens`, rounded to full steps; or tokens for each +1 of target CR,
    `24B tokens_per_ratio`: CR 4 has 72B tokens."""
    learning_rate: Rate | None = None
    """Learning rate of the stage; None: the run's."""
    warmup_steps: Annotated[StrictInt, Field(ge=0, le=10**9)] = 0
    """Steps of a linear rise from 0."""
    final_fraction: Share = 1.0
    """Learning rate at the end as a fraction of `learning_rate`, reached by a cosine; 1 is constant."""
    ramp_fraction: Share | None = None
    """Share of a retrofit stage in which the target CR climbs; 0: it is reached at the first step (DMC-immediate);
    None: 1 for learned decisions, 0 for fixed ones."""
    ramp_to: Annotated[StrictFloat, Field(gt=1, le=1e6)] | None = None
    """CR that the ramp of a retrofit stage reaches at its end. A run with a lower target ends after the first part of
    it, so that runs to several targets share their beginning; None: the target. A ramp by `tokens_per_ratio` is always
    shared."""

    @property
    def tokens_per_ratio(self) -> float | None:
        """Tokens for each +1 of target CR; None: the length is given in another unit."""
        number, unit = read_length(self.length)
        return number if unit == "tokens_per_ratio" else None

    def ramp_share(self, decisions: str) -> float:
        """Return the share of a retrofit stage in which the target CR climbs, given who decides."""
        if self.ramp_fraction is None:
            return 0.0 if decisions == "fixed" else 1.0
        return self.ramp_fraction

    def num_steps(self, tokens_per_step: int, target_ratio: float) -> int:
        """Return the optimizer steps of this stage; a ramp beyond the target counts until it reaches the target."""
        number, unit = read_length(self.length)
        if unit == "tokens_per_ratio":
            steps = number * (target_ratio - 1) / tokens_per_step
        else:
            count = number if unit == "steps" else max(1, round(number / tokens_per_step))
            steps = count if self.ramp_to is None else count * (target_ratio - 1) / (self.ramp_to - 1)
        return max(1, math.ceil(round(steps, 6)))


def _without_length(stages: Any) -> Any:
    """Leave out stages whose length is null."""
    if not isinstance(stages, Mapping):
        return stages
    return {
        name: stage
        for name, stage in stages.items()
        if stage is not None and not (isinstance(stage, Mapping) and stage.get("length", "") is None)
    }


@checked_dataclass(frozen=True)
class DistillationConfig:
    """Logit distillation: loss = (1 - weight) * cross-entropy + weight * temperature^2 * divergence from a teacher."""

    weight: Annotated[StrictFloat, Field(gt=0, le=1)] = 1.0
    """Share of the divergence; the rest is cross-entropy."""
    temperature: Annotated[StrictFloat, Field(ge=1e-3, le=1e3)] = 1.0
    """Softens both distributions."""
    direction: Literal["forward", "reverse"] = "forward"
    """The divergence. forward: KL(teacher || model), as in most distillation; reverse: KL(model || teacher), as in the
    code of DMS, which calls it forward."""
    path: ModelName | None = None
    """Folder, hub name or GGUF file of the frozen teacher; None: the model that the run starts from."""


@checked_dataclass(frozen=True)
class RatioControlConfig:
    """Integral control of the ratio loss's weight: its log grows by gain * (target CR * share held - 1) each step.

    In the last stage, the log of a factor on the loss's target grows likewise with what thresholded decisions hold.
    """

    gain: Annotated[StrictFloat, Field(gt=0, le=1)] = 0.05
    """A cache 10 % too large at gain 0.05 raises the weight by 0.5 % a step."""
    max_weight: Annotated[StrictFloat, Field(gt=1, le=1e6)] = 100.0
    """The weight stays between 1 / max_weight and max_weight."""


@checked_dataclass(frozen=True)
class SensitivityInitConfig:
    """Initializes adapters by the sensitivity of each head to compression, so that cheap heads are compressed first.

    d_h is the increase in held-out loss when head h merges (or drops) every token it can, and all others none. With
    z_h = log(max(d_h, floor * max d)) over its standard deviation, the decision bias of head h is
    spread * (max z - z_h).
    """

    sequences: Count = 16
    """Number of held-out sequences, read once for every KV head of the model."""
    spread: Annotated[StrictFloat, Field(gt=0, le=100)] = 1.5
    """Logits per standard deviation of the log cost."""
    floor: Annotated[StrictFloat, Field(gt=0, lt=1)] = 0.01
    """Costs below this share of the largest count as equal: they are noise."""


@checked_dataclass(frozen=True)
class RegressionInitConfig:
    """Initializes adapters by a linear fit to the attention of a second pass over the text (KVzip+, as KVzap's).

    A token's logit is its predicted log score's distance below the mean of all heads, in standard deviations.
    """

    sequences: Count = 64
    """Number of calibration sequences, whose first halves are read twice; at most training.calibration_sequences."""
    ridge: Annotated[StrictFloat, Field(gt=0, le=1e6)] = 1e-3
    """Penalty on squared weights."""
    logit_scale: Annotated[StrictFloat, Field(gt=0, le=1e3)] = 1.0
    """Standard deviation of the logits. The noise of sampled decisions has 1.8: steps that follow see little of a fit
    whose logits lie within it. Thresholded decisions do not depend on it."""


@checked_dataclass(frozen=True)
class MilestonesConfig:
    """Checkpoints that are kept for good, in the run's folder `milestones`, for branches and analysis."""

    every_steps: Count | None = None
    """Optimizer steps between two milestones, `step_0001000`; None: no such milestones."""
    ratios: list[Ratio] = field(default_factory=list)
    """Target CRs of the ramp at which to keep one, `cr4`; the last may be among them."""


@checked_dataclass(frozen=True)
class TrainingConfig:
    """Optimization: stages, batch, AdamW, the compression loss, and what is saved when."""

    stages: Annotated[dict[StageName, StageConfig], BeforeValidator(_without_length)]
    """Stages in order, those without a length left out; none where gates are only fitted. pretrain: plain; zero_out:
    remove the borrowed neuron; retrofit: CR on its ramp; solidify: CR at its target."""
    sequence_length: Annotated[StrictInt, Field(ge=2)] = 4096
    """Tokens per sequence."""
    batch_size: Count = 1024
    """Sequences per optimizer step, over all devices."""
    micro_batch_size: Count = 1
    """Sequences per forward pass on one device; gradients are accumulated over the batch."""
    learning_rate: Rate = 3e-5
    betas: tuple[Average, Average] = (0.9, 0.95)
    adam_eps: Annotated[StrictFloat, Field(gt=0, le=1)] = 1e-5
    weight_decay: Annotated[StrictFloat, Field(ge=0, le=10)] = 0.1
    """Weight decay of matrices; norms and biases have none."""
    gradient_clip: Annotated[StrictFloat, Field(gt=0, le=1e6)] | None = 1.0
    """Largest gradient norm; None: gradients are never scaled."""
    ratio_weight: LossWeight = 1.0
    """Weight of the compression-ratio loss."""
    ratio_control: RatioControlConfig | None = None
    """Control of the weight by the error, starting at `ratio_weight`; None: constant."""
    loss_average: Literal["sequence", "token"] = "sequence"
    """What cross-entropy and divergence are a mean over. sequence: the sequences of a step, each of them the mean over
    its predicted tokens; token: all predicted tokens of a step, so that a chat counts by the length of its answers. The
    same where every token is predicted, as in the papers' text."""
    distillation: DistillationConfig | None = None
    """Learn from the logits of a frozen teacher; None: from the text alone."""
    sensitivity_init: SensitivityInitConfig | None = None
    """Initialize adapters by the cost of compressing each head; None: by zero."""
    regression_init: RegressionInitConfig | None = None
    """Initialize adapters by a fit; without stages that is all of the run."""
    gates_only: StrictBool = False
    """Train the gates alone, adapters or the borrowed neuron's rows of W_q and W_k, and freeze the rest."""
    delays: list[NonNegative] = field(default_factory=list)
    """Delays of equal parts of the retrofit stage, counted up to its `ramp_to`; the last one is the model's delay,
    which solidify uses; empty: the model's delay throughout."""
    soft_ratio_loss: StrictBool = False
    """Whether the ratio loss uses relaxed decisions; False: straight-through."""
    ratio_prior: Literal["global", "local"] = "global"
    """Whether the mean over all layers (global) or each layer (local) must meet the target."""
    head_agreement_weight: LossWeight = 0.0
    """Weight of the loss on heads of a layer that decide differently (DMC-C, eq. 14)."""
    head_agreement: HeadAgreement = "mean"
    """Form of that loss, see `dmc.compression.head_agreement_loss`."""
    document_masking: StrictBool = False
    """Whether decisions and attention restart at each document of a packed sequence, in teacher and control too."""
    whole_documents: StrictBool = False
    """Whether a sequence holds whole documents, as many as fit, instead of a piece of the text cut anywhere."""
    overfit_sequences: Count | None = None
    """Train on this many sequences repeatedly, to check that the loss can fall; None: on all."""
    skip_below: Annotated[StrictFloat, Field(lt=0)] | None = -14.0
    """Tokens whose log(1 - alpha), noise included, is at most this may be left out of attention, forwards and
    backwards: below 0; -inf is exact; None: none is left out."""
    activation_checkpointing: StrictBool | Literal["selective"] = False
    """Recompute activations in backward (non-reentrant); selective: all but those of matrix products and attention."""
    branch_from: str | None = None
    """Milestone of another run to continue from, such as RUN/milestones/cr4; None: start from the base."""
    snapshot_ratios: list[Ratio] = field(default_factory=list)
    """Target CRs at which a ready-to-use model is exported along the run."""
    calibrate: StrictBool = True
    """Shift the decision offset at export so that the thresholded CR on held-out text meets the target."""
    calibration_sequences: Count = 64
    """Held-out sequences used to calibrate."""
    export_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of exported weights, in which they are calibrated and measured; None: `dtype`."""
    push_to_hub: str | None = None
    """Name on the Hugging Face hub that the folder of the last step is uploaded to; None: nothing is uploaded."""
    validation_sequences: Count = 64
    """Held-out sequences in each validation."""
    validate_every_steps: Count = 1000
    checkpoint_every_steps: Count = 100
    milestones: MilestonesConfig = field(default_factory=MilestonesConfig)
    """Checkpoints that are kept for good."""
    log_every_steps: Count = 10
    max_nonfinite_steps: Count = 10
    """Number of consecutive steps with a non-finite loss or gradient, which are skipped, before the run ends."""

    def __post_init__(self) -> None:
        if not self.stages and self.regression_init is None:
            raise ValueError("training.stages is empty: give a stage a length, or a training.regression_init")
        for name, stage in self.stages.items():
            if name != "retrofit" and (stage.ramp_fraction, stage.ramp_to) != (None, None):
                raise ValueError(f"training.stages.{name}: ramp_fraction and ramp_to are for the retrofit stage only")
        if self.ratio_control is not None and self.ratio_weight == 0:
            raise ValueError("training.ratio_control multiplies training.ratio_weight: give a weight above 0")

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
