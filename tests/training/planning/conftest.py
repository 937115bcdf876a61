"""A step is traced once, however many tests plan it."""

import copy

import pytest

from dmc.training.planning import peak_memory

TRACED = {}


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    plain = peak_memory._trace_layers

    def trace_layers(config, num_layers, micro_batches):
        key = repr((config, num_layers, min(micro_batches, 2)))
        if key not in TRACED:
            TRACED[key] = plain(config, num_layers, micro_batches)
        return copy.deepcopy(TRACED[key])

    monkeypatch.setattr(peak_memory, "_trace_layers", trace_layers)
