"""The page's tables: what a cell shows, and the number by which it is sorted."""

from __future__ import annotations

from dataclasses import dataclass

from dmc.results.report.findings import Findings, Result
from dmc.results.report.judgement import HELD, holds_budget, pareto_front


@dataclass(frozen=True)
class TableCell:
    """Text, and a number where it is one."""

    text: str
    number: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows under column titles."""

    title: str
    caption: str
    columns: list[str]
    rows: list[tuple[str, list[TableCell]]]
    """The method of a row, by which the page lights it up, and its cells."""

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers."""
        return any(cells[column].number is not None for _, cells in self.rows)


def result_table(findings: Findings) -> Table:
    """Put every result into a row."""
    columns = [
        *("method", "budget", "task", "metric", "quality", "over full cache", "requested CR", "achieved CR"),
        *("bytes/token", "peak bytes", "prefill tokens/s", "decode tokens/s", "samples", "source"),
    ]
    fronts = [pareto_front(own, lambda each: each.bytes_per_token) for own in findings.tasks.values()]
    front = {id(each) for own in fronts for each in own}
    rows = [(each.method, _result_cells(each, id(each) in front)) for each in findings.results]
    caption = f"★: on the front of quality and bytes. ↓: below {HELD:.0%} of the ratio asked for. ±: standard error. "
    caption += "CR and bytes/token are means over all positions that were predicted."
    return Table("All results", caption, columns, rows)


def _result_cells(each: Result, on_front: bool) -> list[TableCell]:
    return [
        TableCell(each.name + (" ★" if on_front else "")),
        TableCell(each.budget),
        TableCell(each.task),
        TableCell(f"{each.metric}\u00a0{'↑' if each.higher_is_better else '↓'}"),
        _with_error(each.quality, each.quality_error, ".4f"),
        _with_error(each.over_full_cache, each.over_full_cache_error, "+.4f"),
        _number(each.requested_ratio, ".2f"),
        TableCell(f"{each.achieved_ratio:.2f}" + ("" if holds_budget(each) else " ↓"), each.achieved_ratio),
        _number(each.bytes_per_token, ",.0f"),
        _number(each.bytes_allocated, ",d"),
        _number(each.prefill_tokens_per_second, ",.1f"),
        _number(each.decode_tokens_per_second, ",.1f"),
        _number(each.samples, ",d"),
        _number(each.source + 1, "d"),
    ]


def speed_table(findings: Findings) -> Table:
    """Put every measurement of a benchmark into a row, and every largest batch."""
    columns = [
        *("contestant", "prompt tokens", "batch", "achieved CR", "first token (s)", "ms/token", "tokens/s"),
        *("cache bytes", "source"),
    ]
    rows = []
    for speed in findings.speeds:
        row = speed.measurement
        cells = [
            TableCell(row.name),
            _number(row.prompt_length, ",d"),
            _number(row.batch_size, "d"),
            _number(row.achieved_ratio, ".2f"),
            _number(row.first_token_seconds, ".2f"),
            _number(1e3 * row.token_seconds, ".1f"),
            _number(row.tokens_per_second, ",.1f"),
            _number(row.bytes_allocated, ",d"),
            _number(speed.source + 1, "d"),
        ]
        rows.append((row.name, cells))
    for each in findings.largest_batches:
        name, empty = f"engine CR {each.ratio:g}", TableCell("")
        cells = [TableCell(f"{name}, largest batch"), empty, _number(each.batch_size, "d"), *[empty] * 4]
        rows.append((name, [*cells, _number(each.memory, ",d"), _number(each.source + 1, "d")]))
    return Table("Speed and memory", "Medians; contestants of one batch size took turns.", columns, rows)


def failure_table(findings: Findings) -> Table:
    """Put every failed cell into a row."""
    rows = []
    for each in findings.failures:
        texts = (each.method, each.budget, each.task, each.error)
        rows.append((each.method, [*map(TableCell, texts), _number(each.source + 1, "d")]))
    caption = "Start the same command again: finished cells are not repeated, failed ones are."
    return Table("Failed cells", caption, ["method", "budget", "task", "error", "source"], rows)


def _number(value: float | None, form: str) -> TableCell:
    return TableCell("") if value is None else TableCell(format(value, form), value)


def _with_error(value: float | None, error: float | None, form: str) -> TableCell:
    if value is None:
        return TableCell("")
    return TableCell(format(value, form) + ("" if error is None else f" ± {error:.4f}"), value)
