"""KVzip (arXiv:2505.23416): the entries that the model attends to when it repeats the context from its cache."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from dmc.config.settings import checked_dataclass
from dmc.kernels.base import LayerCache, NewTokens
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import places
from dmc.policies.base import Sum, above_all
from dmc.policies.budgets import keep_top
from dmc.policies.layer_attention import Cache, Rotary
from dmc.policies.repetition import EndedPrompt, Repetition, RepetitionPolicy, SecondReading


@checked_dataclass(frozen=True, kw_only=True)
class KVzip(RepetitionPolicy):
    """Keep the entries with the highest scores of the whole model, independent of later questions.

    An entry's score is the highest attention of any query that repeats its chunk c. The softmax is over the sinks, the
    entries of c and the repetition up to the query:

        s_i = max over the group and queries j of softmax_i(q_j^T k_i / sqrt(d))

    Nothing but the scores stays in the cache. Differs from the authors' code: one instruction leads every chunk, and
    there is none without a tokenizer. A later turn repeats the tokens since the last repetition; entries from before
    keep their scores.
    """

    sums: ClassVar[tuple[Sum, ...]] = ("score",)

    @property
    def serves_compressed(self) -> bool:
        """See `CachePolicy`: scores are of tokens, which gates may have merged."""
        return False

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """See `CachePolicy`; also the number of tokens whose entries have a score."""
        return (*super().fields(layout), Field("scored", torch.int32, "row"))

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: Rotary | None) -> Reconstruction:
        return Reconstruction(cache, backend, self, rotary)


class Reconstruction(SecondReading):
    """Scores the entries of the tokens that are new, and keeps the best of the whole model."""

    @override
    def first_repeated(self, prompt: EndedPrompt) -> int:
        return int(self.cache.fields["scored"][0, prompt.row])  # forks share what is scored

    @override
    def repetition(self, prompt: EndedPrompt, chunk: range) -> ScoringRepetition:
        return ScoringRepetition(self.cache, self.backend, prompt, chunk, self.policy.sinks)

    @override
    def compress(self, prompt: EndedPrompt) -> None:
        self.cache.fields["scored"][:, prompt.row] = prompt.num_tokens
        layers = [self.cache.layer(index) for index in range(self.cache.layout.num_layers)]
        scores = [self._scores(layer, prompt, count) for layer, count in zip(layers, prompt.longest, strict=True)]
        total = prompt.limit * self.cache.lengths[:, prompt.row].numel()
        keep = keep_top(torch.cat([of_layer.flatten() for of_layer in scores]), total)
        counts = [of_layer.numel() for of_layer in scores]
        for layer, kept, of_layer in zip(layers, keep.split(counts), scores, strict=True):
            self.backend.compact(layer, prompt.rows, kept.view_as(of_layer))

    def _scores(self, layer: LayerCache, prompt: EndedPrompt, num_entries: int) -> Tensor:
        """Return the scores of a sequence's entries, [1, H, N]: +inf of sinks, -inf where there is no entry."""
        positions, scores = self.backend.read_metadata(layer, prompt.rows, ["position", "score"], num_entries)
        scores = scores.masked_fill(positions < self.policy.sinks, torch.inf)
        if self.policy.protect:
            scores = above_all(scores, self._protector.chosen(prompt.row, positions, prompt.limit))
        return scores.masked_fill(positions < 0, -torch.inf)


class ScoringRepetition(Repetition):
    """Scores the entries of the tokens that are repeated.

    Args:
        cache: the engine's cache.
        backend: kernel module.
        prompt: what is repeated.
        chunk: positions of the tokens that are repeated.
        sinks: first tokens, which compete with them.
    """

    def __init__(self, cache: Cache, backend: ModuleType, prompt: EndedPrompt, chunk: range, sinks: int) -> None:
        super().__init__(cache, backend, prompt)
        self._chunk, self._sinks = chunk, sinks

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        layer, rows, count = self.cache.layer(layer_index), self.prompt.rows, self.prompt.longest[layer_index]
        positions = self.backend.read_metadata(layer, rows, ["position"], count)[0]
        repeated = (positions >= self._chunk.start) & (positions < self._chunk.stop)
        is_sink = (positions >= 0) & (positions < self._sinks)
        self._competing = pad(repeated | is_sink, (0, len(query)), value=True)[0]  # [H, N + T]
        self._best = torch.zeros(positions.shape[1:], device=query.device)
        attended = super().attend(layer_index, batch, query, tokens, scaling)
        scores = torch.where(repeated, self._best, 0.0)  # they have none yet; 0 beyond the length, wherever that leads
        place = places(layer.block_tables[rows], torch.arange(count, device=query.device)[None, None], layer.block_size)
        layer.entry_metadata["score"].view(-1).index_put_((place,), scores, accumulate=True)
        return attended

    @override
    def look(self, scores: Tensor, weights: Tensor) -> None:
        among = (weights @ self._competing[:, None, :, None].float()).clamp_min(1e-30)
        best = (weights[..., : self._best.shape[-1]] / among).amax((1, 2))
        self._best = torch.maximum(self._best, best)
