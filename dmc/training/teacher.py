"""The frozen model that a run learns from: a second model, or the run's own where only gates are added to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dmc.compression import GateMode
from dmc.models import with_token_losses
from dmc.models.attention import Documents
from dmc.models.modeling import for_unpadded
from dmc.models.token_losses import Direction, TeacherOutput

PLAIN = GateMode(neuron_multiplier=1.0)
"""Attention without gates; where they borrow no channel it is the base model's."""


class Teacher:
    """A frozen causal LM; it is no module, so that optimizers and checkpoints leave out its weights.

    Args:
        model: stock or compressed causal LM, in any mode.
        path: folder or hub name of its weights.
        temperature: softens its distributions and the student's.
        direction: which of the two distributions the divergence is a mean under.
    """

    def __init__(self, model: Any, path: str, temperature: float, direction: Direction = "forward") -> None:
        self.model = for_unpadded(with_token_losses(model)).eval().requires_grad_(False)
        self.path, self.temperature, self.direction = path, temperature, direction

    owns_weights = True
    """Whether the model is another one than the student."""
    gate_mode: GateMode | None = None
    """How its gates decide; None: as at inference, if it has any."""

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let the model run as at inference, without gradients."""
        with torch.no_grad():
            yield

    def read(self, input_ids: Tensor, documents: Documents | None = None) -> TeacherOutput:
        """Run the model on tokens, [B, T], and the documents the student sees; its loss computes the logits."""
        options = {} if self.gate_mode is None else {"gate_mode": self.gate_mode}
        with self.frozen():
            found = self.model(input_ids, use_cache=False, documents=documents, skip_logits=True, **options)
        # FSDP2 leaves the weights outside the layers gathered after a forward, until `release`.
        return TeacherOutput(found.last_hidden_state, self.model.lm_head.weight, self.temperature, self.direction)

    def release(self) -> None:
        """Let FSDP2 divide its embedding and head again, once the losses and their gradient are computed."""
        if self.owns_weights and isinstance(self.model, FSDPModule):
            self.model.reshard()


class OwnBase(Teacher):
    """The base of a student that only adds gates to it: the student's modules, attending without gates.

    Args:
        student: compressed causal LM whose gates borrow no channel and alone are trained.
        path: folder or hub name of the base.
        temperature: as of `Teacher`.
        direction: likewise.
    """

    owns_weights = False
    gate_mode = PLAIN

    def __init__(self, student: Any, path: str, temperature: float, direction: Direction = "forward") -> None:
        self.model, self.path, self.temperature, self.direction = student, path, temperature, direction

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """See `Teacher`; the student goes on in the mode that it was in."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)


def cast_products(model: Any, dtype: torch.dtype) -> None:
    """Keep the weights of a frozen model's linear layers, in place, in the dtype that autocast casts them to.

    Norms, embeddings and what is tied to them stay as they are, so the results do too, bit by bit.
    """
    embedded = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for part in model.modules():
        if isinstance(part, nn.Linear) and id(part.weight) not in embedded:
            for name, value in list(part.named_parameters(recurse=False)):
                setattr(part, name, nn.Parameter(value.detach().to(dtype), requires_grad=False))
