"""Build validated dataclasses from plain nested values, as YAML or JSON gives them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from dmc.target import suggest


def build_config(config_class: type, values: Any, name: str = "") -> Any:
    """Build a dataclass from plain nested values.

    Args:
        config_class: the dataclass.
        values: mapping of its fields, as YAML or JSON gives it.
        name: name of the values, for messages.
    Raises:
        ValueError: a key is unknown or missing, or a value has another type or is out of its `Bounds`; the message
            names the key and what was expected.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{name or 'the configuration'} is {values!r}: expected a mapping of settings")
    fields = {item.name: item for item in dataclasses.fields(config_class)}
    further = next((key for key, item in fields.items() if item.metadata.get("takes_others")), None)
    if further is not None:
        others = {key: value for key, value in values.items() if key not in fields}
        values = {key: values[key] for key in values if key in fields} | {
            further: {**(values.get(further) or {}), **others}
        }
    _check_keys(values, fields, name)
    hints = typing.get_type_hints(config_class, include_extras=True)
    for key, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and key not in values:
            raise ValueError(f"setting {_join(name, key)} is missing")
    return config_class(**{key: _convert(hints[key], value, _join(name, key)) for key, value in values.items()})


def _check_keys(values: dict[str, Any], known: Iterable[str], name: str) -> None:
    for key in values:
        if key not in known:
            raise ValueError(f"unknown setting {_join(name, key)}: {suggest(key, known)}")


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Check `value` against a type hint and convert types that YAML lacks (tuples, whole floats, nested classes)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        value = _convert(arguments[0], value, name)
        for bounds in hint.__metadata__:
            bounds.check(name, value)
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        if len(options) == 1:
            return _convert(options[0], value, name)
        for option in options:
            try:
                return _convert(option, value, name)
            except ValueError:
                continue
        raise ValueError(f"{name}={value!r}: expected {' or '.join(option.__name__ for option in options)}")
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, arguments))}")
        return value
    if dataclasses.is_dataclass(hint):
        return build_config(typing.cast(type, hint), value, name)
    if origin in (list, tuple):
        fixed = origin is tuple and Ellipsis not in arguments
        if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(arguments)):
            raise ValueError(f"{name}={value!r}: expected a list{f' of {len(arguments)}' if fixed else ''}")
        return origin(_convert(arguments[0], item, f"{name}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name}={value!r}: expected a mapping")
        if arguments[1] is Any:
            return dict(value)
        given = {key: each for key, each in value.items() if each is not None}  # null removes an entry
        if typing.get_origin(arguments[0]) is Literal:
            _check_keys(given, typing.get_args(arguments[0]), name)
        return {key: _convert(arguments[1], each, _join(name, key)) for key, each in given.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{name}={value!r}: expected {hint.__name__}")
    return value
