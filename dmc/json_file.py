"""Read mappings from untrusted JSON files, and flatten nested ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no JSON, or holds no mapping.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is damaged: brackets are nested too deeply") from None
    except ValueError as error:  # a UnicodeDecodeError is one
        raise ValueError(f"{path} is damaged, or is no JSON file: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}: expected a mapping")
    return values


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join the keys of nested mappings with dots; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
