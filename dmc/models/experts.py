"""Weights of experts: files hold each expert's matrices under names of their own, models one tensor of all."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming


class StackedWeight:
    """Matrices of a file as the one weight of a model, [experts, rows of all parts, columns], read where it is indexed.

    Args:
        experts: of each expert the slices of safetensors whose rows follow each other, such as gate and up.
    """

    def __init__(self, experts: list[list[Any]]) -> None:
        self._experts = experts

    def get_shape(self) -> list[int]:
        """Return its shape, as a slice of safetensors does."""
        rows, columns = zip(*(part.get_shape() for part in self._experts[0]), strict=True)
        return [len(self._experts), sum(rows), columns[0]]

    def __getitem__(self, index: Any) -> Tensor:
        """Read a slice, one for each dimension, or `...`; rows of all experts that are read are read whole."""
        every = slice(None)
        index = every if index is ... else index
        experts, rows, columns = (*(index if isinstance(index, tuple) else (index,)), every, every)[:3]
        read = [torch.cat([part[:, columns] for part in parts])[rows] for parts in self._experts[experts]]
        return torch.stack(read)


def as_in_model(weights: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Name the weights of a file as the model does, by transformers' own rules for its type, and stack its experts.

    Args:
        weights: slices of safetensors by their names in the file, or in the model already.
        model_type: stock or compressed.
    Raises:
        NotImplementedError: the rules do more than rename and stack.
    """
    for rule in get_checkpoint_conversion_mapping(model_type.removeprefix("dmc_")) or ():
        named = {name: rule.rename_source_key(name) for name in weights}
        if not any(pattern for _, pattern in named.values()):
            continue
        if isinstance(rule, WeightRenaming):
            weights = {new: weights[name] for name, (new, _) in named.items()}
            continue
        steps = [(type(step), step.dim) for step in rule.operations if isinstance(step, (MergeModulelist, Concatenate))]
        known = [(MergeModulelist, 0), (Concatenate, 1)]
        if not isinstance(rule, WeightConverter) or steps != known[: len(rule.operations)]:
            raise NotImplementedError(f"weights of {model_type} are stored in a way of their own: {rule}")
        weights = _stacked(weights, named, list(rule.source_patterns))
    return weights


def _stacked(weights: dict[str, Any], named: dict[str, tuple[str, str | None]], patterns: list[str]) -> dict[str, Any]:
    """Stack the weights that match, by expert, the parts of each in the order of the patterns."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, (new, pattern) in named.items():
        if pattern is not None:
            number = int(re.findall(r"\.(\d+)\.", name)[-1])
            found.setdefault(new, {}).setdefault(number, {})[pattern] = weights[name]
    stacked = {
        new: StackedWeight([[parts[pattern] for pattern in patterns] for _, parts in sorted(experts.items())])
        for new, experts in found.items()
    }
    return {name: weight for name, weight in weights.items() if named[name][1] is None} | stacked
