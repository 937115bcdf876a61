"""What compressing each KV head alone costs, and the decision biases that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from dmc.compression import GateMode
from dmc.measure import evaluating
from dmc.models import CompressedCausalLM, next_tokens, sequence_means
from dmc.models.attention import Documents


def measure_head_costs(
    model: CompressedCausalLM,
    batches: Sequence[Tensor],
    title: str | None = None,
    documents_of: Callable[[Tensor], Documents | None] = lambda _: None,
) -> Tensor:
    """Measure what the loss gains when one head merges (or drops) every token it can and all others none.

    Args:
        model: its layers whole on this rank.
        batches: token ids, each [B, T], all of one size.
        title: of a progress bar; None: none.
        documents_of: gives the documents of a batch at which gates and attention reset, None where they do not.
    Returns:
        Nats per token, [L, H], on the CPU; noise makes some of them negative.
    """
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads

    def loss(compressed: tuple[tuple[int, int], ...]) -> float:
        mode = GateMode(compressed_heads=compressed)
        losses = []
        for batch in batches:
            input_ids, documents = batch.to(model.device), documents_of(batch)
            documents = None if documents is None else documents.to(model.device)
            targets = next_tokens(input_ids)
            found = model(input_ids, use_cache=False, gate_mode=mode, documents=documents, targets=targets)
            losses.append(sequence_means(found.cross_entropy, targets).mean())
        return float(torch.stack(losses).mean())

    costs = torch.zeros(layers, heads)
    with evaluating(model), tqdm(total=1 + layers * heads, desc=title, leave=False, disable=title is None) as bar:
        uncompressed = loss(())
        bar.update()
        for layer in range(layers):
            for head in range(heads):
                costs[layer, head] = loss(((layer, head),)) - uncompressed
                bar.update()
    return costs


def decision_biases(costs: Tensor, spread: float, floor: float) -> Tensor:
    """Turn costs into decision biases: spread * (max z - z), z the standardised log(max(cost, floor * largest cost)).

    The head that costs most keeps its first logit, for a deeper one would hardly ever be sampled, and never learn.

    Args:
        costs: of each head, [L, H].
        spread: logits for each standard deviation.
        floor: share of the largest cost below which all count as equal.
    Returns:
        [L, H], >= 0; zeros where no head costs more than another.
    """
    largest = float(costs.max())
    if largest <= 0:
        return torch.zeros_like(costs)
    logs = costs.clamp(min=floor * largest).log()
    deviation = logs.std(correction=0)
    return spread * (logs.max() - logs) / deviation if deviation > 0 else torch.zeros_like(costs)
