"""The processes of one start: which one this is, and torch's collectives among them, differentiable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

_POLL_SECONDS = 0.05
_FAILURE_SECONDS = 10.0
"""How long the first rank waits for the others to read of its failure: the store may end with its process."""
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
Value = TypeVar("Value", int, Tensor)
Result = TypeVar("Result")


def first_line(error: BaseException) -> str:
    """Say in one line what went wrong."""
    return str(error).split("\n")[0] or type(error).__name__


def is_rank_zero() -> bool:
    """Return whether this is the first of the launched processes, before they can communicate."""
    if "RANK" in os.environ:  # torchrun numbers its processes anew, also inside srun
        return os.environ["RANK"] == "0"
    return all(os.environ.get(name, "0") == "0" for name in ("NODE_RANK", "LOCAL_RANK", "SLURM_PROCID"))


def is_first_of_node() -> bool:
    """Return whether this is the first of the processes that a launcher has started on this machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


@dataclass(frozen=True)
class Ranks:
    """A process group of torch.distributed; the default is a single process, which communicates nothing.

    All ranks must call a method that communicates, in the same order. Tensors of another device than the group's are
    copied there and back. Sums, averages, and what moves tensors have gradients.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    """Process group of torch.distributed; None: all processes."""
    tokens_divided: int = 1
    """Into how many parts these ranks divide each sequence. Each then has the gradients of its own tokens alone;
    `all_gather` multiplies them by this, so that their mean over all ranks, which data parallelism takes, is their sum
    here."""

    @classmethod
    def init_process_group(cls) -> Ranks:
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
        return cls.world()

    @classmethod
    def world(cls) -> Ranks:
        """Return the group of all processes of torch.distributed; a single process if it is not initialized."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else cls()

    @classmethod
    def new_gloo_group(cls, timeout: timedelta | None = None) -> Ranks:
        """Make a CPU group of all processes, whose collectives wait for no device; all of them call this together.

        Args:
            timeout: time after which a collective fails; None: torch's, half an hour.
        """
        world = cls.world()
        # torch writes no checkpoint in the background where the only group is NCCL's, be it of one process
        if world.size == 1 and not (dist.is_initialized() and dist.get_backend() == "nccl"):
            return world
        return cls(world.rank, world.size, dist.new_group(backend="gloo", timeout=timeout))

    @classmethod
    def new_subgroups(cls, size: int, tokens_divided: int = 1) -> Ranks:
        """Make a group of each `size` processes in a row, and return this one's; all processes call this together."""
        if size == 1:
            return cls()
        group, _ = dist.new_subgroups(size)
        return cls(dist.get_rank(group), size, group, tokens_divided)

    def run_on_first(self, name: str, function: Callable[[], None], store: Any = None) -> None:
        """Run a function on the first rank while the others wait, for any time, outside of collectives.

        Args:
            name: unique name of this wait.
            function: called on the first rank.
            store: key-value store between the ranks; None: torch.distributed's.
        Raises:
            RuntimeError: the function failed with one, as of a GPU; the first rank raises its error instead.
            OSError: it failed otherwise.
        """
        if self.size == 1:
            return function()
        store = store or dist.distributed_c10d._get_default_store()
        if self.rank:
            while not store.check([name]):  # a collective would time out; the store ends this if the first rank dies
                time.sleep(_POLL_SECONDS)
            if failure := store.get(name).decode():
                store.add(f"{name} failed", 1)
                kind, message = failure.split(" ", 1)
                kinds = {"RuntimeError": RuntimeError, "OSError": OSError}  # a job restarts after the first alone
                raise kinds[kind](f"{name} failed on the first rank: {message}")
            return
        try:
            function()
        except BaseException as error:
            is_input = isinstance(error, NotImplementedError) or not isinstance(error, (RuntimeError, MemoryError))
            kind = "OSError" if is_input else "RuntimeError"
            store.set(name, f"{kind} {type(error).__name__}: {error}")
            deadline = time.monotonic() + _FAILURE_SECONDS
            while store.add(f"{name} failed", 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            raise
        store.set(name, "")

    def run_on_all(self, function: Callable[[], Result], kind: type[Exception] | None = None) -> Result:
        """Run a function on every rank and return this one's result; where one fails, all raise an error.

        Args:
            function: called on each rank.
            kind: of the error, which says the first line of that of the first rank that failed; None: it is that error.
        Raises:
            Exception: a rank failed: the others would wait for it.
        """
        results: list[Result] = []
        failure = None
        try:
            results.append(function())
        except Exception as error:
            failure = error
        told = failure if failure is None or kind is None else first_line(failure)
        if (found := next((found for found in self.all_gather_object(told) if found is not None), None)) is None:
            return results[0]
        raise (found if kind is None else kind(found)) from (None if found is failure else failure)

    def all_reduce(self, value: Value, op: Literal["sum", "avg", "min", "max"] = "sum") -> Value:
        """Combine the ranks' tensors of one shape, or their integers; sums and averages of tensors have gradients.

        Each rank uses a sum in its own way, so the gradients add up too.
        """
        if self.size == 1:
            return value
        if isinstance(value, int):
            return int(self._reduced(torch.tensor([value]), op))
        reduced = _AllReduce.apply(value, op, self)
        return reduced / self.size if op == "avg" else reduced

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor, on all ranks."""
        if self.size == 1:
            return tensor
        shared = tensor.to(self._device_for(tensor)).contiguous()
        dist.broadcast(shared, group=self.group, group_src=0)
        return shared.to(tensor.device)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Collect a value of each rank, of any kind, on all of them."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' parts of a tensor along a dimension.

        All ranks must go on to compute the same loss from the result: each then takes the gradient of its own part, see
        `tokens_divided`.
        """
        return tensor if self.size == 1 else _AllGather.apply(tensor, dim, self)

    def chunk(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part, one of `size` equal ones along `dim`, of a tensor that all ranks have."""
        return tensor if self.size == 1 else tensor.chunk(self.size, dim)[self.rank]

    def scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's `chunk` such that the tensor has the gradients of all ranks' parts."""
        return tensor if self.size == 1 else _Scatter.apply(tensor, dim, self)

    def all_to_all(self, tensor: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Give each rank its part along `split_dim`, and concatenate what comes back along `concat_dim`.

        With heads split and time concatenated, each rank's tokens with all heads become its heads with all tokens
        (Ulysses, arXiv:2309.14509).
        """
        return tensor if self.size == 1 else _AllToAll.apply(tensor, split_dim, concat_dim, self)

    def _device_for(self, tensor: Tensor) -> torch.device:
        return torch.device("cuda") if dist.get_backend(self.group) == "nccl" else tensor.device

    def _reduced(self, tensor: Tensor, op: str) -> Tensor:
        reduced = tensor.to(self._device_for(tensor), copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, _OPERATIONS[op], group=self.group)
        return reduced.to(tensor.device)

    def _gathered(self, tensor: Tensor, dim: int) -> Tensor:
        sent = tensor.to(self._device_for(tensor)).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent, group=self.group)
        return torch.cat(parts, dim).to(tensor.device)

    def _exchanged(self, tensor: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        parts = torch.stack(tensor.chunk(self.size, split_dim))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return torch.cat(received.unbind(), concat_dim)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks._reduced(tensor, op)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks._reduced(gradients[0], "sum"), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return ranks._gathered(tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.chunk(gradients[0], ctx.dim) * ctx.ranks.tokens_divided, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return ranks.chunk(tensor, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks._gathered(gradients[0], ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split_dim: int, concat_dim: int, ranks: Ranks) -> Tensor:
        ctx.dims, ctx.ranks = (split_dim, concat_dim), ranks
        return ranks._exchanged(tensor, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, concat_dim = ctx.dims
        return ctx.ranks._exchanged(gradients[0], concat_dim, split_dim), None, None, None


ALONE = Ranks()


def local_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight that tensor parallel ranks divide, or have alike and use each in its own way.

    The gradients of the latter add up. Any other tensor is returned as it is.
    """
    if not isinstance(weight, DTensor):
        return weight
    placements = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=placements)
