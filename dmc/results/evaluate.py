"""Run lm-eval's tasks with one model and one method, one row for each task; what is finished is not run again."""

from __future__ import annotations

import importlib.metadata
import json
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from dmc.budget import Budget
from dmc.data.sources import file_stamps
from dmc.policies.from_config import policy_from_config
from dmc.provenance import provenance
from dmc.results.benchmarks import Benchmark, check_tasks, list_tasks, read_benchmarks
from dmc.results.chat_form import check_chat_template
from dmc.results.compare import Load, checked, device_name, failure, memory_of, release_memory
from dmc.results.grid import (
    FULL,
    Cell,
    ComparedModel,
    EngineSettings,
    Method,
    build_model,
    check_fits,
    describe_model,
    digest,
    model_settings,
    named_settings,
    plan_methods,
)
from dmc.results.harness import EngineLM
from dmc.results.store import DONE, Row, Store, divide
from dmc.runtime import Engine

FORMAT = 3
"""Raise it when what a cell measures, or what defines it, changes: finished cells then run again."""


@dataclass(frozen=True)
class BudgetSettings:
    """What a policy may keep; both None: no budget, for the full cache."""

    ratio: float | None = None
    """Compression ratio: 1 / ratio of the tokens, growing with those generated."""
    tokens: int | None = None
    """Entries per KV head."""

    def build(self) -> Budget | None:
        """Return the budget.

        Raises:
            ValueError: see `Budget`.
        """
        return None if self.ratio is None and self.tokens is None else Budget(self.ratio, self.tokens)


@dataclass(frozen=True)
class EvaluateConfig:
    """An evaluation as the user writes it.

    Raises:
        ValueError: a value is missing or out of range.
    """

    model: Any
    """Folder or hub name, or a mapping with the fields of `ComparedModel`."""
    tasks: list[Any]
    """See `read_benchmarks`."""
    name: str | None = None
    """Of the model, in tables; None: its folder."""
    policy: Any = FULL
    """Name of `configs/policy/*.yaml`, or a mapping: see `named_settings`."""
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    tasks_folder: str | None = None
    """Folder of your own lm-eval tasks."""
    task_settings: dict[str, Any] = field(default_factory=dict)
    """For tasks that make their own data, such as RULER: {max_seq_lengths: [4096]}."""
    limit: int | None = None
    """First documents of every task that are used; None: all."""
    chat_template: bool = False
    """Whether prompts are written as conversations."""
    system_instruction: str | None = None
    save_samples: bool = False
    """Whether every prompt, answer and score is written to `samples/`."""
    seed: int = 0
    """Of sampled generations."""
    output: str = "outputs/evaluate"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks is empty: give tasks=cs_qa, names of configs/evaluation or tasks of lm-eval")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit}: expected a whole number >= 1, or null for all documents")


@dataclass(frozen=True)
class Evaluation:
    """All cells, and what they need."""

    cells: list[Cell]
    model: ComparedModel
    benchmarks: dict[str, Benchmark]
    """By task."""
    manager: TaskManager


def plan_evaluation(config: EvaluateConfig, configs: Path) -> Evaluation:
    """Look up every name, construct the policy, and list the cells; no data set is loaded.

    Args:
        config: what to evaluate.
        configs: folder that holds `policy/*.yaml` and `evaluation/*.yaml`.
    Raises:
        ValueError: a model, policy, task, option or budget is unknown or out of range.
        FileNotFoundError: there is no `tasks_folder`.
    """
    model = build_model(config.model, "model")
    method = _method(config, configs)
    identity, values, target_ratio = describe_model(model, "model")
    if (policy := method.build()) is not None:
        check_fits(policy, values["num_hidden_layers"], config.engine.block_size, f"{method.name} on {model.path}")
    elif target_ratio is not None:
        method = Method(FULL, {}, None, target_ratio)
    folder = configs / "evaluation"
    benchmarks = read_benchmarks(config.tasks, folder)
    name, known = config.name or model.path, [path.stem for path in folder.glob("*.yaml")]
    names = [task for each in benchmarks for task in each.tasks]
    manager = list_tasks(names, config.tasks_folder, {"pretrained": model.path, **config.task_settings})
    check_tasks(names, manager, known)
    shared = [FORMAT, importlib.metadata.version("lm-eval"), asdict(config.engine), config.seed, config.limit]
    shared += [config.task_settings, config.chat_template, config.system_instruction, _local_files(config.tasks_folder)]
    cells = [
        Cell(name, target_ratio is not None, method, task, digest(identity), digest([*shared, asdict(each)]))
        for each in benchmarks
        for task in each.tasks
    ]
    return Evaluation(cells, model, {task: each for each in benchmarks for task in each.tasks}, manager)


def _method(config: EvaluateConfig, configs: Path) -> Method:
    policies = named_settings([config.policy], configs / "policy", "policy")
    budget = config.budget.build()
    for name, settings in policies.items():
        if settings and name == FULL:
            raise ValueError(f"{settings['_target_']} is not the full cache: give it a name, +policy.name=mine")
        policy_from_config(settings, budget)  # refuses a budget that is missing or given in vain
    (method,) = plan_methods(policies, [] if budget is None else [budget])
    return method


def _local_files(folder: str | None) -> list[list[Any]]:
    return [] if folder is None else file_stamps(path for path in sorted(Path(folder).rglob("*")) if path.is_file())


def run_evaluation(
    evaluation: Evaluation,
    cells: list[Cell],
    config: EvaluateConfig,
    store: Store,
    load: Load,
    make_engine: Callable[..., Engine] = Engine,
) -> None:
    """Measure cells and store a row as soon as each is finished; a cell that fails is stored as failed.

    Args:
        evaluation: the plan.
        cells: those of it that are to run.
        config: settings.
        store: receives the rows.
        load: gives the model, on its device, and its tokenizer; not called if there is nothing to run.
        make_engine: called as `Engine`.
    Raises:
        ValueError: conversations are asked for, and the tokenizer does not know how they are written.
    """
    if not cells:
        return
    try:
        model, tokenizer = load(evaluation.model)
    except Exception as error:
        for cell in divide(cells, store):
            row = describe(cell, evaluation, config) | {"device": "", "provenance": provenance()}
            store.append(row | failure(error))
        return
    if config.chat_template and tokenizer is not None:
        check_chat_template(tokenizer)
    source = provenance()
    with tqdm(total=len(cells), unit="task", smoothing=0) as bar, closing(divide(cells, store)) as own:  # in a log too
        for cell in own:
            bar.set_description(cell.title)
            row = describe(cell, evaluation, config) | {"device": device_name(model), "provenance": source}
            try:
                options = {"policy": cell.method.build(), **asdict(config.engine)}
                row |= checked(measure(cell, evaluation, config, make_engine(model, tokenizer, **options)))
            except Exception as error:  # of a policy, a task, its data or its packages, which others need not share
                row |= failure(error)
                bar.write(f"{cell.title}: {row['error']}", file=sys.stderr)
            store.append(row)
            bar.update()
            release_memory()  # the cache of one cell, before the next


def describe(cell: Cell, evaluation: Evaluation, config: EvaluateConfig) -> Row:
    """Say what a row measures and with which settings."""
    benchmark = evaluation.benchmarks[cell.task]
    return cell.identity() | {
        "benchmark": benchmark.name,
        "members": benchmark.tasks,
        "settings": {
            "model": model_settings(evaluation.model),
            "policy": cell.method.options,
            "task": asdict(benchmark),
            "engine": asdict(config.engine),
            "task_settings": config.task_settings,
            "limit": config.limit,
            "chat_template": config.chat_template,
            "system_instruction": config.system_instruction,
            "seed": config.seed,
            "format": FORMAT,
        },
    }


def measure(cell: Cell, evaluation: Evaluation, config: EvaluateConfig, engine: Engine) -> Row:
    """Run one task.

    Raises:
        ValueError, NotImplementedError: the engine, the task or the tokenizer refuses a setting.
        OSError: the task's data cannot be had.
        ImportError: the task needs a package that is not installed.
    """
    benchmark = evaluation.benchmarks[cell.task]
    lm = EngineLM(engine, requests_at_once=8 * config.engine.max_batch_size, seed=config.seed)
    found: Any = simple_evaluate(
        model=lm,
        tasks=[cell.task],
        task_manager=evaluation.manager,
        num_fewshot=benchmark.num_fewshot,
        gen_kwargs=dict(benchmark.generation) or None,
        limit=config.limit,
        apply_chat_template=config.chat_template,
        fewshot_as_multiturn=config.chat_template,
        system_instruction=config.system_instruction,
        confirm_run_unsafe_code=True,  # `find_tasks` has asked
        log_samples=True,  # what methods are paired by
    )
    if config.save_samples:
        _write_samples(found["samples"], Path(config.output) / "samples" / cell.key)
    values = {name.removesuffix(",none"): value for name, value in found["results"][cell.task].items() if "," in name}
    metrics = {name: value for name, value in values.items() if "_stderr" not in name}
    errors = {name.replace("_stderr", ""): value for name, value in values.items() if "_stderr" in name}
    main = benchmark.choose(list(metrics))
    return {
        "status": DONE,
        "main_metric": main,
        "higher_is_better": found["higher_is_better"].get(cell.task, {}).get(main.split(",")[0], True),
        "metrics": metrics,
        "errors": {name: value for name, value in errors.items() if isinstance(value, float)},
        "samples": sum(each["effective"] for each in found["n-samples"].values()),
        **answers_of(found["samples"], main, metrics[main]),
        "num_fewshot": sorted(set(found["n-shot"].values())),
        "task_versions": found["versions"],
        "prompts_cut": lm.num_cut,
        **memory_of(lm.stats, cell.method.budget),
    }


def answers_of(samples: dict[str, list[dict[str, Any]]], metric: str, figure: float) -> dict[str, Any]:
    """Keep the value of every question, so that methods can be compared question by question.

    Args:
        samples: by lm-eval's task.
        metric: of the figure, with its filter if there are several.
        figure: what the task says.
    Returns:
        Nothing where the figure is not the mean of its questions' values.
    """
    name, _, chosen = metric.partition(",")
    found = [
        (task, each["doc_id"], each["doc_hash"], each[name])
        for task, rows in sorted(samples.items())
        for each in sorted(rows, key=lambda each: each["doc_id"])
        if each.get("filter", "none") == (chosen or "none") and isinstance(each.get(name), (int, float))
    ]
    values = [float(value) for *_, value in found]
    if not values or not math.isclose(statistics.fmean(values), figure, rel_tol=1e-6, abs_tol=1e-9):
        return {}
    return {"sample_values": values, "samples_key": digest([place for *place, _ in found])}


def _write_samples(samples: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in samples.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
