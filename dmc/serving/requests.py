"""Bodies of requests: checked field by field, turned into prompts of tokens and sampling parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from dmc.runtime import Engine, SamplingParams
from dmc.runtime.prompt import encode

MOST_PROMPTS, MOST_CONTINUATIONS, MOST_STOPS, MOST_LOGPROBS, MOST_BIASES = 128, 32, 32, 20, 1024
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


UNIONS = {
    "prompt": "expected a text, a list of texts, token ids, or a list of lists of them",
    "stop": "expected a text or a list of texts",
    "content": "expected a text or a list of parts",
}
"""What may be given where there is a choice."""


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


class StreamOptions(BaseModel):
    """What comes with the pieces of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage, and with it what the cache holds, with every piece, as vLLM has it."""
    include_obfuscation: bool = False


class Asked(BaseModel):
    """What both kinds of completions have; names that OpenAI does not know are the engine's."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = Field(1, ge=1, le=MOST_CONTINUATIONS)
    seed: int | None = None
    stop: str | list[str] = Field([], max_length=MOST_STOPS * 256)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    presence_penalty: float = 0.0
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] = Field({}, max_length=MOST_BIASES)
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    question_tokens: int = Field(0, ge=0)
    """Last tokens of each prompt that are fed when a policy has compressed those before."""
    stop_token_ids: list[int] = Field([], max_length=MOST_STOPS)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are told with each; None: nothing is."""
        raise NotImplementedError


class CompletionAsked(Asked):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """See `Asked`."""
        return self.logprobs


class Part(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]
    name: str | None = None


class ChatAsked(Asked):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """See `Asked`."""
        return self.top_logprobs if self.logprobs else None


def read(body: Any, kind: type[Asked]) -> Any:
    """Check a body.

    Raises:
        APIError: 422 for what is not served, 400 for all else that is wrong; it names the field.
    """
    if not isinstance(body, dict):
        raise APIError(400, f"the body is a {type(body).__name__}: expected a JSON object")
    values = {name: value for name, value in body.items() if value is not None and name not in METADATA}
    for name in [name for name in values if name not in kind.model_fields]:
        usual = NOT_SERVED.get(name, ())
        if not any(type(values[name]) is type(each) and values[name] == each for each in usual):
            allowed = f"; leave it out, or give {usual[0]!r}" if usual else ""
            raise APIError(422, f"{name!r:.100} is not served here{allowed}", name[:100], "unsupported_parameter")
        del values[name]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))  # of a union's, the closest
        place = [str(each) for each in first["loc"] if each != "str" and "[" not in str(each)]
        shown = "" if first["type"] == "missing" else f"={first['input']!r:.80}"
        is_served = first["type"] not in ("extra_forbidden", "literal_error") or place[-1] == "role"
        told, name = UNIONS.get(place[-1]) or first["msg"].lower(), ".".join(place)
        raise APIError(400 if is_served else 422, f"{name}{shown}: {told}", name) from error
    except RecursionError as error:
        raise APIError(400, "the body is nested too deeply") from error


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
    tokenizer = engine.tokenizer
    if isinstance(asked, ChatAsked):
        if not getattr(tokenizer, "chat_template", None):
            raise APIError(400, f"{asked.model!r} has no chat template: use /v1/completions", "messages")
        messages = [_plain(message) for message in asked.messages]
        template = functools.partial(tokenizer.apply_chat_template, messages, add_generation_prompt=True)
        return [encoded(lambda: template(return_dict=False), engine, "messages")]
    assert isinstance(asked, CompletionAsked)
    prompt: Any = asked.prompt
    given = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(given) > MOST_PROMPTS:
        raise APIError(400, f"{len(given)} prompts: expected at most {MOST_PROMPTS} in one request", "prompt")
    return [encoded(functools.partial(copy.copy, each), engine, "prompt") for each in given]


def _plain(message: Message) -> dict[str, str]:
    text = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)
    return {"role": message.role, "content": text} | ({"name": message.name} if message.name else {})


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
    wanted = asked.max_completion_tokens if isinstance(asked, ChatAsked) else 16
    wanted = asked.max_tokens if asked.max_tokens is not None else wanted
    room = longest - num_prompt_tokens
    if room < (wanted or 1):
        raise APIError(
            400,
            f"a prompt of {num_prompt_tokens} tokens and {wanted or 1} generated ones make "
            f"{num_prompt_tokens + (wanted or 1)}: at most {longest} are served",
            "messages" if isinstance(asked, ChatAsked) else "prompt",
            "context_length_exceeded",
        )
    vocab_size = vocab_size_of(engine)
    bias = {int(token): value for token, value in asked.logit_bias.items() if token.isdecimal()}
    if len(bias) < len(asked.logit_bias) or not all(
        token < vocab_size and -100 <= value <= 100 for token, value in bias.items()
    ):
        raise APIError(400, f"logit_bias: expected token ids below {vocab_size}, from -100 to 100", "logit_bias")
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    if len(stop) > MOST_STOPS or any(not 0 < len(text) <= 1000 for text in stop):
        raise APIError(400, f"stop: expected at most {MOST_STOPS} texts of 1 to 1000 characters", "stop")
    tokenizer = engine.tokenizer  # text has no special tokens in it: they stop by themselves
    ends = {text: tokenizer.convert_tokens_to_ids(text) for text in stop if text in tokenizer.all_special_tokens}
    echoes = isinstance(asked, CompletionAsked) and asked.echo
    adjusts = bias or asked.frequency_penalty
    try:
        return SamplingParams(
            max_new_tokens=room if wanted is None else max(wanted, 1),
            **{name: getattr(asked, name) for name in _SAME},
            stop=tuple(text for text in stop if text not in ends),
            stop_token_ids=(*asked.stop_token_ids, *ends.values()),
            top_logprobs=asked.num_logprobs or 0,
            prompt_logprobs=asked.num_logprobs if echoes else None,
            logits_processor=Adjustment(bias, asked.frequency_penalty, num_prompt_tokens) if adjusts else None,
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
