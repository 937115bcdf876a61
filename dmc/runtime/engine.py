"""The engine: prompts in, continuations and honest memory figures out."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from dmc.budget import achieved_ratio
from dmc.compression import CompressionConfig
from dmc.kernels import load_backend
from dmc.ranks import ALONE
from dmc.runtime.paged_cache import CacheLayout, PagedCache
from dmc.runtime.sampling import SamplingParams, sample_token
from dmc.runtime.scheduler import Scheduler, Segment
from dmc.runtime.sequence import Generation, GenerationStats, Sequence
from dmc.runtime.step import Step
from dmc.runtime.stock_attention import use_stock_attention


def layout_of(model: Any) -> CacheLayout:
    """Read a cache's shape off a model; a compressed one carries its gates' configuration."""
    config = model.config
    compression = getattr(config, "compression", None)
    parameter = next(model.parameters())
    ranks = getattr(model, "ranks", ALONE)
    return CacheLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads // ranks.size,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=parameter.dtype,
        device=parameter.device,
        compression=None if compression is None else CompressionConfig.from_dict(compression),
        ranks=ranks,
    )


class Engine:
    """Serves a compressed or stock causal LM from a paged cache, many sequences at once.

    Args:
        model: from `retrofit`, `load_model` or `AutoModelForCausalLM`, in eval mode.
        tokenizer: needed for prompts given as text.
        policy: training-free compression policy; None: what the model's own gates do (full cache for a stock model).
        block_size: entries per page.
        memory: bytes for the cache's pages; None: grow as needed.
        kernels: backend name, "auto" picks.
        max_batch_size: sequences that run at the same time.
        prefill_chunk_size: most prompt tokens of one sequence in one forward pass; None: the whole prompt.
    Raises:
        ValueError: an option is out of range.
        NotImplementedError: a policy is given (none exists yet).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        policy: None = None,
        block_size: int = 16,
        memory: int | None = None,
        kernels: str = "auto",
        max_batch_size: int = 32,
        prefill_chunk_size: int | None = None,
    ) -> None:
        if policy is not None:
            raise NotImplementedError(f"policy={policy!r}: training-free policies do not exist yet; use policy=None")
        for name, value in (("max_batch_size", max_batch_size), ("prefill_chunk_size", prefill_chunk_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a whole number >= 1")
        if memory is not None and memory < 0:
            raise ValueError(f"memory={memory}: expected a number of bytes >= 0")
        self.model, self.tokenizer = model.eval(), tokenizer
        layout = layout_of(model)
        self._backend = load_backend(kernels, layout.device)
        num_blocks = None if memory is None else memory // layout.block_bytes(block_size)
        self.cache = PagedCache(layout, max_batch_size, block_size, num_blocks)
        if layout.compression is None:
            use_stock_attention(model)
        self._rotary = None if layout.compression is None else model.rotary_tables
        self._scheduler = Scheduler(self.cache, prefill_chunk_size)

    @property
    def blocks_in_use(self) -> int:
        """Blocks held by sequences; 0 when nothing runs."""
        return self.cache.allocator.num_in_use

    def generate(
        self, prompts: Collection[str | list[int]], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[Generation]:
        """Continue prompts; each as if it ran alone.

        Args:
            prompts: texts or token ids, not empty.
            params: for all prompts, or one each.
        Raises:
            ValueError: a prompt is empty, can never fit the memory, or is text without a tokenizer.
        """
        params = params or SamplingParams()
        every = params if isinstance(params, list) else [params] * len(prompts)
        if len(every) != len(prompts):
            raise ValueError(f"{len(every)} sampling parameters for {len(prompts)} prompts: give one, or one for each")
        sequences = [Sequence(self._encode(prompt), each) for prompt, each in zip(prompts, every, strict=True)]
        for sequence in sequences:
            self._check_fits(len(sequence.prompt) + sequence.params.max_new_tokens - 1)
            if sequence.params.seed is not None:
                sequence.generator = torch.Generator().manual_seed(sequence.params.seed)
        for sequence in sequences:
            self._scheduler.submit(sequence)
        try:
            while segments := self._scheduler.next_segments():
                self._advance(segments)
        except BaseException:
            self._scheduler.abort_all()
            raise
        return [self._generation(sequence) for sequence in sequences]

    def score(self, prompts: Collection[str | list[int]], continuations: Collection[str | list[int]]) -> list[Tensor]:
        """Teacher-force continuations through the compressed cache.

        Feeds prompt + continuation[:-1]; the cache acts exactly as while generating.

        Returns:
            For each prompt the float32 log-probabilities [len(continuation), vocab].
        Raises:
            ValueError: as `generate`, or a continuation is empty.
        """
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts and {len(continuations)} continuations: give as many of each")
        pairs = [(self._encode(p), self._encode(c)) for p, c in zip(prompts, continuations, strict=True)]
        for prompt, continuation in pairs:
            self._check_fits(len(prompt) + len(continuation) - 1)
        scores = []
        for prompt, continuation in pairs:
            fed = prompt + continuation[:-1]
            sequence = Sequence(fed, SamplingParams(max_new_tokens=1))
            self._scheduler.submit(sequence)
            rows = []
            try:
                while sequence.num_fed < len(fed):
                    (segment,) = self._scheduler.next_segments()
                    first = max(0, len(prompt) - 1 - sequence.num_fed)  # rows before it would only cost memory
                    rows.append(self._forward([segment], torch.arange(len(segment.tokens))[first:]))
            finally:
                self._scheduler.abort_all()
            scores.append(torch.cat(rows))
        return scores

    def _encode(self, text: str | list[int]) -> list[int]:
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError("a text was given, but the engine has no tokenizer: pass tokenizer=, or token ids")
            text = self.tokenizer(text)["input_ids"]
        if not len(text):
            raise ValueError("a prompt or continuation is empty: give at least one token")
        return [int(token) for token in text]

    def _check_fits(self, num_tokens: int) -> None:
        cache = self.cache
        blocks = -(-num_tokens // cache.block_size) * cache.layout.num_layers * cache.layout.num_kv_heads
        if not cache.grows and blocks > cache.allocator.num_blocks:
            raise ValueError(
                f"a sequence of {num_tokens} tokens may need {blocks} blocks, "
                f"memory= holds {cache.allocator.num_blocks}: "
                f"give at least {blocks * cache.block_bytes} bytes, or shorten it"
            )

    @torch.no_grad()
    def _forward(self, segments: list[Segment], keep: Tensor | None = None) -> Tensor:
        """Feed segments and return float32 log-probabilities after the tokens at `keep`, or each segment's last."""
        rows = [segment.sequence.row for segment in segments]
        num_new = [len(segment.tokens) for segment in segments]
        step = Step(self.cache, self._backend, [row for row in rows if row is not None], num_new, self._rotary)
        flat = torch.tensor(
            [[token for segment in segments for token in segment.tokens]], device=self.cache.layout.device
        )
        if keep is None:
            keep = torch.tensor(num_new).cumsum(0) - 1
        output = self.model(
            flat,
            position_ids=step.position_ids,
            paged_cache=step,
            use_cache=False,
            logits_to_keep=keep.to(flat.device),
        )
        step.finish()
        for segment in segments:
            segment.sequence.num_fed += len(segment.tokens)
        return output.logits[0].float().log_softmax(-1)

    def _advance(self, segments: list[Segment]) -> None:
        log_probs = self._forward(segments)
        for segment, row in zip(segments, log_probs, strict=True):
            sequence = segment.sequence
            if sequence.num_waiting:
                continue  # more of the prompt is to come
            token = sample_token(row, sequence.params, sequence.generator)
            sequence.generated.append(token)
            sequence.logprobs.append(float(row[token]))
            if self._is_finished(sequence, token):
                sequence.stats = self._stats(sequence)
                self._scheduler.finish(sequence)

    def _is_finished(self, sequence: Sequence, token: int) -> bool:
        params = sequence.params
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            end = self.model.generation_config.eos_token_id
            stops |= set() if end is None else set(end) if isinstance(end, list) else {end}
        return len(sequence.generated) >= params.max_new_tokens or token in stops

    def _stats(self, sequence: Sequence) -> GenerationStats:
        assert sequence.row is not None
        slots = self.cache.slots(sequence.row)
        return GenerationStats(
            tokens_seen=sequence.num_fed,
            slots=slots,
            achieved_ratio=achieved_ratio(sequence.num_fed, slots.shape[0], slots.shape[1], int(slots.sum())),
            bytes_used=self.cache.bytes_used(sequence.row),
            bytes_allocated=self.cache.bytes_allocated(sequence.row),
            num_preemptions=sequence.num_preemptions,
        )

    def _generation(self, sequence: Sequence) -> Generation:
        assert sequence.stats is not None
        text = None if self.tokenizer is None else self.tokenizer.decode(sequence.generated, skip_special_tokens=True)
        stats = dataclasses.replace(sequence.stats, num_preemptions=sequence.num_preemptions)
        return Generation(sequence.generated, text, sequence.logprobs, stats)
