"""A step of decoding as a function of buffers that stay where they are, so that it can be recorded and replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmc.kernels.batch import ForwardBatch
from dmc.runtime.sampling import Sampling

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function that reads and writes only what stays in its place into one that does the same by itself."""

READING_ROPE = ("dynamic", "longrope")
"""Tables of RoPE that the host chooses by the positions."""


class GpuRecorder:
    """Records steps as CUDA graphs that share their memory; nothing of a step runs before it is replayed."""

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


def bucket_of(count: int, most: int) -> int:
    """Round a number of sequences up to a power of two, or `most`: so few sizes are recorded."""
    return min(1 << (count - 1).bit_length(), most)


class DecodeSteps:
    """Feeds one token of each of some sequences and chooses their next, recorded once for each bucket of sizes.

    What a bucket has beyond the sequences feeds the cache's scratch row. The first step of a kind runs as it is, which
    also builds what is compiled at first use; the second is recorded. All that was recorded is dropped when the cache's
    tensors have moved.

    Args:
        run: token ids [1, S], their batch, and `Sampling`'s settings on the device, width and number of tokens to tell
            (None: logits are wanted) -> what was chosen or logits, S rows and maybe more; waits for nothing, and makes
            nothing that lasts.
        record: how a step is recorded.
        most: sequences of the largest bucket; the scratch row is the one behind theirs.
        device: of the model.
    """

    def __init__(self, run: Callable[..., Tensor], record: Record, most: int, device: torch.device) -> None:
        self._run, self._record, self._most, self._device = run, record, most, device
        self._steps: dict[Any, tuple[Tensor, Callable[[], Tensor], bool]] = {}
        self._place: object = None

    def __call__(
        self, tokens: list[int], rows: list[int], positions: list[int], sampling: Sampling | None, place: object
    ) -> Tensor:
        """Feed them; what was recorded holds as long as `place` stays equal. The next call overwrites the result."""
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
