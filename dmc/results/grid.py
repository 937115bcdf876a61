"""The grid of a comparison, model x policy x budget x task, checked before anything runs."""

from __future__ import annotations

import difflib
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import StrictFloat, StrictInt
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file, extract_commit_hash

from dmc.budget import Budget
from dmc.data.sources import file_stamps
from dmc.earlier_names import TASKS, present_name
from dmc.kernels import BACKENDS
from dmc.kernels.layout import KV_CACHE_DTYPES
from dmc.policies.from_config import budget_name, parse_budget, policy_from_config
from dmc.policies.reading import ReadingPolicy
from dmc.results.equal_bytes import KIND, bytes_budget, share_of
from dmc.results.lm_eval_tasks import LMEvalSettings, LMEvalTask, plan_lm_eval
from dmc.results.measurement import FULL, digest
from dmc.results.tasks import Task
from dmc.settings import Count, build_config, checked_dataclass
from dmc.target import build_target, suggest

MODEL_FILES = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja"}
"""File types that identify a model: weights, configuration, tokenizer and chat template, but no README."""
FORMAT = 6
"""Version of the cells: raise it when their content or identity changes; finished cells then run again."""


@checked_dataclass(frozen=True)
class ComparedModel:
    """A model of the grid."""

    path: str
    """Folder or hub name of a stock or compressed model."""
    dtype: str = "auto"
    revision: str | None = None
    """Hub revision."""
    variant: str | None = None
    """Common name of models that differ in their seed, one line of a table: `{a: {path: A, variant: cr4, seed: 0}, b:
    {path: B, variant: cr4, seed: 1}}`; None: the model is its own variant."""
    seed: StrictInt | None = None
    """Seed of the model within its variant: a compressed model is compared with the reference of its seed."""
    policies: list[str] | None = None
    """Names of the grid's policies to run on it; None: all."""

    @property
    def defining(self) -> dict[str, Any]:
        """Return all settings except `policies`, which select cells but change none."""
        return {name: value for name, value in asdict(self).items() if name != "policies"}


@checked_dataclass(frozen=True)
class EngineSettings:
    """Engine settings of all cells; see `Engine`.

    Raises:
        ValueError: a size is not positive, or no kernels have this name.
    """

    block_size: Count = 16
    memory: StrictInt | StrictFloat | str | None = None
    kernels: str = "auto"
    max_batch_size: Count = 8
    """Number of samples that run at the same time."""
    prefill_chunk_size: Count | None = None
    kv_cache_dtype: str = "auto"

    @property
    def defining(self) -> dict[str, Any]:
        """Return all settings, but the dtype of the cache only where it is not the model's, as older rows took it."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("kv_cache_dtype", "auto")}

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"engine.kv_cache_dtype={self.kv_cache_dtype!r}: expected {' or '.join(KV_CACHE_DTYPES)}")
        if self.kernels not in ("auto", *BACKENDS):
            raise ValueError(f"engine.kernels={self.kernels!r}: expected auto or one of {', '.join(BACKENDS)}")


@checked_dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison.

    Raises:
        ValueError: a value is missing or out of range.
    """

    models: dict[str, Any]
    """Models by name: a folder, or a mapping with the fields of `ComparedModel`."""
    policies: list[Any]
    """Names of `configs/policy/*.yaml`, or mappings: see `named_settings`."""
    tasks: list[Any]
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
    output: str = "outputs/compare"

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty: name at least one, 'models={base: DIR}'")
        if not self.tasks:
            raise ValueError(
                "tasks is empty: give tasks=text_loss, names of configs/task, configs/evaluation or lm-eval"
            )
        variants = [each["variant"] for each in self.models.values() if isinstance(each, dict) and each.get("variant")]
        if self.reference is not None and self.reference not in (*self.models, *variants):
            raise ValueError(f"reference={self.reference!r} is no model; {suggest(self.reference, self.models)}")


@dataclass(frozen=True)
class Method:
    """A cache policy with its budget, or the full cache."""

    name: str
    """Name of the policy."""
    settings: dict[str, Any]
    budget: Budget | None
    """Budget of the policy; None: no budget, or one in bytes."""
    requested_ratio: float | None
    """Requested ratio; None: the budget is a number of entries, or bytes."""
    options: dict[str, Any] = field(default_factory=dict)
    """All options with defaults filled in, see `complete`; empty for the full cache."""
    bytes_of: str | None = None
    """Name or share of a budget in bytes, see `bytes_budget`."""

    @property
    def asked(self) -> str | None:
        """Return the budget as written in settings; None: no budget."""
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
class Cell:
    """One measurement."""

    model: str
    learned: bool
    """Whether the model has learned gates."""
    method: Method
    task: str
    model_key: str
    task_key: str
    """Hash of task, engine and seed, the same for all rows of a table."""
    same_bytes_as: str | None = None
    """Key of the cell whose bytes, or a share of them, are the method's budget."""

    @property
    def key(self) -> str:
        """Hash of everything that defines the cell."""
        names, other = [self.model, self.method.name, self.task], [self.same_bytes_as] if self.same_bytes_as else []
        return digest([names, self.model_key, self.policy_key, self.task_key, self.method.asked, *other])

    @property
    def policy_key(self) -> str:
        """Hash of the policy's options and of the code of a user's own policy."""
        return digest(self.method.options)

    def identity(self) -> dict[str, Any]:
        """Return the columns of a row that identify the measurement."""
        method = self.method
        return {
            "key": self.key,
            "method": f"{self.model}, {'learned' if self.learned and method.asked is None else method.name}",
            "model": self.model,
            "learned": self.learned,
            "policy": method.name,
            "budget": method.asked,
            "task": self.task,
            "model_key": self.model_key,
            "policy_key": self.policy_key,
            "task_key": self.task_key,
            "requested_ratio": method.requested_ratio,
        }

    @property
    def title(self) -> str:
        """Return the cell's title for progress and messages."""
        return " ".join(filter(None, (self.model, self.method.name, self.method.asked, self.task)))


@dataclass(frozen=True)
class Grid:
    """All cells, grouped by model, and the models and tasks they name."""

    cells: list[Cell]
    models: dict[str, ComparedModel]
    tasks: dict[str, Task | LMEvalTask]
    task_settings: dict[str, dict[str, Any]]


def plan_grid(config: CompareConfig, configs: Path) -> Grid:
    """Look up every name, construct every policy and task, and list the cells.

    The full cache has one cell for each task, whatever the budgets; so has a compressed model with its learned gates.
    It has further cells with the policies that can compress the gates' entries further.

    Args:
        config: the grid.
        configs: folder that holds `policy/*.yaml`, `task/*.yaml` and `evaluation/*.yaml`.
    Raises:
        ValueError: a model, policy, task, option or budget is unknown or out of range.
        FileNotFoundError: a task's files are not there.
        ImportError: tasks of lm-eval are requested, and it is not installed.
    """
    models = {name: build_model(value, f"models.{name}") for name, value in config.models.items()}
    methods = plan_methods(named_settings(config.policies, configs / "policy", "policies"), config.budgets)
    descriptions = {name: describe_model(model, f"models.{name}") for name, model in models.items()}
    tasks, task_settings = plan_tasks(config, configs, next(iter(models.values())).path)
    engine = [FORMAT, config.engine.defining, config.seed]
    task_keys = {}
    for task, each in tasks.items():
        own = [] if isinstance(each, LMEvalTask) else [0, task_settings[task]]  # 0: earlier versions also timed steps
        task_keys[task] = digest([*engine, *own, each.identity()])
    cells = []
    for name, (identity, values, target_ratio) in descriptions.items():
        fitting, known = [], {method.name for method in methods}
        for unknown in set(models[name].policies or ()) - known:
            raise ValueError(f"models.{name}.policies: {unknown!r} is none of the grid's; {suggest(unknown, known)}")
        for method in methods:
            policy = method.build()
            if policy is not None and (target_ratio is None or policy.serves_compressed):
                where = f"{method.name} on {name}"
                check_fits(policy, values["num_hidden_layers"], config.engine, where)
            serves = target_ratio is None or (policy is not None and policy.serves_compressed)
            if serves and method.name in (models[name].policies or [method.name]):
                fitting.append(method)
        if target_ratio is not None:
            fitting.insert(0, Method(FULL, {}, None, target_ratio))
        cells += [
            Cell(name, target_ratio is not None, method, task, digest(identity), task_keys[task])
            for method in fitting
            for task in tasks
        ]
    return Grid(place_bytes(cells, models), models, tasks, task_settings)


def place_bytes(cells: Sequence[Cell], models: Mapping[str, ComparedModel]) -> list[Cell]:
    """Move cells with a budget in bytes to the end, each with the key of the cell whose bytes it gets.

    Raises:
        ValueError: there is no such model, or no full cache for a share of it.
    """
    first = [cell for cell in cells if cell.method.bytes_of is None]
    given = {(cell.model, cell.task): cell for cell in first if cell.method.asked is None}
    variants = {name: model.variant or name for name, model in models.items()}
    variant_of = {cell.model: variants[cell.model] for cell in given.values() if cell.learned}
    last = []
    for cell in cells:
        whose = cell.method.bytes_of
        if whose is None or cell.learned:
            continue
        if share_of(whose) is not None:
            if (cell.model, cell.task) not in given:
                raise ValueError(f"budgets: {KIND}:{whose} needs the full cache of {cell.model}: add full to policies")
            last.append(replace(cell, same_bytes_as=given[cell.model, cell.task].key))
            continue
        known = sorted({*variant_of, *variant_of.values()})
        if (whose and whose not in known) or not known:
            raise ValueError(f"budgets: {KIND}:{whose}: {whose!r} is no compressed model; {suggest(whose, known)}")
        for name, variant in variant_of.items():
            seeds = models[cell.model].seed, models[name].seed
            if whose in ("", name, variant) and (None in seeds or seeds[0] == seeds[1]):
                method = replace(cell.method, bytes_of=name if seeds[0] is None else whose or variant)
                last.append(replace(cell, method=method, same_bytes_as=given[name, cell.task].key))
    return first + last


def plan_tasks(
    config: CompareConfig, configs: Path, model: str
) -> tuple[dict[str, Task | LMEvalTask], dict[str, dict[str, Any]]]:
    """Construct every task; `question: both` gives two.

    Returns:
        The tasks and their settings, by name.
    Raises:
        ValueError: a name is unknown, given twice, or an option is out of range.
    """
    ours = sorted(path.stem for path in (configs / "task").glob("*.yaml"))
    selections = [path.stem for path in (configs / "evaluation").glob("*.yaml")]
    own: list[Any] = []
    theirs: list[Any] = []
    for index, entry in enumerate(map(_of_present_name, config.tasks)):
        is_own = bool({"like", "_target_"} & {*entry}) if isinstance(entry, dict) else entry in ours
        if not isinstance(entry, (str, dict)):
            is_own = True  # which `named_settings` refuses
        elif not is_own and entry not in selections and difflib.get_close_matches(str(entry), ours, cutoff=0.8):
            # at once: lm-eval's own list takes ten seconds
            raise ValueError(f"tasks[{index}]={entry!r} is not in configs/task; {suggest(str(entry), ours)}")
        (own if is_own else theirs).append(entry)
    settings: dict[str, dict[str, Any]] = {}
    for name, each in named_settings(own, configs / "task", "tasks").items():
        both = each.get("question") == "both"
        settings |= {f"{name}:{question}": each | {"question": question} for question in ("known", "hidden") if both}
        settings |= {} if both else {name: each}
    tasks: dict[str, Task | LMEvalTask] = {name: build_target(each, f"tasks.{name}") for name, each in settings.items()}
    settings = {name: complete(each, tasks[name]) for name, each in settings.items()}
    if theirs:
        found = plan_lm_eval(theirs, configs / "evaluation", config.lm_eval, model, ours)
        if twice := sorted(set(found) & set(tasks)):
            raise ValueError(f"tasks: {twice[0]!r} is there twice; give one of them another name")
        tasks |= found
        settings |= {name: asdict(task.benchmark) for name, task in found.items()}
    return tasks, settings


def _of_present_name(entry: Any) -> Any:
    """Return an entry of `tasks` with the present name of the file in `configs/task` that it names."""
    if isinstance(entry, dict) and isinstance(entry.get("like"), str):
        return entry | {"like": present_name(entry["like"], TASKS)}
    return present_name(entry, TASKS) if isinstance(entry, str) else entry


def named_settings(entries: Sequence[Any], folder: Path, setting: str) -> dict[str, dict[str, Any]]:
    """Look up settings by name.

    Args:
        entries: names of YAML files in `folder`, or mappings: `{name: mine, _target_: my_module.MyPolicy, ...}` for
            something new, `{name: mine, like: h2o, ...}` for a file of the folder with other options.
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
        own = {"name": entry, "like": entry} if isinstance(entry, str) else entry
        if not isinstance(own, dict) or "name" not in own or ("like" in own) == ("_target_" in own):
            raise ValueError(f"{where}={entry!r}: expected a name, or a mapping with name and either _target_ or like")
        settings = _read(own["like"], folder, where) if "like" in own else {}
        settings |= {key: value for key, value in own.items() if key not in ("name", "like")}
        if own["name"] in found:
            raise ValueError(f"{where}: {own['name']!r} is there twice; give one of them another name")
        found[own["name"]] = settings
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
        budgets: see `parse_budget`.
    Raises:
        ValueError: a budget or an option is refused, or a policy has no budget.
    """
    whose = [bytes_budget(budget) for budget in budgets]
    others = [budget for budget, name in zip(budgets, whose, strict=True) if name is None]
    parsed = {budget_name(budget): budget for budget in map(parse_budget, others)}
    if not budgets and any(policies.values()):
        raise ValueError("budgets is empty: give budgets=2,4, compression ratios, or tokens:128")
    methods = []
    for name, settings in policies.items():
        if not settings:
            methods.append(Method(name, {}, None, 1.0))
        for budget in parsed.values() if settings else ():
            options = complete(settings, policy_from_config(settings, budget), "budget")
            methods.append(Method(name, settings, budget, budget.ratio, options))
        for each in dict.fromkeys(name for name in whose if name is not None) if settings else ():
            built = policy_from_config(settings, Budget(ratio=1.0))
            if not isinstance(built, ReadingPolicy):  # which holds every token
                methods.append(Method(name, settings, None, None, complete(settings, built, "budget"), each))
    return methods


def complete(settings: Mapping[str, Any], built: Any, *given: str) -> dict[str, Any]:
    """Fill in the defaults of settings, so that equal objects have equal settings.

    Args:
        settings: `_target_` and options.
        built: the object built from them.
        given: names of options that do not come from the settings.
    Returns:
        Every option, and as `_code_` a hash of the source files of a user's own class.
    """
    found = dict(settings)
    for each in fields(built) if is_dataclass(built) else ():
        if each.init and each.name not in given:
            found[each.name] = _plain(getattr(built, each.name), settings.get(each.name))
    sources = [_source_of(kind) for kind in type(built).__mro__]
    code = [Path(source).read_bytes() for source in sources if source is not None]
    return found | ({"_code_": hashlib.sha256(b"".join(code)).hexdigest()[:8]} if code else {})


def _plain(value: Any, settings: Any) -> Any:
    if is_dataclass(value):
        kind = type(value)
        own = settings if isinstance(settings, Mapping) else {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        return complete(own, value)
    if isinstance(value, (list, tuple)):
        return [_plain(each, None) for each in value]
    if value is None or isinstance(value, (bool, int, float, str, Mapping)):
        return value
    return f"{type(value).__module__}.{type(value).__qualname__}" if settings is None else settings


def _source_of(kind: type) -> str | None:
    """Find the file of a user's own class."""
    package = kind.__module__.partition(".")[0]
    if package == "dmc" or package in sys.stdlib_module_names:
        return None
    return getattr(sys.modules[kind.__module__], "__file__", None)


def check_fits(policy: Any, num_layers: int, engine: EngineSettings, where: str) -> None:
    """Raise a ValueError that names `where` if a policy does not fit a model with `num_layers` layers, or its pages."""
    try:
        policy.fitted(num_layers, engine.block_size)
        policy.check_dtype(engine.kv_cache_dtype)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def build_model(value: Any, name: str) -> ComparedModel:
    """Read a model of the grid: a folder or hub name, or a mapping."""
    return build_config(ComparedModel, {"path": value} if isinstance(value, str) else value, name)


def describe_model(model: ComparedModel, name: str) -> tuple[Any, dict[str, Any], float | None]:
    """Identify a model without loading it.

    Returns:
        Its identity (its configuration; names, sizes and times of a folder's files, or the hub's commit), its
        configuration, and the target ratio of its gates, None for a stock model.
    Raises:
        ValueError: there is no such model.
    """
    folder = Path(model.path).expanduser()
    if not folder.is_dir() and (folder.parent.is_dir() or model.path.startswith(("/", ".", "~"))):
        beside = [str(folder.parent / each.name) for each in folder.parent.glob("*") if each.is_dir()]
        close = difflib.get_close_matches(str(folder), beside, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{name}: there is no folder {model.path}{hint}")
    try:
        values, _ = PretrainedConfig.get_config_dict(str(folder), revision=model.revision)
    except OSError as error:
        raise ValueError(f"{name}={model.path}: {str(error).splitlines()[0]}") from error
    if "model_type" not in values:
        raise ValueError(f"{name}: {model.path} has no config.json with a model_type: it is not a Hugging Face model")
    if folder.is_dir():
        files: Any = file_stamps(path for path in sorted(folder.glob("*")) if path.suffix in MODEL_FILES)
    else:
        config = cached_file(str(folder), "config.json", revision=model.revision)
        files = [model.path, extract_commit_hash(config, None)]
    compressed = str(values.get("model_type")).startswith("dmc_")
    target_ratio = values["compression"]["target_ratio"] if compressed else values.get("dms_cr")  # of NVIDIA's DMS
    return [model.dtype, model.revision, files, values], values, None if target_ratio is None else float(target_ratio)


def model_settings(model: ComparedModel) -> dict[str, Any]:
    """Return a model's settings, with the last modification time of a folder."""
    files = Path(model.path).expanduser().glob("*")
    times = [path.stat().st_mtime for path in files if path.suffix in MODEL_FILES]
    written = datetime.fromtimestamp(max(times)).isoformat(sep=" ", timespec="seconds") if times else None
    return model.defining | {"written": written}
