"""Bodies of requests as pydantic models, and their prompts and sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dmc.runtime import Engine, SamplingParams
from dmc.runtime.input_processor import encode

IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
"""Fields of OpenAI's API that do not change an answer."""
NEUTRAL: dict[str, Any] = {
    **{"best_of": 1, "suffix": "", "response_format": {"type": "text"}, "tools": [], "functions": [], "store": False},
    **{"tool_choice": "none", "function_call": "none", "modalities": ["text"], "service_tier": "auto"},
    **{"verbosity": "medium", "reasoning_effort": "none"},
}
"""Fields of OpenAI's API that are not served, and the values with which they change nothing."""
MAX_NAMES = 1024
"""Maximum number of an object's names: pydantic collects an error for each, and 300,000 take 15 seconds and 400 MiB."""
SAMPLING = {
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""Fields that `SamplingParams` has under the same name."""
TYPES = {"str", "int", "bool", "float", "system", "developer", "user", "assistant", "tool"}
"""Types, and roles of messages, that pydantic names in the location of a union's error."""
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item ends its validation."""
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass
class APIError(Exception):
    """An error response in OpenAI's format."""

    status: int
    message: str
    param: str | None = None
    """Name of the wrong field."""
    code: str | None = None
    """Machine-readable reason."""

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


def _bounded(values: Any) -> Any:
    if isinstance(values, dict) and len(values) > MAX_NAMES:
        raise PydanticCustomError("too_many_names", f"at most {MAX_NAMES} names")  # type: ignore[arg-type]
    return values


class Body(BaseModel):
    """A JSON object; null stands for a field's default."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        if not isinstance(_bounded(values), dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if value is not None and (name in cls.model_fields or not (name in IGNORED or NEUTRAL.get(name) == value))
        }


class StreamOptions(Body):
    """OpenAI's options of streams, and vLLM's usage with every chunk."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """No effect."""
    continuous_usage_stats: bool = False


class GenerationRequest(Body):
    """Fields that completions and chats share; `SamplingParams` checks the ranges of its fields."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=32)] = 1
    max_tokens: Count | None = None
    stop: Stop | Annotated[Items[Stop], Field(max_length=32)] = []
    stop_token_ids: Annotated[Items[int], Field(max_length=32)] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[Annotated[int, Field(strict=False)], float], BeforeValidator(_bounded)] | None = None
    """Keys of JSON are text."""
    question_tokens: NonNegative = 0
    """Number of last tokens that are computed after a policy has compressed the tokens before them."""
    cache_id: str | None = None
    """Name of a carried cache that the prompt follows; None: the prompt begins a text."""


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: (
        str
        | Items[int]
        | Annotated[Items[str], Field(max_length=128)]
        | Annotated[Items[Items[int]], Field(max_length=128)]
    )
    echo: bool = False
    logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens that are reported with each token; None: no log-probabilities."""
        return self.logprobs


class TextPart(Body):
    """A text in a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message, whose content becomes one text."""

    role: Literal["system", "developer", "user", "tool", "function"]
    content: str | Items[TextPart]
    name: str | None = None
    tool_call_id: str | None = None

    @field_validator("content")
    @classmethod
    def _join(cls, content: str | list[TextPart]) -> str:
        return content if isinstance(content, str) else "".join(part.text for part in content)


class CalledFunction(Body):
    """A function that an assistant called before; templates take its arguments as an object."""

    name: str
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        try:
            return json.loads(arguments or "{}")
        except ValueError:
            raise PydanticCustomError("json", "the JSON of an object") from None


class ToolCall(Body):
    """A call of a tool in a conversation's history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, exclude=True)


class AssistantMessage(Message):
    """An earlier answer; one that calls tools may have no text."""

    role: Literal["assistant"]  # type: ignore[assignment]
    content: str | Items[TextPart] = Field("", validate_default=False)
    tool_calls: Annotated[Items[ToolCall], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if "content" not in self.model_fields_set and self.tool_calls is None:
            raise PydanticCustomError("says_nothing", "content, or tool_calls")
        return self


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[Items[Annotated[Message | AssistantMessage, Field(discriminator="role")]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    echo: ClassVar[bool] = False

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens that are reported with each token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class TokenizeRequest(Body):
    """Body of /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    tokens: Items[int]
    model: str | None = None


class ModelsRequest(BaseModel):
    """A question about one model, or about all of them."""

    model: str | None = None


BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def parse(request_class: type[Body], body: bytes) -> Body:
    """Validate a body.

    Raises:
        APIError: 422 for a field that is not served, 400 for any other error; it names the field.
    """
    try:
        return request_class.model_validate_json(body)
    except ValidationError as error:
        raise _api_error(error) from error


def _api_error(error: ValidationError) -> APIError:
    """Describe the first error; of a union's, the one of the type that comes closest."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda details: (len(details["loc"]), details["type"] == "extra_forbidden"))
    loc, value = first["loc"], first["input"]
    if not loc:
        return APIError(400, f"the body is not the expected JSON: {first['msg']}")
    # pydantic adds the types of unions, as in ("prompt", "list[int]", 0)
    inner = [str(part) for part in loc[1:] if isinstance(part, int) or (part.isidentifier() and part not in TYPES)]
    name = ".".join([str(loc[0])[:100], *inner])
    if first["type"] == "extra_forbidden":
        return APIError(422, f"{name}={value!r:.80} is not served here: leave it out", name, "unsupported_parameter")
    if first["type"] == "missing":
        return APIError(400, f"{name}: missing", name)
    if first["type"] == "union_tag_invalid":
        return APIError(400, f"{name}.role={first['ctx']['tag']:.80}: expected {first['ctx']['expected_tags']}", name)
    expected = [details["msg"] for details in errors if len(details["loc"]) == len(loc)]
    expected = [message.removeprefix("Input should be ") for message in dict.fromkeys(expected)]
    return APIError(400, f"{name}={value!r:.80}: expected {' or '.join(expected):.300}", name)


def encode_prompt(prompt: str | list[int], engine: Engine, param: str, add_special_tokens: bool = True) -> list[int]:
    """Turn a text into token ids of the model's vocabulary, or raise an APIError about a field."""
    size = engine.model.get_input_embeddings().num_embeddings
    return list(_for_field(param, lambda: encode(prompt, engine.tokenizer, size, add_special_tokens)))


def encode_prompts(request: GenerationRequest, engine: Engine) -> list[list[int]]:
    """Return the token ids of each prompt of a request.

    Raises:
        APIError: a prompt is empty, the model has no chat template, or tokenizer or template refuse the prompt.
    """
    if isinstance(request, CompletionRequest):
        prompt: Any = request.prompt
        prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        begins_text = request.cache_id is None
        return [encode_prompt(prompt, engine, "prompt", begins_text) for prompt in prompts]
    assert isinstance(request, ChatRequest)
    if not getattr(engine.tokenizer, "chat_template", None):
        raise APIError(400, f"{request.model!r} has no chat template: use /v1/completions", "messages")
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    if any("tool_calls" in message for message in messages) and "tool_calls" not in str(engine.tokenizer.chat_template):
        message = f"the chat template of {request.model!r} leaves out tool_calls: expected messages without them"
        raise APIError(400, message, "messages")
    options = {"add_generation_prompt": True, "return_dict": False}
    tokens = _for_field("messages", lambda: engine.tokenizer.apply_chat_template(messages, **options))
    if request.cache_id is not None and tokens[:1] == [engine.tokenizer.bos_token_id]:
        tokens = tokens[1:]  # the cache has begun the text
    return [encode_prompt(tokens, engine, "messages")]


def _for_field(param: str, call: Callable[[], Any]) -> Any:
    """Call a function, and turn any error, perhaps of a chat template, into an APIError about a field."""
    try:
        return call()
    except Exception as error:
        raise APIError(400, " ".join(str(error).split())[:500] or type(error).__name__, param) from error


def sampling_params(request: Any, num_prompt_tokens: int, engine: Engine, max_model_len: int) -> SamplingParams:
    """Return the sampling parameters of one prompt.

    Args:
        request: a completion or chat.
        num_prompt_tokens: tokens of the prompt.
        engine: engine that serves the model.
        max_model_len: maximum number of tokens of prompt and continuation.
    Raises:
        APIError: a value is out of range, or the prompt and its continuation are too long.
    """
    is_chat, max_tokens = isinstance(request, ChatRequest), request.max_tokens
    if is_chat:
        max_tokens = max_tokens or request.max_completion_tokens or max(max_model_len - num_prompt_tokens, 1)
    max_tokens = max_tokens or 16
    total = num_prompt_tokens + max_tokens
    if total > max_model_len:
        message = f"{num_prompt_tokens} tokens of the prompt and {max_tokens} to generate are {total}"
        message += f": at most {max_model_len} are served"
        raise APIError(400, message, "messages" if is_chat else "prompt", "context_length_exceeded")
    tokenizer, stop = engine.tokenizer, [request.stop] if isinstance(request.stop, str) else request.stop
    # special tokens are not part of the text, so they stop by id
    ends = {text: tokenizer.convert_tokens_to_ids(text) for text in stop if text in tokenizer.all_special_tokens}
    options = request.model_dump(include=SAMPLING, exclude_none=True) | {
        "max_new_tokens": max_tokens,
        "stop": tuple(text for text in stop if text not in ends),
        "stop_token_ids": (*request.stop_token_ids, *ends.values()),
        "top_logprobs": request.num_logprobs or 0,
        "prompt_logprobs": request.num_logprobs if request.echo else None,
    }
    try:
        return SamplingParams(**options)
    except ValueError as error:
        raise bad_value(error) from error


def bad_value(error: Exception) -> APIError:
    """Turn the engine's error about a value, which begins with the value's name, into an APIError."""
    name = str(error).partition("=")[0].partition("[")[0]
    return APIError(400, str(error), name if name.isidentifier() else None)
