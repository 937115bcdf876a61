"""Losses of tokens from their logits, and the gradient by these, in two passes over a row: one Triton kernel.

A row's first pass finds the normalizers of both distributions and what the divergence is the mean of. The second writes
the gradient. Of each logit 4 bytes are read twice, the teacher's too, and 2 are written in bfloat16.
"""

import triton
import triton.language as tl


@triton.jit
def row_losses_kernel(
    logits, theirs, targets, by_entropy, by_divergence, entropy, divergence, gradient,
    vocab, stride, their_stride, temperature,
    IS_REVERSE: tl.constexpr, IS_SOFT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program for each token. Running sums are kept relative to the largest logit seen, and rescaled when it grows.

    `mean` is the sum of the share-weighted difference of logits, of the distribution that the divergence is under.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    gradient += row * vocab
    target = tl.load(targets + row)
    most, total = float("-inf"), 0.0
    soft_total, mean = 0.0, 0.0
    their_most, their_total = float("-inf"), 0.0
    if theirs is not None:
        theirs += row * their_stride
    for begin in range(0, vocab, WORDS):
        words = begin + tl.arange(0, WORDS)
        inside = words < vocab
        ours = tl.load(logits + words, mask=inside, other=float("-inf"))
        before, most = most, tl.maximum(most, tl.max(ours, 0))
        total = total * tl.exp(before - most) + tl.sum(tl.exp(ours - most), 0)
        if theirs is not None:
            softly = ours / temperature if IS_SOFT else ours
            soft_most = most / temperature if IS_SOFT else most
            soft_before = before / temperature if IS_SOFT else before
            their = tl.load(theirs + words, mask=inside, other=float("-inf"))
            their = their / temperature if IS_SOFT else their
            their_before, their_most = their_most, tl.maximum(their_most, tl.max(their, 0))
            share = tl.exp(their - their_most)
            their_total = their_total * tl.exp(their_before - their_most) + tl.sum(share, 0)
            soft_share = tl.exp(softly - soft_most)
            soft_total = soft_total * tl.exp(soft_before - soft_most) + tl.sum(soft_share, 0)
            difference = tl.where(inside, their - softly, 0.0)
            if IS_REVERSE:
                mean = mean * tl.exp(soft_before - soft_most) - tl.sum(soft_share * difference, 0)
            else:
                mean = mean * tl.exp(their_before - their_most) + tl.sum(share * difference, 0)
    log_sum = most + tl.log(total)
    is_target = target >= 0
    of_target = tl.load(logits + target, mask=is_target, other=0.0)
    tl.store(entropy + row, tl.where(is_target, log_sum - of_target, 0.0))
    soft_sum, their_sum, found = 0.0, 0.0, 0.0
    if theirs is not None:
        soft_sum = (most / temperature if IS_SOFT else most) + tl.log(soft_total)
        their_sum = their_most + tl.log(their_total)
        found = mean / soft_total - soft_sum + their_sum if IS_REVERSE else mean / their_total - their_sum + soft_sum
        tl.store(divergence + row, tl.where(is_target, temperature * temperature * found, 0.0))
    if by_entropy is not None:
        of_entropy = tl.where(is_target, tl.load(by_entropy + row), 0.0)
        of_divergence = 0.0
        if theirs is not None and by_divergence is not None:
            of_divergence = tl.where(is_target, tl.load(by_divergence + row), 0.0) * temperature
        for begin in range(0, vocab, WORDS):
            words = begin + tl.arange(0, WORDS)
            inside = words < vocab
            ours = tl.load(logits + words, mask=inside, other=float("-inf"))
            slope = of_entropy * (tl.exp(ours - log_sum) - tl.where(words == target, 1.0, 0.0))
            if theirs is not None:
                softly = ours / temperature if IS_SOFT else ours
                their = tl.load(theirs + words, mask=inside, other=float("-inf"))
                their = their / temperature if IS_SOFT else their
                log_q, log_p = softly - soft_sum, their - their_sum
                if IS_REVERSE:
                    slope += of_divergence * tl.exp(log_q) * (tl.where(inside, log_q - log_p, 0.0) - found)
                else:
                    slope += of_divergence * (tl.exp(log_q) - tl.exp(log_p))
            tl.store(gradient + words, slope, mask=inside)
