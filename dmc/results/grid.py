"""The grid of a comparison, model x policy x budget x task, checked before anything runs."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args

from omegaconf import OmegaConf
from pydantic import Field, StrictBool, StrictFloat, StrictInt

from dmc.budget import Budget
from dmc.config.instantiate import instantiate
from dmc.config.settings import Count, OutputFolder, checked_dataclass, suggest
from dmc.data import DocumentSource
from dmc.policies.reading import ReadingPolicy
from dmc.results.equal_bytes import KIND, bytes_budget, share_of
from dmc.results.lm_eval_tasks import LMEvalSettings, plan_lm_eval
from dmc.results.measurement import FULL, Row, key_of
from dmc.results.models import PlannedModel, plan_model
from dmc.results.policies import budget_name, parse_budget, policy_from_config
from dmc.results.tasks import Task
from dmc.results.tasks.asking import Question
from dmc.results.tasks.base import plain_options
from dmc.runtime.carried_cache import file_hash
from dmc.runtime.options import EngineOptions

BATCHING = ("max_batch_size", "memory")
"""Engine settings that decide how many samples run at the same time."""


@checked_dataclass(frozen=True)
class EngineSettings:
    """Engine settings of all cells; see `Engine`."""

    block_size: Count = 16
    memory: StrictInt | StrictFloat | str | None = None
    kernels: str = "auto"
    max_batch_size: Count = 8
    """Number of samples that run at the same time."""
    prefill_chunk_size: Count | None = None
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        try:
            EngineOptions(**vars(self))
        except ValueError as error:
            raise ValueError(f"engine.{error}") from None


@checked_dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison."""

    models: Annotated[dict[str, Any], Field(min_length=1)]
    """Models by name: a folder, or a mapping with the fields of `ComparedModel`."""
    policies: list[Any]
    """Names of `configs/policy/*.yaml`, or mappings: see `named_settings`."""
    tasks: Annotated[list[Any], Field(min_length=1)]
    """Names of `configs/task/*.yaml`, or mappings: see `named_settings`; names of `configs/evaluation` or of lm-eval's
    tasks, or mappings: see `read_benchmarks`."""
    budgets: list[Any]
    """Compression ratios (4), entries per KV head (tokens:128), or bytes (bytes:retrofit): see `equal_bytes`."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    seed: StrictInt = 0
    """Seed of everything that has none of its own."""
    lm_eval: LMEvalSettings = field(default_factory=LMEvalSettings)
    """Settings of lm-eval's tasks."""
    reference: str | None = None
    """Stock model, or variant, whose full cache compressed models are compared with; None: the first."""
    overwrite: StrictBool = False
    """Whether cells that are finished are measured again, and their rows replaced."""
    output: OutputFolder = "outputs/compare"

    def __post_init__(self) -> None:
        variants = [
            model["variant"] for model in self.models.values() if isinstance(model, dict) and model.get("variant")
        ]
        if self.reference is not None and self.reference not in (*self.models, *variants):
            raise ValueError(f"reference={self.reference!r} is no model; {suggest(self.reference, self.models)}")


@dataclass(frozen=True)
class Method:
    """A cache policy with its budget, or the full cache."""

    name: str = FULL
    """Name of the policy."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the policy; empty: the full cache, or what learned gates keep."""
    budget: Budget | None = None
    """Budget of the policy; None: no budget, or one in bytes."""
    bytes_of: str | None = None
    """Name or share of a budget in bytes, see `bytes_budget`."""

    @property
    def budget_name(self) -> str | None:
        """Budget as written in settings; None: no budget."""
        if self.bytes_of is not None:
            return f"{KIND}:{self.bytes_of}"
        return None if self.budget is None else budget_name(self.budget)

    def build(self, ratio: float | None = None) -> Any | None:
        """Construct the policy, anew for every cell, so that no state is shared between cells.

        Args:
            ratio: ratio that replaces a budget in bytes.
        """
        budget = Budget(ratio=ratio or 1.0) if self.bytes_of is not None else self.budget
        return policy_from_config(self.settings, budget)


@dataclass(frozen=True)
class PlannedTask:
    """A task of the grid."""

    name: str
    task: Task
    given: dict[str, Any] = field(default_factory=dict)
    """Settings from which it was made."""

    @cached_property
    def row_settings(self) -> dict[str, Any]:
        """Settings in its rows."""
        return self.task.row_settings(self.given)


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    config: CompareConfig
    model: PlannedModel
    method: Method
    task: PlannedTask
    same_bytes_as: Cell | None = None
    """Cell whose bytes, or a share of them, are the method's budget."""
    answers_of: Cell | None = None
    """Cell of the full cache whose answers are the right ones; None: the task has its own, or this is that cell."""

    @property
    def waits_for(self) -> list[Cell]:
        """Cells that are measured before it."""
        return [cell for cell in (self.same_bytes_as, self.answers_of) if cell is not None]

    @cached_property
    def key(self) -> str:
        """Key of its row; its settings are in the row, see `refuse_other_settings`."""
        return key_of(self.model.name, self.method.name, self.method.budget_name, self.task.name, self.config.seed)

    @property
    def file_name(self) -> str:
        """Key as the name of a file."""
        return self.key.replace("/", "__")

    @cached_property
    def row(self) -> Row:
        """Fields of its row that are known before it is measured."""
        config, model, method, task, budget = self.config, self.model, self.method, self.task, self.method.budget_name
        ratio = None if method.budget is None else method.budget.ratio
        built = method.build()
        policy = method.settings | plain_options(built)
        policy.pop("budget", None)
        if built is not None and built.files:
            policy["files"] = [file_hash(path)[:16] for path in built.files]
        settings = {"model": model.row_settings, "policy": policy, **task.row_settings}
        if self.same_bytes_as is not None:
            settings["budget"] = {"bytes_of": self.same_bytes_as.model.row_settings}
        if self.answers_of is not None:
            settings["answers"] = self.answers_of.model.row_settings
        # how many samples run at the same time, and in how much memory, changes no result
        engine = {name: value for name, value in asdict(config.engine).items() if name not in BATCHING}
        return task.task.row(task.name) | {
            "key": self.key,
            "method": f"{model.name}, {'learned' if model.is_learned and budget is None else method.name}",
            "model": model.name,
            "learned": model.is_learned,
            "policy": method.name,
            "budget": budget,
            "task": task.name,
            "requested_ratio": ratio if budget is not None else model.target_ratio or 1.0,
            "target_counts": model.target_counts if budget is None else None,
            "reference": config.reference,
            "settings": settings | {"engine": engine, "seed": config.seed},
        }

    @property
    def title(self) -> str:
        """Title for progress and messages."""
        return " ".join(filter(None, (self.model.name, self.method.name, self.method.budget_name, self.task.name)))


def plan_grid(config: CompareConfig, configs: Path) -> list[Cell]:
    """Look up every name, construct every policy and task, and list the cells, grouped by model.

    The full cache has one cell for each task, whatever the budgets; so has a compressed model with its learned gates.
    It has further cells with the policies that can compress the gates' entries further. Cells with a budget in bytes
    are the last.

    Args:
        config: the grid.
        configs: folder that holds `policy/*.yaml`, `task/*.yaml` and `evaluation/*.yaml`.
    Raises:
        ValueError: a model, policy, task, option or budget is unknown or out of range.
        FileNotFoundError: a task's files are not there.
        ImportError: tasks of lm-eval are requested, and it is not installed.
    """
    models = [plan_model(name, value) for name, value in config.models.items()]
    methods = plan_methods(named_settings(config.policies, configs / "policy", "policies"), config.budgets)
    tasks = plan_tasks(config, configs, models[0].settings.path)
    stock = [model.name for model in models if not model.is_learned]
    config = replace(config, reference=config.reference or next(iter(stock), None))
    fitting = [(model, method) for model in models for method in methods_for(model, methods, config.engine)]
    cells = [Cell(config, model, method, task) for model, method in fitting for task in tasks]
    cells = place_bytes(give_answers(cells, config.reference))
    if not cells:
        raise ValueError(f"policies={config.policies} leave nothing to measure: add full")
    for key, count in Counter(cell.key for cell in cells).items():
        if count > 1:
            raise ValueError(f"{key} is given twice: give each model of a variant another seed")
    return cells


def methods_for(model: PlannedModel, methods: Sequence[Method], engine: EngineSettings) -> list[Method]:
    """Return the methods that run on a model: its learned gates, and the policies that can serve it.

    Raises:
        ValueError: a policy does not fit the model or its pages, or `policies` of the model names an unknown one.
    """
    known = {method.name for method in methods}
    for unknown in {*(model.settings.policies or ())} - known:
        raise ValueError(f"models.{model.name}.policies: {unknown!r} is none of the grid's; {suggest(unknown, known)}")
    found = [Method()] if model.is_learned else []
    for method in methods:
        policy = method.build()
        serves = not model.is_learned or (policy is not None and policy.serves_compressed)
        if not serves or method.name not in (model.settings.policies or known):
            continue
        try:
            if policy is not None:
                policy.fitted(model.num_layers, engine.block_size)
                policy.check_dtype(engine.kv_cache_dtype)
        except ValueError as error:
            raise ValueError(f"{method.name} on {model.name}: {error}") from error
        found.append(method)
    return found


def give_answers(cells: Sequence[Cell], reference: str | None) -> list[Cell]:
    """Give the cells of tasks whose right answers are the full cache's the cell that is measured first.

    That is the full cache of the cell's own model; of learned gates, that of the reference, with the same seed if any.

    Raises:
        ValueError: there is none.
    """
    full = [cell for cell in cells if cell.method == Method() and not cell.model.is_learned]
    found = []
    for cell in cells:
        if not cell.task.task.needs_answers or cell in full:
            found.append(cell)
            continue
        there = [other for other in full if other.task is cell.task]
        if cell.model.is_learned:
            there = [other for other in there if reference in (other.model.name, other.model.variant)]
            there.sort(key=lambda other: other.model.settings.seed != cell.model.settings.seed)
        else:
            there = [other for other in there if other.model is cell.model]
        if not there:
            whose = reference if cell.model.is_learned else cell.model.name
            raise ValueError(f"tasks: {cell.task.name} needs the full cache of {whose}: add full to policies")
        found.append(replace(cell, answers_of=there[0]))
    return found


def place_bytes(cells: Sequence[Cell]) -> list[Cell]:
    """Move cells with a budget in bytes to the end, each with the cell whose bytes it gets."""
    first = [cell for cell in cells if cell.method.bytes_of is None]
    full = [cell for cell in first if cell.method.budget_name is None]
    known = sorted({name for cell in full if cell.model.is_learned for name in (cell.model.name, cell.model.variant)})
    last = []
    for cell in cells:
        whose, model, seed = cell.method.bytes_of, cell.model, cell.model.settings.seed
        if whose is None or model.is_learned:
            continue
        there = [other for other in full if other.task is cell.task]
        if share_of(whose) is not None:
            given = [(other, whose) for other in there if other.model is model]
            if not given:
                raise ValueError(f"budgets: {KIND}:{whose} needs the full cache of {model.name}: add full to policies")
        elif not known or whose not in ("", *known):
            raise ValueError(f"budgets: {KIND}:{whose}: {whose!r} is no compressed model; {suggest(whose, known)}")
        else:
            given = [
                (other, other.model.name if seed is None else whose or other.model.variant)
                for other in there
                if other.model.is_learned and whose in ("", other.model.name, other.model.variant)
                if seed is None or other.model.settings.seed in (None, seed)
            ]
        for other, name in given:
            last.append(replace(cell, method=replace(cell.method, bytes_of=name), same_bytes_as=other))
    return first + last


def plan_tasks(config: CompareConfig, configs: Path, model: str) -> list[PlannedTask]:
    """Construct every task; `question: both` gives two.

    Args:
        config: the grid.
        configs: folder of the settings.
        model: any model of the grid, for tasks that make their data with its tokenizer.
    Raises:
        ValueError: a name is unknown, given twice, or an option is out of range.
    """
    known = sorted(path.stem for path in (configs / "task").glob("*.yaml"))
    selections = [path.stem for path in (configs / "evaluation").glob("*.yaml")]
    ours, theirs = list[Any](), list[Any]()
    for index, entry in enumerate(config.tasks):
        if isinstance(entry, str):
            is_ours = entry.partition("+")[0] in known
            if not is_ours and entry not in selections and difflib.get_close_matches(entry, known, cutoff=0.8):
                # at once: lm-eval's own list takes ten seconds
                raise ValueError(f"tasks[{index}]={entry!r} is not in configs/task; {suggest(entry, known)}")
        else:
            is_ours = not isinstance(entry, dict) or bool({"like", "_target_"} & {*entry})
        (ours if is_ours else theirs).append(entry)
    asked: dict[str, dict[str, Any]] = {}
    for name, settings in named_settings(ours, configs / "task", "tasks").items():
        both = get_args(Question) if settings.get("question") == "both" else ()
        asked |= {f"{name}:{question}": settings | {"question": question} for question in both} or {name: settings}
    found = []
    for name, settings in asked.items():
        task: Any = instantiate(settings, f"tasks.{name}")
        own = {field.name for field in fields(task)} if is_dataclass(task) else set()
        if "seed" in own - {*settings}:
            task = replace(task, seed=config.seed)
        for source in vars(task).values():
            if isinstance(source, DocumentSource):
                source.check()
        found.append(PlannedTask(name, task, settings))
    if theirs:
        benchmarks = plan_lm_eval(theirs, configs / "evaluation", config.lm_eval, model, known).items()
        found += [PlannedTask(name, task) for name, task in benchmarks]
    names = [task.name for task in found]
    for twice in {name for name in names if names.count(name) > 1}:
        raise ValueError(f"tasks: {twice!r} is given twice; give one of them another name")
    return found


def named_settings(entries: Sequence[Any], folder: Path, setting: str) -> dict[str, dict[str, Any]]:
    """Look up settings by name.

    Args:
        entries: names of YAML files in `folder`, with options, `h2o+protect=0.1`, or without; or mappings:
            `{name: mine, _target_: my_module.MyPolicy, ...}` for something new, `{name: mine, like: h2o, ...}` for a
            file of the folder with other options.
        folder: folder of the files.
        setting: name of the setting, for messages.
    Returns:
        Settings by name, in the order given.
    Raises:
        ValueError: a name is unknown, missing or given twice.
    """
    found: dict[str, dict[str, Any]] = {}
    for index, entry in enumerate(entries):
        where = f"{setting}[{index}]"
        given = entry
        if isinstance(entry, str):
            like, *options = entry.split("+")
            given = {"name": entry, "like": like, **OmegaConf.to_object(OmegaConf.from_dotlist(options))}
        if not isinstance(given, dict) or "name" not in given or ("like" in given) == ("_target_" in given):
            raise ValueError(f"{where}={entry!r}: expected a name, or a mapping with name and either _target_ or like")
        settings = _read(given["like"], folder, where) if "like" in given else {}
        settings |= {key: value for key, value in given.items() if key not in ("name", "like")}
        if given["name"] in found:
            raise ValueError(f"{where}: {given['name']!r} is given twice; give one of them another name")
        found[given["name"]] = settings
    return found


def _read(name: str, folder: Path, where: str) -> dict[str, Any]:
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"{where}={name!r} is not in {folder.parent.name}/{folder.name}; {suggest(name, known)}")
    settings: Any = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"), resolve=True)
    return settings


def plan_methods(policies: dict[str, dict[str, Any]], budgets: list[Any]) -> list[Method]:
    """Pair policies with budgets; the full cache has none.

    Args:
        policies: settings by name.
        budgets: see `parse_budget` and `bytes_budget`.
    Raises:
        ValueError: a budget or an option is refused, or a policy has no budget.
    """
    if not budgets and any(policies.values()):
        raise ValueError("budgets is empty: give budgets=[2,4], compression ratios, or tokens:128")
    parsed = [(budget, bytes_budget(budget)) for budget in budgets]
    unique = dict.fromkeys(
        (None, name) if name is not None else (parse_budget(budget), None) for budget, name in parsed
    )
    methods = []
    for name, settings in policies.items():
        every = [Method(name, settings, *budget) for budget in unique] if settings else [Method(name)]
        for method in every:
            holds_all = isinstance(method.build(), ReadingPolicy)
            if method.bytes_of is None or not holds_all:
                methods.append(method)
    return methods
