"""A teacher that knows nothing of the text is told: it may have been trained with another tokenizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning import Callback, LightningModule, Trainer

from dmc.training.measure import score_text

SHARE_OF_GUESSING = 0.9
"""Loss of a teacher, relative to that of a guess among all words, above which there is a warning."""
logger = logging.getLogger(__name__)


class TeacherCheck(Callback):
    """Scores a run's teacher on the first validation text, before the first step.

    Args:
        open_batches: returns held-out text, see `score_text`; called once the text is prepared.
    """

    def __init__(self, open_batches: Callable[[], list[dict[str, Any]]]) -> None:
        self.open_batches = open_batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of a teacher that hardly does better than a guess; all ranks read the same text."""
        teacher: Any = pl_module.teacher
        if teacher is None or trainer.global_step > 0:
            return
        guess = math.log(teacher.model.config.vocab_size)
        with suppress(ValueError), trainer.precision_plugin.forward_context():  # text of which nothing is scored
            loss = score_text(teacher.model, self.open_batches()[:1], gate_mode=teacher.gate_mode).loss
            if not loss <= SHARE_OF_GUESSING * guess and trainer.is_global_zero:
                logger.warning(
                    "the teacher %s has a loss of %.2f nats per token on the first validation text, a guess among its "
                    "%d tokens %.2f: look at whether data.tokenizer is the one that it was trained with, whether the "
                    "text is of a kind that it knows, and whether its weights are whole",
                    teacher.path, loss, teacher.model.config.vocab_size, guess,
                )  # fmt: skip
