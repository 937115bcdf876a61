"""Tasks of a comparison during training: exact match of answers, in the parallel form that every strategy can run."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from lightning import Trainer
from pydantic import Field

from dmc.compression import GateMode
from dmc.config.instantiate import instantiate
from dmc.config.settings import Count, Named, Ratio, checked_dataclass
from dmc.data import DocumentSource
from dmc.models import CompressedCausalLM
from dmc.ranks import ALONE, Ranks
from dmc.results.tasks import Sample
from dmc.results.tasks.asking import Asking, Turns
from dmc.training.after_step import AfterStep
from dmc.training.measure import evaluating
from dmc.training.stages import Plan


@dataclass(frozen=True)
class AnswerScore:
    """Scores of a model on questions with one right answer."""

    exact_match: float
    """Share of the questions whose answer greedy decoding would give in full."""
    loss: float
    """Cross-entropy of the right answer, nats per token: the mean over questions."""


def score_answers(model: Any, samples: Sequence[Sample], batch_size: int, sharing: Ranks = ALONE) -> AnswerScore:
    """Score right answers in the parallel form, with thresholded decisions, no cache and no decoding.

    Decisions depend on earlier tokens alone: a prompt is compressed before its question is seen, as in a cache, and an
    answer is decoded greedily exactly if each of its tokens is the most likely one after the right tokens before it.

    Args:
        model: stock or compressed causal LM.
        samples: prompts with their answers.
        batch_size: sequences of a forward pass.
        sharing: ranks that divide the batches; all of them call this, with the same result.
    """
    rows: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for sample in samples:
        tokens = [*sample.prompt, *sample.after, *sample.continuation]
        rows[len(tokens), len(sample.continuation)].append(tokens)
    batches = [
        (torch.tensor(equal[begin : begin + batch_size]), num_answered)
        for (_, num_answered), equal in sorted(rows.items())
        for begin in range(0, len(equal), batch_size)
    ]
    cutting = getattr(model, "ranks", ALONE)  # ranks that share each layer read the same text
    reader, num_readers = sharing.rank // cutting.size, max(1, sharing.size // cutting.size)
    gates = {"gate_mode": GateMode()} if isinstance(model, CompressedCausalLM) else {}
    found = torch.zeros(2, dtype=torch.float64)
    with evaluating(model):
        for turn in range(0, len(batches), num_readers):
            # A rank without a batch takes part in the others' passes: some strategies run each pass on all ranks.
            batch, num_answered = batches[min(turn + reader, len(batches) - 1)]
            input_ids = batch.to(model.device)
            read, answers = input_ids[:, :-1], input_ids[:, -num_answered:]
            num_added = -read.shape[1] % cutting.size  # after the text: such ranks may divide its tokens evenly
            read = F.pad(read, (0, num_added))
            output = model(read, use_cache=False, logits_to_keep=num_answered + num_added, **gates)
            logits = output.logits[:, :num_answered].float()
            if turn + reader < len(batches) and sharing.rank % cutting.size == 0:
                losses = F.cross_entropy(logits.transpose(1, 2), answers, reduction="none")
                right = (logits.argmax(-1) == answers).all(-1)
                found += torch.stack((right.double().sum(), losses.double().mean(-1).sum())).cpu()
    exact_match, loss = (sharing.all_reduce(found) / len(samples)).tolist()
    return AnswerScore(exact_match, loss)


@checked_dataclass(frozen=True)
class EvaluationConfig:
    """Settings of evaluations during training."""

    tasks: Annotated[Named[Any], Field(min_length=1)]
    """Tasks with one right answer by name; in settings each is as in `configs/task`."""
    every_steps: Count = 1000
    """Optimizer steps between two."""
    ratios: list[Ratio] = field(default_factory=list)
    """Target CRs of the ramp at which there is another."""


class Evaluation(AfterStep):
    """Logs exact match and loss of tasks' answers beside the validation loss, with thresholded decisions.

    A task asks about the run's validation text (the first of its sources) in place of its own source, which may be for
    reports alone; a text that it repeats stays. Samples are made by each rank before the first step.

    Args:
        tasks: see `EvaluationConfig`.
        every_steps: optimizer steps between two evaluations; there is one after the last step too.
        ratios: target CRs of the ramp at which there is another.
    Raises:
        ValueError: a setting is out of range, or a task has no single right answer.
    """

    def __init__(self, tasks: Mapping[str, Any], every_steps: int = 1000, ratios: Collection[float] = ()) -> None:
        self.settings = EvaluationConfig(dict(tasks), every_steps, [*ratios])
        self.tasks = self.settings.tasks
        for name, task in self.tasks.items():
            if not isinstance(task, Asking):
                raise ValueError(f"tasks.{name} has no right answers: take needle, passkey, key_value or recall")
        self._samples: dict[str, list[Sample]] = {}
        self._steps: set[int] = set()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Make the samples from the validation text.

        Raises:
            ValueError: the text is too short, or a task is a conversation.
        """
        text: Any = trainer.datamodule  # type: ignore[attr-defined]
        config = pl_module.config
        plan = Plan(config.training, config.target_ratio, config.compression)
        reached = [ratio for ratio in self.settings.ratios if ratio <= plan.target_ratio]
        self._steps = set(plan.ratio_steps(reached).values())
        (name, settings), *_ = text.config.data.validation.items()
        source = instantiate(settings, f"data.validation.{name}")
        for task_name, task in self.tasks.items():
            changes = {"cache_folder": text.config.data.cache_folder} if hasattr(task, "cache_folder") else {}
            if isinstance(getattr(task, "haystack", None), DocumentSource):
                changes["haystack"] = source
            try:
                samples = dataclasses.replace(task, **changes).samples(text.tokenizer, len(text.tokenizer))
            except ValueError as error:
                raise ValueError(f"callbacks.evaluation.tasks.{task_name}: {error}") from error
            if any(isinstance(sample, Turns) for sample in samples):
                raise ValueError(
                    f"callbacks.evaluation.tasks.{task_name} is a conversation, which needs the model's own replies"
                )
            self._samples[task_name] = samples

    def after_step(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Evaluate if the step is due; called by all ranks."""
        if step % self.settings.every_steps and step not in self._steps and step != trainer.max_steps:
            return
        metrics: dict[str, float] = {}
        batch_size = pl_module.config.training.micro_batch_size
        for name, samples in self._samples.items():
            with trainer.precision_plugin.forward_context():
                score = score_answers(pl_module.model, samples, batch_size, Ranks.world())
            metrics |= {f"validation/{name}": score.exact_match, f"validation/{name}_loss": score.loss}
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
