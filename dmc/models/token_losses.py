"""Cross-entropy of each token, and its divergence from a teacher, without the logits in one piece.

With a vocabulary of 128k and 4,096 tokens the logits alone are 2 GB in float32, and a plain loss peaks at 8 GB. Here
the vocabulary is processed in chunks: forward keeps a running log-sum-exp, backward recomputes each chunk's logits and
writes its rows of the weight's gradient once. This costs one more product with the output projection, with a teacher
two.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.utils import ModelOutput

from dmc.ranks import ALONE, Ranks

BALANCE = "load_balancing_loss_func"
"""Name of the function in transformers' modules of models with experts."""
IGNORED = -100
"""Target of a token that is not to be predicted, as in transformers."""
CHUNK_ELEMENTS = 2**24
"""Logits computed at a time: 64 MiB in float32."""
Direction = Literal["forward", "reverse"]
"""Of a divergence. forward: KL(teacher || student), the mean under the teacher; reverse: KL(student || teacher)."""


@dataclass
class TeacherOutput:
    """Last hidden states and output projection of a frozen teacher, from which its logits are computed."""

    hidden_states: Tensor
    """The teacher's last hidden states, normalized, [B, T, hidden of the teacher]."""
    weight: Tensor
    """The teacher's output projection, [vocab, hidden of the teacher]."""
    temperature: float = 1.0
    """Softens both distributions."""
    direction: Direction = "forward"
    """Which of the two the divergence is a mean under."""


@dataclass
class TokenLosses(ModelOutput):
    """Output of a causal LM that computes losses in place of logits."""

    cross_entropy: Tensor | None = None
    """Cross-entropy of each token in nats, float32, [B, T]; 0 where nothing is to be predicted."""
    divergence: Tensor | None = None
    """t^2 * KL(softmax(teacher / t) || softmax(student / t)), or the reverse, nats, [B, T]; 0 where nothing is to be
    predicted."""
    last_hidden_state: Tensor | None = None
    """Last hidden states, normalized, and scaled as the family scales its logits, [B, T, hidden]."""
    aux_loss: Tensor | None = None
    """Loss of experts' routers that use experts unevenly, times its coefficient, a scalar; None: the configuration asks
    for none (`output_router_logits`)."""


def next_tokens(input_ids: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Return each position's target, the token after it, [B, T]; `IGNORED` at the end and where the mask is False.

    Args:
        input_ids: [B, T].
        loss_mask: True at tokens that are to be predicted, [B, T]; None: all.
    """
    tokens = input_ids if loss_mask is None else input_ids.masked_fill(~loss_mask.bool(), IGNORED)
    return F.pad(tokens[:, 1:], (0, 1), value=IGNORED)


def sequence_means(losses: Tensor, targets: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Average losses over the predicted tokens of each sequence, [B]; 0 where there are none.

    The mean of these over micro-batches and ranks does not depend on how a step's batch is divided.

    Args:
        losses: loss of each position, [B, T].
        targets: see `next_tokens`.
        loss_mask: the mask that `targets` were made with; numbers in it are the tokens' weights.
    """
    counts = _counts(losses, targets, loss_mask)
    return (losses * counts).sum(-1) / torch.where(counts.sum(-1) > 0, counts.sum(-1), 1)


def token_mean(
    losses: Tensor, targets: Tensor, loss_mask: Tensor | None = None, num_predicted: Tensor | None = None
) -> Tensor:
    """Sum losses over the predicted tokens, and divide by a number of these; 0 where there are none.

    With the mean number of a micro-batch in place of its number, the mean of these over micro-batches and ranks is the
    mean over all predicted tokens of the step, however its batch is divided.

    Args:
        losses: loss of each position, [B, T].
        targets: see `next_tokens`.
        loss_mask: as in `sequence_means`.
        num_predicted: a scalar, in which weighted tokens count by their weight; None: that of `losses`.
    """
    counts = _counts(losses, targets, loss_mask)
    number = counts.sum() if num_predicted is None else num_predicted.to(losses.dtype)
    return (losses * counts).sum() / torch.where(number > 0, number, 1)


def num_predicted(loss_mask: Tensor) -> Tensor:
    """Count the predicted tokens of sequences by their mask or weights, [..., T] -> float64 scalar."""
    return loss_mask[..., 1:].double().sum()


def _counts(losses: Tensor, targets: Tensor, loss_mask: Tensor | None) -> Tensor:
    counts = (targets != IGNORED).to(losses.dtype)
    return counts if loss_mask is None else counts * F.pad(loss_mask[:, 1:].to(losses.dtype), (0, 1))


class _ChunkedLosses(torch.autograd.Function):
    """Cross-entropy and divergence of N tokens; the products are in the states' dtype, sums in float32 or float64."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher_output: TeacherOutput | None,
        most: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.most = most
        ctx.teacher_output, temperature = teacher_output, 1.0 if teacher_output is None else teacher_output.temperature
        is_reverse = teacher_output is not None and teacher_output.direction == "reverse"
        log_sum = torch.full((len(hidden),), -torch.inf, dtype=_sum_dtype(hidden), device=hidden.device)
        found, softened, teacher, cross = torch.zeros_like(log_sum), log_sum, log_sum, torch.zeros_like(log_sum)
        for words, logits, theirs in _chunks(hidden, weight, teacher_output, most):
            inside, place = _placed(targets, words)
            found = found + logits.gather(1, place).squeeze(1) * inside
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
            if theirs is not None:
                # Running mean of the difference under the part of one distribution that has been seen.
                before = softened if is_reverse else teacher
                teacher = torch.logaddexp(teacher, theirs.logsumexp(1))
                softly = logits if temperature == 1 else logits.div_(temperature)
                softened = log_sum if temperature == 1 else torch.logaddexp(softened, softly.logsumexp(1))
                under, seen = (softly, softened) if is_reverse else (theirs, teacher)
                cross = cross * (before - seen).exp()
                share = (under - seen[:, None]).exp_()
                cross += share.mul_(theirs.sub_(softly)).sum(1)
        divergence = None
        if teacher_output is not None:
            divergence = cross - teacher + softened  # the mean of log(teacher / student)
            divergence = -divergence if is_reverse else divergence
        ctx.save_for_backward(hidden, weight, targets, log_sum, softened, teacher, divergence)
        return log_sum - found, None if divergence is None else temperature**2 * divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_entropy: Tensor, by_divergence: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum, softened, teacher, divergence = ctx.saved_tensors
        teacher_output = ctx.teacher_output
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.zeros_like(hidden, dtype=_sum_dtype(hidden)) if wants_hidden else None
        weight_gradient = torch.empty_like(weight) if wants_weight else None
        for words, logits, theirs in _chunks(hidden, weight, teacher_output, ctx.most):
            inside, place = _placed(targets, words)
            difference, by_logits = None, by_entropy
            if theirs is not None and by_divergence is not None:
                theirs.sub_(teacher[:, None])
                if (teacher_output.temperature, teacher_output.direction) == (1, "forward"):  # p is the entropy's own
                    by_logits = by_entropy + by_divergence
                    difference = theirs.exp_().mul_(-by_divergence[:, None])
                else:
                    difference = (logits / teacher_output.temperature).sub_(softened[:, None])
                    if teacher_output.direction == "reverse":  # q (log q - log p - KL)
                        theirs = difference - theirs.add_(divergence[:, None])
                        difference.exp_().mul_(theirs)
                    else:  # q - p
                        difference.exp_().sub_(theirs.exp_())
                    difference *= (teacher_output.temperature * by_divergence)[:, None]
            gradient = logits.sub_(log_sum[:, None]).exp_().mul_(by_logits[:, None])
            gradient.scatter_add_(1, place, -(by_entropy * inside)[:, None])
            if difference is not None:
                gradient += difference
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient += gradient @ weight[words].to(hidden.dtype)
            if weight_gradient is not None:
                weight_gradient[words] = (gradient.T @ hidden).to(weight.dtype)
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.to(hidden.dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, teacher_output: TeacherOutput | None, most: int | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield a chunk's slice of the vocabulary, the logits [N, words], and the teacher's over the temperature."""
    size = max(256, CHUNK_ELEMENTS // len(hidden))
    for begin in range(0, len(weight), size)[:most]:
        words = slice(begin, min(begin + size, len(weight)))
        theirs = None
        if teacher_output is not None:
            theirs = _logits(teacher_output.hidden_states, teacher_output.weight[words])
            if teacher_output.temperature != 1:
                theirs.div_(teacher_output.temperature)
        yield words, _logits(hidden, weight[words]), theirs


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight.to(hidden.dtype)).to(_sum_dtype(hidden))


def _placed(targets: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Return which targets lie in a slice of the vocabulary, [N], and their index in it, [N, 1]."""
    place = targets - words.start
    last = words.stop - words.start - 1
    return (place >= 0) & (place <= last), place.clamp(0, last)[:, None]


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


class LossHead(nn.Linear):
    """Output projection that returns logits, or, given targets, losses without making the logits.

    The weight is read in this module's own forward, where every kind of sharding has gathered it.
    """

    is_linear_without_targets = True
    """Given hidden states alone it does what `nn.Linear` does: the engine may compute that in another way."""
    most_chunks: int | None = None
    """Chunks of the vocabulary to compute, of tensors without data alone: what they hold, the others hold too."""

    def forward(
        self, hidden_states: Tensor, targets: Tensor | None = None, teacher_output: TeacherOutput | None = None
    ) -> Any:
        """Return logits [B, T, vocab], or cross-entropy and divergence (None without a teacher), each [B, T].

        Raises:
            ValueError: the teacher has another vocabulary.
        """
        if targets is None:
            return super().forward(hidden_states)
        if teacher_output is not None and len(teacher_output.weight) != len(self.weight):
            raise ValueError(
                f"the teacher's vocabulary has {len(teacher_output.weight)} tokens, the model's "
                f"{len(self.weight)}: take "
                "another teacher"
            )
        device = hidden_states.device.type
        computes = torch.is_autocast_enabled(device)
        states = hidden_states.flatten(0, 1).to(torch.get_autocast_dtype(device) if computes else hidden_states.dtype)
        if teacher_output is not None:
            theirs = teacher_output.hidden_states.flatten(0, 1).to(states.dtype)
            teacher_output = dataclasses.replace(teacher_output, hidden_states=theirs)
        with torch.autocast(device, enabled=False):
            losses = _ChunkedLosses.apply(states, self.weight, targets.flatten(), teacher_output, self.most_chunks)
        ignored = targets == IGNORED
        return tuple(None if loss is None else loss.view_as(targets).masked_fill(ignored, 0) for loss in losses)


class TokenLossMixin:
    """Mixed in before a stock `*ForCausalLM`: its forward can return losses without logits."""

    context_ranks: Ranks = ALONE
    """Processes that divide each sequence in a forward without logits: all get all of it, and return all of its losses;
    each computes its own tokens. Hidden states are those of its own."""

    def forward(
        self,
        *args: Any,
        targets: Tensor | None = None,
        teacher_output: TeacherOutput | None = None,
        token_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the stock forward, or one that makes no logits.

        Args:
            args: arguments of the stock forward.
            targets: the token that each position predicts, [B, T], see `next_tokens`; `labels` and their loss are the
                stock model's, logits included.
            teacher_output: a teacher's states for the same tokens.
            token_mask: which tokens the balance of experts counts, bool [B, T]; None: all.
            kwargs: keywords of the stock forward; `skip_logits=True` without targets returns hidden states alone.
        Returns:
            `TokenLosses`, or the stock forward's output.
        """
        skip_logits = kwargs.pop("skip_logits", False)
        if targets is None and not skip_logits:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        for name in ("labels", "logits_to_keep"):
            kwargs.pop(name, None)
        model: Any = self
        ranks = self.context_ranks
        if ranks.size > 1:
            input_ids = kwargs.pop("input_ids") if "input_ids" in kwargs else args[0]
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
            args, targets = (ranks.chunk(input_ids, 1), *args[1:]), None if targets is None else ranks.chunk(targets, 1)
            kwargs = {"position_ids": ranks.chunk(positions, 1), **kwargs, "context_ranks": ranks}
        balances = targets is not None and getattr(model.config, "output_router_logits", False) and self._balance
        output = model.model(*args, **kwargs, **({"output_router_logits": True} if balances else {}))
        hidden = output.last_hidden_state
        if (factor := logit_factor(model.config)) != 1:
            hidden = hidden * factor
        if targets is None:
            return TokenLosses(last_hidden_state=hidden)
        losses = model.lm_head(hidden, targets, teacher_output)
        entropy, divergence = (None if loss is None else ranks.all_gather(loss, 1) for loss in losses)
        balance = self._balance_loss(output.router_logits, token_mask) if balances else None
        return TokenLosses(entropy, divergence, hidden, balance)

    def _balance_loss(self, router_logits: tuple[Tensor, ...], token_mask: Tensor | None) -> Tensor:
        """Compute the family's own load balancing loss of a pass, see `TokenLosses.aux_loss`.

        Args:
            router_logits: of each layer with experts, [B T of this rank, experts].
            token_mask: which tokens count, [B, T]; None: all.
        """
        model: Any = self
        every = tuple(self.context_ranks.all_gather(logits, 0) for logits in router_logits)
        if token_mask is not None:  # as logits are gathered: rank by rank, of each all sequences
            chunks = token_mask.chunk(self.context_ranks.size, 1)
            token_mask = torch.cat([chunk.flatten() for chunk in chunks])[None]
        top_k = model.config.num_experts_per_tok
        loss: Tensor = self._balance(every, every[0].shape[-1], top_k=top_k, attention_mask=token_mask)
        return model.config.router_aux_loss_coef * loss

    @property
    def _balance(self) -> Any:
        """The family's function of router logits; None: it has none."""
        modules = (sys.modules[kind.__module__] for kind in type(self).__mro__)
        return next((module.load_balancing_loss_func for module in modules if hasattr(module, BALANCE)), None)


def logit_factor(config: Any) -> float:
    """Return the factor by which a family scales its logits: Granite divides by what HyperCLOVA X multiplies with."""
    scaling = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    return float(factor * scaling if config.model_type.endswith("hyperclovax") else factor / scaling)


def with_token_losses(model: Any) -> Any:
    """Let a causal LM with an unbiased `lm_head` return losses without logits; weights and names do not change.

    Raises:
        ValueError: the model does not end in a bare linear projection.
    """
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear) or head.bias is not None or not hasattr(model, "model"):
        raise ValueError(f"{type(model).__name__} cannot be trained: expected a last layer lm_head without bias")
    if (cap := getattr(model.config, "final_logit_softcapping", None)) is not None:
        raise ValueError(f"{type(model).__name__} cannot be trained: final_logit_softcapping={cap} caps its logits")
    if not isinstance(head, LossHead):
        head.__class__ = LossHead
    if not isinstance(model, TokenLossMixin):
        stock = type(model)
        model.__class__ = type(stock.__name__, (TokenLossMixin, stock), {"__module__": stock.__module__})
    return model
