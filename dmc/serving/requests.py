"""Check bodies by OpenAI's published types, and turn them into prompt tokens and sampling parameters."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from openai.types import completion_create_params as completions
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chats
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic_core import SchemaValidator, ValidationError
from typing_extensions import Required, TypedDict

from dmc.runtime import Engine, SamplingParams
from dmc.runtime.input_processor import encode

MOST_NAMES = 1024
"""Maximum number of fields of an object: to tell 80,000 wrong ones would take seconds and gigabytes."""
METADATA = {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
"""Fields of a request that do not affect its answer."""
DEFAULTS: dict[str, Any] = {
    **{"best_of": 1, "suffix": "", "response_format": {"type": "text"}, "tools": [], "functions": [], "store": False},
    **{"tool_choice": "none", "function_call": "none", "modalities": ["text"], "service_tier": "auto"},
    **{"verbosity": "medium", "reasoning_effort": "none"},
}
"""Fields that are not served, and their values that change nothing."""


@dataclass
class APIError(Exception):
    """An error response in OpenAI's format."""

    status: int
    message: str
    param: str | None = None
    """Name of the wrong field."""
    code: str | None = None
    """Reason for programs."""

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response: when to try again."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


class StreamOptions(ChatCompletionStreamOptionsParam, total=False):
    """OpenAI's, and vLLM's usage with every piece."""

    continuous_usage_stats: bool


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=1)]
Top = Annotated[int, Field(ge=0, le=20)]
OURS: dict[str, Any] = {
    "model": Required[str],
    "stream": bool,
    "stream_options": StreamOptions,
    "n": Annotated[int, Field(ge=1, le=32)],
    "max_tokens": Count,
    "stop": Stop | Annotated[list[Stop], Field(max_length=32)],
    "stop_token_ids": Annotated[list[int], Field(max_length=32)],
    "question_tokens": Annotated[int, Field(ge=0)],
}
"""Fields within our bounds, and fields that OpenAI lacks."""
PLAIN = (
    *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "ignore_eos"),
)
"""Fields that the engine reads, and checks, as they are."""


def _eager(schema: Any) -> Any:
    """Make lists of published iterables, which would be checked as late as they are read, up to the first fault."""
    if isinstance(schema, list):
        return [_eager(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "json-or-python":
        return _eager(schema["json_schema"])
    lists = {"type": "list", "fail_fast": True} if schema.get("type") in ("list", "generator") else {}
    return {name: _eager(each) for name, each in schema.items()} | lists


def _body(published: Any = None, *served: str, **ours: Any) -> tuple[SchemaValidator, set[str]]:
    hints = typing.get_type_hints(published, include_extras=True) if published else {}
    make: Any = TypedDict
    kind = make("Body", {name: hints.get(name, Any) for name in served} | ours, total=False)
    kind.__pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    return SchemaValidator(_eager(TypeAdapter(kind).core_schema)), {*served, *ours}


Talk = Required[list[Annotated[ChatCompletionMessageParam, Field(discriminator="role")]]]
BODIES = {
    "/v1/completions": _body(
        completions.CompletionCreateParamsBase, *PLAIN, "logit_bias", "prompt", "echo", **OURS, logprobs=Top
    ),
    "/v1/chat/completions": _body(
        chats.CompletionCreateParamsBase,
        *(*PLAIN, "logit_bias", "logprobs"),
        **(OURS | {"top_logprobs": Top, "max_completion_tokens": Count, "messages": Talk}),
    ),
    "/tokenize": _body(prompt=Required[str], model=str, add_special_tokens=bool),
    "/detokenize": _body(tokens=Required[list[int]], model=str),
}
"""Validator of each route's bodies, by OpenAI's types and ours, and the names of the fields that it serves."""


def _named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_NAMES:
        raise ValueError(f"an object of {len(pairs)} names: expected at most {MOST_NAMES}")
    "".join(name for name, _ in pairs).encode()  # raises ValueError for half of a character, which no answer can tell
    return {name: value for name, value in pairs if value is not None}


def not_served(name: str, value: Any) -> APIError:
    """Return the error about a field or value that is not served."""
    told = f"{name[:100]}={value!r:.80} is not served here: leave it out"
    return APIError(422, told, name[:100], "unsupported_parameter")


def read(path: str, body: bytes) -> dict[str, Any]:
    """Parse and check the body of a request to `path`; null is left out.

    Raises:
        APIError: 422 for a field that is not served, 400 for any other fault; it names the field.
    """
    validator, names = BODIES[path]
    try:
        given = json.loads(body, object_pairs_hook=_named)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is no JSON that is read here: {error}") from error
    if not isinstance(given, dict):
        raise APIError(400, f"the body={given!r:.80}: expected an object")
    for name, value in given.items():
        if name not in names | METADATA and json.dumps(value) != json.dumps(DEFAULTS.get(name)):
            raise not_served(name, value)
    try:
        return dict(validator.validate_python({name: value for name, value in given.items() if name in names}))
    except ValidationError as error:
        raise _fault(error, given) from error


def _fault(error: ValidationError, given: Any) -> APIError:
    """Return the error about the first fault; of several types that of the one that comes closest."""
    found = error.errors(include_url=False)
    fault = max(found, key=lambda each: len(each["loc"]))
    place, value, is_missing = [], given, fault["type"] == "missing"
    for each in fault["loc"]:  # names of types are no part of the place
        if each in value if isinstance(value, dict) else isinstance(value, list) and isinstance(each, int):
            value = value[each]
            place.append(str(each)[:100])
    name = ".".join([*place, str(fault["loc"][-1])] if is_missing else place)
    if fault["type"] == "extra_forbidden":
        return not_served(name, value)
    reasons = [each["msg"] for each in found if len(each["loc"]) == len(fault["loc"])]
    told = " or ".join(dict.fromkeys(each.removeprefix("Input should be ") for each in reasons))
    return APIError(400, f"{name}: missing" if is_missing else f"{name}={value!r:.80}: expected {told:.300}", name)


def blamed_on(param: str, call: Callable[[], Any]) -> Any:
    """Call a function, and turn any error, of a chat template perhaps, into an APIError about a field."""
    try:
        return call()
    except Exception as error:
        raise APIError(400, " ".join(str(error).split())[:500] or type(error).__name__, param) from error


def encoded(given: str | list[int], engine: Engine, param: str, begins_text: bool = True) -> list[int]:
    """Turn a text into token ids of the model's vocabulary, or raise an APIError about a field."""
    size = engine.model.get_input_embeddings().num_embeddings
    return list(blamed_on(param, lambda: encode(given, engine.tokenizer, size, begins_text)))


def prompts_of(asked: dict[str, Any], engine: Engine) -> list[list[int]]:
    """Return the token ids of each prompt of a request.

    Raises:
        APIError: a prompt is empty or too long, the model has no chat template, or tokenizer or template refuse it.
    """
    if "prompt" in asked:
        given = asked["prompt"]
        prompts = given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
        if not 1 <= len(prompts) <= 128:
            raise APIError(400, f"{len(prompts)} prompts: expected 1 to 128", "prompt")
        return [encoded(each, engine, "prompt") for each in prompts]
    messages = [_plain(message, f"messages.{index}") for index, message in enumerate(asked["messages"])]
    if not messages or not getattr(engine.tokenizer, "chat_template", None):
        told = f"{asked['model']!r} has no chat template: use /v1/completions" if messages else "expected messages"
        raise APIError(400, told, "messages")
    options = {"add_generation_prompt": True, "return_dict": False}
    tokens = blamed_on("messages", lambda: engine.tokenizer.apply_chat_template(messages, **options))
    return [encoded(tokens, engine, "messages")]


def _plain(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a message as chat templates expect it: its content is one text."""
    for name in message.keys() - {"role", "content", "name", "tool_call_id"}:
        raise not_served(f"{place}.{name}", message[name])
    content = message.get("content", "")
    for part in content if isinstance(content, list) else []:
        if part.keys() != {"type", "text"}:
            raise not_served(f"{place}.content", part)
    plain = {name: value for name, value in message.items() if name != "tool_call_id"}
    return plain | {"content": content if isinstance(content, str) else "".join(part["text"] for part in content)}


def sampling_of(asked: dict[str, Any], num_prompt_tokens: int, engine: Engine, longest: int) -> SamplingParams:
    """Return the sampling parameters of one prompt; `longest`: tokens that model and memory allow.

    Raises:
        APIError: a value is out of range, or the prompt and its continuation are too long.
    """
    room, place = longest - num_prompt_tokens, "prompt" if "prompt" in asked else "messages"
    wanted = asked.get("max_tokens", asked.get("max_completion_tokens", 16 if place == "prompt" else max(room, 1)))
    if room < wanted:
        told = f"a prompt of {num_prompt_tokens} tokens and {wanted} generated ones make {num_prompt_tokens + wanted}"
        raise APIError(400, f"{told}: at most {longest} are served", place, "context_length_exceeded")
    stop, tokenizer, number = asked.get("stop", []), engine.tokenizer, num_logprobs(asked)
    stop = [stop] if isinstance(stop, str) else stop
    # special tokens are not part of the text, so they stop by id
    ends = {text: tokenizer.convert_tokens_to_ids(text) for text in stop if text in tokenizer.all_special_tokens}
    biases = asked.get("logit_bias", {})
    options = {name: asked[name] for name in ("n", *PLAIN) if name in asked} | {
        "max_new_tokens": wanted,
        "stop": tuple(text for text in stop if text not in ends),
        "stop_token_ids": (*asked.get("stop_token_ids", ()), *ends.values()),
        "logit_bias": blamed_on("logit_bias", lambda: {int(token): each for token, each in biases.items()}),
        "top_logprobs": number or 0,
        "prompt_logprobs": number if asked.get("echo") else None,
    }
    try:
        return SamplingParams(**options)
    except ValueError as error:
        raise out_of_range(error) from error


def num_logprobs(asked: dict[str, Any]) -> int | None:
    """Return how many of the most likely tokens are told with each token; None: no log-probabilities."""
    given: int | None = asked.get("logprobs")
    if isinstance(given, bool):  # of chats
        return asked.get("top_logprobs", 0) if given else None
    return given


def out_of_range(error: Exception) -> APIError:
    """Turn the engine's error about a value, which begins with the value's name, into an APIError."""
    name = str(error).partition("=")[0].partition("[")[0]
    return APIError(400, str(error), name if name.isidentifier() else None)
