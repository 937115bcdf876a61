"""One step of all beams of a prompt: those that are pruned give their blocks up, those that go on fork."""

from __future__ import annotations

from collections.abc import Iterable

from dmc.runtime.active_requests import ActiveRequests
from dmc.runtime.beams import BeamSearch
from dmc.runtime.request import Request, TokenEvent
from dmc.runtime.sequence import Sequence


def extend_beam(active: ActiveRequests, beam: Request, likely: list[tuple[int, float]]) -> list[TokenEvent]:
    """Note a beam's most likely next tokens; where those of all beams are known, the best go on, or the search ends.

    Returns:
        The tokens of all continuations if the search has ended, else nothing.
    """
    root, search = beam.root or beam, beam.search
    assert search is not None
    beams = root.branches
    search.likely[beams.index(beam)] = likely
    beam.sequence.next_logit_position += 1
    if len(search.likely) < len(beams):
        return []
    going_on, ended = search.extend([each.logprobs for each in beams])
    for extension in ended:
        search.end(extension, beams[extension.beam].steps, active.stats(beams[extension.beam]))
    if search.is_over(going_on, len(beam.logprobs) + 1):
        return _end(active, root, search)
    extended = [each.beam for each in going_on]
    pruned = [each.sequence for index, each in enumerate(beams) if index not in extended]
    active.drop(pruned)
    free = {index: [beams[index].sequence] for index in extended}
    try:
        for index, sequences in free.items():
            sequences += active.copies(sequences[0], extended.count(index) - 1)
    except BaseException:
        active.drop(copy for sequences in free.values() for copy in sequences[1:])
        raise
    for sequence in pruned:
        active.by_sequence.pop(sequence)
    after = [(free[each.beam].pop(0), [*beams[each.beam].steps, each.step]) for each in going_on]
    for index, (sequence, steps) in enumerate(after):
        if index == len(root.branches):
            active.add_branch(root, sequence)
        active.by_sequence[sequence] = root.branches[index]
        root.branches[index].take_over(sequence, steps)
        active.scheduler.resume(sequence)
    return []


def rest_beams(active: ActiveRequests, requests: Iterable[Request]) -> None:
    """Let beams pause whose next tokens are known, until those of the others of their search are."""
    for request in requests:
        if request.search is not None and request.search.likely:
            request.stats_before = active.stats(request)
            active.scheduler.rest(request.sequence)


def _end(active: ActiveRequests, root: Request, search: BeamSearch) -> list[TokenEvent]:
    """Tell of the tokens of all continuations that have ended, the best first."""
    prompt = root.sequence.tokens[: len(root.sequence.tokens) - len(root.logprobs)]
    active.scheduler.finish(root.sequence)  # the prefix cache may take the prompt from it
    for each in root.branches:
        active.by_sequence.pop(each.sequence)
    active.drop(each.sequence for each in root.branches)
    for index, ended in enumerate(search.ended):
        sequence = Sequence([*prompt], next_logit_position=len(prompt))
        if index == len(root.branches):
            active.add_branch(root, sequence)
        request = active.by_sequence[sequence] = root.branches[index]
        request.sequence, request.logprobs, request.top_logprobs = sequence, [], []
        request.stats_before = ended.stats
    brought = [
        [request.accept(*step) for step in ended.steps]
        for request, ended in zip(root.branches, search.ended, strict=True)
    ]
    for request, events in zip(root.branches, brought, strict=True):
        active.finish(request, events[-1].finish_reason or "length")
    return [event for events in brought for event in events]
