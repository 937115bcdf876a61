"""The faults that `plant_faults.py` plants follow the code as it changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import planted_faults
import pytest
from planted_faults import FAULTS, check_faults

ROOT = Path(__file__).parents[1]


def test_every_fault_applies_once_and_compiles():
    check_faults(ROOT)
    assert len({fault.file for fault in FAULTS}) == len(FAULTS) == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "no such text"}, "gradient_sign: its old text occurs 0 times"),
        ({"new": "grad = ("}, "gradient_sign leaves no Python"),
        ({"file": "dmc/compression/gone.py"}, "gone.py does not exist"),
        ({"file": "dmc/budget.py"}, "not in the floor compression"),
    ],
)
def test_a_fault_that_does_not_apply_is_refused(change, message, monkeypatch):
    monkeypatch.setattr(planted_faults, "FAULTS", (dataclasses.replace(FAULTS[0], **change), *FAULTS[1:]))
    with pytest.raises(ValueError, match=message):
        check_faults(ROOT)
