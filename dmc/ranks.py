"""The processes that share one model: this one's rank, and collectives for the numbers they must agree on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_POLL_SECONDS = 0.05
_HEARING_SECONDS = 10.0


@dataclass(frozen=True)
class Ranks:
    """One process of a tensor parallel group; the default is a single process, which communicates nothing.

    Every method that talks to the other ranks must be called by all of them, in the same order.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    """Process group of torch.distributed; None: all processes."""
    tokens_divided: int = 1
    """Into how many parts these ranks divide each sequence. Each then has the gradients of its own tokens alone; `join`
    multiplies them by this, so that their mean over all ranks, which data parallelism takes, is their sum here."""

    @classmethod
    def launched(cls) -> Ranks:
        """Join the processes that `torchrun` started: NCCL, each on a GPU of its own, or gloo.

        Raises:
            RuntimeError: the process was not started by torchrun.
        """
        if not dist.is_torchelastic_launched():
            raise RuntimeError("tensor parallel loading needs several processes: start them with torchrun")
        if torch.cuda.is_available():  # collectives use the current device; a process may see only its own GPU
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @classmethod
    def all(cls) -> Ranks:
        """Return the group of all processes of torch.distributed; a single process if it is not initialized."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else cls()

    @classmethod
    def on_hosts(cls, timeout: timedelta | None = None) -> Ranks:
        """Make a CPU group of all processes, whose collectives wait for no device; all of them call this together.

        Args:
            timeout: time after which a collective fails; None: torch's, half an hour.
        """
        every = cls.all()
        if every.size == 1:
            return every
        return cls(every.rank, every.size, dist.new_group(backend="gloo", timeout=timeout))

    @classmethod
    def neighbors(cls, size: int, tokens_divided: int = 1) -> Ranks:
        """Make a group of each `size` processes in a row, and return this one's; all processes call this together."""
        if size == 1:
            return cls()
        group, _ = dist.new_subgroups(size)
        return cls(dist.get_rank(group), size, group, tokens_divided)

    def while_others_wait(self, name: str, act: Callable[[], None], store: Any = None) -> None:
        """Run `act` on the first rank while the others wait, for any time, outside of collectives.

        Args:
            name: unique name of this wait.
            act: called on the first rank.
            store: key-value store between the ranks; None: torch.distributed's.
        Raises:
            OSError: `act` failed; the first rank raises its error instead.
        """
        if self.size == 1:
            return act()
        store = store or dist.distributed_c10d._get_default_store()
        if self.rank:
            while not store.check([name]):  # a collective would time out; the store ends this if the first rank dies
                time.sleep(_POLL_SECONDS)
            if told := store.get(name).decode():
                store.add(f"{name} heard", 1)
                raise OSError(f"{name} failed on the first rank: {told}")
            return
        try:
            act()
        except BaseException as error:
            store.set(name, f"{type(error).__name__}: {error}")
            deadline = time.monotonic() + _HEARING_SECONDS
            while store.add(f"{name} heard", 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)  # the store may end with this process
            raise
        store.set(name, "")

    def added(self, tensor: Tensor) -> Tensor:
        """Add up the ranks' tensors of one shape; the sum is on the CPU, the same on all ranks."""
        return tensor if self.size == 1 else self._summed(tensor.to(self._device)).cpu()

    def averaged(self, tensor: Tensor) -> Tensor:
        """Average the ranks' tensors of one shape, on their device and without waiting for it."""
        return tensor if self.size == 1 else self._summed(tensor) / self.size

    def minimum(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        return self._reduce(number, dist.ReduceOp.MIN)

    def maximum(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return self._reduce(number, dist.ReduceOp.MAX)

    def total(self, number: int) -> int:
        """Return the sum of the ranks' numbers."""
        return self._reduce(number, dist.ReduceOp.SUM)

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor, on all ranks."""
        if self.size == 1:
            return tensor
        shared = tensor.to(self._device).contiguous()
        dist.broadcast(shared, group=self.group, group_src=0)
        return shared.to(tensor.device)

    def objects(self, value: Any) -> list[Any]:
        """Collect a value of each rank, of any kind, on all of them."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def join_heads(self, numbers: Tensor) -> Tensor:
        """Join the ranks' heads in the last dimension, int64 [..., H] -> [..., H * size]."""
        if self.size == 1:
            return numbers
        numbers = numbers.to(self._device).contiguous()
        return torch.cat(self._gather(numbers), dim=-1).cpu()

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """Join the ranks' parts of a tensor along a dimension, differentiably.

        All ranks must go on to compute the same loss from the whole: each then takes the gradient of its own part, see
        `tokens_divided`.
        """
        return tensor if self.size == 1 else _Join.apply(tensor, dim, self)

    def parted(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of what all ranks have, differentiably: the whole has the gradients of all parts."""
        return tensor if self.size == 1 else _Part.apply(tensor, dim, self)

    def summed(self, tensor: Tensor) -> Tensor:
        """Add up the ranks' tensors, differentiably: each rank uses the sum in its own way, so gradients add up too."""
        return tensor if self.size == 1 else _Sum.apply(tensor, self)

    def exchange(self, tensor: Tensor, cut: int, joined: int) -> Tensor:
        """Give each rank its part along `cut` of what the ranks have, and join it along `joined`, differentiably.

        One all-to-all: with heads cut and time joined, each rank's tokens with all heads become its heads with all
        tokens (Ulysses, arXiv:2309.14509).
        """
        return tensor if self.size == 1 else _Exchange.apply(tensor, cut, joined, self)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part, one of `size` equal ones along `dim`, of a tensor that all ranks have."""
        return tensor if self.size == 1 else tensor.chunk(self.size, dim)[self.rank]

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    def _summed(self, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts

    def _exchanged(self, tensor: Tensor, cut: int, joined: int) -> Tensor:
        parts = torch.stack(tensor.chunk(self.size, cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return torch.cat(received.unbind(), joined)

    def _reduce(self, number: int, operation: dist.ReduceOp.RedOpType) -> int:
        if self.size == 1:
            return number
        shared = torch.tensor([number], device=self._device)
        dist.all_reduce(shared, operation, group=self.group)
        return int(shared)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
        context.dim, context.ranks = dim, ranks
        return torch.cat(ranks._gather(tensor.contiguous()), dim)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = context.ranks.own(gradients[0], context.dim)
        return own * context.ranks.tokens_divided, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
        context.dim, context.ranks = dim, ranks
        return ranks.own(tensor, dim).contiguous()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(context.ranks._gather(gradients[0].contiguous()), context.dim), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        context.ranks = ranks
        return ranks._summed(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.ranks._summed(gradients[0]), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, cut: int, joined: int, ranks: Ranks) -> Tensor:
        context.dims, context.ranks = (cut, joined), ranks
        return ranks._exchanged(tensor, cut, joined)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cut, joined = context.dims
        return context.ranks._exchanged(gradients[0], joined, cut), None, None, None


ALONE = Ranks()
