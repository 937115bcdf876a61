"""What is evaluated: tasks of lm-evaluation-harness, one by one or in the selections of a paper."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from omegaconf import OmegaConf

from dmc.config import build_config

CODE_CONSENT = "HF_ALLOW_CODE_EVAL"
"""Environment variable with which Hugging Face's code_eval is told that generated code may run."""


@dataclass(frozen=True)
class Benchmark:
    """One figure of a table."""

    name: str
    """Of a task or group of lm-eval, or your own for the mean of several."""
    members: list[str] = field(default_factory=list)
    """Tasks or groups of lm-eval whose unweighted mean it is; empty: the one of its name."""
    num_fewshot: int | None = None
    """Examples before each question; None: what the task says."""
    metric: str | list[str] | None = None
    """The one that is shown, or the first of these that a task has; None: a task's first."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Of lm-eval's generation settings those that differ from the task's: {do_sample: true, temperature: 0.1}."""

    @property
    def tasks(self) -> list[str]:
        """Names that lm-eval knows."""
        return self.members or [self.name]

    def choose(self, metrics: Sequence[str]) -> str:
        """Choose what is shown of a task's metrics (`acc`, or `exact_match,strict-match` where answers are filtered).

        Raises:
            ValueError: there is none.
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
        entries: names of YAML files in `folder`, whose own `tasks` take their place; names of lm-eval's tasks; or
            mappings with the fields of `Benchmark`.
        folder: where the selections lie.
    Raises:
        ValueError: a field is unknown or of another type, or a task is there twice.
    """
    found: list[Benchmark] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, str) and (file := folder / f"{entry}.yaml").is_file():
            selection: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
            found += read_benchmarks([each for each in selection["tasks"] if each != entry], folder)
        else:
            values = {"name": entry} if isinstance(entry, str) else entry
            found.append(build_config(Benchmark, values, f"tasks[{index}]"))
    names = [task for each in found for task in each.tasks]
    for name in {name for name in names if names.count(name) > 1}:
        raise ValueError(f"tasks: {name!r} is there twice; run the second one into another output folder")
    return found


def list_tasks(names: Sequence[str], tasks_folder: str | None, metadata: dict[str, Any] | None = None) -> TaskManager:
    """List what can be evaluated; tasks of a folder go before lm-eval's own of the same name.

    Args:
        names: of tasks; lm-eval's own are listed, which takes ten seconds, only if one is not in the folder.
        tasks_folder: folder of lm-eval's YAML files, searched with all folders below it; None: none.
        metadata: for tasks that make their own data, such as RULER.
    Raises:
        FileNotFoundError: there is no such folder.
    """
    if tasks_folder is not None and not Path(tasks_folder).is_dir():
        raise FileNotFoundError(f"tasks_folder={tasks_folder}: there is no such folder")
    own = TaskManager(include_path=tasks_folder, include_defaults=False, metadata=metadata)
    return own if set(names) <= set(own.all_tasks) else TaskManager(include_path=tasks_folder, metadata=metadata)


def check_tasks(names: Sequence[str], manager: TaskManager, known: Sequence[str] = ()) -> None:
    """Refuse what cannot be run; no data set is loaded.

    Args:
        names: of tasks and groups.
        manager: from `list_tasks`.
        known: further names, for suggestions.
    Raises:
        ValueError: a task is unknown, has no score, or runs code that the model writes, without consent.
    """
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"tasks: {name!r} is unknown; {_suggest(name, [*known, *manager.all_tasks])}")
        is_leaf = parts_of(manager, name) == []
        if not is_leaf and not (manager.task_index[name].cfg or {}).get("aggregate_metric_list"):
            raise ValueError(
                f"tasks: {name!r} has no score of its own; name what you want the mean of: "
                f"{{name: {name}_mean, members: [{', '.join(parts_of(manager, name))}]}}"
            )
        if runs_code(manager, name) and os.environ.get(CODE_CONSENT) != "1":
            raise ValueError(
                f"tasks: {name!r} runs code that the model writes: set {CODE_CONSENT}=1 if this machine may do that "
                "(a container without secrets)"
            )


def parts_of(manager: TaskManager, name: str) -> list[str]:
    """Name the tasks and groups that a group or tag consists of; none for a task."""
    entry = manager.task_index.get(name)
    if entry is None:
        return []
    parts = sorted(entry.tags) if entry.cfg is None else entry.cfg.get("task")
    parts = parts if isinstance(parts, list) else []
    return [part if isinstance(part, str) else str(part.get("task") or part.get("group")) for part in parts]


def runs_code(manager: TaskManager, name: str) -> bool:
    """Tell whether a task, or one of a group, is marked as running generated code."""
    entry = manager.task_index.get(name)
    is_marked = entry is not None and bool((entry.cfg or {}).get("unsafe_code"))
    return is_marked or any(runs_code(manager, part) for part in parts_of(manager, name))


def _suggest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else "`lm-eval ls tasks` lists what there is"
