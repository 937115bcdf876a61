"""Forward passes: chunks of sequences in, logits out, or tokens of a step that is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmc.compression import rotate
from dmc.kernels import choose_backend
from dmc.kernels.batch import GENERATED, ForwardBatch
from dmc.policies import CachePolicy
from dmc.policies.layer_attention import CacheAttention
from dmc.runtime import model_view
from dmc.runtime.backend_layers import use_backend_layers
from dmc.runtime.decode_steps import NUM_INPUTS, DecodeBatch, DecodeSteps, Recorder, Result
from dmc.runtime.model_rotary import rotary_of, try_out
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.paged_forward import PagedForward
from dmc.runtime.request import Request
from dmc.runtime.sampling import CANDIDATES, Choice, choose
from dmc.runtime.scheduler import ScheduledChunk
from dmc.runtime.slow_pool import PendingCopy
from dmc.runtime.tally import SlotIndex


@dataclass(eq=False)
class LaunchedStep:
    """A step of decoding that the host has not read."""

    batch: DecodeBatch
    log_probs: Tensor | None
    """What tokens that are left open are chosen from, float32 [S, vocab]; None: none is."""
    copy: PendingCopy
    """See `Runner.packed`."""
    num_counted: int
    """`FreeBlocks.num_counted` when it was launched."""
    goes_on: bool = True
    """Whether the next step may be launched before this one is read."""


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
        NotImplementedError: a stock model attends in a way that the cache does not serve, or turns queries and keys in
            one that is not known to a policy that turns them.
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
        use_backend_layers(self._view, backend)
        tried = try_out(self._view, cache) if is_stock else None
        turns = policy is not None and policy.rotates
        rotary = rotary_of(model, tried) if tried is not None and turns else None
        self._attention = CacheAttention(cache, backend) if policy is None else policy.attention(cache, backend, rotary)
        self._decode_steps = None
        if record is not None:
            assert cache.scratch_row is not None
            self._decode_steps = DecodeSteps(self._decode, record, cache.scratch_row, layout.device)

    @torch.no_grad()
    def forward(self, chunks: list[ScheduledChunk]) -> Tensor:
        """Feed chunks.

        Args:
            chunks: the next tokens of some sequences.
        Returns:
            The logits of each chunk in turn, [rows, vocab].
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
        if self._decode_steps is not None and self.is_recorded(chunks):
            self.cache.tally.watch([], [])
            given = torch.zeros(NUM_INPUTS, len(chunks), dtype=torch.float64)
            given[:3] = torch.tensor([[chunk.tokens[0] for chunk in chunks], rows, begins])
            every, _ = self._decode_steps(given, None, self.cache.place)
            assert every is not None
            logits = every[: len(rows)]
        else:
            logits = self._pass_of(chunks, rows, begins, counts)
        self.cache.tokens_seen[rows] += torch.tensor(counts)
        delay = self.cache.layout.delay
        for chunk, begin, count in zip(chunks, begins, counts, strict=True):
            first, sequence = chunk.first_logit_position, chunk.sequence
            sequence.held.add(begin + first, count - first, delay)
            sequence.num_computed_tokens = begin + count
        return logits

    @torch.no_grad()
    def launch(self, batch: DecodeBatch) -> LaunchedStep:
        """Start a step that is recorded, without waiting for it; `book` counts it when it has been read.

        Raises:
            OutOfBlocksError: see `PagedCache.reserve`; nothing has changed.
            RuntimeError: see `forward`.
        """
        assert self._decode_steps is not None
        self._check_place()
        self.cache.reserve(batch.rows, torch.ones(len(batch.requests), dtype=torch.long))
        self.cache.tally.watch([], [])
        log_probs, packed = self._decode_steps(batch.inputs, batch.mode, self.cache.place)
        assert packed is not None
        if log_probs is not None:  # which the next step overwrites
            log_probs = log_probs[: len(batch.requests)].clone()
        device = self.cache.layout.device
        copied = packed.to("cpu", non_blocking=True, copy=True)
        event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return LaunchedStep(batch, log_probs, PendingCopy(copied, event), self.cache.free.num_counted)

    def book(self, requests: list[Request]) -> None:
        """Count the token that each of these requests was fed in a launched step."""
        self.cache.tokens_seen[[request.sequence.row for request in requests]] += 1
        delay = self.cache.layout.delay
        for request in requests:
            sequence = request.sequence
            sequence.held.add(sequence.num_computed_tokens, 1, delay)
            sequence.num_computed_tokens += 1

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
            len(tokens) == 1 and first == 0 and phase is GENERATED for _, tokens, first, phase in chunks
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
        self.cache.all_lengths[:, self.cache.scratch_row].fill_(1)
        logits = self._pass(tokens, batch, 0, batch.row_index, None)
        if mode is None:
            return logits, None
        log_probs = logits.float().log_softmax(-1)
        # ranks may have summed in another order, and different tokens would part them for good
        packed = self.cache.layout.ranks.broadcast(self.packed(choose(log_probs, log_probs, settings, *mode)))
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
        tally.count_last(ones, self.cache.all_lengths, adds=True)
        tally.count_last(many, self.cache.all_lengths, adds=False)
        return output.logits[0]

    def _feed(self, tokens: list[int], row: int, first_position: int, attention: CacheAttention) -> None:
        """See `CacheAttention.finish`."""
        device = self.cache.layout.device
        batch = ForwardBatch([row], [first_position], [len(tokens)], device)
        forward = PagedForward(self.cache, attention, batch, self._rotary, writes=False)
        asked = {"position_ids": forward.position_ids, "paged_cache": forward, "use_cache": False, "logits_to_keep": 1}
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
