"""A step of decoding as a function of buffers that stay where they are, so that it can be recorded and replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmc.kernels.batch import ForwardBatch

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function that reads and writes only what stays in its place into one that does the same by itself."""

READING_ROPE = ("dynamic", "longrope")
"""Tables of RoPE that the host chooses by the positions."""


def record_on_gpu(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Record a step as a CUDA graph; nothing runs before it is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def why_not_recorded(layout: Any, policy: Any, config: Any) -> str | None:
    """Say why decode steps cannot be recorded on a GPU, or None."""
    if layout.device.type != "cuda":
        return f"the model is on {layout.device}, not on a GPU"
    if policy is not None:
        return f"{type(policy).__name__} reads on the host what it evicts by"
    if layout.ranks.size > 1:
        return "several processes share the model"
    if any(kind in str(getattr(config, "rope_parameters", None)) for kind in READING_ROPE):
        return f"the host chooses its tables of RoPE by positions ({', '.join(READING_ROPE)})"
    return None


class DecodeSteps:
    """Feeds one token of each of some sequences, recorded once for every number of them.

    The first step of so many runs as it is, which also builds what is compiled at first use; the second is recorded.
    All that was recorded is dropped when the cache's tensors have moved.

    Args:
        run: token ids [1, S] and their batch -> logits [S, vocab]; waits for nothing, and makes nothing that lasts.
        record: how a step is recorded.
        device: of the model.
    """

    def __init__(self, run: Callable[[Tensor, ForwardBatch], Tensor], record: Record, device: torch.device) -> None:
        self._run, self._record, self._device = run, record, device
        self._steps: dict[int, tuple[Tensor, Callable[[], Tensor], bool]] = {}
        self._place: object = None

    def __call__(self, tokens: list[int], rows: list[int], positions: list[int], place: object) -> Tensor:
        """Feed them; what was recorded holds as long as `place` stays equal. The next call overwrites the result."""
        if place != self._place:
            self._steps, self._place = {}, place
        if (size := len(tokens)) not in self._steps:
            inputs = torch.zeros(3, size, dtype=torch.long, device=self._device)
            self._steps[size] = inputs, functools.partial(self._step, inputs), False
        else:
            inputs, step, is_recorded = self._steps[size]
            if not is_recorded:
                self._steps[size] = inputs, self._record(step), True
        inputs.copy_(torch.tensor([tokens, rows, positions]))
        return self._steps[size][1]()

    def _step(self, inputs: Tensor) -> Tensor:
        tokens, rows, positions = inputs
        return self._run(tokens[None], ForwardBatch.of_ones(len(rows), self._device, rows, positions))
