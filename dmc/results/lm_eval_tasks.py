"""Tasks of lm-evaluation-harness in a grid, one by one or as a paper's selection; needs the extra `eval`."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from omegaconf import OmegaConf
from pydantic import Field, StrictBool, StrictFloat, StrictInt

from dmc.config.settings import Count, build_config, checked_dataclass
from dmc.data.sources import files_digest
from dmc.files import json_digest
from dmc.results.measurement import Row
from dmc.results.tasks import Conditions, Sample, Task
from dmc.results.tasks.asking import Question
from dmc.results.tasks.voting import VotingOptions
from dmc.runtime import Engine, GenerationStats

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

LONG_CONTEXT = str(Path(__file__).with_name("long_context"))
"""Folder of this project's tasks for lm-eval."""
CODE_CONSENT = "HF_ALLOW_CODE_EVAL"
"""Environment variable that allows Hugging Face's code_eval to run generated code."""


@checked_dataclass(frozen=True)
class Benchmark:
    """One column of a table: a task of lm-eval, or the mean of several."""

    name: str
    """Name of a task or group of lm-eval, or a new name for the mean of several."""
    members: list[str] = field(default_factory=list)
    """Tasks or groups of lm-eval to average with equal weights; empty: the one named `name`."""
    num_fewshot: StrictInt | None = None
    """Number of examples before each question; None: the task's default."""
    metric: str | list[str] | None = None
    """Metric to show, or several of which the first that a task has is shown; None: a task's first."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Generation settings of lm-eval that replace the task's: {do_sample: true, temperature: 0.1}."""
    context_field: str | None = None
    """Field of a document with its context, after which a prompt's question begins; None: see `question_marks`."""
    question_marks: list[str] = field(default_factory=list)
    """Texts that begin a question; the last one in a prompt counts."""
    answer_pattern: str | None = None
    """Regular expression of an answer in a generated text, of which the last match counts, in a vote among several."""

    @property
    def tasks(self) -> list[str]:
        """Return the names of the tasks in lm-eval."""
        return self.members or [self.name]

    @property
    def can_hide(self) -> bool:
        """Return whether it is known where questions begin."""
        return self.context_field is not None or bool(self.question_marks)

    def question_at(self, prompt: str, document: dict[str, Any]) -> int:
        """Find where a prompt's question begins.

        Raises:
            ValueError: the prompt has no question, or nothing before it.
        """
        if self.context_field is not None:
            context = str(document.get(self.context_field, "")).strip()
            found = prompt.rfind(context) + len(context) if context and context in prompt else -1
        else:
            found = max((prompt.rfind(mark) for mark in self.question_marks), default=-1)
        if not 0 < found < len(prompt):
            raise ValueError(f"question=hidden: no question of {self.name} begins in {prompt[-200:]!r}")
        return found

    def choose(self, metrics: Sequence[str]) -> str:
        """Choose the shown metric of a task (`acc`, or `exact_match,strict-match` where answers are filtered).

        Raises:
            ValueError: the task has no such metric.
        """
        wanted = [self.metric] if isinstance(self.metric, str) else self.metric or [metrics[0]]
        for name in wanted:
            for metric in metrics:
                if name in (metric, metric.split(",")[0]):
                    return metric
        raise ValueError(f"{self.name}: metric={self.metric!r} is none of {', '.join(metrics)}")


def read_benchmarks(entries: Sequence[Any], folder: Path) -> list[Benchmark]:
    """Read the setting `tasks`.

    Args:
        entries: names of YAML files in `folder`, which stand for their own `tasks`; names of lm-eval's tasks; or
            mappings with the fields of `Benchmark`.
        folder: folder of the selections.
    Raises:
        ValueError: a field is unknown or of another type, or a task is given twice.
    """
    found: list[Benchmark] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, str) and (file := folder / f"{entry}.yaml").is_file():
            selection: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
            found += read_benchmarks([task for task in selection["tasks"] if task != entry], folder)
        else:
            values = {"name": entry} if isinstance(entry, str) else entry
            found.append(build_config(Benchmark, values, f"tasks[{index}]"))
    names = [task for benchmark in found for task in benchmark.tasks]
    for name in {name for name in names if names.count(name) > 1}:
        raise ValueError(f"tasks: {name!r} is given twice; run the second one into another output folder")
    return found


@checked_dataclass(frozen=True)
class LMEvalSettings(VotingOptions):
    """Settings of lm-eval's tasks.

    Raises:
        ValueError: a value is out of range.
        FileNotFoundError: there is no such folder.
    """

    tasks_folder: str | None = None
    """Folder of your own lm-eval tasks."""
    task_settings: dict[str, Any] = field(default_factory=dict)
    """Settings for tasks that make their own data, such as RULER: {max_seq_lengths: [4096]}."""
    limit: Count | None = None
    """Number of first documents to use of every task; None: all."""
    max_gen_toks: Count | None = None
    """Maximum tokens of an answer; None: the task's default."""
    question: Question | Literal["both"] = "known"
    """hidden: the context of a generating task is compressed before the question is fed, if its benchmark says where
    that begins; both: each such task runs both ways."""
    temperature: Annotated[StrictFloat, Field(ge=0, le=100)] | None = None
    """Temperature of all generations, 0 is greedy; None: the task's settings."""
    chat_template: StrictBool = False
    """Whether prompts are written as conversations."""
    system_instruction: str | None = None
    seeds: list[StrictInt] = field(default_factory=list)
    """Tasks whose `generation` says do_sample: every question is answered once with each; empty: with the grid's."""
    save_samples: StrictBool = False
    """Whether every prompt, answer and score is written to `samples/`."""

    def __post_init__(self) -> None:
        if self.tasks_folder is not None and not Path(self.tasks_folder).is_dir():
            raise FileNotFoundError(f"tasks_folder={self.tasks_folder}: there is no such folder")
        if self.temperature is not None:
            self.check_temperature(self.temperature)

    def list_tasks(self, names: tuple[str, ...], model: str) -> TaskManager:
        """List what can be evaluated, see `list_tasks`; tasks that make their data use a model's tokenizer."""
        return list_tasks(names, self.tasks_folder, json.dumps({"pretrained": model, **self.task_settings}))


@dataclass(frozen=True)
class LMEvalTask(Task):
    """One of lm-eval's tasks, or of its groups that have a score: lm-eval makes its samples, and scores the answers.

    What is fed, and how an answer is written, is `EngineLM`'s.
    """

    name: str
    """Name in lm-eval."""
    benchmark: Benchmark
    """Benchmark that it is, or is a part of."""
    settings: LMEvalSettings
    names: tuple[str, ...]
    """Names of all tasks that are loaded together."""

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of several sampled answers to every question; empty: there is one answer."""
        return self.settings.seeds if self.benchmark.generation.get("do_sample") else []

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """Return none: lm-eval makes them when it measures."""
        return []

    def row_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the settings in its rows, with what else defines the task; saving samples changes no result."""
        defaults = {"chains": 1, "vote": "majority", "temperature": None}.items()  # which older rows do not name
        lm_eval = {name: value for name, value in asdict(self.settings).items() if (name, value) not in defaults}
        del lm_eval["save_samples"]
        if not self.seeds:
            del lm_eval["seeds"]
        lm_eval["version"] = importlib.metadata.version("lm-eval")
        if self.settings.tasks_folder is not None:
            files = sorted(path for path in Path(self.settings.tasks_folder).rglob("*") if path.is_file())
            lm_eval["content"] = files_digest([path for path in files if "__pycache__" not in path.parts])[:16]
        task = asdict(self.benchmark)
        if self.settings.chains == 1:
            task.pop("answer_pattern")
        return {"task": task, "lm_eval": lm_eval}

    def row(self, name: str) -> Row:
        """Return the fields of its rows that are known before it runs; `name` ends in ":hidden" where both run."""
        end = name.removeprefix(self.name)
        members = [member + end for member in self.benchmark.tasks]
        return {"benchmark": self.benchmark.name + end, "members": members, "question": self.settings.question}

    def measure(
        self, engine: Engine, samples: Sequence[Sample], conditions: Conditions
    ) -> tuple[Row, list[GenerationStats]]:
        """Run the task on an engine with a tokenizer, with several seeds one after the other.

        Returns:
            The metrics, and the memory of every sequence.
        Raises:
            ValueError, NotImplementedError: the engine, the task or the tokenizer refuses a setting.
            OSError: the task's data cannot be loaded.
            ImportError: the task needs a package that is not installed.
        """
        runs = [
            self._run_once(
                engine, replace(conditions, seed=seed, folder=conditions.folder / (f"seed{seed}" if self.seeds else ""))
            )
            for seed in self.seeds or [conditions.seed]
        ]
        return over_seeds([row for row, _ in runs]), [stats for _, of_run in runs for stats in of_run]

    def _run_once(self, engine: Engine, conditions: Conditions) -> tuple[Row, list[GenerationStats]]:
        """See `measure`."""
        from lm_eval import simple_evaluate

        from dmc.results.harness import EngineLM

        question_at = self.benchmark.question_at if self.settings.question == "hidden" else None
        pattern, temperature = self.benchmark.answer_pattern, self.settings.temperature
        lm = EngineLM(
            engine, 8 * conditions.together, conditions.seed, question_at, self.settings, pattern, temperature
        )
        length = self.settings.max_gen_toks
        generation = self.benchmark.generation | ({} if length is None else {"max_gen_toks": length})
        found: Any = simple_evaluate(
            model=lm,
            tasks=[self.name],
            task_manager=self.settings.list_tasks(self.names, conditions.model),
            num_fewshot=self.benchmark.num_fewshot,
            gen_kwargs=generation or None,
            limit=self.settings.limit,
            apply_chat_template=self.settings.chat_template,
            fewshot_as_multiturn=self.settings.chat_template,
            system_instruction=self.settings.system_instruction,
            confirm_run_unsafe_code=allows_code(),
            log_samples=True,  # for pairing methods by question
        )
        if self.settings.save_samples:
            conditions.folder.mkdir(parents=True, exist_ok=True)
            for task, rows in found["samples"].items():
                lines = "".join(json.dumps(row, default=str) + "\n" for row in rows)
                (conditions.folder / f"{task}.jsonl").write_text(lines)
        values = {
            name.removesuffix(",none"): value for name, value in found["results"][self.name].items() if "," in name
        }
        metrics = {name: value for name, value in values.items() if "_stderr" not in name}
        errors = {name.replace("_stderr", ""): value for name, value in values.items() if "_stderr" in name}
        main = self.benchmark.choose(list(metrics))
        return {
            "main_metric": main,
            "higher_is_better": found["higher_is_better"].get(self.name, {}).get(main.split(",")[0], True),
            "metrics": metrics | lm.mean_memory(),
            "errors": {name: value for name, value in errors.items() if isinstance(value, float)},
            "samples": sum(count["effective"] for count in found["n-samples"].values()),
            **answers_of(found["samples"], main, metrics[main]),
            "num_fewshot": sorted(set(found["n-shot"].values())),
            "task_versions": found["versions"],
            "prompts_cut": lm.num_cut,
        }, lm.stats


def answers_of(samples: dict[str, list[dict[str, Any]]], metric: str, value: float) -> Row:
    """Return the score of every question, so that methods can be compared question by question.

    Args:
        samples: samples by lm-eval's task.
        metric: metric, with its filter if there are several.
        value: the task's score.
    Returns:
        The scores; empty if the task's score is not their mean.
    """
    name, _, chosen = metric.partition(",")
    found = [
        (task, sample["doc_id"], sample["doc_hash"], sample[name])
        for task, rows in sorted(samples.items())
        for sample in sorted(rows, key=lambda sample: sample["doc_id"])
        if sample.get("filter", "none") == (chosen or "none") and isinstance(sample.get(name), (int, float))
    ]
    values = [float(value) for *_, value in found]
    if not values or not math.isclose(statistics.fmean(values), value, rel_tol=1e-6, abs_tol=1e-9):
        return {}
    return {"sample_values": values, "samples_key": json_digest([place for *place, _ in found])[:16]}


def over_seeds(rows: Sequence[Row]) -> Row:
    """Join the rows of a task's seeds: each question is a context with an answer for each seed."""
    first, num = rows[0], len(rows)
    if num == 1:
        return first
    joined = first | {"samples": num * first["samples"], "prompts_cut": sum(row["prompts_cut"] for row in rows)}
    joined["metrics"] = {name: statistics.fmean(row["metrics"][name] for row in rows) for name in first["metrics"]}
    joined["errors"] = {name: max(row["errors"].get(name, 0.0) for row in rows) for name in first["errors"]}
    if all("sample_values" in row for row in rows):
        joined["sample_values"] = [value for row in rows for value in row["sample_values"]]
        joined["contexts"] = [*range(len(first["sample_values"]))] * num
        joined["samples_key"] = json_digest([row["samples_key"] for row in rows])[:16]
    else:
        joined = {name: value for name, value in joined.items() if name not in ("sample_values", "samples_key")}
    return joined


def plan_lm_eval(
    entries: Sequence[Any], folder: Path, settings: LMEvalSettings, model: str, known: Sequence[str] = ()
) -> dict[str, LMEvalTask]:
    """Look up tasks; no data set is loaded.

    Args:
        entries: see `read_benchmarks`.
        folder: folder of the selections.
        settings: settings of lm-eval's tasks.
        model: any model of the grid.
        known: names of other tasks, for suggestions.
    Raises:
        ImportError: lm-eval is not installed.
        ValueError: hidden questions are requested where their beginning is unknown; see `read_benchmarks` and
            `check_tasks`.
    """
    benchmarks, both = read_benchmarks(entries, folder), settings.question == "both"
    unknown = [benchmark.name for benchmark in benchmarks if not benchmark.can_hide]
    if unknown and (settings.question == "hidden" or (both and len(unknown) == len(benchmarks))):
        raise ValueError(
            f"question={settings.question}: it is unknown where questions of {unknown[0]!r} begin; give the task a "
            f"context_field or question_marks, {{name: {unknown[0]}, question_marks: ['Question:']}}"
        )
    names = tuple(task for benchmark in benchmarks for task in benchmark.tasks)
    try:
        manager = settings.list_tasks(names, model)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install '.[eval]'") from error
    check_tasks(names, manager, [*known, *(path.stem for path in folder.glob("*.yaml"))])
    return {
        f"{task}:{question}" if both else task: LMEvalTask(task, benchmark, replace(settings, question=question), names)
        for benchmark in benchmarks
        for question in (get_args(Question)[: 1 + benchmark.can_hide] if both else [settings.question])
        for task in benchmark.tasks
    }


@functools.lru_cache(maxsize=2)
def list_tasks(names: tuple[str, ...], folder: str | None, metadata_json: str) -> TaskManager:
    """List tasks and groups; those of a folder take precedence over lm-eval's of the same name.

    Args:
        names: requested names; lm-eval's own are listed, in ten seconds, only if one is neither ours nor in the folder.
        folder: folder of your own tasks.
        metadata_json: settings for tasks that make their own data, such as RULER, as JSON.
    """
    from lm_eval.tasks import TaskManager

    places, metadata = [LONG_CONTEXT, *([] if folder is None else [folder])], json.loads(metadata_json)
    manager = TaskManager(include_path=places, include_defaults=False, metadata=metadata)
    is_enough = set(names) <= set(manager.all_tasks)
    return manager if is_enough else TaskManager(include_path=places, metadata=metadata)


def check_tasks(names: Sequence[str], manager: TaskManager, known: Sequence[str] = ()) -> None:
    """Refuse tasks that cannot be run; no data set is loaded.

    Args:
        names: names of tasks and groups.
        manager: result of `list_tasks`.
        known: further names, for suggestions.
    Raises:
        ValueError: a task is unknown, has no score, or runs code that the model writes, without consent.
    """
    for name in names:
        if name not in manager.all_tasks:
            close = " or ".join(map(repr, difflib.get_close_matches(name, [*known, *manager.all_tasks], n=3)))
            hint = f"did you mean {close}?" if close else "`lm-eval ls tasks` lists what there is"
            raise ValueError(f"tasks: {name!r} is unknown; {hint}")
        settings = manager.task_index[name].cfg or {}
        if name in (*manager.all_groups, *manager.all_tags) and "aggregate_metric_list" not in settings:
            raise ValueError(
                f"tasks: {name!r} has no score of its own; name the tasks to average, {{name: {name}_mean, members: "
                "[...]}: `lm-eval ls subtasks` lists them"
            )
        if settings.get("unsafe_code") and not allows_code():
            raise ValueError(
                f"tasks: {name!r} runs code that the model writes: set {CODE_CONSENT}=1 if this machine may do that "
                "(a container without secrets)"
            )


def allows_code() -> bool:
    """Return whether generated code may be run."""
    return os.environ.get(CODE_CONSENT) == "1"
