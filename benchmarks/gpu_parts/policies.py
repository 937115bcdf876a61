"""What each training-free method adds to a decode step and to a prompt, against the cache without one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import policies
import torch
from timings import Case

from dmc.models.build import random_model
from gpu_parts.place import Figure, Place, Rows, beside_first

STEPS = 4
"""Decode steps that are timed together."""


def figures(place: Place) -> Iterator[Figure]:
    """What methods add to a decode step and to a prompt, in turns with the cache without one"""
    model = random_model(place.shape(place.size(8, 1)), place.dtype, place.device)
    yield Figure("decode steps", partial(_decode, place, model))
    yield Figure("prompts", partial(_prompts, place, model))


def _decode(place: Place, model: torch.nn.Module) -> Rows:
    batch, length, rounds = place.size(8, 1), place.size(2048, 64), place.size(9, 1)
    cases = policies.decode_cases(model, batch, length, STEPS * (rounds + 2))
    found = place.milliseconds({name: partial(_several, case) for name, case in cases.items()}, rounds=rounds)
    title = f"step of {batch} sequences, {length} entries each"
    yield from beside_first({name: milliseconds / STEPS for name, milliseconds in found.items()}, title)


def _prompts(place: Place, model: torch.nn.Module) -> Rows:
    length = place.size(4096, 64)
    yield from beside_first(
        place.milliseconds(policies.prefill_cases(model, length, 4.0), rounds=3), f"prompt of {length}, CR 4"
    )


def _several(step: Case) -> None:
    for _ in range(STEPS):
        step()
