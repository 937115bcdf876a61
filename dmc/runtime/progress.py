"""The bar of offline generation: tokens a second, and what runs and waits."""

from __future__ import annotations

from collections.abc import Collection

from tqdm.auto import tqdm

from dmc.runtime.request import Request, TokenEvent

SECONDS_BEFORE_BAR = 3
"""A run that is over by then shows no bar unless one was asked for."""


def open_bar(requests: Collection[Request], progress: bool | None) -> tqdm:
    """Open a bar over the most tokens that requests may bring; None: on a terminal, if it takes long."""
    return tqdm(
        desc="generating",
        total=sum(request.params.max_new_tokens * request.params.n for request in requests),
        unit=" tokens",
        disable=None if progress is None else not progress,
        delay=0 if progress else SECONDS_BEFORE_BAR,
    )


def advance_bar(bar: tqdm, events: list[TokenEvent], num_running: int, num_waiting: int) -> None:
    """Count new tokens; what a finished request leaves unused comes off the total."""
    if bar.disable:
        return
    for event in events:
        if event.finish_reason is not None:
            bar.total -= event.request.params.max_new_tokens - len(event.request.branches[event.number].logprobs)
    bar.set_postfix(running=num_running, waiting=num_waiting, refresh=False)
    bar.update(len(events))
