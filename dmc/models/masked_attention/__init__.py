"""Causal attention over a compressed cache, as every position sees it, in parallel and without a T x T mask."""

import torch
from torch import Tensor

from dmc.models.masked_attention.blocked import BlockedAttention
from dmc.models.masked_attention.flash import FlashAttention
from dmc.models.masked_attention.flash_ops import find_flash_kernel
from dmc.models.masked_attention.form import AttentionForm

_SHORT, _WIDE = 1536, 128
"""Sequence length up to which, and delay above which, matrix products beat the flash kernel of a CPU."""


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor,
    scaling: float,
    *,
    hidden: Tensor | None = None,
    free_channel: int | None = None,
) -> Tensor:
    """Attend causally with a bias per key on all but the diagonal (DMC, arXiv:2403.09636, section 3.2 and appendix G).

    score(i, j) = scaling * query[i] . key[j] + (log_keep[j] if j != i else 0) for j <= i.

    Args:
        query: [batch, heads, time, head_dim]; query head h attends to KV head h // (heads // kv_heads).
        key: partial states, rotated, [batch, kv_heads, time, head_dim].
        value: partial states, [batch, kv_heads, time, head_dim].
        log_keep: log(1 - alpha) of the token after each key, 0 or -inf included, [batch, kv_heads, time].
        scaling: multiplies query . key, > 0.
        hidden: True at padding, which no query may see, [batch, time]. Rows that see nothing are 0, and so are their
            gradients.
        free_channel: channel that is 0 in query and key. The bias is stored there, which saves widening the head by
            one; its gradient is 0.
    Returns:
        [batch, heads, time, head_dim] in query's dtype or autocast's, differentiable in query, key, value, log_keep.
    Raises:
        ValueError: shapes that do not belong together, or a free_channel the head does not have.
    """
    form = AttentionForm(scaling, delay=0, keep_top=True, free_channel=free_channel)
    return _attend(form, query, None, None, key, value, log_keep, hidden)


def delayed_masked_attention(
    query: Tensor,
    recent_key: Tensor,
    recent_value: Tensor,
    stream_key: Tensor,
    stream_value: Tensor,
    log_keep: Tensor,
    scaling: float,
    *,
    delay: int,
    keep_top: bool,
    hidden: Tensor | None = None,
    free_channel: int | None = None,
) -> Tensor:
    """Attend to the newest `delay` tokens raw and to the compressed stream of the tokens before, in one softmax.

    Query i sees raw token j for i - delay < j <= i without a bias, and stream entry j for j <= i - delay with the bias
    log_keep[j]; but for a merge gate (keep_top) the top of the stream, j = i - delay, has none. delay = 0 with keep_top
    is `masked_attention`; delay >= time is causal attention to the raw tokens (the stream then gets no gradient).

    Args:
        query: [batch, heads, time, head_dim]; query head h attends to KV head h // (heads // kv_heads).
        recent_key: raw keys, rotated, [batch, kv_heads, time, head_dim].
        recent_value: raw values, [batch, kv_heads, time, head_dim].
        stream_key: merge: partial states, rotated; drop: the raw keys; [batch, kv_heads, time, head_dim].
        stream_value: merge: partial states; drop: the raw values; [batch, kv_heads, time, head_dim].
        log_keep: merge: log(1 - alpha) of the token after; drop: of the token itself; [batch, kv_heads, time].
        scaling: multiplies query . key, > 0.
        delay: newest tokens seen raw, including the query's own.
        keep_top: True for a merge gate, False for a drop gate (which needs delay >= 1).
        hidden: True at padding, which no query may see, [batch, time]. Rows that see nothing are 0, and so are their
            gradients.
        free_channel: channel that is 0 in query and keys, as in `masked_attention`.
    Returns:
        [batch, heads, time, head_dim] in query's dtype or autocast's, differentiable in all tensors but hidden.
    Raises:
        ValueError: shapes that do not belong together, a free_channel the head does not have, or a delay below 0 (1
            for a drop gate).
    """
    if delay < (not keep_top):
        raise ValueError(
            f"delay={delay} is not supported with keep_top={keep_top}; expected delay >= 0 for a merge gate and >= 1 "
            "for a drop gate, which would drop the query's own token: raise delay."
        )
    if delay >= query.shape[-2]:
        # A delay that covers the whole sequence leaves the raw tokens, a stream without a bias.
        form = AttentionForm(scaling, delay=0, keep_top=False, free_channel=free_channel)
        return _attend(form, query, None, None, recent_key, recent_value, torch.zeros_like(log_keep), hidden)
    form = AttentionForm(scaling, delay, keep_top, free_channel)
    raw_key, raw_value = (recent_key, recent_value) if delay else (None, None)
    return _attend(form, query, raw_key, raw_value, stream_key, stream_value, log_keep, hidden)


def _attend(
    form: AttentionForm,
    query: Tensor,
    recent_key: Tensor | None,
    recent_value: Tensor | None,
    stream_key: Tensor,
    stream_value: Tensor,
    log_keep: Tensor,
    hidden: Tensor | None,
) -> Tensor:
    keys = [states for states in (recent_key, recent_value, stream_key, stream_value) if states is not None]
    _check_shapes(form, query, keys, log_keep, hidden)
    dtype = _product_dtype(query)
    query, recent = query.to(dtype), [None if each is None else each.to(dtype) for each in (recent_key, recent_value)]
    operands = (query, *recent, stream_key.to(dtype), stream_value.to(dtype), log_keep, hidden)
    is_blocked = query.device.type == "cpu" and (query.shape[2] <= _SHORT or form.delay > _WIDE)
    is_blocked = is_blocked or find_flash_kernel(query) is None
    implementation = BlockedAttention if is_blocked else FlashAttention
    with torch.autocast(query.device.type, enabled=False):  # each product chooses its own dtype
        return implementation.apply(form, *operands)


def _product_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that autocast gives PyTorch's own attention: rotated queries and keys are float32."""
    device = query.device.type
    if query.dtype == torch.float64 or not (
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    ):
        return query.dtype
    return torch.get_autocast_dtype(device)


def _check_shapes(
    form: AttentionForm, query: Tensor, keys: list[Tensor], log_keep: Tensor, hidden: Tensor | None
) -> None:
    batch, heads, time, channels = query.shape
    expected = (batch, log_keep.shape[1], time, channels)
    if any(states.shape != expected for states in keys) or log_keep.shape != expected[:3] or heads % expected[1]:
        raise ValueError(
            f"masked attention got query {tuple(query.shape)}, keys and values "
            f"{[tuple(states.shape) for states in keys]}, log_keep {tuple(log_keep.shape)}; expected "
            "[batch, heads, time, head_dim], [batch, kv_heads, time, head_dim] and [batch, kv_heads, time] with heads "
            "a multiple of kv_heads: cut all to the same tokens, and do not repeat keys for a group of query heads."
        )
    if hidden is not None and (hidden.shape != (batch, time) or hidden.dtype != torch.bool):
        raise ValueError(
            f"hidden is {hidden.dtype} {tuple(hidden.shape)}; expected torch.bool {(batch, time)}, True at padding: "
            "invert the attention mask of the tokenizer."
        )
    if form.free_channel is not None and not -channels <= form.free_channel < channels:
        raise ValueError(
            f"free_channel={form.free_channel} is not a channel of a head of {channels}; use one that is 0 in query "
            "and key, or None."
        )
