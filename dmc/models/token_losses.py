"""Cross-entropy of each token, and its divergence from a teacher, without the logits in one piece.

With a vocabulary of 128k and 4,096 tokens the logits alone are 2 GB in float32, and a plain loss peaks at 8 GB. Here
tokens are processed in chunks, as Liger's kernels do. Training knows each token's weight in its loss before: then the
gradient is formed in the forward pass, and each chunk's logits are made once. Else backward makes them again.
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

from dmc.models.fused_losses import fused_losses_of_rows
from dmc.models.masked_attention import runs_triton
from dmc.ranks import ALONE, Ranks

BALANCE = "load_balancing_loss_func"
"""Name of the function in transformers' modules of models with experts."""
IGNORED = -100
"""Target of a token that is not to be predicted, as in transformers."""
CHUNK_ELEMENTS = 2**24
"""Logits computed at a time: 64 MiB in float32."""
CHUNK_ELEMENTS_OF_GPU = 2**27
"""Likewise on a GPU, where each chunk adds to the weight's gradient: 512 MiB."""
TokenWeights = tuple[Tensor, Tensor | None]
"""Weights of N tokens in the sum of cross-entropies and that of divergences, each [N]."""
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
    total: Tensor | None = None
    """Sum of both over all tokens by given `LossWeights`, a scalar: then it alone has a gradient."""
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
    return (losses * sequence_weights(targets, loss_mask, losses.dtype)).sum(-1)


def sequence_weights(targets: Tensor, loss_mask: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight of each token in its sequence's mean, [B, T], see `sequence_means`."""
    counts = _counts(targets, loss_mask, dtype)
    number = counts.sum(-1, keepdim=True)
    return counts / torch.where(number > 0, number, 1)


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
    return (losses * token_weights(targets, loss_mask, num_predicted, losses.dtype)).sum()


def token_weights(
    targets: Tensor,
    loss_mask: Tensor | None = None,
    num_predicted: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight of each token in the mean over a step's, [B, T], see `token_mean`."""
    counts = _counts(targets, loss_mask, dtype)
    number = counts.sum() if num_predicted is None else num_predicted.to(dtype)
    return counts / torch.where(number > 0, number, 1)


def num_predicted(loss_mask: Tensor) -> Tensor:
    """Count the predicted tokens of sequences by their mask or weights, [..., T] -> float64 scalar."""
    return loss_mask[..., 1:].double().sum()


def _counts(targets: Tensor, loss_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    counts = (targets != IGNORED).to(dtype)
    return counts if loss_mask is None else counts * F.pad(loss_mask[:, 1:].to(dtype), (0, 1))


class LossWeights:
    """Weight of each token's losses in a sum, which is then computed with its gradient in one pass.

    Not a dataclass: FSDP2 casts the tensors in those among a model's arguments to bfloat16.

    Args:
        cross_entropy: float32 [B, T], 0 where nothing is to be predicted.
        divergence: likewise; None: there is no teacher.
    """

    def __init__(self, cross_entropy: Tensor, divergence: Tensor | None = None) -> None:
        self.cross_entropy, self.divergence = cross_entropy, divergence


class _ChunkedLosses(torch.autograd.Function):
    """Cross-entropy and divergence of N tokens, and their weighted sum.

    With weights the gradient is made beside the losses, from the same logits, and only the sum has one. Without, the
    losses have one, for which each chunk's logits are computed once more.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, teacher_output: TeacherOutput | None,
        weights: TokenWeights | None, most: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        ctx.gradients, wants = None, ctx.needs_input_grad[:2]
        found = _in_chunks(hidden, weight, targets, teacher_output, weights, wants, most)
        entropy, divergence, *gradients = found
        if weights is None:
            ctx.given, ctx.most = (targets, teacher_output), most
            ctx.save_for_backward(hidden, weight)
            return entropy, divergence, None
        ctx.gradients = gradients
        total = (entropy * weights[0]).sum()
        if divergence is not None and weights[1] is not None:
            total = total + (divergence * weights[1]).sum()
        ctx.mark_non_differentiable(entropy, *(() if divergence is None else (divergence,)))
        return entropy, divergence, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_entropy: Tensor, by_divergence: Tensor | None, by_total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            (hidden, weight), (targets, teacher_output) = ctx.saved_tensors, ctx.given
            by, wants = (by_entropy, by_divergence), ctx.needs_input_grad[:2]
            found = _in_chunks(hidden, weight, targets, teacher_output, by, wants, ctx.most)[2:]
        else:
            found = [None if gradient is None else gradient.mul_(by_total) for gradient in found]
        return (*found, None, None, None, None)


def _in_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, teacher_output: TeacherOutput | None, by: TokenWeights | None,
    wants: tuple[bool, bool], most: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return both losses, and the gradients of states and weight by the sum in which tokens weigh `by`."""
    sums = _sum_dtype(hidden)
    entropy = torch.zeros(len(hidden), dtype=sums, device=hidden.device)
    divergence = None if teacher_output is None else torch.zeros_like(entropy)
    by = by if any(wants) else None
    hidden_gradient = torch.zeros_like(hidden) if by is not None and wants[0] else None
    weight_gradient = torch.zeros_like(weight, dtype=sums) if by is not None and wants[1] else None
    weight, dtype = weight.to(hidden.dtype), weight.dtype
    for rows, logits, theirs in _chunks(hidden, weight, teacher_output, most):
        part = None if by is None else (by[0][rows], None if by[1] is None else by[1][rows])
        given = (logits, theirs, targets[rows], teacher_output, part)
        if runs_triton(logits, logits.dtype):
            entropy[rows], mean, gradient = fused_losses_of_rows(*given, hidden.dtype)
        else:
            entropy[rows], mean, gradient = losses_of_rows(*given)
        if divergence is not None and mean is not None:
            divergence[rows] = mean
        if gradient is None:
            continue
        gradient = gradient.to(hidden.dtype)
        if hidden_gradient is not None:
            torch.mm(gradient, weight, out=hidden_gradient[rows])
        if weight_gradient is not None:
            size = _chunk_size(hidden, hidden.shape[1])
            for words, part in zip(weight_gradient.split(size), gradient.T.split(size), strict=True):
                words += _product(part, hidden[rows])
    return entropy, divergence, hidden_gradient, None if weight_gradient is None else weight_gradient.to(dtype)


def losses_of_rows(
    logits: Tensor, theirs: Tensor | None, targets: Tensor, teacher_output: TeacherOutput | None,
    by: TokenWeights | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute both losses, [n], and the gradient of their weighted sum by the logits, [n, vocab].

    Args:
        logits: of some tokens, [n, vocab]; overwritten.
        theirs: the teacher's, likewise; None: there is none.
        targets: [n].
        teacher_output: temperature and direction.
        by: weights of the tokens in both losses, each [n]; None: no gradient is made.
    """
    place = targets.clamp(min=0)[:, None]
    found = logits.gather(1, place).squeeze(1)
    log_sum = _log_sums(logits)
    divergence, gradient, difference = None, None, None
    if theirs is not None and teacher_output is not None:
        of_divergence = None if by is None else by[1]
        divergence, difference = _divergence(logits, log_sum, theirs, teacher_output, of_divergence)
    if by is not None:
        gradient = logits.sub_(log_sum[:, None]).exp_().mul_(by[0][:, None])
        gradient.scatter_add_(1, place, -by[0][:, None])
        if difference is not None:
            gradient += difference
    return log_sum - found, divergence, gradient


def _log_sums(logits: Tensor) -> Tensor:
    """Return log(sum(exp)) of each row: what `logsumexp` holds meanwhile no plan would see."""
    most = logits.amax(1)
    return (logits - most[:, None]).exp_().sum(1).log_() + most


def _divergence(
    logits: Tensor, log_sum: Tensor, theirs: Tensor, teacher_output: TeacherOutput, by: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the divergence, [n], and its gradient by the logits, [n, vocab], times `by`."""
    temperature, is_reverse = teacher_output.temperature, teacher_output.direction == "reverse"
    softened = logits if temperature == 1 else logits / temperature
    student = softened - (log_sum if temperature == 1 else _log_sums(softened))[:, None]
    teacher = theirs.div_(temperature) if temperature != 1 else theirs
    teacher.sub_(_log_sums(teacher)[:, None])
    share = (student if is_reverse else teacher).exp()
    apart = teacher - student
    mean = torch.linalg.vecdot(share, apart)
    divergence = temperature**2 * (-mean if is_reverse else mean)
    if by is None:
        return divergence, None
    scale = (temperature * by)[:, None]
    if is_reverse:  # q (log q - log p - KL)
        return divergence, apart.sub_(mean[:, None]).mul_(share).mul_(-scale)
    return divergence, student.exp_().sub_(share).mul_(scale)  # q - p


def _chunks(
    hidden: Tensor, weight: Tensor, teacher_output: TeacherOutput | None, most: int | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield a chunk's slice of the tokens, their logits, [n, vocab], and the teacher's."""
    weight = weight.to(hidden.dtype)
    of_teacher = None if teacher_output is None else teacher_output.weight.to(hidden.dtype)
    size = _chunk_size(hidden, len(weight))
    for begin in range(0, len(hidden), size)[:most]:
        rows = slice(begin, min(begin + size, len(hidden)))
        theirs = None
        if teacher_output is not None and of_teacher is not None:
            theirs = _product(teacher_output.hidden_states[rows], of_teacher.T)
        yield rows, _product(hidden[rows], weight.T), theirs


def _chunk_size(like: Tensor, width: int) -> int:
    """Return how many rows of so many elements are made at a time on a tensor's device."""
    return max(1, (CHUNK_ELEMENTS_OF_GPU if runs_triton(like, _sum_dtype(like)) else CHUNK_ELEMENTS) // width)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of 16 bits into sums of 32, which a GPU does not round to 16 between."""
    dtype = _sum_dtype(left)
    if left.is_cuda and dtype != left.dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


class LossHead(nn.Linear):
    """Output projection that returns logits, or, given targets, losses without making the logits.

    The weight is read in this module's own forward, where every kind of sharding has gathered it.
    """

    is_linear_without_targets = True
    """Given hidden states alone it does what `nn.Linear` does: the engine may compute that in another way."""
    most_chunks: int | None = None
    """Chunks of the tokens to compute, of tensors without data alone: what they hold, the others hold too."""

    def forward(
        self,
        hidden_states: Tensor,
        targets: Tensor | None = None,
        teacher_output: TeacherOutput | None = None,
        weights: LossWeights | None = None,
    ) -> Any:
        """Return logits [B, T, vocab], or cross-entropy and divergence, each [B, T], and their sum by `weights`.

        Divergence is None without a teacher; the sum is returned with weights.

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
        by = None
        if weights is not None:
            by = (weights.cross_entropy.flatten(), None if weights.divergence is None else weights.divergence.flatten())
        with torch.autocast(device, enabled=False):
            entropy, divergence, total = _ChunkedLosses.apply(
                states, self.weight, targets.flatten(), teacher_output, by, self.most_chunks
            )
        ignored = targets == IGNORED
        losses = (
            None if loss is None else loss.view_as(targets).masked_fill(ignored, 0) for loss in (entropy, divergence)
        )
        return tuple(losses) if weights is None else (*losses, total)


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
        loss_weights: LossWeights | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the stock forward, or one that makes no logits.

        Args:
            args: arguments of the stock forward.
            targets: the token that each position predicts, [B, T], see `next_tokens`; `labels` and their loss are the
                stock model's, logits included.
            teacher_output: a teacher's states for the same tokens.
            token_mask: which tokens the balance of experts counts, bool [B, T]; None: all.
            loss_weights: of the tokens in the total; None: none is computed, and each loss has a gradient.
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
        if loss_weights is not None and ranks.size > 1:
            of_divergence = loss_weights.divergence
            of_divergence = None if of_divergence is None else ranks.chunk(of_divergence, 1)
            loss_weights = LossWeights(ranks.chunk(loss_weights.cross_entropy, 1), of_divergence)
        *losses, total = (*model.lm_head(hidden, targets, teacher_output, loss_weights), None)[:3]
        entropy, divergence = (None if loss is None else ranks.all_gather(loss, 1) for loss in losses)
        if total is not None:
            total = ranks.all_gather(total[None], 0).sum()
        balance = self._balance_loss(output.router_logits, token_mask) if balances else None
        return TokenLosses(entropy, divergence, total, hidden, balance)

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
