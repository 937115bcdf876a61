"""Check the bodies of requests and turn them into prompt tokens and sampling parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dmc.runtime import Engine, SamplingParams
from dmc.runtime.prompt import encode

MOST_FIELDS = 1024
"""Maximum number of fields of a mapping: validating 80,000 wrong ones would take seconds and gigabytes."""
METADATA = {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "include_obfuscation"}
"""Fields of a request that do not affect its answer."""
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
}
"""Fields of OpenAI's API that are not served, and the values that are accepted because they change nothing."""
SAME_NAMES = {each.name for each in dataclasses.fields(SamplingParams)}
"""Fields that the engine reads as they are, unless `sampling_of` replaces them."""


class APIError(Exception):
    """An error response in OpenAI's format: status, message, name of the wrong field, reason for programs, headers."""

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


def _changes(name: str, value: Any) -> bool:
    usual = NOT_SERVED.get(name, ())
    return name not in METADATA and not any(type(value) is type(each) and value == each for each in (None, *usual))


class Body(BaseModel):
    """A JSON object; a field that is not served is refused unless it is null or its value changes nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(_few(values), dict):
            return values
        return {name: value for name, value in values.items() if _changes(name, value)}


Tokens = Annotated[list[int], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Bias = dict[Annotated[int, Field(strict=False)], float]


class StreamOptions(Body):
    """Options of a streamed response; `continuous_usage_stats` is vLLM's: usage and the cache with every piece."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Asked(Body):
    """Fields of both kinds of completions; those that OpenAI's API lacks are the engine's own."""

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
    frequency_penalty: float = 0.0
    logit_bias: Annotated[Bias, BeforeValidator(_few)] = {}
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    question_tokens: int = Field(0, ge=0)
    """Number of last tokens of each prompt that are computed after a policy has compressed the tokens before them."""
    stop_token_ids: Annotated[Tokens, Field(max_length=32)] = []

    num_logprobs: ClassVar[property]
    """How many of the most likely tokens are reported with each token; None: no log-probabilities."""


class CompletionAsked(Asked):
    """Body of /v1/completions."""

    prompt: Annotated[list[str | Tokens], Field(fail_fast=True, min_length=1, max_length=128), BeforeValidator(_listed)]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    num_logprobs = property(lambda self: self.logprobs)


class Part(Body):
    """One content part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation, as chat templates expect it: its content becomes one text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[Part],
        Field(fail_fast=True),
        BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given),
        AfterValidator(lambda parts: "".join(part.text for part in parts)),
    ]
    name: str | None = None


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
    """Parse and check a body.

    Raises:
        APIError: 422 for a field that is not served, 400 for any other fault; it names the field.
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


@contextlib.contextmanager
def blamed_on(param: str) -> Iterator[None]:
    """Turn any error into an APIError about a field: chat templates may raise errors of any type."""
    try:
        yield
    except Exception as error:
        raise APIError(400, " ".join(str(error).split())[:500] or type(error).__name__, param) from error


def encoded(given: str | list[int], engine: Engine, param: str, begins_text: bool = True) -> list[int]:
    """Turn a text into token ids of the model's vocabulary, or raise an APIError about a field."""
    with blamed_on(param):
        return encode(given, engine.tokenizer, vocab_size_of(engine), begins_text)


def vocab_size_of(engine: Engine) -> int:
    """Return the size of the model's vocabulary."""
    return engine.model.get_input_embeddings().num_embeddings


def prompts_of(asked: Asked, engine: Engine) -> list[list[int]]:
    """Return the token ids of each prompt of a request.

    Raises:
        APIError: a prompt is empty or too long, the model has no chat template, or tokenizer or template refuse it.
    """
    if isinstance(asked, CompletionAsked):
        return [encoded(each, engine, "prompt") for each in asked.prompt]
    assert isinstance(asked, ChatAsked)
    if not getattr(engine.tokenizer, "chat_template", None):
        raise APIError(400, f"{asked.model!r} has no chat template: use /v1/completions", "messages")
    with blamed_on("messages"):
        messages = [each.model_dump(exclude_none=True, warnings=False) for each in asked.messages]
        tokens = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [encoded(tokens, engine, "messages")]


def sampling_of(asked: Asked, num_prompt_tokens: int, engine: Engine, longest: int) -> SamplingParams:
    """Return the sampling parameters of one prompt; `longest`: tokens that model and memory allow.

    Raises:
        APIError: a value is out of range, or the prompt and its continuation are too long.
    """
    wanted, place = asked.max_tokens, "prompt"
    if isinstance(asked, ChatAsked):
        wanted, place = asked.max_completion_tokens if wanted is None else wanted, "messages"
    room, least = longest - num_prompt_tokens, wanted or 1
    if room < least:
        told = f"a prompt of {num_prompt_tokens} tokens and {least} generated ones make {num_prompt_tokens + least}"
        raise APIError(400, f"{told}: at most {longest} are served", place, "context_length_exceeded")
    tokenizer = engine.tokenizer  # special tokens are not part of the text, so they stop by id
    ends = {text: tokenizer.convert_tokens_to_ids(text) for text in asked.stop if text in tokenizer.all_special_tokens}
    changed: dict[str, Any] = {
        "max_new_tokens": room if wanted is None else least,
        "stop": tuple(text for text in asked.stop if text not in ends),
        "stop_token_ids": (*asked.stop_token_ids, *ends.values()),
        "top_logprobs": asked.num_logprobs or 0,
        "prompt_logprobs": asked.num_logprobs if getattr(asked, "echo", False) else None,
    }
    try:
        return SamplingParams(**asked.model_dump(include=SAME_NAMES) | changed)
    except ValueError as error:
        raise out_of_range(error) from error


def out_of_range(error: ValueError) -> APIError:
    """Turn the engine's error about a value, which begins with the value's name, into an APIError."""
    name = str(error).partition("=")[0]
    return APIError(400, str(error), name if name.isidentifier() else None)
