"""Export of a run's models: calibration, measurement on held-out text, and writing."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning import LightningModule, Trainer

from dmc.budget import check_ratio
from dmc.config import build_config
from dmc.files import refuse_occupied, replacement
from dmc.models import CompressedCausalLM
from dmc.models.build import twin
from dmc.models.weights import check_weights
from dmc.ranks import Ranks
from dmc.training.calibrate import calibrate_offset
from dmc.training.callbacks.steps import AfterStep
from dmc.training.checkpoints.folder import naming, on_every_rank
from dmc.training.checkpoints.saving import load_last_model
from dmc.training.config import RunConfig, TrainingConfig
from dmc.training.export import ModelCard, check_push, describe, export, push
from dmc.training.measure import TextScore, score_text
from dmc.training.record import read_foreign_config
from dmc.training.stages import Plan
from dmc.training.strategies import Parallelism
from dmc.training.text_data import TextData, build_tokenizer

RATIO_TOLERANCE = 0.05
logger = logging.getLogger(__name__)


class Exporter(AfterStep):
    """Calibrates, measures and exports the model of a run at its end, and where its ramp reaches chosen ratios.

    Args:
        config: the run.
        data: its text.
        tokenizer: exported beside the weights.
        strategy: parallelism of the weights.
        snapshots: folders of snapshots by ratio.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TextData,
        tokenizer: Any,
        strategy: Parallelism,
        snapshots: Mapping[float, Path] = MappingProxyType({}),
    ) -> None:
        self.config, self.data, self.tokenizer, self.strategy = config, data, tokenizer, strategy
        self.plan, self.snapshots = Plan(config.training, config.target_ratio, config.compression), snapshots
        self.dtype = None if config.training.export_dtype is None else getattr(torch, config.training.export_dtype)
        self._num_written = 0

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Export a snapshot if the step reached its ratio; all ranks wait for it."""
        for ratio, at in self.plan.snapshot_steps([*self.snapshots]).items():
            if at == step:
                self.write(pl_module.model, self.snapshots[ratio], ratio)
                trainer.strategy.barrier("snapshot")

    def write(
        self, model: Any, folder: Path, target_ratio: float, overwrite: bool = True, *, step: int | None = None
    ) -> None:
        """Export `model` with its metrics on held-out text; the training model keeps its own offset.

        Called by all ranks: each reads its share of the text where the model's weights lie; rank 0 writes, and
        each rank its own parts of the weights where they are divided.
        """
        ranks = Ranks.world()
        self._num_written += 1
        if self.dtype is not None and not self.strategy.exports_parts:
            model = twin(model, self.dtype)
        compressed = isinstance(model, CompressedCausalLM)
        metrics: dict[str, Any] = {}
        if step is not None:  # optimizer steps that the model has seen
            metrics |= {"steps": step, "planned_steps": self.plan.total_steps}
        trained = model.compression if compressed else None
        if compressed:
            model.compression = dataclasses.replace(model.compression, target_ratio=target_ratio)
            if self.config.training.calibrate and target_ratio > 1 and model.compression.decisions != "fixed":
                contexts = self.data.held_out("calibration", has_questions=False)
                found = calibrate_offset(model, contexts, target_ratio, sharing=ranks)
                metrics |= {
                    "decision_offset_before_calibration": found.offset_before,
                    "decision_offset": found.offset,
                    **_ratios(found.before, suffix="_before_calibration"),
                    **_ratios(found.after, suffix="_on_calibration_text"),
                }
                if abs(found.ratio / target_ratio - 1) > RATIO_TOLERANCE:
                    logger.warning(
                        "%s: calibration reached CR %.2f held at the end, %.2f decided, not %g %s: train longer, or "
                        "with a larger training.ratio_weight",
                        folder, found.after.achieved_ratio, found.after.decided_ratio, target_ratio, found.counts,
                    )  # fmt: skip
        score = score_text(model, self.data.held_out("validation"), "validate", ranks)
        metrics |= {"validation_loss_nats_per_token": score.loss, **_ratios(score)}
        if self.config.data.test is not None:
            score = score_text(model, self.data.held_out("test"), "test", ranks)
            metrics |= {"test_loss_nats_per_token": score.loss, **_ratios(score, "test_")}
        base = self.config.model.path or f"fresh {(self.config.model.fresh or {}).get('model_type')}"
        text = ", ".join(str(source.get("name", source.get("_target_"))) for source in self.config.data.train.values())
        title = Path(base).name
        if self.config.model.merge_kv_heads is not None:
            title += f" with {self.config.model.merge_kv_heads} KV heads"
        if compressed:
            title += f" at CR {target_ratio:g}"
        name = None if step is None else self.config.training.push_to_hub  # a snapshot is not uploaded
        card = ModelCard(title, base, text, metrics, name)
        self._export(model, folder, card, overwrite, f"export {self._num_written} to {folder}")
        if trained is not None:
            model.compression = trained

    def _export(self, model: Any, folder: Path, card: ModelCard, overwrite: bool, name: str) -> None:
        ranks, options = Ranks.world(), {"tokenizer": self.tokenizer, "card": card}
        if not self.strategy.exports_parts:

            def write() -> None:
                export(model, folder, **options, overwrite=overwrite)

            return ranks.run_on_first(name, write)
        writers = self.strategy.writers
        with ExitStack() as stack:  # rank 0's alone holds the folder

            def begin() -> list[Path]:
                return [] if writers.rank else [stack.enter_context(replacement(folder, overwrite))]

            def describe_whole(partial: Path) -> None:
                if writers.rank == 0:
                    check_weights(partial)
                    describe(partial, **options, compression=getattr(model.config, "compression", None))

            with naming(folder, "what it held"):
                ((partial,), *_) = on_every_rank(begin, writers)
                self.strategy.write_weights(model, partial, self.dtype)
                on_every_rank(lambda: describe_whole(partial), writers)
            on_every_rank(stack.close, writers)


def _ratios(score: TextScore, prefix: str = "", suffix: str = "") -> dict[str, float]:
    return {
        f"{prefix}achieved_ratio{suffix}": score.achieved_ratio,
        f"{prefix}decided_ratio{suffix}": score.decided_ratio,
    }


def check_device(device: str) -> None:
    """Check that a device exists.

    Raises:
        ValueError: it does not.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device}: {str(error).splitlines()[0]}; expected cpu, or cuda with a GPU") from error


def roomy_device(model: Any) -> str:
    """Choose the GPU if it has room for two copies of a model, which are compared after writing, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    needed = 2.2 * sum(parameter.nbytes for parameter in model.parameters())
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        logger.warning("the GPU has %.0f GiB free, %.0f are needed: the CPU exports", free / 2**30, needed / 2**30)
        return "cpu"
    return "cuda"


def export_checkpoint(
    run_folder: Path,
    output: Path,
    *,
    target_ratio: float | None = None,
    overwrite: bool = False,
    measured: Mapping[str, Any] = MappingProxyType({}),
    use_previous_checkpoint: bool = False,
    trust_run: bool = False,
    device: str | None = None,
    push_to_hub: str | None = None,
) -> Path:
    """Export the last checkpoint of a run, finished or not.

    Args:
        run_folder: output folder of the run.
        output: new or empty folder.
        target_ratio: CR to calibrate to; None: the run's.
        overwrite: replace a folder that was exported here.
        measured: settings of the run's training to be others: calibrate, calibration_sequences, validation_sequences,
            export_dtype.
        use_previous_checkpoint: take the checkpoint before the last one where that is damaged.
        trust_run: let the run's record name code of others as its text.
        device: where the model is calibrated and measured; None: a GPU, if there is one and it has room.
        push_to_hub: name on the hub to upload the folder to; None: nothing is uploaded, whatever the run says.
    Raises:
        FileNotFoundError, ValueError: there is no run, its checkpoint is damaged, or a setting is out of range.
        FileExistsError: `output` may not be written or replaced, see `refuse_occupied`.
        OSError: it could not be written, or not be uploaded.
    """
    refuse_occupied(output, overwrite, [run_folder])
    if push_to_hub is not None:
        check_push(push_to_hub)
    if device is not None:
        check_device(device)
    config = read_foreign_config(run_folder, trust_run)
    changes = {**measured, "push_to_hub": push_to_hub}
    training = build_config(TrainingConfig, dataclasses.asdict(config.training) | changes)
    config = dataclasses.replace(config, training=training)
    target_ratio = config.target_ratio if target_ratio is None else check_ratio(target_ratio, "target_ratio")
    model, step = load_last_model(run_folder, use_previous_checkpoint)
    tokenizer = build_tokenizer(config.data, config.model)
    exporter = Exporter(config, TextData(config, tokenizer, total_steps=1), tokenizer, Parallelism(config))
    model.to(roomy_device(model) if device is None else device)
    exporter.write(model, output, target_ratio, overwrite, step=step)
    if push_to_hub is not None:
        logger.info("uploaded to %s", push(output, push_to_hub))
    return output
