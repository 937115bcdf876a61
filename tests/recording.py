"""A recorder of decode steps for any device, which records and replays operations as a CUDA graph does kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmc import Engine

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2")


class Tape(TorchDispatchMode):
    """Records operations as a CUDA graph does: each again, out of and into the memory that it first had.

    It raises where the host waits for a value, or a shape depends on one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in READS, f"{name} waits for the device"
        out = function(*arguments, **(keywords or {}))
        if not function.is_view:
            self.calls.append((function, arguments, keywords or {}, out))
        return out

    def replay(self) -> None:
        """Do all of it once more."""
        for function, arguments, keywords, out in self.calls:
            again = function(*arguments, **keywords)
            for work in tree_leaves(again):
                if isinstance(work, torch.ScriptObject):  # of a collective, which its caller has waited for
                    Work.unbox(work).wait()
            if not function._schema.is_mutable:
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class Recorder:
    """Records steps on any device; what the recording itself did is taken back."""

    engine: Engine

    def __init__(self) -> None:
        self.num_recorded, self.num_replayed, self.num_dropped = 0, 0, 0

    def drop(self) -> None:
        """Count."""
        self.num_dropped += 1

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.num_recorded += 1
        cache, tape = self.engine.cache, Tape()
        written = [*cache.fields._tensors.values(), cache.allocator.stack, cache.allocator.height]
        written += [cache.tally.slots, cache.tally.blocks, self.engine._runner._decode_steps.chosen]
        before = [tensor.clone() for tensor in written]
        with tape:
            result = step()
        for tensor, was in zip(written, before, strict=True):
            tensor.copy_(was)

        def replay() -> Any:
            self.num_replayed += 1
            tape.replay()
            return result

        return replay
