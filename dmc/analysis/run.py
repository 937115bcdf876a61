"""Plan an analysis, check all that can be checked before a model is loaded, and write its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dmc.analysis.decisions import collect_decisions
from dmc.analysis.figures import Figures
from dmc.analysis.segments import segment_text
from dmc.analysis.survivors import find_survivors
from dmc.data import DocumentSource, build_packed
from dmc.policies import EvictionPolicy
from dmc.policies.from_config import budget_name, parse_budget, policy_from_config
from dmc.provenance import provenance
from dmc.results.grid import ComparedModel, EngineSettings, check_fits, describe_model
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

    @property
    def name(self) -> str:
        """Of model, policy and budget, or of the training run."""
        if self.model is None:
            return Path(str(self.run)).name
        name = "/".join(Path(self.model.path).parts[-2:])
        if not self.policy:
            return name
        budget = parse_budget(self.budget)
        asked = f"CR {budget_name(budget)}" if budget.tokens is None else f"{budget.tokens} tokens"
        return f"{name}, {self.policy['_target_'].rpartition('.')[2]} at {asked}"


@dataclass(frozen=True)
class Analysis:
    """What has been checked."""

    source: DocumentSource | None
    policy: EvictionPolicy | None
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
        return Analysis(None, None, history)
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
    return Analysis(source, policy, history)


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
    """Write the figures.

    Args:
        analysis: the plan.
        config: settings.
        load: gives the model, on its device, and its tokenizer.
    Returns:
        The files that were written.
    Raises:
        ValueError: the text is too short, or the tokenizer does not suit.
    """
    figures = Figures(Path(config.output), config.name)
    if config.model is not None and analysis.source is not None:
        model, tokenizer = load(config.model)
        if tokenizer is None:
            raise ValueError(f"{config.model.path} has no tokenizer: add tokenizer.json")
        windows: Any = build_packed(analysis.source, tokenizer, config.sequence_length, config.cache_folder)
        sequences = [windows[index]["input_ids"] for index in range(min(config.num_sequences, len(windows)))]
        if analysis.policy is None:
            _analyse_gates(figures, model, tokenizer, sequences, _text(config, analysis.source), config)
        else:
            options: dict[str, Any] = asdict(config.engine)
            engine = Engine(model, tokenizer, analysis.policy, **options)
            prompts = [each.tolist() for each in sequences]
            survives = find_survivors(engine, prompts, config.new_tokens, "prompts")
            figures.survivors(survives.float().mean(0))
            figures.entries_by_head(survives.sum(-1).float().mean(0))
    if analysis.history is not None:
        figures.ratio_over_training(*analysis.history)
    record = {
        "name": config.name,
        "config": asdict(config),
        "files": [path.name for path in figures.paths],
        "provenance": provenance(),
    }
    figures.path("analysis.json").write_text(json.dumps(record, indent=1))
    return figures.paths


def _text(config: AnalyseConfig, source: DocumentSource) -> str:
    if config.segmentation.text is not None:
        return config.segmentation.text
    return next((text for text in source.documents() if text and text.strip()), "")


def _analyse_gates(
    figures: Figures, model: Any, tokenizer: Any, sequences: list[Any], text: str, config: AnalyseConfig
) -> None:
    chosen = config.segmentation
    cut = segment_text(model, tokenizer, text, chosen.layer, chosen.head, chosen.tokens)
    batches = torch.stack(sequences).split(config.batch_size)
    decisions = collect_decisions(model, batches, "sequences")
    step = max(1, config.sequence_length // NUM_LENGTHS)
    lengths = range(step, config.sequence_length + 1, step)
    figures.ratio_by_head(decisions.ratio_by_head())
    figures.ratio_over_length(lengths, decisions.ratio_over_length(lengths))
    figures.decision_over_position(decisions.decision_over_position())
    figures.segment_lengths(decisions.segment_lengths())
    figures.path("segmentation.html").write_text(cut.page())
    figures.path("segmentation.json").write_text(json.dumps(asdict(cut), indent=1, ensure_ascii=False))
