"""Bodies of requests: checked field by field, turned into prompts of tokens and sampling parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from dmc.runtime import Engine, SamplingParams
from dmc.runtime.prompt import encode

MOST_FIELDS = 1024
"""Of any mapping; errors of 80,000 would take seconds and gigabytes."""
METADATA = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
"""Fields about a request that change nothing of its answer."""
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "include_obfuscation": (True, False),
}
"""Fields of OpenAI's that are not served, and the values that ask for what is done anyway."""
SAME_NAMES = {
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "presence_penalty", "repetition_penalty", "ignore_eos"),
}
"""Fields that are named as in `SamplingParams`."""


class APIError(Exception):
    """What a client is told in OpenAI's form.

    Args:
        status: of HTTP.
        message: what was given, what was expected.
        param: the field that is wrong.
        code: for programs.
        headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MOST_FIELDS:
        raise ValueError(f"expected at most {MOST_FIELDS} names")
    return given


def _listed(given: Any) -> Any:
    return given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]


def _parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class Body(BaseModel):
    """A JSON object; a field that is not served is refused, unless it is null, or asks for what is done anyway."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        def changes(name: str, value: Any) -> bool:
            usual = NOT_SERVED.get(name, ())
            return name not in METADATA and not any(type(value) is type(each) and value == each for each in usual)

        if not isinstance(_few(values), dict):
            return values
        return {name: value for name, value in values.items() if value is not None and changes(name, value)}


Tokens = Annotated[list[int], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(Body):
    """What comes with the pieces of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage, and with it what the cache holds, with every piece, as vLLM has it."""


class Asked(Body):
    """What both kinds of completions have; names that OpenAI does not know are the engine's."""

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = Field(1, ge=1, le=32)
    seed: int | None = None
    stop: Annotated[list[Stop], Field(fail_fast=True, max_length=32), BeforeValidator(_listed)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    presence_penalty: float = 0.0
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[Annotated[int, Field(strict=False, ge=0)], Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(_few),
    ] = {}
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    question_tokens: int = Field(0, ge=0)
    """Last tokens of each prompt that are fed when a policy has compressed those before."""
    stop_token_ids: Annotated[Tokens, Field(max_length=32)] = []

    num_logprobs: ClassVar[property]
    """How many of the most likely tokens are told with each; None: nothing is."""


class CompletionAsked(Asked):
    """Body of /v1/completions."""

    prompt: Annotated[list[str | Tokens], Field(fail_fast=True, min_length=1, max_length=128), BeforeValidator(_listed)]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    num_logprobs = property(lambda self: self.logprobs)


class Part(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], Field(fail_fast=True), BeforeValidator(_parts)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Write it as templates read it."""
        content = "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


class ChatAsked(Asked):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    num_logprobs = property(lambda self: self.top_logprobs if self.logprobs else None)


class ToTokenize(Body):
    """Body of /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class ToDetokenize(Body):
    """Body of /detokenize."""

    tokens: Tokens
    model: str | None = None


Kind = TypeVar("Kind", bound=Body)


def read(body: bytes, kind: type[Kind]) -> Kind:
    """Check a body.

    Raises:
        APIError: 422 for what is not served, 400 for all else that is wrong; it names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [str(each)[:100] for each in first["loc"] if each not in ("str", "list[int]", "[key]")]
        name, reason = ".".join(place), f"{first['msg'][0].lower()}{first['msg'][1:]}"
        reason += " or a list of token ids" if "str" in first["loc"] else ""
        if first["type"] == "extra_forbidden" or (first["type"] == "literal_error" and place[-1] == "type"):
            told = f"{name}={first['input']!r:.80} is not served here: leave it out"
            raise APIError(422, told, name, "unsupported_parameter") from error
        shown = "" if first["type"] in ("missing", "json_invalid") else f"={first['input']!r:.80}"
        raise APIError(400, f"{name or 'the body'}{shown}: {reason}", name or None) from error


@dataclass(frozen=True)
class Adjustment:
    """Changes logits as `logit_bias` and `frequency_penalty` ask; a plain value, which other ranks get too."""

    bias: dict[int, float]
    frequency_penalty: float
    num_prompt_tokens: int

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Do what `SamplingParams.logits_processor` does."""
        scores = scores.clone()
        for token, bias in self.bias.items():
            scores[:, token] += bias
        generated = tokens[:, self.num_prompt_tokens :]
        penalties = torch.full(generated.shape, -self.frequency_penalty, dtype=scores.dtype, device=scores.device)
        return scores.scatter_add(1, generated.to(scores.device), penalties)


@contextlib.contextmanager
def blamed_on(param: str) -> Iterator[None]:
    """Tell any error as one of a field: templates raise what they like, and jinja's errors are its own."""
    try:
        yield
    except APIError:
        raise
    except Exception as error:
        raise APIError(400, " ".join(str(error).split())[:500] or type(error).__name__, param) from error


def vocab_size_of(engine: Engine) -> int:
    """Tokens that the model knows."""
    return engine.model.get_input_embeddings().num_embeddings


def encoded(given: str | list[int], engine: Engine, param: str, begins_text: bool = True) -> list[int]:
    """Turn a text into tokens that the model knows.

    Raises:
        APIError: the tokenizer or the model refuses it.
    """
    with blamed_on(param):
        return encode(given, engine.tokenizer, vocab_size_of(engine), begins_text)


def prompts_of(asked: Asked, engine: Engine) -> list[list[int]]:
    """Turn what is to be continued into tokens.

    Raises:
        APIError: there is nothing, too much, no chat template, or what the tokenizer or the template refuses.
    """
    if isinstance(asked, CompletionAsked):
        return [encoded(each, engine, "prompt") for each in asked.prompt]
    assert isinstance(asked, ChatAsked)
    if not getattr(engine.tokenizer, "chat_template", None):
        raise APIError(400, f"{asked.model!r} has no chat template: use /v1/completions", "messages")
    with blamed_on("messages"):
        messages = [message.plain() for message in asked.messages]
        tokens = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [encoded(tokens, engine, "messages")]


def sampling_of(asked: Asked, num_prompt_tokens: int, engine: Engine, longest: int) -> SamplingParams:
    """Turn what is asked for one prompt into sampling parameters.

    Args:
        asked: for all prompts of the request.
        num_prompt_tokens: of this one.
        engine: that shall continue it.
        longest: sequence that the model is made for and the memory can hold.
    Raises:
        APIError: a value is out of range, or the prompt and its continuation are too long.
    """
    is_chat, wanted = isinstance(asked, ChatAsked), asked.max_tokens
    if isinstance(asked, ChatAsked) and wanted is None:
        wanted = asked.max_completion_tokens
    room, least = longest - num_prompt_tokens, wanted or 1
    if room < least:
        told = f"a prompt of {num_prompt_tokens} tokens and {least} generated ones make {num_prompt_tokens + least}"
        place = "messages" if is_chat else "prompt"
        raise APIError(400, f"{told}: at most {longest} are served", place, "context_length_exceeded")
    if asked.logit_bias and max(asked.logit_bias) >= vocab_size_of(engine):
        raise APIError(400, f"logit_bias: expected token ids below {vocab_size_of(engine)}", "logit_bias")
    tokenizer = engine.tokenizer  # text has no special tokens in it: they stop by themselves
    ends = {text: tokenizer.convert_tokens_to_ids(text) for text in asked.stop if text in tokenizer.all_special_tokens}
    adjustment = Adjustment(asked.logit_bias, asked.frequency_penalty, num_prompt_tokens)
    try:
        return SamplingParams(
            max_new_tokens=room if wanted is None else least,
            **asked.model_dump(include=SAME_NAMES),
            stop=tuple(text for text in asked.stop if text not in ends),
            stop_token_ids=(*asked.stop_token_ids, *ends.values()),
            top_logprobs=asked.num_logprobs or 0,
            prompt_logprobs=asked.num_logprobs if getattr(asked, "echo", False) else None,
            logits_processor=adjustment if asked.logit_bias or asked.frequency_penalty else None,
        )
    except ValueError as error:
        raise out_of_range(error) from error


def out_of_range(error: ValueError) -> APIError:
    """Tell what the engine says of a value, which begins with its name."""
    name = str(error).partition("=")[0]
    return APIError(400, str(error), name if name.isidentifier() else None)
