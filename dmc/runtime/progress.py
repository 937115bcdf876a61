"""The progress bar of offline generation: tokens per second, and running and waiting sequences."""

from __future__ import annotations

from collections.abc import Collection

from tqdm.auto import tqdm

from dmc.runtime.request import Request, TokenEvent

SECONDS_BEFORE_BAR = 3
"""A shorter run shows no bar unless one was requested."""


def open_bar(requests: Collection[Request], progress: bool | None) -> tqdm:
    """Open a bar over the maximum number of new tokens; None: on a terminal, if it takes long."""
    return tqdm(
        desc="generating",
        total=sum(request.params.max_new_tokens * request.params.n for request in requests),
        unit=" tokens",
        disable=None if progress is None else not progress,
        delay=0 if progress else SECONDS_BEFORE_BAR,
    )


def advance_bar(bar: tqdm, events: list[TokenEvent], num_running: int, num_waiting: int) -> None:
    """Count new tokens; the total falls by a finished request's unused ones."""
    if bar.disable:
        return
    for event in events:
        if event.finish_reason is not None:
            bar.total -= event.request.params.max_new_tokens - len(event.request.branches[event.number].logprobs)
    bar.set_postfix(running=num_running, waiting=num_waiting, refresh=False)
    bar.update(len(events))
