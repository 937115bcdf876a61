"""What callers set: of a request, `SamplingParams`, and of an engine, `EngineOptions`; pydantic checks both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr
from torch import Tensor

from dmc.config.settings import Count, NonNegative, Positive, Share, checked_dataclass
from dmc.kernels import check_backend

Bias = Annotated[StrictFloat, Field(ge=-100, le=100)]
Penalty = Annotated[StrictFloat, Field(ge=-2, le=2)]
STOPS = 8
"""Tokens that may end a request and that the device is told of."""


@checked_dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    Raises:
        ValueError: a value is of another type or out of range.
    """

    max_new_tokens: Count = 64
    """Tokens to generate at most, >= 1."""
    temperature: Annotated[StrictFloat, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_k: Count | Literal[-1] | None = None
    """Sample among the k most likely tokens and ties with the k-th; None or -1: among all tokens."""
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens whose probabilities reach this sum, in (0, 1]."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] | None = None
    """Seed of this request's own generator, in [0, 2**64); None: torch's default generator draws one."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Stop after one of these, besides the model's own end of sequence."""
    ignore_eos: StrictBool = False
    """Continue after the model's end of sequence."""
    stop: tuple[Annotated[StrictStr, Field(min_length=1)], ...] = ()
    """Stop when the text contains one of these; the text ends before it. Needs a tokenizer."""
    n: Count = 1
    """Number of continuations of the prompt, which is computed once; continuation i samples as with seed + i."""
    min_p: Share = 0.0
    """Sample among tokens whose probability is at least this share of the most likely one's, in [0, 1]."""
    repetition_penalty: Positive = 1.0
    """Divides positive and multiplies negative logits of tokens that occurred, in the prompt too; > 0, 1 is none."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that have been generated (as OpenAI does), in [-2, 2]."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit once for each time it has been generated, in [-2, 2]."""
    logit_bias: dict[NonNegative, Bias] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens, in [-100, 100]; -100 almost forbids a token, 100 almost forces it."""
    top_logprobs: NonNegative = 0
    """How many of the most likely tokens are reported with each token, under the unmodified distribution."""
    prompt_logprobs: NonNegative | None = None
    """How many of the most likely tokens are reported with each prompt token; None: prompt tokens are not scored."""
    logits_processor: Callable[[Tensor, Tensor], Tensor] | None = None
    """Changes logits after the penalties and before temperature, like a processor of transformers: (tokens so far
    [1, t], logits [1, vocab]) -> logits. If it raises, its request fails."""

    @cached_property
    def numbers(self) -> tuple[float, float, float, float]:
        """What the device is told of a row: temperature, top_k (0: all), top_p, min_p."""
        return self.temperature, float(max(self.top_k or 0, 0)), self.top_p, self.min_p

    @cached_property
    def stops_on_device(self) -> tuple[int, ...]:
        """The first `STOPS` of the tokens that end the request, filled up with -1."""
        return (*self.stop_token_ids, *[-1] * STOPS)[:STOPS]

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are changed by the tokens so far or by a processor."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logit_bias) or self.logits_processor is not None


@checked_dataclass(frozen=True)
class EngineOptions:
    """The options of `Engine`, which tells what they mean.

    Raises:
        ValueError: a value is of another type or out of range, or there is no such backend.
    """

    block_size: Literal[16, 32, 64, 128, 256] = 16
    memory: (
        Annotated[StrictInt, Field(gt=0)]
        | Annotated[StrictFloat, Field(gt=0, le=1)]
        | Annotated[StrictStr, Field(pattern=r"^auto(/[1-9]\d*)?$")]
        | None
    ) = None
    kernels: StrictStr = "auto"
    max_batch_size: Count = 32
    prefill_chunk_size: Count | None = None
    token_budget: Count | None = 2048
    prefix_cache: StrictBool = False
    cuda_graphs: StrictBool | Literal["auto"] = False
    compile: StrictBool | Literal["auto"] = False
    kv_cache_dtype: Literal["auto", "int8"] = "auto"

    def __post_init__(self) -> None:
        check_backend(self.kernels)
