"""Export: from a run's checkpoint, or the model that it trains, to a Hugging Face folder.

From top to bottom: `export_checkpoint` loads a checkpoint; `Exporter.write` takes a model, calibrates and measures it,
and has its folder written beside its place, compared with the model, and renamed by `export`. What one process holds is
written by transformers and compared by its logits (`write_whole`); what ranks hold in parts is written by all of them
and compared weight by weight (`write_parts`). Then the folder may be uploaded. What lies in it: `model_folder.py`, or,
where gates alone were learned, `dmc/models/adapter_folder.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import glob
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from lightning import LightningModule, Trainer
from torch import Tensor
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME

from dmc.budget import check_ratio
from dmc.compression import GateMode
from dmc.config import build_config
from dmc.files import read_mapping, refuse_occupied, replacement
from dmc.models import CompressedCausalLM, load_model
from dmc.models.adapter_folder import Base, of_gates, save_gates
from dmc.models.build import twin
from dmc.models.weights import GATES_NAME, INDEX_NAME, SINGLE_NAME, check_weights, is_adapter
from dmc.ranks import ALONE, Ranks
from dmc.training.after_step import AfterStep
from dmc.training.calibrate import calibrate_offset
from dmc.training.checkpoints import as_write_error, load_last_model
from dmc.training.config import RunConfig, TrainingConfig
from dmc.training.measure import TextScore, evaluating, score_text
from dmc.training.model_folder import (
    METRICS_NAME,
    ModelCard,
    check_push,
    describe,
    is_final,
    push,
    write_generation_config,
)
from dmc.training.record import check_same_text, read_foreign_config
from dmc.training.run_base import base_of
from dmc.training.stages import Plan
from dmc.training.strategies import Parallelism
from dmc.training.text_data import TextData, build_tokenizer, tokenizer_digests

FINAL_NAME = "final"
"""Folder of a run's model after its last step."""
CALIBRATION_TOLERANCE = 0.05
"""Relative distance of the calibrated ratio from the target above which there is a warning."""
LOGITS_TOLERANCE = 1e-5
"""Largest difference of logits, relative to their largest, between the model in memory and the folder."""
MAX_SHARD_SIZE = "50GB"
"""Largest file of an export, as transformers writes them."""
logger = logging.getLogger(__name__)


def export_checkpoint(
    run_folder: Path,
    output: Path,
    *,
    target_ratio: float | None = None,
    overwrite: bool = False,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    use_previous_checkpoint: bool = False,
    trust_run: bool = False,
    device: str | None = None,
    push_to_hub: str | None = None,
    merge: bool = False,
) -> Path:
    """Export the last checkpoint of a run, finished or not.

    Args:
        run_folder: output folder of the run.
        output: new or empty folder.
        target_ratio: CR to calibrate to; None: the run's.
        overwrite: replace a folder that was exported here.
        overrides: settings of the run's training to replace: calibrate, calibration_sequences, validation_sequences,
            export_dtype.
        use_previous_checkpoint: take the checkpoint before the last one where that is damaged.
        trust_run: let the run's record name code of others as its text.
        device: where the model is calibrated and measured; None: a GPU, if there is one and it has room.
        push_to_hub: name on the hub to upload the folder to; None: nothing is uploaded, whatever the run says.
        merge: write the base's weights too where gates alone were learned; those of a finished run as it calibrated
            them, unless something here says otherwise.
    Raises:
        FileNotFoundError, ValueError: there is no run, its checkpoint is damaged, or a setting is out of range.
        FileExistsError: `output` may not be written or replaced, see `refuse_occupied`.
        OSError: it could not be written, or not be uploaded.
    """
    refuse_occupied(output, overwrite, [run_folder], CONFIG_NAME)
    if push_to_hub is not None:
        check_push(push_to_hub)
    if device is not None:
        check_device(device)
    config = read_foreign_config(run_folder, trust_run)
    if config.model is not None and Path(config.model).is_dir():  # the adapter would replace its own base
        refuse_occupied(output, overwrite, [Path(config.model)], CONFIG_NAME)
    changes = {**overrides, "push_to_hub": push_to_hub}
    training = build_config(TrainingConfig, dataclasses.asdict(config.training) | changes)
    config = dataclasses.replace(config, training=training)
    as_run = target_ratio is None and not overrides and not use_previous_checkpoint
    target_ratio = config.target_ratio if target_ratio is None else _reachable(target_ratio, config)
    check_same_text(run_folder, tokenizer_digests(config))
    tokenizer = build_tokenizer(config)
    exporter = Exporter(config, TextData(config, tokenizer, total_steps=1), tokenizer, Parallelism(config), merge=merge)
    final = run_folder / FINAL_NAME
    if merge and as_run and is_adapter(final) and is_final(final):
        exporter.merge(final, output, overwrite)
    else:
        model, step = _load_learned(run_folder, config, use_previous_checkpoint)
        model.to(choose_device(model) if device is None else device)
        exporter.write(model, output, target_ratio, overwrite, step=step)
    if push_to_hub is not None:
        logger.info("uploaded to %s", push(output, push_to_hub))
    return output


def _load_learned(run_folder: Path, config: RunConfig, use_previous: bool) -> tuple[Any, int]:
    """Load what a run has learned, and its number of steps: from `final/` where there were none, and no checkpoint."""
    final = run_folder / FINAL_NAME
    has_steps = Plan(config.training, config.target_ratio, config.compression).total_steps > 0
    if has_steps or config.gates is None or not final.is_dir():
        return load_last_model(run_folder, use_previous)
    model = load_model(final, dtype=getattr(torch, config.dtype))
    model.compression = config.gates  # it is calibrated anew
    return model, 0


def _reachable(target_ratio: float, config: RunConfig) -> float:
    """Return a ratio to export at that is not the run's.

    Raises:
        ValueError: it is no ratio, or nothing of the model would follow it.
    """
    target_ratio = check_ratio(target_ratio, "target_ratio")
    if config.gates is None:
        raise ValueError(f"target_ratio={target_ratio:g}: the run has no gates to calibrate: leave it out")
    if not config.training.calibrate and config.gates.decisions != "fixed":
        raise ValueError(f"target_ratio={target_ratio:g}: calibrate=false leaves the threshold where it is: give one")
    return target_ratio


def check_device(device: str) -> None:
    """Check that a device exists.

    Raises:
        ValueError: it does not.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device}: {str(error).splitlines()[0]}; expected cpu, or cuda with a GPU") from error


def choose_device(model: Any) -> str:
    """Choose the GPU if it has room for two copies of a model, which are compared after writing, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    needed = 2.2 * sum(parameter.nbytes for parameter in model.parameters())
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        logger.warning("the GPU has %.0f GiB free, %.0f are needed: the CPU exports", free / 2**30, needed / 2**30)
        return "cpu"
    return "cuda"


class Exporter(AfterStep):
    """Calibrates, measures and exports the model of a run at its end, and where its ramp reaches chosen ratios.

    Args:
        config: the run.
        data: its text.
        tokenizer: exported beside the weights.
        strategy: parallelism of the weights.
        snapshots: folders of snapshots by ratio.
        merge: write whole models where gates alone were learned, too.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TextData,
        tokenizer: Any,
        strategy: Parallelism,
        snapshots: Mapping[float, Path] = MappingProxyType({}),
        merge: bool = False,
    ) -> None:
        self.config, self.data, self.tokenizer, self.strategy = config, data, tokenizer, strategy
        self.plan, self.snapshots = Plan(config.training, config.target_ratio, config.compression), snapshots
        self.dtype = None if config.training.export_dtype is None else getattr(torch, config.training.export_dtype)
        self._num_written = 0
        self._writes_gates = config.learns_gates_alone(self.plan.total_steps) and not merge

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
        self._num_written += 1
        if self.dtype is not None and not self.strategy.exports_parts:
            model = twin(model, self.dtype)
        metrics: dict[str, Any] = {}
        if step is not None:  # optimizer steps that the model has seen
            metrics |= {"steps": step, "planned_steps": self.plan.total_steps}
        trained = model.compression if isinstance(model, CompressedCausalLM) else None
        if trained is not None:
            model.compression = dataclasses.replace(trained, target_ratio=target_ratio)
            if self.config.training.calibrate and target_ratio > 1 and trained.decisions != "fixed":
                metrics |= self._calibrate(model, target_ratio, folder)
        metrics |= self._measure(model)
        title = f" at CR {target_ratio:g}" if trained is not None else ""
        card = self._card(title, metrics, None if step is None else self.config.training.push_to_hub)
        base = functools.partial(base_of, self.config) if self._writes_gates else None
        strategy = self.strategy if self.strategy.exports_parts else None

        def write() -> None:
            export(
                model, folder, tokenizer=self.tokenizer, card=card, overwrite=overwrite, base=base, strategy=strategy
            )

        if strategy is not None:
            strategy.saver.wait()  # a checkpoint on its way communicates in the same group
            write()
        else:
            Ranks.world().run_on_first(f"export {self._num_written} to {folder}", write)
        if trained is not None:
            model.compression = trained

    def merge(self, adapter: Path, folder: Path, overwrite: bool) -> None:
        """Write the whole model of an adapter that the run has exported, with its metrics."""
        metrics = read_mapping(adapter / METRICS_NAME)["metrics"]
        card = self._card(f" at CR {self.config.target_ratio:g}", metrics, self.config.training.push_to_hub)
        export(load_model(adapter), folder, tokenizer=self.tokenizer, card=card, overwrite=overwrite)

    def _calibrate(self, model: Any, target_ratio: float, folder: Path) -> dict[str, Any]:
        """Shift the model's decision offset until its ratio on held-out text meets the target."""
        contexts = self.data.held_out("calibration", has_questions=False)
        found = calibrate_offset(model, contexts, target_ratio, sharing=Ranks.world())
        logger.info(
            "%s: calibrated in %d passes: CR %.3f %s at offset %.4g",
            folder, found.num_passes, found.ratio, found.counts, found.offset,
        )  # fmt: skip
        if abs(found.ratio / target_ratio - 1) > CALIBRATION_TOLERANCE:
            logger.warning(
                "%s: calibration reached CR %.2f held at the end, %.2f decided, not %g %s: train longer, or with a "
                "larger training.ratio_weight",
                folder, found.after.achieved_ratio, found.after.decided_ratio, target_ratio, found.counts,
            )  # fmt: skip
        return {
            "decision_offset_before_calibration": found.offset_before,
            "decision_offset": found.offset,
            "calibration_passes": found.num_passes,
            **_ratios(found.before, suffix="_before_calibration"),
            **_ratios(found.after, suffix="_on_calibration_text"),
        }

    def _measure(self, model: Any) -> dict[str, Any]:
        """Measure loss and ratios on the text for validation, and on that for tests if the run has any."""
        score = score_text(model, self.data.held_out("validation"), "validate", Ranks.world())
        metrics = {"validation_loss_nats_per_token": score.loss, **_ratios(score)}
        if self.config.data.test is not None:
            score = score_text(model, self.data.held_out("test"), "test", Ranks.world())
            metrics |= {"test_loss_nats_per_token": score.loss, **_ratios(score, "test_")}
        return metrics

    def _card(self, ratio: str, metrics: dict[str, Any], repository: str | None) -> ModelCard:
        """Describe the model; a snapshot has no name on the hub, for it is not uploaded."""
        base = self.config.model or f"fresh {self.config.base.shape.get('model_type')}"
        heads = "" if self.config.merge_kv_heads is None else f" with {self.config.merge_kv_heads} KV heads"
        text = ", ".join(str(source.get("name", source.get("_target_"))) for source in self.config.data.train.values())
        return ModelCard(f"{Path(base).name}{heads}{ratio}", base, text, metrics, repository)


def _ratios(score: TextScore, prefix: str = "", suffix: str = "") -> dict[str, float]:
    return {
        f"{prefix}achieved_ratio{suffix}": score.achieved_ratio,
        f"{prefix}decided_ratio{suffix}": score.decided_ratio,
    }


def export(
    model: Any,
    folder: Path | str,
    *,
    tokenizer: Any,
    card: ModelCard,
    overwrite: bool = False,
    base: Callable[[], Base] | None = None,
    strategy: Parallelism | None = None,
) -> Path:
    """Write a model as safetensors, configuration, tokenizer and model card; done only once it reads back equal.

    Args:
        model: compressed or stock causal LM.
        folder: new or empty folder.
        tokenizer: saved beside the weights; None: none.
        card: the model card.
        overwrite: replace a folder that was exported here; it stays until the new one is complete.
        base: describes the model that has all weights but the gates', which alone are written: an adapter. None: all
            weights are.
        strategy: parallelism of a model of which each rank holds parts: all ranks, which all see the folder, call this.
            None: this process holds all of it.
    Returns:
        The folder.
    Raises:
        FileExistsError: the folder may not be written or replaced, see `refuse_occupied`; nothing is written.
        RuntimeError: the folder holds another model, or another rank is gone; nothing is replaced.
        OSError: one of several ranks failed, on all of them; nothing is replaced.
    """
    folder = Path(folder)
    writers, kind = (ALONE, None) if strategy is None else (strategy.writers, OSError)
    with ExitStack() as stack, nullcontext() if strategy is None else as_write_error(folder, "what it held"):

        def begin() -> Path | None:  # rank 0's stack alone holds the folder
            return None if writers.rank else stack.enter_context(replacement(folder, overwrite, marker=CONFIG_NAME))

        partial: Path = writers.all_gather_object(writers.run_on_all(begin, kind))[0]

        def complete() -> None:
            if writers.rank == 0:
                check_weights(partial)
                describe(partial, tokenizer, card, getattr(model.config, "compression", None))

        if strategy is None:
            write_whole(model, partial, tokenizer, base)
        else:
            write_parts(strategy, model, partial, tokenizer, base)
        writers.run_on_all(complete, kind)
        writers.run_on_all(stack.close, kind)
    return folder


def write_whole(model: Any, folder: Path, tokenizer: Any, base: Callable[[], Base] | None = None) -> None:
    """Write weights and configurations of a model that this process holds, and compare its logits; see `export`."""
    settings = model.generation_config
    if base is not None:
        save_gates(model, folder, base())
    else:
        try:
            model.generation_config = GenerationConfig()  # its own may be such that transformers refuses to save them
            model.save_pretrained(folder)
        finally:
            model.generation_config = settings
    write_generation_config(folder, settings, tokenizer)
    _compare_logits(model, folder)


def _compare_logits(model: Any, folder: Path) -> None:
    """Reload a folder and compare logits on random tokens.

    Raises:
        RuntimeError: they differ.
        ArithmeticError: those of the model are not finite.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(model.config.vocab_size, (2, 48), generator=generator).to(model.device)
    reloaded = load_model(folder, dtype=model.dtype).to(model.device)
    gates = {"gate_mode": GateMode()} if isinstance(model, CompressedCausalLM) else {}
    with evaluating(model), torch.no_grad():
        expected = model(input_ids, use_cache=False, **gates).logits.float()
        got = reloaded(input_ids, use_cache=False, **gates).logits.float()
    if not expected.isfinite().all():
        raise ArithmeticError(f"{folder}: the model's logits are not finite; nothing was replaced")
    difference = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    if not difference <= LOGITS_TOLERANCE:
        raise RuntimeError(
            f"{folder} was written but gives other logits than the model (relative difference {difference:.1e}); "
            "nothing was replaced"
        )


def write_parts(
    strategy: Parallelism,
    model: Any,
    folder: Path,
    tokenizer: Any = None,
    base: Callable[[], Base] | None = None,
) -> None:
    """Write a model as safetensors in transformers' form, each rank its parts, and read them back; see `export`.

    The first rank joins the parts on disk, one weight at a time, which takes twice the model's space there; each
    holds its parts twice. Called by all ranks.

    Args:
        strategy: parallelism of the weights.
        model: the model.
        folder: exists, and all ranks see it.
        tokenizer: will be saved beside them; None: none.
        base: of the gates, which alone are written; None: all weights are.
    Raises:
        CheckpointException, OSError: a rank could not write or read its parts, or the first one join them; on all
            ranks.
        RuntimeError: the folder holds other weights than the model, on all ranks; or another rank is gone.
    """
    weights, dtype = strategy.weights(model), strategy.run_config.training.export_dtype
    if dtype is not None:
        weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    written = next(iter(weights.values())).dtype
    weights = weights if base is None else of_gates(weights)
    group = strategy.writers.group
    options: dict[str, Any] = {"process_group": group, "no_dist": group is None}
    split = split_state_dict_into_shards_factory(
        weights,
        get_storage_size=lambda weight: weight.numel() * weight.element_size(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_SIZE,
    )
    files = [*split.filename_to_tensors]
    places = {name: 1 + files.index(file) for name, file in split.tensor_to_filename.items()}
    writer = _PartsWriter(str(folder), places, save_distributed=True, enable_consolidation=True)
    stored = {name: torch.empty_like(weight) for name, weight in weights.items()}

    def complete() -> None:
        if strategy.writers.rank > 0:
            return
        shutil.rmtree(folder / "sharded")
        if len(files) == 1:
            next(folder.glob("model-*.safetensors")).rename(folder / SINGLE_NAME)
            (folder / INDEX_NAME).unlink()
        if base is not None:
            (folder / SINGLE_NAME).rename(folder / GATES_NAME)
            base().save_config(model, folder, written)
        else:
            config, name = copy.deepcopy(model.config), type(model).__name__.removeprefix("FSDP")
            config.update({"dtype": written, "architectures": [name]})
            config.save_pretrained(folder)
        write_generation_config(folder, model.generation_config, tokenizer)

    distributed_checkpoint.save(weights, storage_writer=writer, **options)
    strategy.writers.run_on_all(complete, OSError)
    distributed_checkpoint.load(stored, storage_reader=HuggingFaceStorageReader(str(folder)), **options)
    differing = [name for name, weight in weights.items() if not torch.equal(_local(stored[name]), _local(weight))]
    if differing := [name for names in strategy.writers.all_gather_object(differing) for name in names]:
        raise RuntimeError(f"{folder} was written but its {differing[0]} differs from the model's")


class _PartsWriter(HuggingFaceStorageWriter):
    """Writes each rank's parts, which the first one joins in a folder of any name: torch takes it for a pattern."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Join the parts."""
        self.path = glob.escape(str(self.path))
        super().finish(metadata, results)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
