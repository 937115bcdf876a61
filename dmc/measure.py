"""Loss and achieved compression of a model on held-out text, with the decisions that inference takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from dmc.compression import GateMode, GateTrace, held_fraction
from dmc.ranks import ALONE


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


def next_token_loss(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it, in nats; logits [B, T, vocab], input_ids [B, T]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten())


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
) -> TextScore:
    """Score sequences of equal length.

    Args:
        model: stock or compressed causal LM.
        batches: token ids, each [B, T].
        title: of a progress bar; None: none.
        documents_of: gives the documents of a batch at which gates and attention reset; None: they do not.
    """
    compression = getattr(model, "compression", None)
    losses, helds = [], []
    with evaluating(model):
        for input_ids in tqdm(batches, title, leave=False, disable=title is None):
            input_ids = input_ids.to(model.device)
            trace = GateTrace(ranks=getattr(model, "ranks", ALONE))
            gates: dict[str, Any] = {} if compression is None else {"gate_mode": GateMode(), "gate_trace": trace}
            if gates and documents_of is not None:
                gates["documents"] = documents_of(input_ids)
            logits = model(input_ids, use_cache=False, **gates).logits
            losses.append(next_token_loss(logits, input_ids).double().expand(input_ids.shape[0]))
            if compression is not None:
                helds.append(held_fraction(trace.stacked_alpha(), delay=compression.delay).transpose(0, 1))  # [B, L, H]
    loss = float(torch.cat(losses).mean())
    return TextScore(loss, torch.cat(helds).mean(0).cpu() if helds else None)
