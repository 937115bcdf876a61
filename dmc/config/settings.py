"""Settings as dataclasses that pydantic checks, with errors of one line."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import pydantic.dataclasses
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationError,
)

Value = TypeVar("Value")
_NAMES = re.compile("'(.*?)'")
UNKNOWN = "unexpected_keyword_argument"
"""Pydantic's name of the error that comes first: a misspelt setting is often a missing one too."""
Count = Annotated[StrictInt, Field(ge=1)]
NonNegative = Annotated[StrictInt, Field(ge=0)]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
Positive = Annotated[StrictFloat, Field(gt=0)]
Ratio = Annotated[StrictFloat, Field(ge=1)]


def _without_nulls(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: value for key, value in values.items() if value is not None}


Named = Annotated[dict[str, Value], BeforeValidator(_without_nulls)]
"""Settings by a name that the user gives; null removes an entry."""


def _check_folder(folder: str) -> str:
    for path in (Path(folder), *Path(folder).parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; give a folder")
    existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{existing} cannot be written to")
    return folder


OutputFolder = Annotated[str, Field(min_length=1), AfterValidator(_check_folder)]
"""A folder to write to, new or existing."""

if TYPE_CHECKING:
    from dataclasses import dataclass as checked_dataclass
else:

    def checked_dataclass(**options: Any) -> Callable[[type], type]:
        """Decorate a dataclass whose values are checked against its annotations, however it is constructed.

        Numbers, `StrictInt` or `StrictFloat`, are finite, and neither text nor true or false.

        Args:
            options: those of `dataclasses.dataclass`.
        """

        def decorate(cls: type) -> type:
            config = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
            kind = pydantic.dataclasses.dataclass(cls, config=config, **options)
            check = kind.__init__

            @functools.wraps(check)
            def init(self: Any, *values: Any, **named: Any) -> None:
                named = dict(zip(inspect.signature(kind).parameters, values, strict=False), **named)
                try:
                    check(self, **named)
                except ValidationError as error:
                    raise ValueError(_in_one_line(error, kind, named, "")) from None

            kind.__init__ = init
            return kind

        return decorate


def build_config(config_class: type[Value], values: Any, name: str = "") -> Value:
    """Build a checked dataclass, and those inside it, from plain values.

    Args:
        config_class: the dataclass.
        values: mapping of its fields, as YAML or JSON gives it.
        name: name of the values, for messages.
    Raises:
        ValueError: a key is unknown or missing, or a value has another type or is out of its bounds; the message names
            the key, the value and what was expected.
    """
    try:
        return TypeAdapter(config_class).validate_python(values)
    except ValidationError as error:
        raise ValueError(_in_one_line(error, config_class, values, name)) from None


def _in_one_line(error: ValidationError, owner: Any, values: Any, name: str) -> str:
    """Say what is wrong with the first setting, and what each type of a union expects."""
    first, *others = sorted(error.errors(include_url=False), key=lambda found: found["type"] != UNKNOWN)
    path = _path(first, values)
    setting = name + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    setting = setting.removeprefix(".") or "the configuration"
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        # a class's own check names its settings itself
        return f"{setting}={first['input']}: {message}" if isinstance(first["input"], (str, int, float)) else message
    if first["type"] == "missing":
        return f"setting {setting} is missing"
    if first["type"] == UNKNOWN:
        for key in path[:-1]:
            field = owner.__pydantic_fields__.get(key)
            owner = (field and _settings_in(field.annotation)) or owner
        return f"unknown setting {setting}: {suggest(path[-1], owner.__pydantic_fields__)}"
    if first["loc"][-1:] == ("[key]",) and (known := _NAMES.findall(first["msg"])):
        return f"unknown setting {setting}: {suggest(path[-1], known)}"
    expected = dict.fromkeys(_expected(found) for found in (first, *others) if _path(found, values) == path)
    return f"{setting}={first['input']!r:.80}: expected {' or '.join(expected)}"


def _path(error: Any, values: Any) -> list[int | str]:
    """Return the keys and indices of a wrong value: its place without the names of a union's types."""
    path: list[int | str] = []
    for key in error["loc"]:
        inside = isinstance(values, Mapping) if isinstance(key, str) else isinstance(values, (list, tuple))
        found = inside and (key in values if isinstance(key, str) else key < len(values))
        if found or (inside and error["type"] == "missing"):
            path.append(key)
            values = values[key] if found else None
    return path


def _expected(error: Any) -> str:
    if error["type"] in ("dict_type", "dataclass_type"):
        return "a mapping"
    return re.sub(r"^\w+ should (be|have) ", "", error["msg"]).replace(" after validation", "")


def _settings_in(hint: Any) -> Any:
    """Find the checked dataclass in a type, such as that of a mapping's values."""
    if is_dataclass(hint):
        return hint
    return next(filter(None, map(_settings_in, get_args(hint))), None)


def suggest(word: Any, known: Iterable[str]) -> str:
    """Return a hint for an unknown word: the closest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known) or 'none'}"
