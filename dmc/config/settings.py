"""Settings as dataclasses that pydantic checks; whatever is wrong with one is told in one line."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, StrictFloat, StrictInt, TypeAdapter, ValidationError

from dmc.config.target import suggest

Value = TypeVar("Value")
UNKNOWN = "unexpected_keyword_argument"
"""Pydantic's name of the error that is told first: a misspelt setting is often a missing one too."""
Count = Annotated[StrictInt, Field(ge=1)]
Whole = Annotated[StrictInt, Field(ge=0)]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
Positive = Annotated[StrictFloat, Field(gt=0)]
Ratio = Annotated[StrictFloat, Field(ge=1)]


def _without_nulls(values: Any) -> Any:
    return {key: each for key, each in values.items() if each is not None} if isinstance(values, Mapping) else values


WITHOUT_NULLS = BeforeValidator(_without_nulls)
"""Marks a mapping in which null removes an entry."""
Named = Annotated[dict[str, Value], WITHOUT_NULLS]
"""Settings by a name that the user gives."""

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
    """Tell the first error, with what each type of a union expects."""
    first, *others = sorted(error.errors(include_url=False), key=lambda each: each["type"] != UNKNOWN)
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])  # a class's own check, which names its settings itself
    path = _path(first, values)
    named = name + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    named = named.removeprefix(".") or "the configuration"
    if first["type"] == "missing":
        return f"setting {named} is missing"
    if first["type"] == UNKNOWN:
        for key in path[:-1]:
            field = owner.__pydantic_fields__.get(key)
            owner = (field and _settings_in(field.annotation)) or owner
        return f"unknown setting {named}: {suggest(path[-1], owner.__pydantic_fields__)}"
    if first["loc"][-1:] == ("[key]",):
        known = re.findall(r"'(.*?)'", first["msg"])
        return f"unknown setting {named}: {suggest(path[-1], known)}"
    expected = dict.fromkeys(_expected(each) for each in (first, *others) if _path(each, values) == path)
    return f"{named}={first['input']!r}: expected {' or '.join(expected)}"


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
