"""Forward passes: chunks of sequences in, logits out; steps that only decode can be recorded and replayed."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dmc.compression import rotate
from dmc.kernels import choose_backend
from dmc.kernels.batch import GENERATED, ForwardBatch
from dmc.kernels.layout import CacheLayout
from dmc.policies import CachePolicy
from dmc.policies.layer_attention import CacheAttention
from dmc.runtime import model_view
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.paged_forward import PagedForward
from dmc.runtime.sampling import CANDIDATES, Choice, Sampling, choose
from dmc.runtime.scheduler import ScheduledChunk
from dmc.runtime.tally import SlotIndex

logger = logging.getLogger(__name__)

Result = tuple[Tensor | None, Tensor | None]
"""Logits or log-probabilities, and what the host reads of a step: see `Runner.forward`."""


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
            outlives the call but its result, of S or more rows.
        record: recorder of a step.
        most: sequences of the largest bucket; the scratch row follows theirs.
        device: device of the model.
    """

    def __init__(self, run: Callable[..., Result], record: Recorder, most: int, device: torch.device) -> None:
        self._run, self._most, self._device = run, most, device
        self._record: Recorder | None = record
        self._steps: dict[Any, tuple[Tensor, Callable[[], Result], bool]] = {}
        self._place: object = None

    def __call__(
        self, tokens: list[int], rows: list[int], positions: list[int], sampling: Sampling | None, place: object
    ) -> Result:
        """Run a step; recordings stay valid while `place` stays equal. The next call overwrites the result."""
        if place != self._place:
            self._steps, self._place = {}, place
            if self._record is not None:
                self._record.drop()
        size = bucket_of(len(tokens), self._most)
        mode = None if sampling is None else (sampling.width, sampling.num_top)
        if (size, mode) not in self._steps:
            inputs = torch.zeros(8, size, dtype=torch.float64, device=self._device)
            self._steps[size, mode] = inputs, functools.partial(self._step, inputs, mode), False
        else:
            inputs, step, is_recorded = self._steps[size, mode]
            if not is_recorded and self._record is not None:
                self._steps[size, mode] = inputs, self._recorded(step), True
        given = torch.zeros(8, size, dtype=torch.float64)
        given[1] = self._most
        given[:3, : len(tokens)] = torch.tensor([tokens, rows, positions])
        if sampling is not None:
            given[3:, : len(tokens)] = sampling.settings
        inputs.copy_(given, non_blocking=True)
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
        batch = ForwardBatch.of_ones(len(rows), self._device, rows, positions)
        batch.phases = [GENERATED] * len(rows)
        return self._run(tokens[None], batch, inputs[3:], mode)


class Runner:
    """Feeds chunks to a model, compressed or stock, in one row without padding.

    Args:
        model: causal LM. Passes run a view of it, whose linear layers call the backend and, in a stock model, whose
            attention uses the paged cache; the model itself stays as it is.
        cache: where it keeps keys and values.
        kernels: backend name, "auto" picks.
        policy: what a stock model's cache keeps, or reads; None: all, or what a compressed model's gates decide.
        record: how steps of decoding are recorded, to be replayed; None: they are not.
        compiles: whether decoder layers are compiled in passes that only decode.
    Raises:
        ValueError: there is no such backend, or it cannot serve this cache.
        ImportError: it needs a package that is not installed.
        NotImplementedError: a stock model has attention sinks.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        kernels: str,
        policy: CachePolicy | None = None,
        record: Recorder | None = None,
        compiles: bool = False,
    ) -> None:
        self.model: Any = model
        self.cache = cache
        layout = cache.layout
        dtype = layout.page_dtype or layout.dtype
        backend = choose_backend(kernels, dtype, layout.head_dim, cache.block_size, layout.device)
        is_stock = layout.compression is None
        self._rotary = None if is_stock else model.rotary_tables
        self._view = self._decoding_view = model_view.view_of(model)
        if is_stock:
            model_view.use_paged_attention(self._view)
        self._rotate = rotate
        self._graph_settings: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if compiles:
            self._decoding_view = model_view.view_of(self._view)
            model_view.compile_layers(self._decoding_view)
            self._rotate = model_view.compiled_for_any_number(rotate)
            self._graph_settings = model_view.general_graphs
        model_view.use_backend_linear(self._view, backend)
        rotary = self._rotary or model_view.rotary_of(model)
        self._attention = CacheAttention(cache, backend) if policy is None else policy.attention(cache, backend, rotary)
        self._decode_steps = None
        if record is not None:
            assert cache.scratch_row is not None
            self._decode_steps = DecodeSteps(self._decode, record, cache.scratch_row, layout.device)

    @torch.no_grad()
    def forward(self, chunks: list[ScheduledChunk], sampling: Sampling | None = None) -> Result:
        """Feed chunks.

        Args:
            chunks: the next tokens of some sequences.
            sampling: how their next tokens are chosen, of a step that is recorded; None: that is not done here.
        Returns:
            Without `sampling` the logits of each chunk in turn, [rows, vocab]. Else their log-probabilities, None where
            the choice leaves nothing open, and the choice as `packed` lays it out.
        Raises:
            OutOfBlocksError: see `PagedCache.reserve`; nothing has changed.
            RuntimeError: the model has moved to another device or dtype than the cache's; nothing has changed.
            NotImplementedError: a stock model's attention turns out to be another than the cache serves.
        """
        self._check_place()
        rows, counts = _rows_of(chunks), [len(chunk.tokens) for chunk in chunks]
        begins = [chunk.sequence.num_computed_tokens for chunk in chunks]
        self.cache.reserve(rows, counts)
        self._attention.tokens = {chunk.sequence.row or 0: chunk.sequence.tokens for chunk in chunks}
        self._attention.prompts = {chunk.sequence.row or 0: chunk.sequence.prompts for chunk in chunks}
        packed: Tensor | None = None
        if self._decode_steps is not None and self.is_recorded(chunks):
            self.cache.tally.watch([], [])
            tokens = [chunk.tokens[0] for chunk in chunks]
            logits, packed = self._decode_steps(tokens, rows, begins, sampling, self.cache.place)
            logits = None if logits is None else logits[: len(rows)]
        else:
            logits = self._pass_of(chunks, rows, begins, counts)
        self.cache.tokens_seen[rows] += torch.tensor(counts)
        delay = self.cache.layout.delay
        for chunk, begin, count in zip(chunks, begins, counts, strict=True):
            first, sequence = chunk.first_logit_position, chunk.sequence
            sequence.held.add(begin + first, count - first, delay)
            sequence.num_computed_tokens = begin + count
        return logits, packed

    def _pass_of(self, chunks: list[ScheduledChunk], rows: list[int], begins: list[int], counts: list[int]) -> Tensor:
        """Put a pass together out of what the host knows."""
        device, tally = self.cache.layout.device, self.cache.tally
        phases, prompt_ends = [chunk.phase for chunk in chunks], [chunk.sequence.prompt_end for chunk in chunks]
        batch = ForwardBatch(rows, begins, counts, device, phases, prompt_ends)
        tokens: list[int] = []
        wanted: list[int] = []
        for chunk in chunks:
            wanted += range(len(tokens) + chunk.first_logit_position, len(tokens) + len(chunk.tokens))
            tokens += chunk.tokens
        several = [chunk for chunk in chunks if chunk.num_logits > 1]
        ones = tally.index(_rows_of([chunk for chunk in chunks if chunk.num_logits == 1]))
        many = tally.index(_rows_of(several))
        tally.watch(
            _rows_of(several),
            [chunk.sequence.num_computed_tokens + chunk.first_logit_position for chunk in several],
        )
        logits_of = torch.tensor(wanted, dtype=torch.long, device=device)
        return self._pass(torch.tensor([tokens], device=device), batch, logits_of, ones, many)

    def is_recorded(self, chunks: list[ScheduledChunk]) -> bool:
        """Whether a step over these chunks is recorded: one that only decodes."""
        return self._decode_steps is not None and all(
            len(chunk.tokens) == chunk.num_logits == 1 and chunk.phase == GENERATED for chunk in chunks
        )

    @property
    def num_recorded_steps(self) -> int:
        """Number of steps, by their sizes, that are replayed now."""
        return 0 if self._decode_steps is None else self._decode_steps.num_recorded

    def packed(self, choice: Choice) -> Tensor:
        """Lay out all that the host reads of a step: `Choice.as_rows` and a row of free blocks, [S + 1, columns]."""
        rows = choice.as_rows()
        return torch.cat((rows, self.cache.allocator.height.double().expand(1, rows.shape[1])))

    def _decode(self, tokens: Tensor, batch: ForwardBatch, settings: Tensor, mode: tuple[int, int] | None) -> Result:
        """One token of each sequence; the host knows how many there are and nothing else, and waits for nothing."""
        self.cache.lengths[:, self.cache.scratch_row].fill_(1)
        logits = self._pass(tokens, batch, 0, batch.row_index, None)
        if mode is None:
            return logits, None
        log_probs = logits.float().log_softmax(-1)
        packed = self.packed(choose(log_probs, log_probs, settings, *mode))
        return log_probs if mode[0] == CANDIDATES else None, packed

    def _pass(
        self, tokens: Tensor, batch: ForwardBatch, logits_of: Tensor | int, ones: SlotIndex, many: SlotIndex
    ) -> Tensor:
        """Run the model over the cache, with blocks reserved; count what rows hold after one token and after many."""
        decodes, tally = batch.most_new == 1, self.cache.tally
        turn = self._rotate if decodes else rotate
        forward = PagedForward(self.cache, self._attention, batch, self._rotary, turn)
        asked = {"position_ids": forward.position_ids, "paged_cache": forward, "use_cache": False}
        if decodes:
            with self._graph_settings():
                output = self._decoding_view(tokens, logits_to_keep=logits_of, **asked)
        else:
            output = self._view(tokens, logits_to_keep=logits_of, **asked)
        forward.finish()
        self._attention.finish(self._feed)
        tally.count_last(ones, self.cache.lengths, adds=True)
        tally.count_last(many, self.cache.lengths, adds=False)
        return output.logits[0]

    def _feed(self, tokens: list[int], first_position: int, paged_cache: Any) -> None:
        """See `CacheAttention.finish`."""
        device = self.cache.layout.device
        positions = torch.arange(first_position, first_position + len(tokens), device=device)[None]
        asked = {"position_ids": positions, "paged_cache": paged_cache, "use_cache": False, "logits_to_keep": 1}
        self._view(torch.tensor([tokens], device=device), **asked)

    def _check_place(self) -> None:
        layout, parameter = self.cache.layout, next(self.model.parameters())
        if parameter.device != layout.device or parameter.dtype != layout.dtype:
            raise RuntimeError(
                f"the model is now {parameter.dtype} on {parameter.device}, this engine's cache is {layout.dtype} on "
                f"{layout.device}: make a new Engine after model.to(...)"
            )


def _rows_of(chunks: list[ScheduledChunk]) -> list[int]:
    return [chunk.sequence.row for chunk in chunks if chunk.sequence.row is not None]
