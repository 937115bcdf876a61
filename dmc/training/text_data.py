"""The text of a run: tokenizer, training order and held-out sequences, from the configuration's sources."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Subset, default_collate
from transformers import PreTrainedTokenizerBase

from dmc.config.instantiate import instantiate
from dmc.data import (
    Blend,
    DocumentSource,
    FactSequences,
    PackedTokens,
    Positions,
    Shuffled,
    StreamLoader,
    build_packed,
    check_text,
    framing_of,
    local_copy,
    once,
    train_tokenizer,
)
from dmc.data.hub import TOKENIZER_FILES
from dmc.data.numbering import excess_ids, has_tokenizer, moved_special_token, moved_token
from dmc.data.sources import files_digest
from dmc.data.streaming import check_stream
from dmc.files import json_digest
from dmc.models.attention import Documents
from dmc.models.loading import load_tokenizer
from dmc.models.weights import read_model_config, weights_digest
from dmc.training.callbacks.preemption import leave_signals_to_parent
from dmc.training.config import RunConfig
from dmc.training.micro_batches import StepLoader
from dmc.training.stages import Plan

logger = logging.getLogger(__name__)
MIN_SCORED = 0.01
"""Share of tokens that are learned below which a start warns."""
SPLITS = ("train", "validation", "calibration", "test")
_TOKENIZER = re.compile("tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|spiece|sentencepiece")


def fetched(config: RunConfig) -> RunConfig:
    """Name the local copies of a run's model, teacher and tokenizer that are on the hub, see `dmc.data.hub`."""
    model, revision = config.model, config.revision
    tokenizer, training = config.data.tokenizer, config.training
    distillation = config.distillation  # a control needs no teacher
    if distillation is not None and distillation.path is not None:
        path = local_copy(distillation.path, revision if distillation.path == model else None)
        training = dataclasses.replace(training, distillation=dataclasses.replace(distillation, path=path))
    if tokenizer.path is not None:
        path = local_copy(tokenizer.path, revision if tokenizer.path == model else None, files=TOKENIZER_FILES)
        tokenizer = dataclasses.replace(tokenizer, path=path)
    if model is not None:
        local_copy(model, revision, files=["config.json"])  # which a start reads first
        path = local_copy(model, revision)
        model, revision = path, revision if path == model else None
    data = dataclasses.replace(config.data, tokenizer=tokenizer)
    return dataclasses.replace(config, model=model, revision=revision, data=data, training=training)


def build_sources(sources: Mapping[str, Any], split: str) -> list[Any]:
    """Build the sources of a split.

    Raises:
        ValueError: one of them cannot be built, or is none.
    """
    return [instantiate(settings, f"data.{split}.{name}", DocumentSource) for name, settings in sources.items()]


def tokenizer_path(config: RunConfig) -> str | None:
    """Return the folder or hub name of a run's tokenizer: the one it names, or the model's own; None: it is trained.

    A tokenizer is trained for a fresh model: to a model that has one the numbers of another mean other words.
    """
    settings, model = config.data.tokenizer, config.model
    if settings.path is None and model is not None and (settings.train_vocab_size is None or has_tokenizer(model)):
        return model
    return settings.path


def build_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run, see `tokenizer_path`, or train it on the training text.

    Raises:
        ValueError: it is missing or damaged, or numbers tokens otherwise than the model.
    """
    data, path = config.data, tokenizer_path(config)
    if path is None:
        if config.model is not None:
            logger.warning(
                "model=%s has no tokenizer: one of %d tokens is trained on the text. If another one made the model's "
                "text, name it: data.tokenizer.path", config.model, data.tokenizer.train_vocab_size,
            )  # fmt: skip
        sources = build_sources(data.train, "train")
        texts = (text for source in sources for text in source.documents() if text)
        described = json.dumps([source.description() for source in sources], default=str)
        size, folder = data.tokenizer.train_vocab_size, str(data.tokenizer.folder)
        tokenizer = train_tokenizer(texts, cast(int, size), folder, sources=described)
    else:
        tokenizer = load_tokenizer(path, config.revision if path == config.model else None)
    _check_numbers(config, tokenizer, path)
    return tokenizer


def _check_numbers(config: RunConfig, tokenizer: PreTrainedTokenizerBase, path: str | None) -> None:
    """Refuse a tokenizer that numbers tokens otherwise than the model; if it is the model's own, say so.

    Raises:
        ValueError: it does.
    """
    model, size = config.model, config.data.tokenizer.train_vocab_size
    name = f"data.tokenizer.train_vocab_size={size}" if path is None else f"data.tokenizer.path={path}"
    if model is None:
        if problem := excess_ids(tokenizer, config.base.shape.get("vocab_size")):
            raise ValueError(f"{name}: {problem}: raise base.shape.vocab_size, or leave it out")
        return
    name = f"the tokenizer of model={model}" if path == model else name
    folder, remedy = Path(model), "take the tokenizer that the model was trained with"
    if not (folder / "config.json").is_file():  # out of reach
        return
    shape, is_others = read_model_config(folder), path not in (None, model)
    if problem := excess_ids(tokenizer, getattr(shape, "vocab_size", None)):
        raise ValueError(f"{name}: {problem}: {remedy}")
    own = load_tokenizer(folder) if is_others and has_tokenizer(model) else None
    if own is not None and (problem := moved_token(tokenizer, own)):
        raise ValueError(f"{name}: {problem}: leave data.tokenizer.path out, and the model's own is taken")
    if problem := moved_special_token(tokenizer, shape):
        if is_others and (own is None or problem != moved_special_token(own, shape)):
            raise ValueError(f"{name}: {problem}: {remedy}")
        logger.warning("%s: %s", name, problem)


def text_digests(config: RunConfig) -> dict[str, str]:
    """Return hashes of the text of a run, and of its tokenizer's files, by setting's name.

    Raises:
        ValueError, OSError: see `_source_digests`.
    """
    return _source_digests(config, "train") | _source_digests(config, "validation") | tokenizer_digests(config)


def tokenizer_digests(config: RunConfig) -> dict[str, str]:
    """Return hashes of what a run's tokenizer comes from by setting's name: its files, or the text it is trained on.

    Raises:
        ValueError, OSError: see `_source_digests`.
    """
    path = tokenizer_path(config)
    if path is None:
        return _source_digests(config, "train")
    if not (folder := Path(path)).is_dir():
        return {}
    files = [path for path in folder.iterdir() if path.is_file() and _TOKENIZER.match(path.name)]
    return {"data.tokenizer": files_digest(sorted(files))}


def _source_digests(config: RunConfig, split: str) -> dict[str, str]:
    """Return hashes of a split's text by setting's name, from samples of each source.

    That of text on the hub is taken once, when it is prepared or first read.

    Raises:
        ValueError, OSError: a source is missing, or has no text.
    """
    found = {}
    for name, settings in getattr(config.data, split).items():
        source = instantiate(settings, key := f"data.{split}.{name}")
        if source.is_remote:
            file = Path(config.data.cache_folder) / "hub" / json_digest(source.description())
            found[key] = once(file, source.digest)
        else:
            found[key] = source.digest()
    return found


def weight_digests(config: RunConfig) -> dict[str, str]:
    """Return hashes of the weights that a run starts and learns from, by setting's name, see `weights_digest`."""
    teacher = None if config.distillation is None else config.distillation.path
    named = {"model": config.model, "training.distillation.path": None if teacher == config.model else teacher}
    return {
        name: weights_digest(Path(path)) for name, path in named.items() if path is not None and Path(path).is_dir()
    }


def held_out_batches(
    packed: PackedTokens | Blend | FactSequences, num_sequences: int, batch_size: int
) -> list[dict[str, Any]]:
    """Pick sequences spread over a packed corpus, or the first of an endless one, as batches for `score_text`."""
    if not isinstance(packed, Sized):  # in random order already
        index = list(range(num_sequences))
    else:
        index = torch.linspace(0, len(packed) - 1, min(num_sequences, len(packed))).round().long().tolist()
    batches = []
    for begin in range(0, len(index), batch_size):
        batch: dict[str, Any] = default_collate([packed[i] for i in index[begin : begin + batch_size]])
        if "document_starts" in batch:
            batch["documents"] = Documents.from_starts(batch.pop("document_starts"))
        batches.append(batch)
    return batches


def prepare_text(config: RunConfig) -> list[str]:
    """Tokenize all text of a run and fetch its models; say how much there is, a line for each source.

    What comes from the hub is in the caches then: a start needs no network.

    Raises:
        ValueError, OSError: see `dmc.data.build_packed`.
    """
    config = fetched(config)
    text_digests(config)
    data = TextData(
        config,
        build_tokenizer(config),
        Plan(config.training, config.target_ratio, config.compression).total_steps,
    )
    return data.describe()


class TextData(LightningDataModule):
    """Serves micro-batches of packed text; resuming starts the order at the samples consumed so far.

    Args:
        config: the run.
        tokenizer: for text that is not cached yet.
        total_steps: optimizer steps of the run.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> None:
        super().__init__()
        self.config, self.tokenizer, self.total_steps = config, tokenizer, total_steps
        self.num_draws = total_steps * config.training.batch_size
        self.framing = framing_of(tokenizer, config.data.tokenizer.bos, config.data.tokenizer.eod_token)
        self._train: Any = None

    def check(self) -> None:
        """Open every source, so that errors come before the run is recorded; nothing is written.

        Raises:
            ValueError, OSError: a source is not there, or holds no text.
        """
        for split in self._cached_splits():
            check_text(self._sources(split), self.tokenizer, self.config.data.cache_folder, self.framing)
        if self.config.data.streaming:
            for source in self._sources("train"):
                check_stream(source)

    def prepare_data(self) -> None:
        """Tokenize into the cache, once per machine; machines that share a folder share the work."""
        for split in self._cached_splits():
            self._packed(split)

    def setup(self, stage: str) -> None:
        """Open the training text.

        Raises:
            ValueError: nothing of a source is trained on, or measured.
        """
        for split in self._cached_splits():
            self._check_scored(split)
            self._tell_cut(split)
        if not self.config.data.streaming:
            train = self._sequences("train")
            if (count := self.config.training.overfit_sequences) is not None:
                train = Subset(train, range(count))
            self._train = Shuffled(train, self.config.seed) if isinstance(train, Sized) else train

    def train_dataloader(self) -> StepLoader:
        """Start at the sample after the last one that an optimizer step has consumed."""
        training, trainer = self.config.training, self.trainer
        assert trainer is not None
        accumulation = training.accumulation(trainer.world_size // self.config.trainer.devices_per_sequence)
        counts_tokens = training.loss_average == "token"
        cuts = self.config.trainer.devices_per_sequence  # neighbors read the same text
        batches = self.micro_batches(trainer.global_step, trainer.global_rank // cuts, trainer.world_size // cuts)
        return StepLoader(batches, accumulation, counts_tokens, lambda: trainer.global_step * training.batch_size)

    def micro_batches(
        self, step: int = 0, rank: int = 0, world_size: int = 1
    ) -> DataLoader[dict[str, Any]] | StreamLoader:
        """Serve the training text from an optimizer step on to one of the ranks that divide it; streams go on alone."""
        training = self.config.training
        options: dict[str, Any] = {"batch_size": training.micro_batch_size, "num_workers": self.config.data.num_workers}
        ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
        if self.config.data.streaming:  # Lightning restores the loader's own state
            options |= {"num_stream_shards": self.config.data.stream_shards, "num_draws": self.num_draws}
            options |= {"draws_per_step": training.batch_size, "framing": self.framing}
            options |= {"document_starts": training.document_masking, "seed": self.config.seed}
            options |= {"worker_init_fn": leave_signals_to_parent}
            return StreamLoader(self._sources("train"), self.tokenizer, training.sequence_length, **options, **ranks)
        positions = Positions(self.num_draws, min(step * training.batch_size, self.num_draws), **ranks)
        return DataLoader(self._train, sampler=positions, worker_init_fn=leave_signals_to_parent, **options)

    def held_out(
        self, split: Literal["validation", "calibration", "test"], *, has_questions: bool = True, at_least: int = 1
    ) -> list[dict[str, Any]]:
        """Return held-out sequences for `score_text`: of the validation text where the configuration names no other.

        Args:
            split: which text.
            has_questions: whether facts that are written into it are asked for, too; a cache that is compressed before
                anyone asks sees none.
            at_least: number of sequences, where the configuration gives the split fewer.
        """
        training = self.config.training
        count = training.calibration_sequences if split == "calibration" else training.validation_sequences
        sequences = self._sequences("validation" if getattr(self.config.data, split) is None else split, has_questions)
        return held_out_batches(sequences, max(count, at_least), training.micro_batch_size)

    def describe(self) -> list[str]:
        """Return how much text there is, tokenized where it is not yet, a line for each source that is not streamed."""
        lines = []
        for split in self._cached_splits():
            for source, part in self._parts(split):
                table = part.tokens
                lines.append(
                    f"{split}: {len(table):,} tokens in {table.num_documents:,} documents of {source.label}, "
                    f"{table.num_skipped:,} skipped"
                )
        return lines

    def _check_scored(self, split: str) -> None:
        """Refuse text of which no token is learned, such as chats whose answers all lie behind the cut."""
        for source, part in self._parts(split):
            if not source.has_loss_mask:
                continue
            num_scored, num_tokens = part.num_scored(), len(part) * part.sequence_length
            share = f"{100 * num_scored / num_tokens:.2g} % of {num_tokens:,} tokens"
            if not num_scored:
                cut = f" within the first {part.sequence_length} tokens" if self.config.training.whole_documents else ""
                raise ValueError(
                    f"data.{split}: none of the {part.tokens.num_documents:,} documents of {source.label} has a token "
                    f"of an answer{cut}: raise training.sequence_length={part.sequence_length}, or check its answers"
                )
            if num_scored < MIN_SCORED * num_tokens:
                logger.warning(
                    "data.%s: only %s of %s are of answers, the others are not learned", split, share, source.label
                )
            else:
                logger.info("data.%s: %s of %s are of answers, and learned", split, share, source.label)

    def _tell_cut(self, split: str) -> None:
        """Warn of documents that are longer than a sequence, of which only the beginning is read."""
        for source, part in self._parts(split):
            if part.num_cut:
                share = f"{100 * part.num_cut / len(part.tokens):.2g} % of {len(part.tokens):,} tokens"
                logger.warning(
                    "data.%s: %s of %s lie behind the first training.sequence_length=%d of their document, and are not "
                    "read (training.whole_documents)",
                    *(split, share, source.label, part.sequence_length),
                )

    def _parts(self, split: str) -> list[tuple[Any, PackedTokens]]:
        """Open the sources of a split, each with its sequences."""
        packed = self._packed(split)
        return list(zip(self._sources(split), packed.datasets if isinstance(packed, Blend) else [packed], strict=True))

    def _cached_splits(self) -> list[str]:
        data = self.config.data
        return [
            *([] if data.streaming else ["train"]),
            "validation",
            *([] if data.calibration is None else ["calibration"]),
            *([] if data.test is None else ["test"]),
        ]

    def _sources(self, split: str) -> list[Any]:
        return build_sources(getattr(self.config.data, split), split)

    def _sequences(self, split: str, has_questions: bool = True) -> Any:
        """Open what the model reads of a split: its text, with facts in it where the run has them."""
        packed, facts = self._packed(split), self.config.data.facts
        if facts is None:
            return packed
        length, keys = self.config.training.sequence_length, (self.config.seed, SPLITS.index(split))
        options = {"has_lessons": split == "train", "has_questions": has_questions}
        return FactSequences(packed, self.tokenizer, facts, length, keys=keys, **options)

    def _packed(self, split: str) -> Any:
        data = self.config.data
        return build_packed(
            self._sources(split),
            self.tokenizer,
            self.config.training.sequence_length,
            data.cache_folder,
            seed=self.config.seed,
            tokenize_num_proc=data.tokenize_num_proc,
            framing=self.framing,
            document_starts=self.config.training.document_masking,
            whole_documents=self.config.training.whole_documents,
        )
