"""Build objects from settings: `_target_` names a class or function, the other keys are its options."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def build_target(settings: Mapping[str, Any], name: str, **given: Any) -> Any:
    """Call the class or function named by `_target_` with the other settings; nested targets are built first.

    Args:
        settings: such as `{"_target_": "dmc.data.TextSource", "name": "book.txt"}`.
        name: name of the settings, for messages.
        given: further options, not from the settings.
    Raises:
        ValueError: there is no `_target_`, it cannot be imported, an option is unknown or missing, or the target
            refuses a value. The message names the setting and what was expected.
    """
    if not isinstance(settings, Mapping) or "_target_" not in settings:
        raise ValueError(f"{name} has no _target_: name a class, such as dmc.data.TextSource")
    target = find_target(settings["_target_"], name)
    options = {key: value for key, value in settings.items() if key != "_target_"}
    _check_options(target, [*options, *given], f"{name} ({settings['_target_']})")
    for key, value in options.items():
        if isinstance(value, Mapping) and "_target_" in value:
            options[key] = build_target(value, f"{name}.{key}")
    try:
        return target(**options, **given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def build_targets(settings: Mapping[str, Mapping[str, Any]], name: str, kind: type) -> list[Any]:
    """Build objects from named settings, each with a `_target_`.

    Args:
        settings: settings by name.
        name: name of the settings, for messages.
        kind: class that each object must have.
    Raises:
        ValueError: see `build_target`; or an object has another class.
    """
    built = {key: build_target(each, f"{name}.{key}") for key, each in settings.items()}
    for key, each in built.items():
        if not isinstance(each, kind):
            raise ValueError(f"{name}.{key} is {type(each).__name__}: expected a {kind.__module__}.{kind.__name__}")
    return list(built.values())


def find_target(path: str, name: str) -> Callable[..., Any]:
    """Import the class or function at a dotted path.

    Raises:
        ValueError: there is none.
    """
    module_name, _, attribute = str(path).rpartition(".")
    setting = f"{name}._target_={path!r}"
    if not module_name:
        raise ValueError(f"{setting}: expected a dotted path, such as my_module.MyClass")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{setting} cannot be imported: {error}") from error
    target = getattr(module, attribute, None)
    if not callable(target):
        classes = [each for each, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(f"{setting}: {module_name} has no {attribute}; {suggest(attribute, classes)}")
    return target


def suggest(word: Any, known: Iterable[str]) -> str:
    """Return a hint for an unknown word: the closest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known) or 'none'}"


def _check_options(target: Callable[..., Any], options: list[str], name: str) -> None:
    parameters = inspect.signature(target).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            raise ValueError(f"{name} has no option {option!r}: {suggest(option, parameters)}")
    for option, parameter in parameters.items():
        if (
            option not in options
            and parameter.default is parameter.empty
            and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            raise ValueError(f"{name}: option {option!r} is missing")
