"""Which tokens a training-free method still holds when prompts have been read, and how many in each head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from dmc.runtime import Engine, SamplingParams


def find_survivors(
    engine: Engine, prompts: Sequence[list[int]], new_tokens: int = 1, title: str | None = None
) -> Tensor:
    """Read prompts one by one and see what is left.

    Args:
        engine: with a policy that evicts.
        prompts: token ids, all of one length.
        new_tokens: generated behind each; all but the last are fed.
        title: of a progress bar; None: none.
    Returns:
        Whether each head holds the token at a position, bool [B, L, H, T].
    Raises:
        ValueError: the engine does not know what it holds: see `Session.positions_held`.
    """
    greedy = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    found = []
    for prompt in tqdm(prompts, title, disable=None if title else True):
        with engine.session() as session:
            session.generate(prompt, greedy)
            held = session.positions_held()
        survives = torch.zeros(len(held), len(held[0]), len(prompt) + new_tokens - 1, dtype=torch.bool)
        for layer, heads in enumerate(held):
            for head, positions in enumerate(heads):
                survives[layer, head, positions] = True
        found.append(survives)
    return torch.stack(found)
