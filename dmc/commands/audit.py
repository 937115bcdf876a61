"""The audit: a comparison that fails where a claim is false, where samples carry none, or nothing was compressed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pandas
from pydantic import Field, StrictFloat

from dmc.config import build_config
from dmc.config.folder import CONFIGS
from dmc.config.settings import Count, OutputFolder, checked_dataclass
from dmc.models.loading import load_tokenizer, load_with_tokenizer
from dmc.policies.protection import Protection
from dmc.results.benchmark import BenchmarkConfig, EngineDecoder, random_prompts, time_interleaved
from dmc.results.claims import Claim, NamedMethod
from dmc.results.compare import run_cells
from dmc.results.equal_bytes import asked_of, bytes_budget
from dmc.results.grid import Cell, CompareConfig, named_settings, plan_grid, plan_methods
from dmc.results.measurement import DONE, Row
from dmc.results.models import PlannedModel, plan_model
from dmc.results.report import read_folders, write_page
from dmc.results.store import Store, replace_file
from dmc.results.tables import markdown, meets_ratio, texts_of, write_tables
from dmc.results.tasks.prompts import Encoder

AUDIT = "audit.md"
"""Claims and counters, beside the tables."""


@checked_dataclass(frozen=True)
class SpeedSettings:
    """How fast each method decodes; all of them take turns, so that all models are loaded."""

    prompt_length: Count = 1024
    new_tokens: Count = 32
    batch_size: Count = 4
    rounds: Count = 4

    def __post_init__(self) -> None:
        if self.new_tokens < self.rounds:
            raise ValueError(f"speed: new_tokens={self.new_tokens} cannot be divided among rounds={self.rounds}")


@checked_dataclass(frozen=True)
class AuditConfig(CompareConfig):
    """Settings of an audit: those of a comparison, and what makes it fail."""

    claim: str | list[str] | None = None
    """Claims, see `dmc.results.claims`; one that is not shown to be true of what it claims fails the audit."""
    protect: Annotated[StrictFloat, Field(gt=0, le=0.25)] | None = 0.1
    """Share of the budget that a second form of each method that evicts protects; None: no second form."""
    chat_tasks: list[Any] = field(default_factory=list)
    """Tasks for conversations; left out where the tokenizer of a model has no chat template with a system prompt."""
    reasoning: list[Any] = field(default_factory=list)
    """Tasks of lm-eval; answers that are sampled have every seed of `lm_eval.seeds`."""
    speed: SpeedSettings | None = None
    """None: speeds are not measured."""
    output: OutputFolder = "outputs/audit"

    @property
    def claims(self) -> list[Claim]:
        """Read the claims.

        Raises:
            ValueError: see `Claim.parse`.
        """
        given = [self.claim] if isinstance(self.claim, str) else self.claim or []
        return [Claim.parse(text) for text in given]


@dataclass(frozen=True)
class PlannedAudit:
    """What an audit measures."""

    cells: list[Cell]
    reference: str | None
    """Variant whose full cache `full` is."""
    left_out: list[str]
    """What it leaves out, and why."""


def plan_audit(config: AuditConfig, configs: Path) -> PlannedAudit:
    """Add protected forms and the tasks that suit the models, and check all names, those of the claims too.

    Args:
        config: the audit.
        configs: folder of policies, tasks and selections.
    Raises:
        ValueError, FileNotFoundError, ImportError: see `plan_grid` and `Claim.check`.
    """
    claims, tasks, left_out = config.claims, [*config.tasks, *config.reasoning], list[str]()
    if config.chat_tasks:
        models = [plan_model(name, model) for name, model in config.models.items()]
        why = [reason for model in models if (reason := _takes_no_system_prompt(model))]
        left_out += [f"left out: conversations: {'; '.join(why)}"] if why else []
        tasks += [] if why else config.chat_tasks
    if not config.reasoning:
        downloaded = "reasoning=[reasoning_sampled], which downloads its data"
        left_out.append(f"left out: reasoning: no task was given ({downloaded})")
    policies = [*config.policies, *(protected(config.policies, config.protect, configs) if config.protect else [])]
    cells = plan_grid(replace(config, policies=policies, tasks=tasks), configs)
    names = {cell.model.name: cell.model.variant for cell in cells}
    reference = names.get(str(cells[0].config.reference), cells[0].config.reference)
    metrics = {cell.task.name: cell.task.task.main_metric or None for cell in cells}
    for claim in claims:
        claim.check(map(_method_of, cells), metrics, reference)
    return PlannedAudit(cells, reference, left_out)


def protected(policies: Sequence[Any], share: float, configs: Path) -> list[Any]:
    """Return a form of each method that evicts which protects the bounds of prompts (arXiv:2605.18053)."""
    found, known = [], named_settings(policies, configs / "policy", "policies")
    for entry, (name, settings) in zip(policies, known.items(), strict=True):
        evicts = settings and isinstance(plan_methods({name: settings}, [2])[0].build(), Protection)
        if evicts and not settings.get("protect"):
            changes = {"name": f"{name}+protect={share:g}", "protect": share}
            if changes["name"] not in known:
                found.append(changes["name"] if isinstance(entry, str) else entry | changes)
    return found


def _takes_no_system_prompt(model: PlannedModel) -> str:
    """Return why a model cannot be asked in a conversation; empty: it can."""
    try:
        tokenizer = load_tokenizer(model.settings.path, model.settings.revision)
        if not getattr(tokenizer, "chat_template", None):
            return f"{model.name} has no chat template"
        Encoder(tokenizer).conversation(["system", "user"])
    except ValueError as error:
        return f"{model.name}: {error}"
    return ""


def _method_of(cell: Cell) -> NamedMethod:
    budget, learned = cell.method.budget_name, cell.model.is_learned
    return NamedMethod(cell.model.variant, cell.method.name, budget, budget is None and not learned)


def run_audit(config: AuditConfig, configs: Path) -> str | None:
    """Measure what is not measured yet, and print tables, verdict, counters and claims.

    Args:
        config: the audit.
        configs: folder of policies, tasks and selections.
    Returns:
        What makes the audit fail; None: nothing.
    Raises:
        ValueError, FileNotFoundError, ImportError: see `plan_audit`; nothing has been written.
    """
    plan, folder = plan_audit(config, configs), Path(config.output)
    store, keys = Store(folder / "cells.jsonl"), {cell.key for cell in plan.cells}
    run_cells(plan.cells, store, lambda model: load_with_tokenizer(model.path, model.dtype, model.revision))
    rows = [row for row in store.rows() if row["key"] in keys]
    shown = {*keys}
    for row in measure_speeds(config.speed, plan.cells, rows) if config.speed is not None else ():
        store.append(row)
        shown.add(row["key"])
    tables = write_tables(store, folder, config.reference, keys=shown)
    failed = [f"{row['key']}: {row.get('error', row['status'])}" for row in rows if row["status"] != DONE]
    judged, refuted = judge(config.claims, store.frame(keys), plan.reference)
    failed += [*idle_cells(rows), *refuted]
    parts = ["### What compression did", counters(rows), *plan.left_out]
    said = "\n\n".join([*parts, *(["### Claims"] if judged else []), *judged])
    replace_file(folder / AUDIT, f"{said}\n".encode())
    findings = read_folders([folder], config.reference, shown)
    findings.claims += judged
    page = write_page(findings, folder / "report", "Audit of a compressed cache")
    print(f"\n{tables}\n\n{said}\n\n{folder / AUDIT}, {page}")
    return "\n  ".join(["error: the audit failed:", *failed]) if failed else None


def judge(claims: Sequence[Claim], frame: pandas.DataFrame, reference: str | None) -> tuple[list[str], list[str]]:
    """Return what measurements say of each claim, and of these the ones that are not true."""
    said, refuted = list[str](), list[str]()
    for claim in claims:
        try:
            found = claim.judge(frame, reference)
            said.append(str(found))
            is_true = found.standing == "true"
        except ValueError as error:  # a cell of it has failed
            said.append(f"not measured: {error}")
            is_true = False
        refuted += [] if is_true else said[-1:]
    return said, refuted


def asked_to_compress(row: Row | pandas.Series) -> bool:
    """Return whether a finished row's method was to hold or read less than everything."""
    return (row["learned"] or not pandas.isna(row["budget"])) and row["requested_ratio"] > 1


def acted(row: Row) -> tuple[int, int]:
    """Return the entries that a row's cell removed or merged, and those that it left unread, summed over its steps."""
    return row["entries_seen"] - row["entries_held"], row["entries_unread"]


def idle_cells(rows: Sequence[Row]) -> list[str]:
    """Describe cells in which nothing was compressed although it was asked for, or nothing was counted."""
    found = []
    for row in rows:
        if row["status"] == DONE and "entries_seen" not in row:
            found.append(f"{row['key']}: an earlier version measured it and counted nothing: give overwrite=true")
        elif row["status"] == DONE and asked_to_compress(row) and not any(acted(row)):
            asked, seen = f"CR {row['requested_ratio']:.3g} was asked for", f"{row['entries_seen']:,}"
            found.append(f"nothing was compressed: {row['key']}: {asked}, and all {seen} entries were held and read")
    return found


def counters(rows: Sequence[Row]) -> str:
    """Format what each cell's compression did: at the last step of every sample, but reads left out in all steps.

    CR held is over the scored positions. A cell whose CR does not meet what was asked for has an arrow.
    """

    def end_ratio(line: pandas.Series) -> str:
        held = max(line["achieved_ratio"], line["mean_achieved_ratio"])
        of_bytes = bytes_budget(line["budget"]) is not None
        is_missed = asked_to_compress(line) and not of_bytes and not meets_ratio(held, line["requested_ratio"])
        return f"{line['achieved_ratio']:.2f}" + (" ↓" if is_missed else "")

    lines = pandas.DataFrame([row for row in rows if row["status"] == DONE and "entries_seen" in row])
    if lines.empty:
        return "Nothing was counted."
    columns: Any = {
        "method": ("method", ""),
        "asked": lambda line: asked_of({**line, "is_full": pandas.isna(line["budget"]) and not line["learned"]}),
        "task": ("task", ""),
        "entries seen": ("entries_seen", ",d"),
        "removed or merged": lambda line: f"{acted(line)[0]:,}",
        "left unread, all steps": lambda line: f"{acted(line)[1]:,}",
        "CR held": ("mean_achieved_ratio", ".2f"),
        "CR at the end": end_ratio,
    }
    return markdown(texts_of(lines, columns))


def measure_speeds(settings: SpeedSettings, cells: Sequence[Cell], rows: Sequence[Row]) -> Iterator[Row]:
    """Let all methods decode in turns, at the ratios that they had in the first task.

    Args:
        settings: prompts and steps.
        cells: those of the audit.
        rows: their rows.
    Yields:
        Rows for a `Store`.
    """
    found, models = {row["key"]: row for row in rows if row["status"] == DONE}, dict[str, Any]()
    decoders, first = list[EngineDecoder](), cells[0].task.name
    for cell in cells:
        row = found.get(cell.key)
        if cell.task.name != first or row is None:
            continue
        model, ratio = cell.model.settings, row["requested_ratio"]
        if cell.model.name not in models:
            models[cell.model.name] = load_with_tokenizer(model.path, model.dtype, model.revision)[0]
        dtype: Any = str(models[cell.model.name].dtype).removeprefix("torch.")
        engine: Any = cell.config.engine
        config = BenchmarkConfig(
            model.path, dtype=dtype, prompt_length=settings.prompt_length, new_tokens=settings.new_tokens,
            rounds=settings.rounds, block_size=engine.block_size, kernels=engine.kernels,
            kv_cache_dtype=engine.kv_cache_dtype, seed=cell.config.seed,
        )  # fmt: skip
        prompts = random_prompts(models[cell.model.name], settings.batch_size, config)
        name = f"engine: {row['method']}" + ("" if cell.method.budget_name is None else f" at CR {ratio:.3g}")
        policy = cell.method.build(ratio)
        decoders.append(EngineDecoder(models[cell.model.name], ratio, prompts, config, policy, name))
    if decoders:
        yield from time_interleaved(decoders, settings.batch_size)


def main(settings: Any) -> None:
    """Run an audit; it ends non-zero where a claim is false, or nothing was compressed."""
    sys.exit(run_audit(build_config(AuditConfig, settings), CONFIGS))
