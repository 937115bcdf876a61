"""The text of a run: tokenizer, training order and held-out sequences, from the configuration's sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dmc.config import DataConfig, RunConfig
from dmc.data import (
    OrderedDataset,
    PackedTokens,
    RankedLoader,
    ResumableOrder,
    StreamingPacked,
    build_packed,
    open_stream,
    train_tokenizer,
)
from dmc.target import build_target
from dmc.training.preemption import leave_signals_to_parent


def build_sources(specifications: list[dict[str, Any]], name: str) -> list[Any]:
    """Instantiate sources from mappings with a `_target_`.

    Raises:
        ValueError: a mapping does not describe a source.
    """
    return [build_target(each, f"{name}[{index}]") for index, each in enumerate(specifications)]


def build_tokenizer(data: DataConfig, model_path: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or train it on the training text.

    Raises:
        ValueError: neither the data nor the model names one.
    """
    if data.tokenizer.train_vocab_size is not None:
        sources = build_sources(data.train, "data.train")
        texts = (text for source in sources for text in source.documents() if text)
        return train_tokenizer(texts, data.tokenizer.train_vocab_size, str(data.tokenizer.folder))
    path = data.tokenizer.path or model_path
    if path is None:
        raise ValueError(
            "no tokenizer: set data.tokenizer.path, or data.tokenizer.train_vocab_size and data.tokenizer.folder"
        )
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def held_out_batches(packed: PackedTokens, num_sequences: int, batch_size: int) -> list[Tensor]:
    """Pick sequences spread evenly over a packed corpus, as batches of token ids [B, T]."""
    count = min(num_sequences, len(packed))
    index = torch.linspace(0, len(packed) - 1, count).round().long().tolist()
    sequences = torch.stack([packed[i]["input_ids"] for i in index])
    return list(sequences.split(batch_size))


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
        self._train: Any = None

    def prepare_data(self) -> None:
        """Tokenise into the cache, once per machine."""
        if not self.config.data.streaming:
            self._packed("train")
        self._packed("validation")

    def setup(self, stage: str) -> None:
        """Open the training text."""
        if self.config.data.streaming:
            sources = build_sources(self.config.data.train, "data.train")
            self._train = open_stream(sources, seed=self.config.seed, repeat=True)
        else:
            self._train = self._packed("train")

    def train_dataloader(self) -> DataLoader[dict[str, Any]] | RankedLoader:
        """Start at the sample after the last one that an optimizer step has consumed."""
        training, trainer = self.config.training, self.trainer
        assert trainer is not None
        options: dict[str, Any] = {
            "batch_size": training.micro_batch_size,
            "num_workers": self.config.data.num_workers,
            "worker_init_fn": leave_signals_to_parent,
        }
        cuts = self.config.trainer.tensor_parallel_size  # neighbours, which share each layer, read the same text
        rank: dict[str, Any] = {"rank": trainer.global_rank // cuts, "world_size": trainer.world_size // cuts}
        if self.config.data.streaming:
            stream = StreamingPacked(
                self._train, self.tokenizer, training.sequence_length, num_draws=self.num_draws, **rank
            )
            return RankedLoader(stream, **options)
        start = min(trainer.global_step * training.batch_size, self.num_draws)
        order = ResumableOrder.over(self._train, self.config.seed, num_draws=self.num_draws, start=start, **rank)
        return DataLoader(OrderedDataset(self._train, order), sampler=order, **options)

    def validation_batches(self) -> list[Tensor]:
        """Held-out sequences for the reported loss and ratio."""
        training = self.config.training
        return held_out_batches(self._packed("validation"), training.validation_sequences, training.micro_batch_size)

    def calibration_batches(self) -> list[Tensor]:
        """Held-out sequences for calibration, apart from the validation's where the configuration names a source."""
        training = self.config.training
        split = "validation" if self.config.data.calibration is None else "calibration"
        return held_out_batches(self._packed(split), training.calibration_sequences, training.micro_batch_size)

    def _packed(self, split: str) -> Any:
        sources = build_sources(getattr(self.config.data, split), f"data.{split}")
        length, folder = self.config.training.sequence_length, Path(self.config.data.cache_folder)
        return build_packed(sources, self.tokenizer, length, folder, seed=self.config.seed)
