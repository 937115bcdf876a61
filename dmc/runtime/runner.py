"""Forward passes: chunks of sequences in, logits out; steps that only decode can be recorded and replayed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmc.compression import rotate
from dmc.kernels import choose_backend
from dmc.kernels.batch import ForwardBatch
from dmc.policies import CachePolicy
from dmc.policies.layer_attention import CacheAttention
from dmc.runtime import model_view
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.paged_forward import PagedForward
from dmc.runtime.sampling import Choice, Sampling, choose
from dmc.runtime.scheduler import ScheduledChunk
from dmc.runtime.tally import SlotIndex

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function whose inputs and outputs stay at the same addresses into one that replays its kernels."""

READING_ROPE = ("dynamic", "longrope")
"""Types of RoPE whose tables the host chooses by the positions."""


class GpuRecorder:
    """Records steps as CUDA graphs that share one memory pool; recording runs no kernel of the step."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Record`."""
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def why_not_recorded(layout: Any, policy: Any, config: Any) -> str | None:
    """Return why decode steps cannot be recorded as CUDA graphs; None if they can."""
    if layout.device.type != "cuda":
        return f"the model is on {layout.device}, not on a GPU"
    if policy is not None:
        return f"{type(policy).__name__} reads the scores it evicts by on the host"
    if layout.ranks.size > 1:
        return "the model is split over several processes"
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
    cache's tensors have moved.

    Args:
        run: function of token ids [1, S], their batch, and `Sampling`'s settings on the device, width and number of
            reported tokens (None: return logits); it returns the choices or logits of S or more rows, does not wait for
            the device, and allocates nothing that outlives the call.
        record: recorder of a step.
        most: sequences of the largest bucket; the scratch row follows theirs.
        device: device of the model.
    """

    def __init__(self, run: Callable[..., Tensor], record: Record, most: int, device: torch.device) -> None:
        self._run, self._record, self._most, self._device = run, record, most, device
        self._steps: dict[Any, tuple[Tensor, Callable[[], Tensor], bool]] = {}
        self._place: object = None

    def __call__(
        self, tokens: list[int], rows: list[int], positions: list[int], sampling: Sampling | None, place: object
    ) -> Tensor:
        """Run a step; recordings stay valid while `place` stays equal. The next call overwrites the result."""
        if place != self._place:
            self._steps, self._place = {}, place
        size = bucket_of(len(tokens), self._most)
        mode = None if sampling is None else (sampling.width, sampling.num_top)
        if (size, mode) not in self._steps:
            inputs = torch.zeros(8, size, dtype=torch.float64, device=self._device)
            self._steps[size, mode] = inputs, functools.partial(self._step, inputs, mode), False
        else:
            inputs, step, is_recorded = self._steps[size, mode]
            if not is_recorded:
                self._steps[size, mode] = inputs, self._record(step), True
        given = torch.zeros(8, size, dtype=torch.float64)
        given[1] = self._most
        given[:3, : len(tokens)] = torch.tensor([tokens, rows, positions])
        if sampling is not None:
            given[3:, : len(tokens)] = sampling.settings
        inputs.copy_(given, non_blocking=True)
        return self._steps[size, mode][1]()

    def _step(self, inputs: Tensor, mode: tuple[int, int] | None) -> Tensor:
        tokens, rows, positions = inputs[:3].long()
        batch = ForwardBatch.of_ones(len(rows), self._device, rows, positions)
        return self._run(tokens[None], batch, inputs[3:], mode)


class Runner:
    """Feeds chunks to a model, compressed or stock, in one row without padding.

    Args:
        model: causal LM. Passes run a view of it, whose linear layers call the backend and, in a stock model, whose
            attention uses the paged cache; the model itself stays as it is.
        cache: where it keeps keys and values.
        kernels: backend name, "auto" picks.
        policy: what a stock model's cache keeps, or reads; None: all, or what a compressed model's gates decide.
        record: how steps of decoding are recorded, to be replayed; None: they are not, nor can be under a policy.
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
        record: Record | None = None,
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
    def forward(self, chunks: list[ScheduledChunk], sampling: Sampling | None = None) -> Tensor:
        """Feed chunks.

        Args:
            chunks: the next tokens of some sequences.
            sampling: how their next tokens are chosen, of a step that is recorded; None: that is not done here.
        Returns:
            The logits of each chunk in turn, [rows, vocab]; or the choice as `packed` lays it out.
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
        if self._decode_steps is not None and self.is_recorded(chunks):
            self.cache.tally.watch([], [])
            tokens = [chunk.tokens[0] for chunk in chunks]
            logits = self._decode_steps(tokens, rows, begins, sampling, self.cache.place)
            logits = logits[: len(rows)] if sampling is None else logits
        else:
            logits = self._pass_of(chunks, rows, begins, counts)
        self.cache.tokens_seen[rows] += torch.tensor(counts)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.held.add(
                sequence.num_computed_tokens + chunk.first_logit_position, chunk.num_logits, self.cache.layout.delay
            )
            sequence.num_computed_tokens += len(chunk.tokens)
        return logits

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
        return self._decode_steps is not None and all(len(chunk.tokens) == chunk.num_logits == 1 for chunk in chunks)

    def packed(self, choice: Choice) -> Tensor:
        """Lay out all that the host reads of a step: `Choice.as_rows` and a row of free blocks, [S + 1, columns]."""
        rows = choice.as_rows()
        return torch.cat((rows, self.cache.allocator.height.double().expand(1, rows.shape[1])))

    def _decode(self, tokens: Tensor, batch: ForwardBatch, settings: Tensor, mode: tuple[int, int] | None) -> Tensor:
        """One token of each sequence; the host knows how many there are and nothing else, and waits for nothing."""
        self.cache.lengths[:, self.cache.scratch_row].fill_(1)
        logits = self._pass(tokens, batch, 0, batch.row_index, None)
        if mode is None:
            return logits
        log_probs = logits.float().log_softmax(-1)
        return self.packed(choose(log_probs, log_probs, settings, *mode))

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
