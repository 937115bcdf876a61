"""Bodies of requests: checked field by field, turned into prompts of tokens and sampling parameters."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from torch import Tensor

from dmc.runtime import Engine, SamplingParams
from dmc.runtime.prompt import encode

MOST_PROMPTS, MOST_CONTINUATIONS, MOST_STOPS, MOST_LOGPROBS, MOST_BIASES = 128, 32, 32, 20, 1024
Kind = TypeVar("Kind", bound="Body")
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
}
"""Fields of OpenAI's that are not served, and the values that ask for what is done anyway."""


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
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> dict[str, Any]:
        """Write it as OpenAI does."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def event(self) -> str:
        """Write it into a stream whose status has been sent."""
        return f"data: {json.dumps(self.body())}\n\n"


def _wrong(expected: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "expected {expected}", {"expected": expected})


class Body(BaseModel):
    """A JSON object; a field that is not served is refused, unless it is null, or asks for what is done anyway."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if value is not None and name not in METADATA}
        for name in [name for name in values if name not in cls.model_fields]:
            value, usual = values.pop(name), NOT_SERVED.get(name, ())
            if not any(type(value) is type(each) and value == each for each in usual):
                allowed = f"; leave it out, or give {usual[0]!r}" if usual else ""
                told = {"name": name[:100], "allowed": allowed}
                raise PydanticCustomError("not_served", "{name} is not served here{allowed}", told)
        return values


def _prompt(value: Any) -> Any:
    def is_tokens(each: Any) -> bool:
        return isinstance(each, list) and all(type(token) is int for token in each)

    # a wrong one is told at once: errors of 80,000 items and of each alternative would take seconds
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if isinstance(value, str) or texts or is_tokens(value) or (isinstance(value, list) and all(map(is_tokens, value))):
        return value
    raise _wrong("a text, a list of texts, token ids, or a list of lists of them")


def _stop(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(text, str) and 0 < len(text) <= 1000 for text in given):
        raise _wrong("a text or a list of texts of 1 to 1000 characters")
    if len(given) > MOST_STOPS:
        raise _wrong(f"at most {MOST_STOPS} texts")
    return tuple(given)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise _wrong(f"at most {MOST_BIASES} token ids, each with a number")
    for token, bias in value.items():
        if not (token.isdecimal() and len(token) < 20 and type(bias) in (int, float) and -100 <= bias <= 100):
            raise _wrong("token ids, each with a number from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


class StreamOptions(Body):
    """What comes with the pieces of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage, and with it what the cache holds, with every piece, as vLLM has it."""
    include_obfuscation: bool = False


class Asked(Body):
    """What both kinds of completions have; names that OpenAI does not know are the engine's."""

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = Field(1, ge=1, le=MOST_CONTINUATIONS)
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    presence_penalty: float = 0.0
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[int, float], PlainValidator(_bias)] = {}
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    question_tokens: int = Field(0, ge=0)
    """Last tokens of each prompt that are fed when a policy has compressed those before."""
    stop_token_ids: Annotated[list[int], FailFast()] = Field([], max_length=MOST_STOPS)

    num_logprobs: ClassVar[property]
    """How many of the most likely tokens are told with each; None: nothing is."""


class CompletionAsked(Asked):
    """Body of /v1/completions."""

    prompt: Annotated[Any, PlainValidator(_prompt)]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    num_logprobs = property(lambda self: self.logprobs)


class Part(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[Part],
        FailFast(),
        BeforeValidator(lambda given: [Part(type="text", text=given)] if isinstance(given, str) else given),
    ]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Write it as templates read it."""
        return {"role": self.role, "content": "".join(part.text for part in self.content)} | (
            {"name": self.name} if self.name else {}
        )


class ChatAsked(Asked):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    num_logprobs = property(lambda self: self.top_logprobs if self.logprobs else None)


class ToTokenize(Body):
    """Body of /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class ToDetokenize(Body):
    """Body of /detokenize."""

    tokens: Annotated[list[int], FailFast()]
    model: str | None = None


def read(body: bytes, kind: type[Kind]) -> Kind:
    """Check a body.

    Raises:
        APIError: 422 for what is not served, 400 for all else that is wrong; it names the field.
    """
    try:
        values = json.loads(body.decode("utf-8"))
        if not isinstance(values, dict):
            raise APIError(400, f"the body is a {type(values).__name__}: expected a JSON object")
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [str(each) for each in first["loc"]]
        shown = "" if first["type"] in ("missing", "not_served") else f"={first['input']!r:.80}"
        is_served = first["type"] != "not_served" and (first["type"] != "literal_error" or place[-1] == "role")
        name = ".".join([*place, *([first["ctx"]["name"]] if first["type"] == "not_served" else [])])
        told = f"{name}{shown}: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise APIError(*((400, told, name) if is_served else (422, told, name, "unsupported_parameter"))) from error
    except RecursionError as error:
        raise APIError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise APIError(400, f"the body is no JSON in UTF-8: {str(error)[:200]}") from error


@dataclass(frozen=True)
class Adjustment:
    """Changes logits as `logit_bias` and `frequency_penalty` ask; a plain value, which other ranks get too."""

    bias: dict[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    num_prompt_tokens: int = 0

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Do what `SamplingParams.logits_processor` does."""
        scores = scores.clone()
        for token, bias in self.bias.items():
            scores[:, token] += bias
        generated = tokens[:, self.num_prompt_tokens :]
        penalties = torch.full(generated.shape, -self.frequency_penalty, dtype=scores.dtype, device=scores.device)
        return scores.scatter_add(1, generated.to(scores.device), penalties)


def prompts_of(asked: Asked, engine: Engine) -> list[list[int]]:
    """Turn what is to be continued into tokens.

    Raises:
        APIError: there is nothing, too much, no chat template, or what the tokenizer or the template refuses.
    """
    if isinstance(asked, ChatAsked):
        if not getattr(engine.tokenizer, "chat_template", None):
            raise APIError(400, f"{asked.model!r} has no chat template: use /v1/completions", "messages")
        messages = [message.plain() for message in asked.messages]
        template = functools.partial(engine.tokenizer.apply_chat_template, messages, return_dict=False)
        return [encoded(lambda: template(add_generation_prompt=True), engine, "messages")]
    assert isinstance(asked, CompletionAsked)
    prompt: Any = asked.prompt
    given = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(given) > MOST_PROMPTS:
        raise APIError(400, f"{len(given)} prompts: expected at most {MOST_PROMPTS} in one request", "prompt")
    return [encoded(functools.partial(lambda each: each, each), engine, "prompt") for each in given]


def encoded(make: Callable[[], Any], engine: Engine, param: str, begins_text: bool = True) -> list[int]:
    """Turn a text, or what a template makes, into tokens that the model knows.

    Raises:
        APIError: the template or the tokenizer refuses it.
    """
    try:
        return encode(make(), engine.tokenizer, vocab_size_of(engine), begins_text)
    except Exception as error:  # a template raises what it likes, and jinja's errors are its own
        raise APIError(400, " ".join(str(error).split())[:500] or type(error).__name__, param) from error


def vocab_size_of(engine: Engine) -> int:
    """Tokens that the model knows."""
    return engine.model.get_input_embeddings().num_embeddings


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
    wanted = asked.max_tokens
    if isinstance(asked, ChatAsked) and wanted is None:
        wanted = asked.max_completion_tokens
    room = longest - num_prompt_tokens
    if room < (wanted or 1):
        raise APIError(
            400,
            f"a prompt of {num_prompt_tokens} tokens and {wanted or 1} generated ones make "
            f"{num_prompt_tokens + (wanted or 1)}: at most {longest} are served",
            "messages" if isinstance(asked, ChatAsked) else "prompt",
            "context_length_exceeded",
        )
    if asked.logit_bias and max(asked.logit_bias) >= vocab_size_of(engine):
        raise APIError(400, f"logit_bias: expected token ids below {vocab_size_of(engine)}", "logit_bias")
    tokenizer = engine.tokenizer  # text has no special tokens in it: they stop by themselves
    ends = {text: tokenizer.convert_tokens_to_ids(text) for text in asked.stop if text in tokenizer.all_special_tokens}
    echoes = isinstance(asked, CompletionAsked) and asked.echo
    adjustment = Adjustment(asked.logit_bias, asked.frequency_penalty, num_prompt_tokens)
    try:
        return SamplingParams(
            max_new_tokens=room if wanted is None else max(wanted, 1),
            **{name: getattr(asked, name) for name in _SAME},
            stop=tuple(text for text in asked.stop if text not in ends),
            stop_token_ids=(*asked.stop_token_ids, *ends.values()),
            top_logprobs=asked.num_logprobs or 0,
            prompt_logprobs=asked.num_logprobs if echoes else None,
            logits_processor=adjustment if asked.logit_bias or asked.frequency_penalty else None,
        )
    except ValueError as error:
        raise out_of_range(error) from error


def out_of_range(error: ValueError) -> APIError:
    """Tell what the engine says of a value, which begins with its name."""
    name = str(error).partition("=")[0]
    return APIError(400, str(error), name if name.isidentifier() else None)


_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "presence_penalty", "repetition_penalty"),
    "ignore_eos",
)
"""Fields that are named as in `SamplingParams`."""
