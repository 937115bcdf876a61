"""Loss and achieved compression ratio of a model on held-out text, with thresholded decisions as in inference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import trange

from dmc.compression import GateMode, GateTrace, held_fraction
from dmc.compression.losses import decided_tokens
from dmc.models import next_tokens, sequence_means, with_token_losses
from dmc.models.modeling import for_unpadded
from dmc.models.token_losses import IGNORED
from dmc.ranks import ALONE, Ranks
from dmc.training.logit_histogram import LogitHistogram


@dataclass(frozen=True)
class TextScore:
    """Scores of a model on held-out text, with thresholded decisions."""

    loss: float
    """Next-token cross-entropy, nats per token: the mean over sequences of the mean over their scored tokens."""
    held: Tensor | None
    """Share of the tokens each head holds at the end of a sequence, [L, H]; None without gates."""
    decided: Tensor | None = None
    """Share of the tokens each head decides to hold, those that wait for their decision included, [L, H]."""

    @property
    def achieved_ratio(self) -> float:
        """Tokens over held entries; 1 without gates."""
        return 1.0 if self.held is None else 1.0 / float(self.held.mean())

    @property
    def decided_ratio(self) -> float:
        """Tokens over those that no decision merges or drops, executed or not; 1 without gates."""
        return 1.0 if self.decided is None else 1.0 / float(self.decided.mean())

    def counted_ratio(self, target_counts: Literal["held", "decided"]) -> float:
        """The ratio that a target is of, see `CompressionConfig.target_counts`."""
        return self.achieved_ratio if target_counts == "held" else self.decided_ratio


@contextmanager
def evaluating(model: Any) -> Any:
    """Put a model in eval mode without gradients, and back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


@contextmanager
def seeing_documents(model: Any, batches: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    """Let a stock model see documents as a compressed one does, where a batch has any."""
    before = model.config._attn_implementation
    if any(batch.get("documents") is not None for batch in batches):
        for_unpadded(model)
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


def score_text(
    model: Any,
    batches: Iterable[Mapping[str, Any]],
    title: str | None = None,
    sharing: Ranks = ALONE,
    gate_mode: GateMode | None = None,
    histogram: LogitHistogram | None = None,
) -> TextScore:
    """Score sequences of equal length, as training does.

    Args:
        model: stock or compressed causal LM.
        batches: of `input_ids` [B, T], and where given `loss_mask` [B, T], True at tokens that are scored,
            `token_mask` [B, T], True at those that ratios count, and `documents` at which attention and gates restart.
        title: title of a progress bar; None: no bar.
        sharing: ranks that divide the batches; all of them call this, and get the score of all batches.
        gate_mode: how the gates decide; None: as in inference.
        histogram: takes the decision logits of all batches, of tokens that the target counts.
    Raises:
        ValueError: no token is scored.
    """
    compression = getattr(with_token_losses(model), "compression", None)
    has_gates = compression is not None
    if gate_mode is not None and gate_mode.neuron_multiplier is not None:
        compression = None  # attention without gates decides nothing
    batches = list(batches)
    sizes = [len(batch["input_ids"]) for batch in batches]
    cutting = getattr(model, "ranks", ALONE)  # ranks that share each layer read the same text
    reader, num_readers = sharing.rank // cutting.size, max(1, sharing.size // cutting.size)
    scores = None
    with evaluating(model), seeing_documents(model, batches):
        for turn in trange(0, len(batches), num_readers, desc=title, leave=False, disable=title is None or reader > 0):
            number = turn + reader
            # A rank without a batch takes part in the others' passes: some strategies run each pass on all ranks.
            batch = batches[min(number, len(batches) - 1)]
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            input_ids, trace = batch["input_ids"], GateTrace(ranks=cutting)
            options: dict[str, Any] = {"documents": batch.get("documents")}
            if has_gates:
                options |= {"gate_mode": gate_mode or GateMode(), "gate_trace": trace}
            targets = next_tokens(input_ids, batch.get("loss_mask"))
            losses = model(input_ids, use_cache=False, targets=targets, **options).cross_entropy
            scored = (targets != IGNORED).any(-1)
            found = torch.stack([sequence_means(losses, targets).double(), scored.double()], dim=1)
            if compression is not None:
                alpha = trace.stacked_alpha()
                logits = alpha if histogram is None else trace.stacked_logits()
                shares = torch.stack(
                    [
                        held_fraction(alpha, delay=delay, token_mask=batch.get("token_mask"))
                        for delay in (compression.delay, 0)
                    ]
                )
                found = torch.cat([found, shares.movedim(2, 0).flatten(1).double()], dim=1)
            if scores is None:
                scores = torch.zeros(sum(sizes), found.shape[1], dtype=torch.float64)
            if number < len(batches) and sharing.rank % cutting.size == 0:
                first = sum(sizes[:number])
                scores[first : first + len(found)] = found.cpu()
                if histogram is not None and compression is not None:
                    _count_logits(histogram, logits, batch, compression.counted_delay)
    assert scores is not None, "no batches"
    scores = sharing.all_reduce(scores)  # rows of other ranks are 0: the sum is exact
    if histogram is not None:
        histogram.all_reduce(sharing)
    if not scores[:, 1].any():
        raise ValueError(f"no token of {len(scores)} held-out sequences is scored: use more or longer sequences")
    loss = float(scores[:, 0].sum() / scores[:, 1].sum())  # a sequence without a scored token has 0
    if compression is None:
        return TextScore(loss, None)
    held, decided = scores[:, 2:].float().mean(0).view(2, alpha.shape[0], alpha.shape[2])
    return TextScore(loss, held, decided)


def _count_logits(histogram: LogitHistogram, logits: Tensor, batch: Mapping[str, Any], delay: int) -> None:
    token_mask, documents = batch.get("token_mask"), batch.get("documents")
    token_mask = torch.ones_like(batch["input_ids"], dtype=torch.bool) if token_mask is None else token_mask
    decided = decided_tokens(token_mask, delay)
    if documents is not None:
        decided = decided & ~documents.starts
    histogram.add(logits, decided, token_mask.sum(-1))
