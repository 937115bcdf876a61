"""Batches out of lanes, the same whatever the ranks and workers, resumable at any number of both."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dmc.data.blend import integer_shares
from dmc.data.streaming import Lane, StreamReader, open_lanes
from dmc.data.text import TextSource
from dmc.data.tokenizer import Framing, encode_documents, framing_of

Sample = tuple[int, Tensor, dict[str, Any]]


def check_lanes(num_lanes: int, world_size: int) -> None:
    """Refuse lanes that `world_size` processes cannot share.

    Raises:
        ValueError: each would not have as many.
    """
    if num_lanes % world_size:
        raise ValueError(
            f"data.streaming_lanes={num_lanes} cannot be shared out evenly to {world_size} ranks; "
            f"set a multiple of {world_size}, when the run starts"
        )


class StreamLoader:
    """Draws sample p of the global sequence from lane p % lanes; rank r of n has the samples r, r + n, r + 2 n, ...

    A batch is `{"input_ids": int64 [batch_size, sequence_length], "position": int64 [batch_size]}`, `position` being p.
    The state covers all ranks, so all of them must ask for it at the same time. It is that at the end of the last
    `draws_per_step` samples: a step under way, whose gradients no checkpoint holds, is drawn again.

    Lanes are read ahead by threads: reading and encoding leave the interpreter to others most of the time, and a
    stream that is open stays where it is, as it could not in processes.
    """

    def __init__(
        self,
        sources: Sequence[TextSource],
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        num_lanes: int,
        batch_size: int,
        num_draws: int,
        draws_per_step: int = 1,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        framing: Framing | None = None,
    ) -> None:
        """Check the numbers and open the streams.

        Args:
            sources: the streams, blended in their weights.
            tokenizer: any tokenizer with an eos token, which ends each document.
            sequence_length: tokens per sample, >= 1.
            num_lanes: lanes of the stream, the same for the whole training; a multiple of `world_size`.
            batch_size: samples of a batch, >= 1.
            num_draws: samples drawn over the whole training by all ranks.
            draws_per_step: samples of an optimizer step, over all ranks.
            num_workers: threads that read ahead; 0: none.
            rank: this process, 0 <= rank < world_size.
            world_size: processes that share the samples.
            framing: what stands around each document; None: as in the pretraining of the tokenizer's model.
        Raises:
            ValueError: a number is outside its range, or there is no source or an empty one.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be at least 0 and below world_size={world_size}.")
        check_lanes(num_lanes, world_size)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        self.lanes = open_lanes(sources, num_lanes)
        self.shares = integer_shares([source.weight for source in sources])
        self.tokenizer, self.sequence_length = tokenizer, sequence_length
        self.framing = framing or framing_of(tokenizer)
        self.batch_size, self.num_draws, self.num_workers = batch_size, num_draws, num_workers
        self.draws_per_step = draws_per_step
        self.rank, self.world_size = rank, world_size
        self._num_drawn = 0  # by all ranks
        self._states: dict[int, dict[str, Any]] = {}  # of this rank's lanes, after the last sample handed out
        self._whole_steps: tuple[int, dict[int, dict[str, Any]]] = 0, {}

    def __len__(self) -> int:
        """Return this rank's batches from sample 0, wherever it goes on: Lightning resumes its own batch counter."""
        return self.num_draws // self.world_size // self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Gather the places of all ranks' lanes."""
        num_drawn, own = self._whole_steps
        states = [own]
        if dist.is_initialized():
            states = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(states, own)
        merged = {lane: state for part in states for lane, state in part.items()}
        return {"num_drawn": num_drawn, "num_lanes": len(self.lanes), "lanes": merged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples drawn so far, at any number of ranks and workers.

        Raises:
            ValueError: the state is of another number of lanes, or of samples that these ranks cannot have drawn.
        """
        if state.get("num_lanes") != len(self.lanes):
            raise ValueError(
                f"the checkpoint holds the places of {state.get('num_lanes')} lanes of the stream, "
                f"data.streaming_lanes is {len(self.lanes)}: it cannot change within a run"
            )
        if state["num_drawn"] % self.world_size:
            raise ValueError(
                f"{state['num_drawn']} samples are drawn, no multiple of world_size={self.world_size}: go on with a "
                "number of ranks that divides training.batch_size"
            )
        self._num_drawn = state["num_drawn"]
        self._states = {lane: state["lanes"][lane] for lane in self._own_lanes() if lane in state["lanes"]}
        self._whole_steps = self._num_drawn, dict(self._states)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        samples = self._samples()
        while len(batch := list(itertools.islice(samples, self.batch_size))) == self.batch_size:
            for position, _, state in batch:
                self._states[position % len(self.lanes)] = state
            self._num_drawn += self.batch_size * self.world_size
            if self._num_drawn % self.draws_per_step == 0:
                self._whole_steps = self._num_drawn, dict(self._states)  # places are replaced, never changed
            yield {
                "input_ids": torch.stack([sequence for _, sequence, _ in batch]),
                "position": torch.tensor([position for position, _, _ in batch]),
            }

    def _own_lanes(self) -> range:
        return range(self.rank, len(self.lanes), self.world_size)

    def _open_lane(self, lane: int) -> Lane:
        readers = [
            StreamReader(stream, self.tokenizer, self.sequence_length, self.framing) for stream in self.lanes[lane]
        ]
        return Lane(readers, self.shares, lane / len(self.lanes), self._states.get(lane))

    def _samples(self) -> Iterator[Sample]:
        encode_documents(self.tokenizer, [""])  # sets what a tokenizer sets at its first call, before threads share it
        lanes = {lane: self._open_lane(lane) for lane in self._own_lanes()}

        def draw(position: int) -> Sample:
            lane = position % len(self.lanes)
            try:
                return position, lanes[lane].draw(), lanes[lane].state_dict()
            except StopIteration:
                raise ValueError(
                    f"Lane {lane} of {len(self.lanes)} has no text of a source; lower data.streaming_lanes."
                ) from None

        positions = iter(range(self._num_drawn + self.rank, self.num_draws, self.world_size))
        if self.num_workers == 0:
            yield from map(draw, positions)
            return
        pool = ThreadPoolExecutor(self.num_workers)
        try:
            ahead: collections.deque[Future[Sample]] = collections.deque()
            for position in itertools.islice(positions, len(lanes)):  # each lane once: it serves one thread
                ahead.append(pool.submit(draw, position))
            while ahead:
                sample = ahead.popleft().result()
                ahead.extend(pool.submit(draw, position) for position in itertools.islice(positions, 1))
                yield sample
        finally:
            pool.shutdown(cancel_futures=True)
