"""A decode step as a function of buffers at fixed addresses, so that it can be recorded and replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmc.kernels.batch import ForwardBatch
from dmc.runtime.sampling import Sampling

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function whose inputs and outputs stay at the same addresses into one that replays its kernels."""

READING_ROPE = ("dynamic", "longrope")
"""Types of RoPE whose tables the host chooses by the positions."""


class GpuRecorder:
    """Records steps as CUDA graphs that share one memory pool; recording runs no kernel of the step."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Record`."""
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def why_not_recorded(layout: Any, policy: Any, config: Any) -> str | None:
    """Return why decode steps cannot be recorded as CUDA graphs; None if they can."""
    if layout.device.type != "cuda":
        return f"the model is on {layout.device}, not on a GPU"
    if policy is not None:
        return f"{type(policy).__name__} reads the scores it evicts by on the host"
    if layout.ranks.size > 1:
        return "the model is split over several processes"
    if any(kind in str(getattr(config, "rope_parameters", None)) for kind in READING_ROPE):
        return f"the host chooses RoPE tables by position ({', '.join(READING_ROPE)})"
    return None


def bucket_of(count: int, most: int) -> int:
    """Round a number of sequences up to a power of two, at most `most`, so that few sizes are recorded."""
    return min(1 << (count - 1).bit_length(), most)


class DecodeSteps:
    """Computes one token of each sequence and chooses the next ones; each bucket of batch sizes is recorded once.

    Rows of a bucket beyond the given sequences write to the cache's scratch row. The first step of a bucket runs
    eagerly, which also compiles kernels at their first use; the second is recorded. All recordings are dropped when the
    cache's tensors have moved.

    Args:
        run: function of token ids [1, S], their batch, and `Sampling`'s settings on the device, width and number of
            reported tokens (None: return logits); it returns the choices or logits of S or more rows, does not wait for
            the device, and allocates nothing that outlives the call.
        record: recorder of a step.
        most: sequences of the largest bucket; the scratch row follows theirs.
        device: device of the model.
    """

    def __init__(self, run: Callable[..., Tensor], record: Record, most: int, device: torch.device) -> None:
        self._run, self._record, self._most, self._device = run, record, most, device
        self._steps: dict[Any, tuple[Tensor, Callable[[], Tensor], bool]] = {}
        self._place: object = None

    def __call__(
        self, tokens: list[int], rows: list[int], positions: list[int], sampling: Sampling | None, place: object
    ) -> Tensor:
        """Run a step; recordings stay valid while `place` stays equal. The next call overwrites the result."""
        if place != self._place:
            self._steps, self._place = {}, place
        size = bucket_of(len(tokens), self._most)
        mode = None if sampling is None else (sampling.width, sampling.num_top)
        if (size, mode) not in self._steps:
            inputs = torch.zeros(8, size, dtype=torch.float64, device=self._device)
            self._steps[size, mode] = inputs, functools.partial(self._step, inputs, mode), False
        else:
            inputs, step, is_recorded = self._steps[size, mode]
            if not is_recorded:
                self._steps[size, mode] = inputs, self._record(step), True
        given = torch.zeros(8, size, dtype=torch.float64)
        given[1] = self._most
        given[:3, : len(tokens)] = torch.tensor([tokens, rows, positions])
        if sampling is not None:
            given[3:, : len(tokens)] = sampling.settings
        inputs.copy_(given, non_blocking=True)
        return self._steps[size, mode][1]()

    def _step(self, inputs: Tensor, mode: tuple[int, int] | None) -> Tensor:
        tokens, rows, positions = inputs[:3].long()
        batch = ForwardBatch.of_ones(len(rows), self._device, rows, positions)
        return self._run(tokens[None], batch, inputs[3:], mode)
