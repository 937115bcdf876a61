"""The answer in words: which method, at which budget, at what cost; and what the rows do not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dmc.results.benchmark import HuggingFaceContestant
from dmc.results.report.findings import Findings, Inside, Result, Speed
from dmc.results.report.judgement import (
    HELD,
    MARGIN,
    STANDARD_ERRORS,
    badness,
    holds_budget,
    is_tied,
    loss_over_full_cache,
    margin_of,
    standing,
    tells_apart,
)


@dataclass
class Verdict:
    """Sentences, the most important first."""

    headline: str
    detail: str = ""
    """Its cost."""
    points: list[tuple[str, str]] = field(default_factory=list)
    """What each is about, and what is said of it."""
    caveats: list[str] = field(default_factory=list)


def judge(findings: Findings) -> Verdict:
    """Compute the verdict from the rows; the same rows give the same words."""
    tasks, speeds = findings.tasks, list(judge_speeds(findings.speeds))
    verdict = Verdict("There are failed cells only: see their errors below.", caveats=caveats(findings))
    compressed = [{result.title for result in results if not result.is_full} for results in tasks.values()]
    single = [(task, *judge_task(results)) for task, results in tasks.items()]
    if len(tasks) > 1 and set.intersection(*compressed):
        verdict.headline = judge_all(tasks)
    elif tasks:
        task, verdict.headline, verdict.detail = single.pop(0)
        verdict.headline = f"On {task}: {verdict.headline}"
    elif speeds:
        _, verdict.headline = speeds.pop()
    elif findings.insides:
        verdict.headline = f"{findings.insides[0].name}: {describe(findings.insides[0])}"
    verdict.points += [(task, f"{sentence} {detail}".strip()) for task, sentence, detail in single]
    verdict.points += [*judge_budgets(tasks), *speeds]
    told = not tasks and not findings.speeds
    verdict.points += [(inside.name, describe(inside)) for inside in findings.insides[told:]]
    return verdict


def describe(inside: Inside) -> str:
    """Say what gates merge, or a policy leaves, and how unevenly."""
    ratios = [ratio for layer in inside.ratios for ratio in layer]
    layers = [len(layer) / sum(1 / ratio for ratio in layer) for layer in inside.ratios]
    text = f"CR {inside.ratio:.2f}" + (f" over {inside.text}" if inside.text else " at the end of the run")
    if max(ratios) >= 1.01 * min(ratios):
        text += (
            f", heads from {min(ratios):.2f} to {max(ratios):.2f}, layers from {min(layers):.2f} to {max(layers):.2f}"
        )
    if inside.segments is None:
        return f"{text}."
    return (
        f"{text}; {inside.segments.mean:.2f} tokens share an entry on average, {inside.segments.lengths[-1]} at most."
    )


def judge_all(tasks: dict[str, list[Result]]) -> str:
    """Name the smallest cache that is as good as the full one on every task that tells methods apart."""
    silent = [task for task, results in tasks.items() if not tells_apart(results)]
    tasks = {task: results for task, results in tasks.items() if task not in silent}
    if not tasks:
        return f"None of the {len(silent)} tasks tells methods apart: all have one figure, or the full cache none."
    left_out = f" Left out, for they tell nothing apart: {', '.join(silent)}." if silent else ""
    found: dict[str, list[Result]] = {}
    for result in (result for results in tasks.values() for result in candidates(results)):
        found.setdefault(result.title, []).append(result)
    everywhere = [results for results in found.values() if len(results) == len(tasks)]
    if not everywhere:
        return f"No smaller cache is shown to be as good as the full one on all {len(tasks)} tasks.{left_out}"
    sizes = [sum(share_of_full(result, tasks[result.task]) for result in results) for results in everywhere]
    best = everywhere[sizes.index(min(sizes))]
    return (
        f"{best[0].title} is the smallest cache shown to be as good as the full one on each of the "
        f"{len(tasks)} tasks: {min(sizes) / len(tasks):.0%} of its bytes, achieved CR "
        f"{min(each.achieved_ratio for each in best):.2f} or more.{left_out}"
    )


def judge_task(results: list[Result]) -> tuple[str, str]:
    """Name the smallest cache that is shown to be as good as the full one on a task, and say its cost."""
    first, full, best = results[0], full_cache(results), min(results, key=badness)
    if len(results) == 1:
        return f"only {first.title} has a row; there is nothing to compare it with.", f"It has {cost(first)}."
    if len({result.quality for result in results}) == 1:
        return f"all {len(results)} rows have {figure(first)}; this task tells nothing apart.", ""
    if not tells_apart(results):
        return f"the full cache has {figure(full or first)}; this task tells nothing about smaller ones.", ""
    if full is None:
        return (
            f"without a full cache nothing says what compression costs; best is {best.title}.",
            f"It has {cost(best)}.",
        )
    smaller = [each for each in results if each.over_full_cache is not None and share_of_full(each, results) < 1]
    if not smaller:
        return "no smaller cache has a row on the samples of the full one.", f"That has {cost(full)}."
    if found := candidates(results):
        best = min(found, key=lambda result: (share_of_full(result, results), badness(result)))
        text = f"{best.title} is the smallest cache shown to be as good as the full one, to {margin_of(best):.2g}."
    else:
        best = min(smaller, key=lambda result: (badness(result), result.bytes_per_token))
        text = f"every compressed cache is worse than the full one; {best.title} is the closest."
        if open_ended := [result for result in smaller if standing(result) == "unknown"]:
            text = (
                f"no smaller cache is shown to be as good as the full one, to {margin_of(best):.2g}; of "
                f"{len(open_ended)} the samples cannot tell, more of them would. {best.title} is the closest."
            )
    return text, f"It has {cost(best, full_cache(results, best.model))}. {_doubt(best)}"


def _doubt(result: Result) -> str:
    lost, error = loss_over_full_cache(result), result.over_full_cache_error
    if lost is None or error is None:
        return "There is no standard error: a difference may be noise."
    most = lost + STANDARD_ERRORS * error
    return f"Within noise it may be worse than the full cache by up to {most:.2g}." if most > 0 else ""


def judge_budgets(tasks: dict[str, list[Result]]) -> Iterable[tuple[str, str]]:
    """Name the best methods of each budget, those they tie with, and those that did not hold the budget."""
    budgets: dict[str, dict[str, list[Result]]] = {}
    every = [result for results in tasks.values() for result in results]
    for result in sorted(every, key=lambda each: each.requested_ratio):
        if not result.is_full and result.requested_ratio > 1:
            budgets.setdefault(result.budget, {}).setdefault(result.task, []).append(result)
    for budget, members in budgets.items():
        if len({result.name for results in members.values() for result in results}) > 1:
            yield f"At {budget}", _judge_budget(members, tasks)


def _judge_budget(members: dict[str, list[Result]], tasks: dict[str, list[Result]]) -> str:
    held = {task: [each for each in results if holds_budget(each)] for task, results in members.items()}
    held = {task: results for task, results in held.items() if results}
    missed = {each.name: each.achieved_ratio for found in members.values() for each in found if not holds_budget(each)}
    text = ""
    if not held:
        text = "No method held it. "
    elif len(members) == 1:
        ((task, found),) = held.items()
        best = min(found, key=lambda result: (badness(result), result.bytes_per_token))
        others = [each for each in sorted(found, key=badness) if each is not best]
        tied = [each.name for each in others if is_tied(each, best)]
        unknown = [each.name for each in others if is_tied(each, best) is None]
        price = cost(best, full_cache(tasks[task], best.model))
        text = f"{best.name} is best of {len(found)} that held it, with {price}. "
        text += f"Tied with it, within noise: {', '.join(tied)}. " if tied else ""
        text += "" if tied or unknown else "No other is tied with it. "
        text += (
            f"Without standard errors nothing says whether these tie with it: {', '.join(unknown)}. " if unknown else ""
        )
    else:
        wins: Counter[str] = Counter()
        unknown_ties: set[str] = set()
        for found in held.values():
            best = min(found, key=lambda result: (badness(result), result.bytes_per_token))
            wins.update(each.name for each in found if each is best or is_tied(each, best))
            unknown_ties |= {each.task for each in found if each is not best and is_tied(each, best) is None}
        ranked = [f"{name} ({count})" for name, count in wins.most_common()]
        text = f"Best, or tied with the best, on how many of {len(held)} tasks: {', '.join(ranked)}. "
        if unknown_ties:
            text += f"Without standard errors ties are unknown on: {', '.join(sorted(unknown_ties))}. "
    if missed:
        names = ", ".join(f"{name} ({ratio:.2f})" for name, ratio in missed.items())
        text += f"Not ranked, for they did not hold it (achieved CR): {names}."
    return text.strip()


def judge_speeds(speeds: list[Speed]) -> Iterable[tuple[str, str]]:
    """Name the fastest contestant of every benchmark at its largest batch."""
    for source in dict.fromkeys(speed.source for speed in speeds):
        rows = [speed.measurement for speed in speeds if speed.source == source]
        size = max(row.batch_size for row in rows)
        rows = [row for row in rows if row.batch_size == size]
        plain = next((row for row in rows if row.name == HuggingFaceContestant.name), rows[0])
        best = max(rows, key=lambda row: row.tokens_per_second)
        if len(rows) == 1:
            text = f"{best.name} decodes {best.tokens_per_second:,.0f} tokens/s; there is nothing to compare it with."
        elif best is plain:
            text = f"{best.name} is the fastest of {len(rows)}: {best.tokens_per_second:,.0f} tokens/s."
        else:
            gain, share = best.tokens_per_second / plain.tokens_per_second, best.bytes_allocated / plain.bytes_allocated
            text = (
                f"{best.name} decodes {best.tokens_per_second:,.0f} tokens/s, {gain:.2f} times {plain.name}, with "
                f"{share:.0%} of its cache bytes."
            )
        yield f"Speed, batch {size}", f"{text} Prompts of {rows[0].prompt_length:,} tokens, source {source + 1}."


def caveats(findings: Findings) -> list[str]:
    """Say what is missing, and how far the figures carry."""
    found = []
    if missing := count_missing(findings):
        failed = f", of which {len(findings.failures)} failed" if findings.failures else ""
        found.append(f"Cells (method x budget x task) without a figure: {missing}{failed}.")
    counts = [result.samples for result in findings.results if result.samples is not None]
    if counts:
        fewest = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        found.append(
            f"Noise: {STANDARD_ERRORS} standard errors of the difference, over {fewest} samples per task; more samples "
            "would tell more methods apart, and of many comparisons some mislead. As good as the full cache is what, "
            f"noise included, loses at most {MARGIN:g} nats per token, or of the answers; above 1 that share."
        )
    if any(result.requested_ratio > 1 for result in findings.results):
        found.append(
            f"A budget counts as held from {HELD:.0%} of the ratio asked for; bytes are those allocated, over all "
            "positions that were predicted."
        )
    if any(result.own_gates for result in findings.results):
        found.append("A model with gates of its own has other weights than the full cache it is compared with.")
    return found


def count_missing(findings: Findings) -> int:
    """Count the combinations of method, budget and task without a figure, folder by folder."""
    cells: dict[str, set[tuple[str, str, str]]] = {}
    for result in findings.results:
        cells.setdefault(findings.sources[result.source].folder, set()).add((result.method, result.budget, result.task))
    done = sum(map(len, cells.values()))
    for failure in findings.failures:
        place = (failure.method, failure.budget, failure.task)
        cells.setdefault(findings.sources[failure.source].folder, set()).add(place)
    planned = sum(len({cell[:2] for cell in found}) * len({cell[2] for cell in found}) for found in cells.values())
    return planned - done


def full_cache(results: list[Result], model: str | None = None) -> Result | None:
    """Find the yardstick among a task's results: the full cache of the model, or else the first."""
    full = [result for result in results if result.is_full]
    return next((result for result in full if result.model == model), full[0] if full else None)


def candidates(results: list[Result]) -> list[Result]:
    """List the results that are smaller than the full cache and shown to be as good."""
    return [
        result
        for result in results
        if result.over_full_cache is not None and share_of_full(result, results) < 1 and standing(result) == "as good"
    ]


def share_of_full(result: Result, results: list[Result]) -> float:
    """Return the bytes of a result over those of the full cache."""
    full = full_cache(results, result.model)
    return 1.0 if full is None else result.bytes_per_token / full.bytes_per_token


def figure(result: Result) -> str:
    """Write the quality."""
    return f"{result.metric} {result.quality:.4g}"


def cost(result: Result, full: Result | None = None) -> str:
    """Write what a result costs: quality, bytes, ratio, speed."""
    text = figure(result)
    if result.over_full_cache is not None:
        error = result.over_full_cache_error
        text += f" ({result.over_full_cache:+.2g}" + (f" ± {error:.1g}" if error is not None else "") + ")"
    text += f", {result.bytes_per_token:,.0f} bytes/token"
    if full is not None and full is not result:
        text += f" ({result.bytes_per_token / full.bytes_per_token:.0%} of the full cache's)"
    text += f", CR {result.achieved_ratio:.2f} achieved"
    if full is not None and full.decode_tokens_per_second and result.decode_tokens_per_second:
        text += f", {result.decode_tokens_per_second / full.decode_tokens_per_second:.2f} times its decoding speed"
    return text
