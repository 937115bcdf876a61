"""Text that is tokenized on the fly: shards that resume anywhere, the same whatever the ranks and workers.

A shard is a fixed part of the documents: a shard of each source's `IterableDataset`, whose place is the stream's
`state_dict()` and the tokens that are read but not drawn yet. There are as many shards as the configuration says, and a
rank draws from some of them, so what is drawn does not depend on the number of ranks.

torchdata's `StatefulDataLoader` keeps the place of each worker of one rank, and refuses to go on with another number of
workers; `test_run_goes_on_at_any_number_of_ranks_and_workers` asks for both. So each sample carries its shard's place.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info
from transformers import PreTrainedTokenizerBase

from dmc.data.encoding import DocumentEncoder, Refusals
from dmc.data.order import blend_schedule
from dmc.data.sources import DocumentSource
from dmc.data.tokenizer import Framing, framing_of
from dmc.ranks import Ranks

_BATCH_DOCUMENTS = 16
CHECKED_CHATS = 100
"""Chats after which it is known whether the chat template refuses too many."""
MAX_WITHOUT_TOKENS = 2**16
"""Consecutive documents without tokens after which a repeating stream is known to have no others."""
ID, LEARNED, STARTS = range(3)
"""Columns of an array of tokens: the id, whether it is learned, whether it begins a document."""


def check_stream_shards(num_stream_shards: int, world_size: int) -> None:
    """Raise a ValueError for a number of shards that `world_size` processes cannot share equally."""
    if num_stream_shards % world_size:
        raise ValueError(
            f"data.stream_shards={num_stream_shards} cannot be shared out evenly to {world_size} ranks; "
            f"set a multiple of {world_size}, when the run starts"
        )


def check_stream(source: DocumentSource) -> None:
    """Raise a clear error if a source cannot be streamed: it is empty, or has no such column."""
    if all(document is None for document in source.documents()):
        raise ValueError(f"The corpus {source.label!r} is empty: no document is text. Check its path and column.")


def open_stream_shards(sources: Sequence[DocumentSource], num_stream_shards: int) -> list[list[IterableDataset]]:
    """Split sources into shards, endless parts of every source, together all of its documents.

    Files, or parts of files, are divided among the shards. Of a source with fewer of them, every shard reads all and
    keeps its part. There is no shuffle buffer: its content would be lost on resume.

    Args:
        sources: the sources.
        num_stream_shards: shards; each that is read holds a file of every source open.
    Returns:
        The streams of each shard, in the order of `sources`.
    """
    parts = [[part.repeat(None) for part in _split(source.stream(), num_stream_shards)] for source in sources]
    return [list(streams) for streams in zip(*parts, strict=True)]


def _split(stream: IterableDataset, num_parts: int) -> list[IterableDataset]:
    if stream.num_shards < num_parts:
        stream = stream.reshard()
    if stream.num_shards >= num_parts:
        return [stream.shard(num_parts, part, contiguous=False) for part in range(num_parts)]
    return [  # copies, for a stream keeps its place in objects that it shares with what is made of it
        copy.deepcopy(stream).filter(_belongs, with_indices=True, fn_kwargs={"part": part, "num_parts": num_parts})
        for part in range(num_parts)
    ]


def _belongs(_: dict[str, Any], index: int, part: int, num_parts: int) -> bool:
    return index % num_parts == part


class StreamReader(Iterator[np.ndarray]):
    """Tokenizes one stream and cuts it in sequences, int64 [sequence_length, 3], see `ID`.

    Args:
        source: what the stream is part of.
        stream: one of `open_stream_shards`.
        encoder: frames and encodes documents; those without text, or refused, are left out.
        sequence_length: tokens of a sequence.
        refusals: where refused chats are counted.
        state: an earlier `state`, to go on there; None: at the beginning.
    """

    def __init__(
        self,
        source: DocumentSource,
        stream: IterableDataset,
        encoder: DocumentEncoder,
        sequence_length: int,
        refusals: Refusals,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.source, self.stream, self.encoder, self.sequence_length = source, stream, encoder, sequence_length
        self.refusals = refusals
        self.state = state or {"stream": None, "remainder": [], "num_yielded": 0}
        """The stream's state before the current batch of documents, the tokens left over from before that batch, fewer
        than a sequence, and how many sequences are cut from both; replaced, never changed."""
        self._sequences = self._cut()

    def __next__(self) -> np.ndarray:
        return next(self._sequences)

    def _cut(self) -> Iterator[np.ndarray]:
        self.stream.load_state_dict(self.state["stream"])
        documents, num_without = self.source.read(self.stream), 0
        while batch := list(itertools.islice(documents, _BATCH_DOCUMENTS)):
            before = np.array(self.state["remainder"], dtype=np.int64).reshape(-1, 3)
            encoded = self._encoded(batch)
            num_without = 0 if len(encoded) else num_without + len(batch)
            if num_without >= MAX_WITHOUT_TOKENS:
                raise ValueError(
                    f"{num_without} documents of {self.source.label!r} in a row have nothing to learn: expected text; "
                    "of a chat, messages of the role 'assistant'"
                )
            tokens, length = np.concatenate([before, encoded]), self.sequence_length
            num_sequences = len(tokens) // length
            for number in range(self.state["num_yielded"], num_sequences):
                self.state = {**self.state, "num_yielded": number + 1}
                yield tokens[number * length : (number + 1) * length]
            remainder = tokens[num_sequences * length :].tolist()
            self.state = {"stream": self.stream.state_dict(), "remainder": remainder, "num_yielded": 0}

    def _encoded(self, documents: list[Any]) -> np.ndarray:
        parts = [np.empty((0, 3), dtype=np.int64)]
        for encoded in self.encoder(documents):
            self.refusals.add(encoded)
            part = np.zeros((len(encoded.token_ids), 3), dtype=np.int64)
            part[:, ID] = encoded.token_ids
            part[:, LEARNED] = True if encoded.scored is None else encoded.scored
            part[:1, STARTS] = True
            parts.append(part)
        if self.refusals.num_chats >= CHECKED_CHATS:
            self.refusals.check()
        return np.concatenate(parts)


class StreamLoader:
    """Draws sample p of the global sequence from shard p % shards; rank r of n has the samples r, r + n, r + 2 n, ...

    A batch is `{"input_ids": int64 [batch_size, sequence_length], "position": int64 [batch_size]}`, `position` being p,
    with "loss_mask" and "document_starts" as in `PackedTokens`. A shard draws from its sources as the schedule of a
    blend says, each shard from another place in it.
    The state covers all ranks, so all of them must ask for it at the same time. It is that between two optimizer steps,
    each of `draws_per_step` samples: a step under way, whose gradients no checkpoint holds, is drawn again.

    Args:
        sources: the streams, blended in their weights.
        tokenizer: any tokenizer with an eos token, which ends each document.
        sequence_length: tokens per sample, >= 1.
        num_stream_shards: shards of the stream, the same for the whole training; a multiple of `world_size`.
        batch_size: samples of a batch, >= 1.
        num_draws: samples drawn over the whole training by all ranks.
        draws_per_step: samples of an optimizer step, over all ranks.
        num_workers: whether a process reads ahead, if it is not 0.
        worker_init_fn: called in that process.
        rank: this process.
        world_size: processes that share the samples.
        framing: special tokens around each document; None: as in the pretraining of the tokenizer's model.
        document_starts: whether batches have the starts of documents.
        seed: selects the schedule of a blend.
    Raises:
        ValueError: the ranks cannot share the shards.
    """

    def __init__(
        self,
        sources: Sequence[DocumentSource],
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        num_stream_shards: int,
        batch_size: int,
        num_draws: int,
        draws_per_step: int = 1,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        rank: int = 0,
        world_size: int = 1,
        framing: Framing | None = None,
        document_starts: bool = False,
        seed: int = 0,
    ) -> None:
        check_stream_shards(num_stream_shards, world_size)
        self.sources, self.shards = sources, open_stream_shards(sources, num_stream_shards)
        self._schedule = blend_schedule([source.weight for source in sources], seed)
        self.encoder = DocumentEncoder(tokenizer, framing or framing_of(tokenizer))
        self.refusals = [Refusals(source.label) for source in sources]
        self.sequence_length = sequence_length
        self.loss_mask, self.document_starts = any(source.has_loss_mask for source in sources), document_starts
        self.batch_size, self.num_draws, self.draws_per_step = batch_size, num_draws, draws_per_step
        self.num_workers, self.worker_init_fn = min(num_workers, 1), worker_init_fn
        self.rank, self.world_size = rank, world_size
        self._num_drawn = 0  # by all ranks
        self._states: dict[int, list[dict[str, Any]]] = {}  # of this rank's shards, after the last sample handed out
        self._finished_steps: dict[int, dict[int, list[dict[str, Any]]]] = {0: {}}  # of the last two, by samples drawn

    def __len__(self) -> int:
        """Return this rank's batches from sample 0, wherever it goes on: Lightning resumes its own batch counter."""
        return self.num_draws // self.world_size // self.batch_size

    def state_dict(self, num_drawn: int | None = None) -> dict[str, Any]:
        """Gather the places of all ranks' shards: Lightning keeps only rank 0's state.

        Args:
            num_drawn: samples of all ranks in the steps that are done; None: in all steps that were handed out.
        """
        num_drawn = max(self._finished_steps) if num_drawn is None else num_drawn
        gathered = Ranks.world().all_gather_object(self._finished_steps[num_drawn])
        merged = {shard: state for states in gathered for shard, state in states.items()}
        return {"num_drawn": num_drawn, "num_stream_shards": len(self.shards), "shards": merged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples drawn so far, at any number of ranks and workers.

        Raises:
            ValueError: the state has another number of shards, or of samples that these ranks cannot have drawn.
        """
        if state.get("num_stream_shards") != len(self.shards):
            raise ValueError(
                f"the checkpoint holds the places of {state.get('num_stream_shards')} shards of the stream, "
                f"data.stream_shards is {len(self.shards)}: it cannot change within a run"
            )
        if state["num_drawn"] % self.world_size:
            raise ValueError(
                f"{state['num_drawn']} samples are drawn, no multiple of world_size={self.world_size}: go on with a "
                "number of ranks that divides training.batch_size"
            )
        self._num_drawn = state["num_drawn"]
        self._states = {shard: state["shards"][shard] for shard in self._shards_of_rank() if shard in state["shards"]}
        self._finished_steps = {self._num_drawn: dict(self._states)}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches, read ahead by a process that hands out each sample with its shard's place behind it."""
        batches: Any = DataLoader(
            _Samples(self),
            self.batch_size,
            drop_last=True,
            collate_fn=list,
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
        )
        for batch in batches:
            for item, state in batch:
                self._states[item["position"] % len(self.shards)] = state
            self._num_drawn += self.batch_size * self.world_size
            if self._num_drawn % self.draws_per_step == 0:
                last = max(self._finished_steps)  # its step is under way until the next one is read
                self._finished_steps = {last: self._finished_steps[last], self._num_drawn: dict(self._states)}
            yield default_collate([item for item, _ in batch])

    def _shards_of_rank(self) -> range:
        return range(self.rank, len(self.shards), self.world_size)

    def _open(self, shard: int) -> list[StreamReader]:
        states = self._states.get(shard, [None] * len(self.sources))
        parts = zip(self.sources, self.shards[shard], self.refusals, states, strict=True)
        return [
            StreamReader(source, stream, self.encoder, self.sequence_length, refusals, state)
            for source, stream, refusals, state in parts
        ]

    def _item(self, position: int, tokens: np.ndarray) -> dict[str, Any]:
        item: dict[str, Any] = {"input_ids": torch.from_numpy(tokens[:, ID].copy()), "position": position}
        if self.loss_mask:
            item["loss_mask"] = torch.from_numpy(tokens[:, LEARNED] > 0)
        if self.document_starts:
            item["document_starts"] = torch.from_numpy(tokens[:, STARTS] > 0)
            item["document_starts"][0] = True
        return item

    def samples(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yield the samples of this rank that are not drawn yet, each with the state of its shard behind it."""
        readers = {shard: self._open(shard) for shard in self._shards_of_rank()}
        for position in range(self._num_drawn + self.rank, self.num_draws, self.world_size):
            turn, shard = divmod(position, len(self.shards))
            turn += shard * len(self._schedule) // len(self.shards)
            try:
                tokens = next(readers[shard][self._schedule[turn % len(self._schedule)]])
            except StopIteration:
                raise ValueError(
                    f"shard {shard} of {len(self.shards)} has no text of a source; lower data.stream_shards."
                ) from None
            yield self._item(position, tokens), [reader.state for reader in readers[shard]]


class _Samples(torch.utils.data.IterableDataset[Any]):
    """The samples of a loader, for a process that reads them ahead."""

    def __init__(self, loader: StreamLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        if get_worker_info() is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads were not forked
        return self.loader.samples()
