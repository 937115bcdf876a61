"""Objects out of settings that name a class (`_target_`), built by Hydra with errors of one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException


def instantiate(settings: Mapping[str, Any], name: str, kind: type = object, **options: Any) -> Any:
    """Build an object by `hydra.utils.instantiate`.

    Args:
        settings: such as `{"_target_": "dmc.data.TextSource", "name": "book.txt"}`.
        name: name of the settings, for messages.
        kind: class that the object must have.
        options: further ones, not from the settings.
    Raises:
        ValueError: there is no `_target_`, it cannot be imported or called, or the object has another class.
    """
    if not isinstance(settings, Mapping) or "_target_" not in settings:
        raise ValueError(f"{name} has no _target_: name a class, such as dmc.data.TextSource")
    try:
        # partial: Hydra would turn options that are dataclasses into plain dictionaries
        built = hydra.utils.instantiate(_literal(settings), _partial_=True, _convert_="all")(**options)
    except (InstantiationException, TypeError, ValueError) as error:
        reason: BaseException = error
        while isinstance(reason, InstantiationException) and reason.__cause__ is not None:
            reason = reason.__cause__
        raise ValueError(f"{name} ({settings['_target_']}): {' '.join(str(reason).split())}") from error
    if not isinstance(built, kind):
        raise ValueError(f"{name} is {type(built).__name__}: expected a {kind.__module__}.{kind.__name__}")
    return built


def _literal(value: Any) -> Any:
    """Escape what Hydra would interpolate: settings are resolved already, and a stranger's text stays text."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {key: _literal(inner) for key, inner in value.items()}
    return [_literal(inner) for inner in value] if isinstance(value, (list, tuple)) else value
