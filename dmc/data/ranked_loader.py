"""A stateful loader whose state covers every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader


class RankedLoader(StatefulDataLoader[dict[str, Any]]):
    """Saves the states of all ranks' loaders as one and restores each rank's own.

    Lightning keeps the loader state of rank 0 alone, while each rank reads another part of a stream. All ranks must
    ask for the state at the same time.
    """

    def state_dict(self) -> dict[str, Any]:
        """Gather the ranks' states."""
        states: list[Any] = [super().state_dict()]
        if dist.is_initialized():
            own = states[0]
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, own)
        return {"ranks": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where this rank stood.

        Raises:
            ValueError: the state is of another number of ranks.
        """
        states = state_dict["ranks"]
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if len(states) != num_ranks:
            raise ValueError(
                f"the checkpoint holds the places of {len(states)} ranks in the stream, {num_ranks} are running: "
                "streamed text resumes at the same number of ranks only (cached text at any)"
            )
        super().load_state_dict(states[rank])
