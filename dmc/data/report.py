"""Report of the amount of text in each source, and how often a run reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dmc.data.order import Blend
from dmc.data.packing import PackedTokens
from dmc.data.sources import DocumentSource

REPORT_NAME = "data.json"


@dataclass(frozen=True)
class SourceReport:
    """Size of a source; None where it is unknown, as for a stream."""

    split: str
    """train, validation, calibration or test."""
    source: str
    share: float
    """Share of the split's sequences that are drawn from it."""
    num_tokens: int | None = None
    """Number of tokens, separators included."""
    num_documents: int | None = None
    num_skipped: int | None = None
    """Number of documents without text, or undecodable."""
    num_bytes: int | None = None
    """Size of the tokens on disk."""
    epochs: float | None = None
    """Number of times the run reads the source; for training text only."""


def report_sources(
    split: str,
    sources: Sequence[DocumentSource],
    packed: PackedTokens | Blend | None = None,
    num_draws: int | None = None,
) -> list[SourceReport]:
    """Report the sources of a split.

    Args:
        split: name of the split.
        sources: sources of `packed`.
        packed: result of `build_packed`; None: streams, of which only the shares are known.
        num_draws: number of sequences drawn by the run; None for text that is not trained on.
    """
    if packed is None:
        total = sum(source.weight for source in sources)
        return [SourceReport(split, source.label, source.weight / total) for source in sources]
    if isinstance(packed, Blend):
        parts, shares, draws = packed.datasets, packed.shares, packed.draws_of_each(num_draws or 0)
    else:
        parts, shares, draws = [packed], [1], [num_draws or 0]
    reports = []
    for source, part, share, drawn in zip(sources, parts, shares, draws, strict=True):
        counts = (len(part.tokens), part.tokens.num_documents, part.tokens.num_skipped, part.tokens.num_bytes)
        epochs = None if num_draws is None else drawn / len(part)
        reports.append(SourceReport(split, source.label, share / sum(shares), *counts, epochs))
    return reports


def format_report(reports: Sequence[SourceReport]) -> str:
    """Write a report as a Markdown table."""
    lines = [
        "| split | source | share | tokens | documents | skipped | bytes | epochs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        counts = (report.num_tokens, report.num_documents, report.num_skipped, report.num_bytes)
        shown = ["?" if count is None else f"{count:,}" for count in counts]
        epochs = "" if report.epochs is None else f"{report.epochs:.3g}"
        lines.append(f"| {' | '.join([report.split, report.source, f'{report.share:.1%}', *shown, epochs])} |")
    return "\n".join(lines)


def write_report(reports: Sequence[SourceReport], folder: Path) -> None:
    """Write a report as `data.json` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT_NAME).write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
