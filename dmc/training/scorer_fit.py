"""Fit KVpop's scorer to the attention that a frozen base pays later (arXiv:2607.05061)."""

from __future__ import annotations

import math
from dataclasses import field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, StrictInt
from torch import Tensor
from tqdm.auto import tqdm

from dmc.compression import CompressionConfig, GateMode
from dmc.config.settings import Count, OutputFolder, Share, checked_dataclass
from dmc.data.config import DataConfig
from dmc.gguf import ModelName
from dmc.models import load_model, retrofit
from dmc.policies.delayed_scorer import DelayedScorer, ScorerConfig
from dmc.training.attention_targets import future_attention, rotated_states
from dmc.training.config import RunConfig, TrainingConfig
from dmc.training.config.training import Rate, StageConfig
from dmc.training.text_data import TextData, build_tokenizer

SCORER_NAME = "scorer.safetensors"
SMALLEST_DEVIATION = 1e-3


@checked_dataclass(frozen=True)
class FitConfig:
    """A fit of a scorer.

    Raises:
        ValueError: a value is missing or out of range, or sequences are too short for the window.
    """

    model: ModelName
    """Folder, hub name or GGUF file of the stock model."""
    data: DataConfig
    scorer: ScorerConfig = field(default_factory=ScorerConfig)
    steps: Count = 160
    sequence_length: Count = 1024
    batch_size: Count = 4
    """Sequences of a step, all in one pass."""
    learning_rate: Rate = 5e-3
    """At first; it falls to 0 as a cosine."""
    min_future: Share = 0.125
    """Share of a sequence that must come after a token has left the window, or it teaches nothing."""
    seed: Annotated[StrictInt, Field(ge=0, le=2**32 - 1)] = 0
    output: OutputFolder = "outputs/scorer"

    def __post_init__(self) -> None:
        if self.num_rated < 1:
            raise ValueError(
                f"sequence_length={self.sequence_length} leaves no token behind scorer.window={self.scorer.window} and "
                f"min_future={self.min_future:g}: use longer sequences"
            )

    @property
    def num_rated(self) -> int:
        """Tokens of a sequence, its first ones, that the fit is of."""
        return self.sequence_length - self.scorer.window - 1 - math.ceil(self.min_future * self.sequence_length)

    @property
    def run(self) -> RunConfig:
        """A run that reads the same text."""
        training = TrainingConfig(
            stages={"pretrain": StageConfig(f"{self.steps} steps")},
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            micro_batch_size=self.batch_size,
        )
        return RunConfig(self.data, training, model=self.model, seed=self.seed)


def fit_scorer(config: FitConfig) -> Path:
    """Fit a scorer and return its file.

    For each head the softmax of its scores over a text is pulled to the share of the later attention that each token
    receives (`future_attention`), by cross-entropy: so the tokens that receive most of it count most. The base is
    frozen, and nothing is compressed meanwhile. That loss is our choice; the paper's is not known to us.

    Raises:
        ValueError: the file is there already, or the model has gates.
        ArithmeticError: the fit diverges; nothing is written.
    """
    file = Path(config.output) / SCORER_NAME
    if file.exists():
        raise ValueError(f"{file} is there already: choose another output")
    model = load_model(config.model)
    if hasattr(model.config, "compression"):
        raise ValueError(f"model={config.model} has gates: a scorer is fitted to a stock model")
    run = config.run
    data = TextData(run, build_tokenizer(run), config.steps)
    data.prepare_data()
    data.setup("fit")
    torch.manual_seed(config.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    observed = ObservedAttention(model.to(device), config.scorer.window)
    scorer = observed.fresh_scorer(config.scorer).to(device)
    optimizer = torch.optim.AdamW(scorer.parameters(), config.learning_rate, weight_decay=0.0)
    batches = islice(data.micro_batches(), config.steps)
    for step, batch in enumerate(bar := tqdm(batches, desc="scorer", total=config.steps)):
        layers = observed.read(batch["input_ids"].to(device))
        if step == 0:
            standardize(scorer, [states for states, _ in layers])
        loss = torch.stack([_loss(scorer, i, *seen, config.num_rated) for i, seen in enumerate(layers)]).mean()
        if not loss.isfinite():
            raise ArithmeticError(f"step {step}: the divergence is not finite: give a smaller learning_rate")
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / config.steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix(divergence=loss.item())
    file.parent.mkdir(parents=True, exist_ok=True)
    scorer.cpu().save(file)
    return file


class ObservedAttention:
    """A frozen model whose attention is observed.

    Args:
        model: stock causal LM; its weights are reused.
        window: tokens W that a token stays before its attention counts.
    """

    def __init__(self, model: Any, window: int) -> None:
        gates = CompressionConfig(action="drop", delay=1, gate_input="hidden")
        self.model, self.window = retrofit(model, gates).eval().requires_grad_(False), window
        self._seen: list[tuple[Tensor, Tensor]] = []
        for layer in self.model.compressed_layers:
            layer.self_attn.register_forward_pre_hook(self._observe, with_kwargs=True)

    def fresh_scorer(self, config: ScorerConfig) -> DelayedScorer:
        """Make a random scorer of the model's shape."""
        heads = self.model.config.num_key_value_heads
        layers = self.model.compressed_layers
        return DelayedScorer(config, len(layers), heads, layers[0].self_attn.head_dim)

    @torch.no_grad()
    def read(self, input_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Read tokens, [B, T].

        Returns:
            Of each layer keys before RoPE and values, [B, H, T, 2 D], and `future_attention`, [B, H, T - W - 1].
        """
        self._seen = []
        self.model(input_ids, use_cache=False, gate_mode=GateMode(compressed_heads=()), logits_to_keep=1)
        return self._seen

    def _observe(self, attention: Any, args: Any, kwargs: Any) -> None:
        states = kwargs["hidden_states"]
        grouped, key, value, unrotated = rotated_states(attention, states, kwargs["position_embeddings"])
        later = future_attention(grouped, key, attention.scaling, self.window)
        self._seen.append((torch.cat((unrotated, value), dim=-1), later))


def standardize(scorer: DelayedScorer, states: list[Tensor]) -> None:
    """Set the mean and deviation by which a scorer standardizes its inputs; of each layer [B, H, T, 2 D]."""
    scorer.mean.copy_(torch.stack([of_layer.mean((0, 2)) for of_layer in states]))
    deviation = torch.stack([of_layer.std((0, 2)) for of_layer in states])
    scorer.deviation.copy_(deviation.clamp_min(SMALLEST_DEVIATION))


def _loss(scorer: DelayedScorer, index: int, states: Tensor, later: Tensor, num_rated: int) -> Tensor:
    """Kullback-Leibler divergence of a layer's softmaxed scores from the later attention, its mean over heads."""
    window = scorer.config.window
    begin = torch.zeros(*states.shape[:2], scorer.state_numbers, device=states.device)
    leaving = torch.nn.functional.pad(states, (0, 0, window, 0))[..., : states.shape[2], :]
    scores = scorer.read(index, begin, states, leaving)[0][..., window : window + num_rated]
    wanted = later[..., :num_rated].clamp_min(1e-12)
    wanted = wanted / wanted.sum(-1, keepdim=True)
    return (wanted * (wanted.log() - scores.log_softmax(-1))).sum(-1).mean()
