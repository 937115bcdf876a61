"""The main job: train gates, compare caches in equal bytes, write a page, and name the commands to go on with.

Its model is a pretrained one that the package index has, or a tiny one that it trains itself (`quickstart_tiny.py`).
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas
import transformers

from dmc.commands.import_gguf import ImportConfig
from dmc.config import build_config
from dmc.files import flattened
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import compare
from dmc.results.grid import Cell, CompareConfig, plan_grid
from dmc.results.measurement import Row
from dmc.results.report import read_folders, write_page
from dmc.results.store import Store
from dmc.results.verdict import ACCURACY, verdicts_of
from dmc.training.config import RunConfig
from dmc.training.run import train

QUESTION = "What is a paper clip good for?"
PROMPT = "def read_lines(path):"
"""What the command at the end asks a model with a chat template, or lets another go on with."""

LEGEND = (
    "Questions are asked only after the cache of their text was compressed. Losses are in nats per token; in brackets\n"
    "is what compression adds. ±: standard error over texts. Bytes: all that is allocated, and the share of the full.\n"
    "CR: tokens for each entry that the cache holds; on short texts the newest tokens, all held, make it less."
)


@dataclass(frozen=True)
class Quickstart:
    """What the main job trains, in this order, and measures then."""

    title: str
    """Title of the page."""
    runs: dict[str, RunConfig]
    """Trainings; the last one's model is the result."""
    grid: CompareConfig


def bring_model(settings: Mapping[str, Any]) -> bool:
    """Bring the pretrained model, unless it is there; return False, and say why in one line, if it cannot be had.

    Args:
        settings: those of `ImportConfig`.
    Raises:
        ValueError: the index has another file under its name.
        FileExistsError: other files are in its place.
    """
    transformers.utils.logging.disable_progress_bar()
    try:
        print(build_config(ImportConfig, settings).run(), file=sys.stderr)
    except (FileNotFoundError, ImportError) as error:
        print(f"no pretrained model: {error}. Going on with a tiny base, trained from scratch", file=sys.stderr)
        return False
    return True


def of_pretrained(retrofit: RunConfig, grid: Mapping[str, Any]) -> Quickstart:
    """Put together the training of gates on a pretrained model, and what its caches are asked.

    Args:
        retrofit: training of the gates.
        grid: settings of `CompareConfig`, with the models `base` and `gates`.
    """
    dtype, final = retrofit.training.export_dtype or retrofit.dtype, str(Path(retrofit.output_dir) / "final")
    paths = {"base": str(retrofit.model), "gates": final}
    models = {name: {**grid["models"][name], "path": path, "dtype": dtype} for name, path in paths.items()}
    title = f"Quickstart: a cache of {Path(paths['base']).name} by learned gates"
    return Quickstart(title, {"gates": retrofit}, build_config(CompareConfig, {**grid, "models": models}))


def run_quickstart(job: Quickstart, configs: Path) -> None:
    """Run or reuse the trainings, measure the models, print what was found, and write the page.

    Args:
        job: trainings and measurements.
        configs: folder of policies and tasks.
    """
    transformers.utils.logging.disable_progress_bar()  # of weights, which load in a second
    start, folder, steps = time.perf_counter(), Path(job.grid.output), len(job.runs) + 1

    def tell(number: int, what: str) -> None:
        print(f"[{number}/{steps}] {what}, after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    for number, (name, config) in enumerate(job.runs.items(), start=1):
        tell(number, f"train {name}: {config.output_dir}")
        final = train(config).final
    tell(steps, f"measure what each cache loses: {folder}")
    cells = plan_grid(job.grid, configs)
    replaced = of_replaced_weights(cells, Store(folder / "cells.jsonl"))
    grid = replace(job.grid, overwrite=job.grid.overwrite or replaced)
    compare(grid, configs, load_with_tokenizer, only_this_grid=True)
    findings = read_folders([folder], grid.reference, {cell.key for cell in cells})
    page = write_page(findings, folder / "report", job.title)
    print(f"\n{result_table(findings.summary)}\n\n{LEGEND}\n")
    print(*verdicts_of(findings.summary, findings.baselines), sep="\n\n")
    print(f"\n{time.perf_counter() - start:.0f} s in all. The page with all plots and tables: {page}")
    print(f"\n{closing_words(final)}")


def of_replaced_weights(cells: Iterable[Cell], store: Store) -> bool:
    """Return whether a cell was measured with weights that have been replaced since."""

    def versions(row: Row) -> dict[str, Any]:  # of its model, and of that whose bytes it has
        return {
            name: value for name, value in flattened(row.get("settings") or {}).items() if name.endswith(".version")
        }

    return any((row := store.row(cell.key)) and versions(row) != versions(cell.row) for cell in cells)


def result_table(summary: pandas.DataFrame) -> str:
    """Format what each cache holds and loses, a line for each: bytes per token, then right answers, or the loss.

    Args:
        summary: of `statistics.summarize`, with the column `name`.
    """
    cells: dict[str, dict[str, str]] = {}
    for _, line in summary.iterrows():
        of = line["task"]
        size = f"{line['bytes_per_token']:,.0f} ({line['share']:.0%})"
        told = {f"{of}: bytes per token": size, f"{of}: {_measure(line)}": _told(line)}
        cells.setdefault(line["name"], {}).update(told)
    table = pandas.DataFrame.from_dict(cells, orient="index").fillna("").rename_axis("cache").reset_index()
    rows = [[*table.columns], *table.to_numpy().tolist()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _measure(line: pandas.Series) -> str:
    return "right answers" if line["metric"] in ACCURACY else line["metric"].replace("_", " ")


def _told(line: pandas.Series) -> str:
    """Format a value with its standard error: answers are counted, a loss stands with what compression adds to it."""
    if line["metric"] in ACCURACY:
        error = "" if pandas.isna(line["value_error"]) else f" (± {line['value_error'] * line['samples']:.1f})"
        return f"{line['value'] * line['samples']:.0f} of {line['samples']}{error}"
    if line["is_full"] or pandas.isna(line["lost"]):
        return f"{line['value']:.3f}"
    return f"{line['value']:.3f} ({line['lost']:+.3f} ± {line['lost_error']:.3f})"


def closing_words(final: Path) -> str:
    """Return the commands to go on with: to chat, or to write, and to serve."""
    dmc = pasted_command()
    is_chat = (final / "chat_template.jinja").is_file()
    ask = f"chat=true prompt='{QUESTION}'" if is_chat else f"prompt='{PROMPT}'"
    return (
        f"{'Chat' if is_chat else 'Write'} with the compressed model:\n  {dmc} generate model={final} {ask}\n"
        f"Serve it, with OpenAI's API and a chat page at http://127.0.0.1:8000:\n  {dmc} serve model={final}"
    )


def pasted_command() -> str:
    """Return how a shell here finds `dmc`: by its name, by the path beside this Python, or as a module of it."""
    python, here = Path(sys.executable), Path.cwd()
    program = python.with_name("dmc")
    if (found := shutil.which("dmc")) and Path(found).parent == python.parent:
        return "dmc"
    chosen = program if program.is_file() else python
    chosen = chosen.relative_to(here) if chosen.is_relative_to(here) else chosen
    return shlex.quote(str(chosen)) + ("" if program.is_file() else " -m dmc")
