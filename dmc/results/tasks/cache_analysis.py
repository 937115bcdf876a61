"""Analysis of a cache after a text: the tokens held in each layer and head, and the segments of learned gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmc.compression import GateMode, GateTrace, held_fraction
from dmc.config.settings import Count, checked_dataclass
from dmc.policies.reading import ReadingPolicy
from dmc.results.tasks.base import Breakdown, Sample, SampleResult
from dmc.results.tasks.text_loss import TextTask
from dmc.runtime import Engine, SamplingParams, Session

NUM_BINS = 64
"""Points of a curve, and the longest segment with its own count."""


@checked_dataclass(frozen=True, kw_only=True)
class CacheAnalysis(TextTask):
    """Reads text and records the entries that are left, for plots of the page; it measures no quality.

    A row has `share_held` by position and layer; for learned gates, which decide token by token, also
    `by_tokens_and_layer`, the share held after as many tokens, and `segments` by length (the last: that long or longer)
    and layer. The compression ratio of each head is in every row.
    """

    num_samples: Count = 16
    length: Count = 1024
    """Tokens of each text."""
    new_tokens: Count = 1
    """Number of tokens generated before the analysis; all but the last are fed."""
    main_metric = "share_held"
    higher_is_better = True

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        windows = self.windows(tokenizer, self.length)
        chosen = range(min(self.num_samples, len(windows)))
        return [Sample(windows[index]["input_ids"].tolist(), []) for index in chosen]

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        params = SamplingParams(max_new_tokens=self.new_tokens, temperature=0.0, ignore_eos=True)
        results = []
        for sample in samples:
            with engine.session() as session:
                stats = session.generate(sample.prompt, params).stats
                tokens = session.tokens[: stats.tokens_seen]
                decisions = decisions_of(engine.model, tokens) if decides(engine) else None
                held = held_tokens(session, stats.tokens_seen, decisions)
            width = -(-held.shape[-1] // NUM_BINS)
            breakdown = [
                Breakdown({"position": begin, "layer": layer}, {"share_held": float(share)})
                for begin in range(0, held.shape[-1], width)
                for layer, share in enumerate(held[..., begin : begin + width].float().mean((1, 2)))
            ]
            results.append(
                SampleResult({}, stats, breakdown if decisions is None else breakdown + _of_gates(engine, decisions))
            )
        return results


def decides(engine: Engine) -> bool:
    """Return whether learned gates alone decide what an engine's cache holds."""
    return engine.policy is None and getattr(engine.model, "compression", None) is not None


def survivors(session: Session, tokens: list[int]) -> Tensor | None:
    """Return which of a session's tokens it holds, bool [L, H, T]; None: that is not recorded.

    Args:
        session: a session that has read these tokens.
        tokens: ids of the T tokens.
    """
    engine = session.engine
    if decides(engine):
        return held_tokens(session, len(tokens), decisions_of(engine.model, tokens))
    if isinstance(engine.policy, ReadingPolicy):
        return torch.ones(*session.core.cache.slots(0).shape, len(tokens), dtype=torch.bool)
    if engine.policy is not None and "position" not in engine.cache.fields:
        return None
    return held_tokens(session, len(tokens))


def held_tokens(session: Session, length: int, decisions: Tensor | None = None) -> Tensor:
    """Return which tokens a session holds, bool [L, H, T].

    Args:
        session: a session that has read T tokens.
        length: T.
        decisions: the gates' decisions, see `decisions_of`; None: no gates.
    """
    if decisions is not None:
        waiting = max(0, length - session.engine.model.compression.delay)
        return torch.cat((~decisions[..., :waiting], torch.ones_like(decisions[..., waiting:])), dim=-1)
    layout = session.engine.cache.layout
    held = torch.zeros(layout.num_layers, layout.num_kv_heads * layout.ranks.size, length, dtype=torch.bool)
    if session.engine.policy is None:
        return ~held
    for layer, heads in enumerate(session.positions_held()):
        for head, positions in enumerate(heads):
            held[layer, head, positions] = True
    return held


def decisions_of(model: Any, tokens: list[int]) -> Tensor:
    """Return the decisions on a text by the parallel form: whether a token is merged or dropped, bool [L, H, T].

    Raises:
        ValueError: the model has no gates.
    """
    if getattr(model, "compression", None) is None:
        raise ValueError(f"{type(model).__name__} has no gates: give a model that was retrofitted")
    trace = GateTrace(model.ranks)
    with torch.no_grad():
        input_ids = torch.tensor([tokens], device=model.device)
        model(input_ids, use_cache=False, logits_to_keep=1, gate_mode=GateMode(), gate_trace=trace)
    decisions = trace.stacked_alpha()[:, 0].bool().cpu()
    decisions[..., 0] = False
    return decisions


def _of_gates(engine: Engine, decisions: Tensor) -> list[Breakdown]:
    delay, length, breakdown = engine.model.compression.delay, decisions.shape[-1], []
    step = -(-length // NUM_BINS)
    for count in range(step, length + 1, step):
        shares = held_fraction(decisions[:, None, :, :count].float(), delay=delay).mean((1, 2))
        breakdown += [
            Breakdown({"tokens": count, "layer": layer}, {"share_held": float(share)})
            for layer, share in enumerate(shares)
        ]
    for layer, heads in enumerate(decisions[..., : max(0, length - delay)]):
        counts = torch.bincount(segment_lengths(heads).clamp(max=NUM_BINS), minlength=NUM_BINS + 1)
        breakdown += [
            Breakdown({"segment_length": size, "layer": layer}, {"segments": float(counts[size])})
            for size in range(1, NUM_BINS + 1)
        ]
    return breakdown


def segment_lengths(decisions: Tensor) -> Tensor:
    """Return the lengths of segments: a kept token and the merged or dropped tokens after it.

    Args:
        decisions: bool [heads, T], False at the first token.
    Returns:
        Tokens of each segment, the truncated last one included, int64 [number of segments].
    """
    starts = ~decisions
    ends = torch.ones_like(starts[:, :1])
    places = torch.cat((starts, ends), dim=1).nonzero()  # positions of each start and of each head's end
    gaps = places[1:, 1] - places[:-1, 1]
    return gaps[places[1:, 0] == places[:-1, 0]]
