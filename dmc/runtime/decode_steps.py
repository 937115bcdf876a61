"""Steps that only decode: what they are told of each request, and their recordings as CUDA graphs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dmc.kernels.batch import GENERATED, ForwardBatch
from dmc.kernels.layout import CacheLayout
from dmc.policies import CachePolicy
from dmc.runtime.options import STOPS
from dmc.runtime.request import Request, Sequence
from dmc.runtime.sampling import mode_of

logger = logging.getLogger(__name__)

TOKEN, ROW, POSITION, SETTINGS, UNIFORM = 0, 1, 2, slice(3, 8), 7
NUM_INPUTS = 8 + STOPS
Result = tuple[Tensor | None, Tensor | None]
"""Logits or log-probabilities, and what the host reads of a step: see `Runner.packed`."""
SITS_OUT = -2
"""Token of a request that took no part in a step, because the step before has ended it or left its token open."""


@dataclass(eq=False)
class DecodeBatch:
    """One token of each of S requests, whose logits alone decide the next one."""

    requests: list[Request]
    inputs: Tensor
    """Token (negative: what the step before has chosen, which only the device knows), cache row, position,
    `Sampling.settings` and the tokens that end the request (-1: none), float64 [NUM_INPUTS, S] on the host."""
    mode: tuple[int, int]
    """`Sampling.width` and `num_top`."""
    left: Tensor
    """Tokens that each request may still get, this step's included, int64 [S]."""
    ends_on_device: bool
    """Whether the device sees which requests end with this step's tokens, but for those at their length."""

    @classmethod
    def of(cls, requests: list[Request], vocab_size: int) -> DecodeBatch:
        """Make the batch of requests whose last token is known."""
        columns = []
        for request in requests:
            sequence, params = request.sequence, request.params
            place = sequence.tokens[-1], sequence.row, sequence.num_computed_tokens
            columns.append((*place, *params.numbers, request.uniform(), *params.stops_on_device))
        inputs = torch.tensor(columns, dtype=torch.float64).T
        left = torch.tensor([request.params.max_new_tokens - len(request.logprobs) for request in requests])
        given = [request.params for request in requests]
        ends_on_device = not any(params.stop or len(params.stop_token_ids) > STOPS for params in given)
        return cls(requests, inputs, mode_of(given, vocab_size), left, ends_on_device)

    @property
    def rows(self) -> Tensor:
        """Cache row of each request, int64 [S]."""
        return self.inputs[ROW].long()

    @property
    def sequences(self) -> list[Sequence]:
        """Those whose requests have not ended."""
        return [request.sequence for request in self.requests if request.outcome is None]

    def following(self) -> DecodeBatch | None:
        """Make the next step's batch before this step's tokens are read; None: all requests end at their length.

        A request that ends at another token stays: the device lets it sit out.
        """
        requests, inputs, left = self.requests, self.inputs.clone(), self.left - 1
        goes_on = torch.tensor([request.outcome is None for request in requests]) & (left > 0)
        if not goes_on.all():
            requests = [request for request, stays in zip(requests, goes_on.tolist(), strict=True) if stays]
            inputs, left = inputs[:, goes_on], left[goes_on]
        if not requests:
            return None
        inputs[TOKEN] = -1
        inputs[POSITION] += 1
        if self.mode[0] >= 0:
            inputs[UNIFORM] = torch.tensor([request.uniform(1) for request in requests], dtype=torch.float64)
        return DecodeBatch(requests, inputs, self.mode, left, self.ends_on_device)


class Recorder(Protocol):
    """Turns functions whose inputs and outputs stay at the same addresses into ones that replay their kernels."""

    def __call__(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """Record a step."""

    def drop(self) -> None:
        """Forget what was recorded."""


READING_ROPE = ("dynamic", "longrope")
"""Types of RoPE whose tables the host chooses by the positions."""


class GpuRecorder:
    """Records steps as CUDA graphs of one device; recording runs no kernel of the step.

    Graphs share a memory pool until they are dropped together. No other recorder has the stream: torch frees a stream's
    workspace with the graphs of any recorder that captured on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def drop(self) -> None:
        """Begin a pool of its own for the next graphs; torch does not take graphs into one whose last has gone."""
        self._pool = None

    def __call__(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """See `Recorder`."""
        with torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream(self._device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:  # other threads may go on to allocate
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    result = step()
            except BaseException:
                torch.cuda.set_stream(before)  # which a capture that fails does not
                raise

        def replay() -> Result:
            graph.replay()
            return result

        return replay


def why_not_recorded(layout: CacheLayout, policy: CachePolicy | None, config: Any) -> str | None:
    """Return why decode steps cannot be recorded as CUDA graphs; None if they can."""
    if layout.device.type != "cuda":
        return f"the model is on {layout.device}, not on a GPU"
    if policy is not None and not policy.decodes_on_device:
        return f"{type(policy).__name__} asks the host in every step of decoding"
    if layout.ranks.size > 1 and dist.get_backend(layout.ranks.group) != "nccl":
        return "the processes that share the model do so through the host"
    if any(kind in str(getattr(config, "rope_parameters", None)) for kind in READING_ROPE):
        return f"the host chooses RoPE tables by position ({', '.join(READING_ROPE)})"
    return None


def bucket_of(count: int, most: int) -> int:
    """Round a number of sequences up to a power of two, at most `most`, so that few sizes are recorded."""
    return min(1 << (count - 1).bit_length(), most)


class DecodeSteps:
    """Computes one token of each sequence and chooses the next ones; each bucket of batch sizes is recorded once.

    Rows of a bucket beyond the given sequences write to the cache's scratch row. The first step of a bucket runs
    eagerly, which also compiles kernels at their first use; the second is recorded. All recordings are dropped when the
    cache's tensors have moved. When a recording fails, this and all later steps run eagerly.

    Args:
        run: function of token ids [1, S], their batch, and `Sampling`'s settings on the device, width and number of
            reported tokens (None: nothing is chosen); it does not wait for the device, and allocates nothing that
            outlives the call but its result.
        record: recorder of a step.
        most: sequences of the largest bucket; the scratch row follows theirs.
        device: device of the model.
    """

    def __init__(self, run: Callable[..., Result], record: Recorder, most: int, device: torch.device) -> None:
        self._run, self._most, self._device = run, most, device
        self._record: Recorder | None = record
        self._steps: dict[Any, tuple[Tensor, Callable[[], Result], bool]] = {}
        self._place: object = None
        self.chosen = torch.zeros(most + 1, dtype=torch.long, device=device)
        """What each row's last step has chosen; negative: nothing that another step could be fed, int64 [C]."""

    def __call__(self, given: Tensor, mode: tuple[int, int] | None, place: object) -> Result:
        """Run a step; recordings stay valid while `place` stays equal. The next call overwrites the result.

        Args:
            given: see `DecodeBatch.inputs`.
            mode: see `DecodeBatch.mode`; None: nothing is chosen.
            place: see `PagedCache.place`.
        """
        if place != self._place:
            self._steps, self._place = {}, place
            if self._record is not None:
                self._record.drop()
        count, size = given.shape[1], bucket_of(given.shape[1], self._most)
        if (size, mode) not in self._steps:
            inputs = torch.zeros(NUM_INPUTS, size, dtype=torch.float64, device=self._device)
            self._steps[size, mode] = inputs, functools.partial(self._step, inputs, mode), False
        else:
            inputs, step, is_recorded = self._steps[size, mode]
            if not is_recorded and self._record is not None:
                self._steps[size, mode] = inputs, self._recorded(step), True
        # a copy from other memory would wait until the device has done all steps before
        filled = torch.zeros(NUM_INPUTS, size, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        filled[ROW] = self._most
        filled[:, :count] = given
        inputs.copy_(filled, non_blocking=True)
        return self._steps[size, mode][1]()

    @property
    def num_recorded(self) -> int:
        """Number of steps that have been recorded, and are replayed."""
        return 0 if self._record is None else sum(is_recorded for *_, is_recorded in self._steps.values())

    def _recorded(self, step: Callable[[], Result]) -> Callable[[], Result]:
        assert self._record is not None
        try:
            return self._record(step)
        except Exception:
            logger.warning("decoding goes on without CUDA graphs: a step could not be recorded", exc_info=True)
            self._record = None
            return step

    def _step(self, inputs: Tensor, mode: tuple[int, int] | None) -> Result:
        tokens, rows, positions = inputs[:3].long()
        tokens = tokens.where(tokens >= 0, self.chosen[rows])
        sits_out = tokens < 0
        places = rows.masked_fill(sits_out, self._most), positions.masked_fill(sits_out, 0)
        batch = ForwardBatch.of_ones(len(rows), self._device, *places)
        batch.phases = [GENERATED] * len(rows)
        logits, packed = self._run(tokens.clamp_min(0)[None], batch, inputs[SETTINGS], mode)
        if packed is not None:
            new, logprobs = packed[:-1, 0], packed[:-1, 1]
            ends = (new == inputs[SETTINGS.stop :]).any(0) | ~logprobs.isfinite() | sits_out
            self.chosen[rows] = new.long().masked_fill(ends, -1)
            new.masked_fill_(sits_out, SITS_OUT)
        return logits, packed
