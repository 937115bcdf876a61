"""Loss and achieved compression of a model on held-out text, with the decisions that inference takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import trange

from dmc.compression import GateMode, GateTrace, held_fraction
from dmc.models import next_tokens, sequence_means, with_token_losses
from dmc.ranks import ALONE, Ranks


@dataclass(frozen=True)
class TextScore:
    """A model on held-out text, thresholded decisions."""

    loss: float
    """Mean next-token cross-entropy, nats per token."""
    held: Tensor | None
    """Share of the tokens each head holds at the end of a sequence, [L, H]; None without gates."""

    @property
    def achieved_ratio(self) -> float:
        """Tokens over entries held; 1 without gates."""
        return 1.0 if self.held is None else 1.0 / float(self.held.mean())


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


def score_text(
    model: Any,
    batches: Iterable[Tensor],
    title: str | None = None,
    documents_of: Callable[[Tensor], Any] | None = None,
    sharing: Ranks = ALONE,
) -> TextScore:
    """Score sequences of equal length.

    Args:
        model: stock or compressed causal LM.
        batches: token ids, each [B, T].
        title: of a progress bar; None: none.
        documents_of: gives the documents of a batch at which gates and attention reset; None: they do not.
        sharing: ranks that read a part of the batches each; all of them call this, and get the score of all batches.
    """
    compression = getattr(with_token_losses(model), "compression", None)
    batches = list(batches)
    cutting = getattr(model, "ranks", ALONE)  # ranks that share each layer read the same text
    reader, num_readers = sharing.rank // cutting.size, max(1, sharing.size // cutting.size)
    scores = None
    with evaluating(model):
        for turn in trange(0, len(batches), num_readers, desc=title, leave=False, disable=title is None or reader > 0):
            own = turn + reader
            # A rank without a batch takes part in the pass of those that have one: some must make each pass together.
            batch = batches[min(own, len(batches) - 1)]
            input_ids = batch.to(model.device)
            trace = GateTrace(ranks=cutting)
            gates: dict[str, Any] = {} if compression is None else {"gate_mode": GateMode(), "gate_trace": trace}
            if gates and documents_of is not None:
                documents = documents_of(batch)
                gates["documents"] = None if documents is None else documents.to(model.device)
            targets = next_tokens(input_ids)
            losses = model(input_ids, use_cache=False, targets=targets, **gates).cross_entropy
            found = sequence_means(losses, targets).double()[:, None]
            if compression is not None:
                held = held_fraction(trace.stacked_alpha(), delay=compression.delay).transpose(0, 1)  # [B, L, H]
                found = torch.cat([found, held.flatten(1).double()], dim=1)
            if scores is None:
                scores = torch.zeros(sum(len(each) for each in batches), found.shape[1], dtype=torch.float64)
            if own < len(batches) and sharing.rank % cutting.size == 0:
                first = sum(len(each) for each in batches[:own])
                scores[first : first + len(found)] = found.cpu()
    assert scores is not None, "no batches"
    scores = sharing.added(scores)  # every rank's rows are 0 where they are another's: the sum is exact
    shares = scores[:, 1:].float().mean(0)
    return TextScore(
        float(scores[:, 0].mean()), None if compression is None else shares.view(held.shape[1], held.shape[2])
    )
