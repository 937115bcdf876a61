"""Plan an analysis, check all that can be checked before a model is loaded, and store and draw what it finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dmc.analysis.decisions import Decisions, collect_decisions
from dmc.analysis.segments import segment_text
from dmc.analysis.survivors import find_survivors
from dmc.data import DocumentSource, build_packed
from dmc.policies import EvictionPolicy
from dmc.policies.from_config import budget_name, parse_budget, policy_from_config
from dmc.results.grid import ComparedModel, EngineSettings, check_fits, describe_model, model_settings
from dmc.results.measurement import Row, new_row
from dmc.results.report import read_folders, write_plots
from dmc.results.store import Store
from dmc.results.tables import MEASUREMENTS, write_measurements
from dmc.runtime import Engine
from dmc.target import build_target
from dmc.training.callbacks.heatmap import RATIOS_NAME, RatioHistory

NUM_LENGTHS = 32
"""Points of the curve of the compression ratio over the length."""


@dataclass(frozen=True)
class SegmentationSettings:
    """Which text is cut into segments, and by whom."""

    text: str | None = None
    """The text itself; None: the beginning of the first document."""
    tokens: int = 256
    """Of the text that are used."""
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class AnalyseConfig:
    """An analysis as the user writes it.

    Raises:
        ValueError: a value is missing or out of range.
    """

    model: ComparedModel | None = None
    """A compressed model, or a stock one with a policy."""
    policy: dict[str, Any] = field(default_factory=dict)
    """Settings of `configs/policy/*.yaml`; empty: the model's own gates."""
    budget: Any = None
    """Of the policy: a compression ratio, or entries per KV head (tokens:128)."""
    run: str | None = None
    """Output folder of a training run, for the ratios along it."""
    source: dict[str, Any] = field(default_factory=dict)
    """Text that the model reads: a `_target_` such as dmc.data.TextSource, with its options."""
    num_sequences: int = 16
    sequence_length: int = 1024
    """Tokens of each."""
    batch_size: int = 4
    """Sequences that are read at the same time."""
    new_tokens: int = 1
    """Generated under a policy before it is seen what is left; all but the last are fed."""
    segmentation: SegmentationSettings = field(default_factory=SegmentationSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    cache_folder: str = "outputs/cache"
    """Where tokenised text is kept."""
    output: str = "outputs/analysis"

    def __post_init__(self) -> None:
        if self.model is None and self.run is None:
            raise ValueError("nothing to analyse: give model=DIR, or run=DIR for the ratios along a training run")
        for name in ("num_sequences", "sequence_length", "batch_size", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a whole number >= 1")
        if self.segmentation.tokens < 1:
            raise ValueError(f"segmentation.tokens={self.segmentation.tokens}: expected a whole number >= 1")


@dataclass(frozen=True)
class Analysis:
    """What has been checked."""

    source: DocumentSource | None
    policy: EvictionPolicy | None
    target_ratio: float | None
    """Of the model's own gates."""
    history: tuple[list[int], torch.Tensor] | None
    """Steps of validations, and the shares held after each, [S, L, H]."""


def plan_analysis(config: AnalyseConfig) -> Analysis:
    """Check settings, files and names; no model is loaded and nothing is written.

    Raises:
        ValueError: a model, policy or option is unknown or out of range, or one does not suit the other.
        FileNotFoundError: there is no text, or the run has no ratios.
    """
    history = None if config.run is None else _read_history(Path(config.run) / "heatmaps" / RATIOS_NAME)
    if config.model is None:
        return Analysis(None, None, None, history)
    _, values, target_ratio = describe_model(config.model, "model")
    policy: Any = policy_from_config(config.policy, config.budget)
    if policy is None:
        if target_ratio is None:
            raise ValueError(f"{config.model.path} is a stock model, which keeps everything: give policy=h2o budget=4")
        _check_head(config.segmentation, values)
    else:
        name = type(policy).__name__
        if target_ratio is not None:
            raise ValueError(f"{config.model.path} has gates of its own: leave policy and budget out")
        if not isinstance(policy, EvictionPolicy):
            raise ValueError(f"{name} holds every token and only reads fewer: choose a policy that evicts, such as h2o")
        check_fits(policy, values["num_hidden_layers"], config.engine.block_size, f"{name} on {config.model.path}")
    source = build_target(config.source, "source")
    source.check()
    return Analysis(source, policy, target_ratio, history)


def _read_history(path: Path) -> tuple[list[int], torch.Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: run= is the output folder of a retrofit, which writes it")
    try:
        return RatioHistory(path).read()
    except (ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged or empty ({type(error).__name__}: {error})") from error


def _check_head(settings: SegmentationSettings, values: dict[str, Any]) -> None:
    sizes = {"layer": values["num_hidden_layers"], "head": values["num_key_value_heads"]}
    for name, size in sizes.items():
        if not 0 <= getattr(settings, name) < size:
            raise ValueError(f"segmentation.{name}={getattr(settings, name)}: the model has {name}s 0 to {size - 1}")


def run_analysis(
    analysis: Analysis, config: AnalyseConfig, load: Callable[[ComparedModel], tuple[Any, Any]]
) -> list[Path]:
    """Store what the model, and the run, show, and draw all that the folder's store holds.

    Args:
        analysis: the plan.
        config: settings.
        load: gives the model, on its device, and its tokenizer.
    Returns:
        The files that were written.
    Raises:
        ValueError: the text is too short, or the tokenizer does not suit.
    """
    rows, pages, folder = [], dict[str, str](), Path(config.output)
    if config.model is not None and analysis.source is not None:
        model, tokenizer = load(config.model)
        if tokenizer is None:
            raise ValueError(f"{config.model.path} has no tokenizer: add tokenizer.json")
        windows: Any = build_packed(analysis.source, tokenizer, config.sequence_length, config.cache_folder)
        sequences = [windows[index]["input_ids"] for index in range(min(config.num_sequences, len(windows)))]
        if analysis.policy is None:
            chosen, text = config.segmentation, _text(config, analysis.source)
            cut = segment_text(model, tokenizer, text, chosen.layer, chosen.head, chosen.tokens)
            pages = {"segmentation.html": cut.page()}
            pages["segmentation.json"] = json.dumps(asdict(cut), indent=1, ensure_ascii=False)
            decisions = collect_decisions(model, torch.stack(sequences).split(config.batch_size), "sequences")
            figures = tables_of_gates(decisions) | {"own_gates": True, "requested_ratio": analysis.target_ratio}
        else:
            engine = Engine(model, tokenizer, analysis.policy, **asdict(config.engine))
            prompts = [each.tolist() for each in sequences]
            figures = tables_of_survivors(find_survivors(engine, prompts, config.new_tokens, "prompts"))
            budget = parse_budget(config.budget)
            figures |= {"budget": budget_name(budget), "requested_ratio": budget.ratio or figures["achieved_ratio"]}
        policy = "full" if analysis.policy is None else type(analysis.policy).__name__
        read = {name: getattr(config, name) for name in ("source", "num_sequences", "sequence_length", "new_tokens")}
        settings = {"model": model_settings(config.model), "policy": config.policy, "task": read}
        rows.append(new_row("/".join(Path(config.model.path).parts[-2:]), policy, "inside", settings, **figures))
    if config.run is not None and analysis.history is not None:
        rows.append(_row_of_run(Path(config.run), *analysis.history))
    store = Store(folder / "cells.jsonl")
    for row in rows:
        store.append(row)
    for name, content in pages.items():
        (folder / name).write_text(content)
    write_measurements(store.frame(), folder)
    drawn = [path for _, _, path in write_plots(read_folders([folder]), folder / "plots")]
    return [*drawn, *(folder / name for name in pages), store.path, folder / MEASUREMENTS]


def _text(config: AnalyseConfig, source: DocumentSource) -> str:
    if config.segmentation.text is not None:
        return config.segmentation.text
    return next((text for text in source.documents() if text and text.strip()), "")


def tables_of_gates(decisions: Decisions) -> Row:
    """Put what gates decide into the fields of a row."""
    merged, counts = decisions.merged, decisions.segment_lengths()
    layers, samples, _, length = merged.shape
    step = max(1, length // NUM_LENGTHS)
    lengths, ratios = range(step, length + 1, step), decisions.ratio_by_head()
    of_layers = {"layer": [*range(layers)], "samples": samples}
    return {
        "achieved_ratio": float(1 / (1 / ratios).mean()),
        "samples": samples,
        "head_ratios": ratios.tolist(),
        "by_tokens": {"tokens": [*lengths], **of_layers}
        | {"compression_ratio": decisions.ratio_over_length(lengths).tolist()},
        "by_position": {"position": [*range(length)], **of_layers}
        | {"share_merged": decisions.decision_over_position().T.tolist()},
        "by_segment_length": {"segment_length": [*range(1, counts.shape[1])], **of_layers}
        | {"segments": counts[:, 1:].T.tolist()},
    }


def tables_of_survivors(survives: torch.Tensor) -> Row:
    """Put what a policy leaves of sequences, bool [B, L, H, T], into the fields of a row."""
    samples, layers, heads, length = survives.shape
    entries = survives.sum(-1).double().mean(0)
    of_heads = {"layer": [*range(layers)], "head": [*range(heads)], "samples": samples}
    places = {"layer": [*range(layers)], "position": [*range(length)], "samples": samples}
    return {
        "achieved_ratio": float(length / entries.mean()),
        "samples": samples,
        "head_ratios": (length / entries).tolist(),
        "by_head": of_heads | {"entries": entries.tolist()},
        "by_position": places | {"share_held": survives.float().mean((0, 2)).tolist()},
    }


def _row_of_run(run: Path, steps: list[int], held: torch.Tensor) -> Row:
    """Put the shares held at each validation of a run, [S, L, H], into a row: the paper's figure 7."""
    ratio = float(1 / held[-1].mean())
    places = {"step": steps, "layer": [*range(held.shape[1])], "samples": 1}
    figures: Row = {"achieved_ratio": ratio, "requested_ratio": round(ratio, 2), "own_gates": True}
    figures |= {"head_ratios": (1 / held[-1]).tolist(), "samples": 1}
    figures["by_step"] = places | {"compression_ratio": (1 / held.mean(-1)).tolist()}
    return new_row(run.name, "full", "training", {"model": {"run": str(run)}, "task": {}}, **figures)
