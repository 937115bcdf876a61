"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recording import Recorder

from dmc import Engine


@pytest.fixture
def make_recording(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, Recorder]]:
    """Return what makes an engine that records as on a GPU, and its recorder."""

    def make(model: Any, recorder: type[Recorder] = Recorder, **options: Any) -> tuple[Engine, Recorder]:
        record = recorder()
        monkeypatch.setattr("dmc.runtime.engine.GpuRecorder", lambda device: record)
        monkeypatch.setattr("dmc.runtime.engine.why_not_recorded", lambda *_: None)
        record.engine = Engine(model, kernels="reference", cuda_graphs=True, **options)
        return record.engine, record

    return make
