"""The model and its cache: chunks of sequences in, logits out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from typing import Any

import torch
from torch import Tensor

from dmc.compression import CompressionConfig, rotate
from dmc.compression.full_attention import refuse_other_attention
from dmc.kernels import choose_backend
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import CacheLayout
from dmc.policies import CachePolicy
from dmc.policies.layer_attention import CacheAttention, RotaryTables
from dmc.ranks import ALONE
from dmc.runtime.decode_step import DecodeSteps, Record
from dmc.runtime.lent_forwards import backend_linears, compiled_for_any_number, compiled_layers
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.paged_forward import PagedForward
from dmc.runtime.sampling import Choice, Sampling, choose
from dmc.runtime.scheduler import ScheduledChunk
from dmc.runtime.stock_attention import StockAttention
from dmc.runtime.tally import SlotIndex


def layout_of(model: Any, policy: CachePolicy | None = None) -> CacheLayout:
    """Read a cache's shape off a model; a compressed one carries its gates' configuration, a policy its fields.

    Raises:
        NotImplementedError: a stock model's attention is not full causal attention.
    """
    config = model.config
    compression = getattr(config, "compression", None)
    if compression is None:
        refuse_other_attention(config)
    parameter = next(model.parameters())
    ranks = getattr(model, "ranks", ALONE)
    num_kv_heads = config.num_key_value_heads // ranks.size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layout = CacheLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=parameter.dtype,
        device=parameter.device,
        compression=None if compression is None else CompressionConfig.from_dict(compression),
        ranks=ranks,
        num_query_heads=config.num_attention_heads // ranks.size,
    )
    if policy is None:
        return layout
    offloaded = policy.offloaded(layout.num_layers)
    return dataclasses.replace(layout, policy_fields=policy.fields(layout), offloaded=offloaded)


def fit_policy(
    model: Any, policy: CachePolicy, block_size: int = 16, prefill_chunk_size: int | None = None
) -> CachePolicy:
    """Return the policy with what depends on the model filled in.

    Raises:
        TypeError: it is no policy.
        ValueError: the model cannot be served with it: several processes share it, or it compresses by itself and the
            policy acts while generating, or lacks what the options name; or prompts are to be cut inside what the
            policy takes together.
    """
    if not isinstance(policy, CachePolicy):
        raise TypeError(f"policy={policy!r}: expected an object such as dmc.policies.H2O(budget=Budget(ratio=4.0))")
    if getattr(model.config, "compression", None) is not None and not policy.serves_compressed:
        raise ValueError(
            f"policy={policy!r}: the gates of {type(model).__name__} decide token by token what its cache keeps; give "
            "a stock model, policy=None, or a policy that compresses prompts alone (SnapKV, PyramidKV, AdaKV, LAVa)"
        )
    if getattr(model, "ranks", ALONE).size > 1:
        raise ValueError("a policy cannot be used with a model that several processes share: use one process")
    chunk = policy.prompt_chunk
    if chunk is not None and prefill_chunk_size is not None and prefill_chunk_size % chunk:
        raise ValueError(
            f"prefill_chunk_size={prefill_chunk_size}: {type(policy).__name__} takes {chunk} tokens of a prompt "
            f"together; give a multiple of {chunk}, or None"
        )
    return policy.fitted(model.config.num_hidden_layers, block_size)


def rotary_of(model: Any) -> RotaryTables:
    """Return the function that turns position ids [S, n] into a stock model's cos and sin, float32 [S, n, D].

    It raises NotImplementedError for a model that does not rotate all channels of all layers by halves, as Llama does:
    the policies that ask for tables would turn its keys wrongly.
    """
    check = functools.cache(lambda: _check_rotates_by_halves(model))

    def tables(position_ids: Tensor) -> tuple[Tensor, Tensor]:
        check()
        rotary = model.model.rotary_emb
        cos, sin = rotary(torch.zeros((), device=position_ids.device), position_ids)
        return cos / rotary.attention_scaling, sin / rotary.attention_scaling

    return tables


def _check_rotates_by_halves(model: Any) -> None:
    attention = next(module for module in model.modules() if hasattr(module, "q_proj") or hasattr(module, "qkv_proj"))
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    layout = layout_of(model)
    states = torch.linspace(-1, 1, 2 * layout.head_dim, device=layout.device).view(1, 1, 2, -1)
    angles = torch.linspace(0, 1, layout.head_dim // 2, device=layout.device).view(1, 1, -1).expand(1, 2, -1)
    cos, sin = (each.repeat(1, 1, 2) for each in (angles.cos(), angles.sin()))
    turned = rotate(states, cos, sin)
    partly = getattr(model.config, "partial_rotary_factor", None) or (model.config.rope_parameters or {}).get(
        "partial_rotary_factor", 1.0
    )
    everywhere = all(getattr(model.config, "no_rope_layers", None) or [1])
    if apply is None or partly != 1 or not everywhere or not torch.allclose(apply(states, states, cos, sin)[1], turned):
        raise NotImplementedError(
            "the policy turns keys further by RoPE, which is written for models that rotate all channels of all "
            f"layers by halves, as Llama does; this {model.config.model_type} model does not"
        )


class Runner:
    """Feeds chunks to a model, compressed or stock, in one row without padding.

    Args:
        model: causal LM; while a pass runs its linear layers ask the backend, a stock one's attention the paged cache.
        cache: where it keeps keys and values.
        kernels: backend name, "auto" picks.
        policy: what a stock model's cache keeps, or reads; None: all, or what a compressed model's gates decide.
        record: how steps of decoding are recorded, to be replayed; None: they are not, nor can be under a policy.
        compiles: whether decoder layers are compiled in passes that only decode.
    Raises:
        ValueError: there is no such backend, or it cannot serve this cache.
        ImportError: it needs a package that is not installed.
        NotImplementedError: a stock model's attention is not full causal attention.
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
        self.model, self.cache = model, cache
        layout = cache.layout
        dtype = layout.page_dtype or layout.dtype
        backend = choose_backend(kernels, dtype, layout.head_dim, cache.block_size, layout.device)
        is_stock = layout.compression is None
        self._rotary = None if is_stock else model.rotary_tables
        self._linear = backend_linears(backend, model)
        self._compiled = compiled_layers(model) if compiles else None
        self._compiled_rotate = compiled_for_any_number(rotate) if compiles else rotate
        self._stock = StockAttention(model) if is_stock else contextlib.nullcontext()
        rotary = self._rotary or rotary_of(model)
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
            tokens = [each.tokens[0] for each in chunks]
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
        phases, prompt_ends = [each.phase for each in chunks], [each.sequence.prompt_end for each in chunks]
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
            _rows_of(several), [each.sequence.num_computed_tokens + each.first_logit_position for each in several]
        )
        logits_of = torch.tensor(wanted, dtype=torch.long, device=device)
        return self._pass(torch.tensor([tokens], device=device), batch, logits_of, ones, many)

    def is_recorded(self, chunks: list[ScheduledChunk]) -> bool:
        """Whether a step over these chunks is recorded: one that only decodes."""
        return self._decode_steps is not None and all(len(each.tokens) == each.num_logits == 1 for each in chunks)

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
        compiled = self._compiled if batch.most_new == 1 else None
        turn = rotate if compiled is None else self._compiled_rotate
        forward, tally = PagedForward(self.cache, self._attention, batch, self._rotary, turn), self.cache.tally
        asked = {"position_ids": forward.position_ids, "paged_cache": forward, "use_cache": False}
        with compiled or self._linear, self._stock:
            output = self.model(tokens, logits_to_keep=logits_of, **asked)
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
        with self._linear, self._stock:
            self.model(torch.tensor([tokens], device=device), **asked)

    def _check_place(self) -> None:
        layout, parameter = self.cache.layout, next(self.model.parameters())
        if parameter.device != layout.device or parameter.dtype != layout.dtype:
            raise RuntimeError(
                f"the model is now {parameter.dtype} on {parameter.device}, this engine's cache is {layout.dtype} on "
                f"{layout.device}: make a new Engine after model.to(...)"
            )


def _rows_of(chunks: list[ScheduledChunk]) -> list[int]:
    return [chunk.sequence.row for chunk in chunks if chunk.sequence.row is not None]
