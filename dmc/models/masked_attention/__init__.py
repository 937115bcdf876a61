"""Causal attention over a compressed cache, as every position sees it, in parallel and without a T x T mask."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from dmc.models.masked_attention.blocked import BlockedAttention
from dmc.models.masked_attention.documents import Documents
from dmc.models.masked_attention.fused import LARGEST_HEAD, FusedWithSinks, fused_attention

__all__ = [
    "Documents",
    "as_on",
    "causal_attention",
    "delayed_masked_attention",
    "masked_attention",
    "runs_triton",
    "window_attention",
]
_DEVICE_TYPE: ContextVar[str | None] = ContextVar("device_type", default=None)


@contextmanager
def as_on(device_type: str) -> Iterator[None]:
    """Choose what computes attention as on another device: tensors without data then show what would run there.

    Args:
        device_type: "cuda", an NVIDIA GPU of compute capability 8.0 or higher, or "cpu".
    """
    token = _DEVICE_TYPE.set(device_type)
    try:
        yield
    finally:
        _DEVICE_TYPE.reset(token)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor,
    scaling: float,
    *,
    hidden: Tensor | None = None,
    documents: Documents | None = None,
    skip_below: float | None = -math.inf,
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
        documents: a query sees keys of its own document alone; None: a sequence is one.
        skip_below: keys whose log_keep is at most this may be left out where they have it, forwards and backwards:
            exact for -inf. Of a lower bound c, a row's weights change by less than the number of its keys times
            exp(c + s), s the most that a score is above that of the row's own key. None: none is.
    Returns:
        [batch, heads, time, head_dim] in query's dtype or autocast's, differentiable in query, key, value, log_keep.
    Raises:
        ValueError: shapes that do not belong together.
    """
    given = (query, key, value, log_keep, None, None, hidden, documents)
    return _attend(*given, scaling, 0, True, skip_below=skip_below)


def delayed_masked_attention(
    query: Tensor,
    recent_key: Tensor | None,
    recent_value: Tensor | None,
    stream_key: Tensor,
    stream_value: Tensor,
    log_keep: Tensor,
    scaling: float,
    *,
    delay: int,
    keep_top: bool,
    hidden: Tensor | None = None,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    skip_below: float | None = -math.inf,
) -> Tensor:
    """Attend to the newest `delay` tokens raw and to the compressed stream of the tokens before, in one softmax.

    Query i sees raw token j for i - delay < j <= i without a bias, and stream entry j for j <= i - delay with the bias
    log_keep[j]; but for a merge gate (keep_top) the top of the stream, j = i - delay, has none. delay = 0 with keep_top
    is `masked_attention`; delay >= time is causal attention to the raw tokens.

    Args:
        query: [batch, heads, time, head_dim]; query head h attends to KV head h // (heads // kv_heads).
        recent_key: raw keys, rotated, [batch, kv_heads, time, head_dim]; None: those of the stream, as for a drop gate,
            whose stream is raw.
        recent_value: raw values, [batch, kv_heads, time, head_dim]; None with recent_key.
        stream_key: merge: partial states, rotated; drop: the raw keys; [batch, kv_heads, time, head_dim].
        stream_value: merge: partial states; drop: the raw values; [batch, kv_heads, time, head_dim].
        log_keep: merge: log(1 - alpha) of the token after; drop: of the token itself; [batch, kv_heads, time].
        scaling: multiplies query . key, > 0.
        delay: newest tokens seen raw, including the query's own.
        keep_top: True for a merge gate, False for a drop gate (which needs delay >= 1).
        hidden: as in `masked_attention`.
        documents: as in `masked_attention`.
        sinks: logit of each head that its softmax counts beside the keys', [heads]; None: there is none.
        skip_below: as in `masked_attention`.
    Returns:
        [batch, heads, time, head_dim] in query's dtype or autocast's, differentiable in all tensors but hidden.
    Raises:
        ValueError: shapes that do not belong together, or a delay below 0 (1 for a drop gate).
    """
    if delay < (not keep_top):
        raise ValueError(
            f"delay={delay} is not supported with keep_top={keep_top}; expected delay >= 0 for a merge gate and >= 1 "
            "for a drop gate, which would drop the query's own token: raise delay."
        )
    recent = (recent_key, recent_value) if delay else (None, None)
    given = (query, stream_key, stream_value, log_keep, *recent, hidden, documents)
    return _attend(*given, scaling, delay, keep_top, sinks=sinks, skip_below=skip_below)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally, by PyTorch's own attention where a sequence is one document.

    Args:
        query: [batch, heads, time, head_dim]; query head h attends to KV head h // (heads // kv_heads).
        key: [batch, kv_heads, time, head_dim].
        value: [batch, kv_heads, time, head_dim].
        scaling: multiplies query . key, > 0.
        documents: a query sees keys of its own document alone; None: a sequence is one.
        sinks: as in `delayed_masked_attention`.
    Returns:
        [batch, heads, time, head_dim], differentiable in query, key, value and sinks.
    Raises:
        ValueError: shapes that do not belong together.
    """
    if documents is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    return _attend(query, key, value, None, None, None, None, documents, scaling, 0, True, sinks=sinks)


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int,
    *,
    hidden: Tensor | None = None,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally to the last `window` tokens, the query's own included; others cost nothing.

    Args:
        query: [batch, heads, time, head_dim]; query head h attends to KV head h // (heads // kv_heads).
        key: [batch, kv_heads, time, head_dim].
        value: [batch, kv_heads, time, head_dim].
        scaling: multiplies query . key, > 0.
        window: number of tokens.
        hidden: as in `masked_attention`.
        documents: as in `masked_attention`.
        sinks: as in `delayed_masked_attention`.
    Returns:
        [batch, heads, time, head_dim], differentiable in query, key, value and sinks.
    """
    return _attend(query, key, value, None, None, None, hidden, documents, scaling, 0, True, window, sinks=sinks)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor | None, recent_key: Tensor | None,
    recent_value: Tensor | None, hidden: Tensor | None, documents: Documents | None, scaling: float, delay: int,
    keep_top: bool, window: int | None = None, sinks: Tensor | None = None, skip_below: float | None = None,
) -> Tensor:  # fmt: skip
    _check_shapes(query, (key, value), log_keep, (recent_key, recent_value), hidden, documents)
    dtype = _product_dtype(query)
    states = [None if tensor is None else tensor.to(dtype) for tensor in (query, key, value, recent_key, recent_value)]
    bounds = (None, None) if documents is None else (documents.first, documents.end)
    operands = (*states[:3], log_keep, *states[3:], hidden, *bounds, scaling, delay, keep_top, window, skip_below)
    with torch.autocast(query.device.type, enabled=False):  # each product chooses its own dtype
        if not _runs_fused(query, dtype):
            return BlockedAttention.apply(sinks, *operands)
        bias = None if log_keep is None else log_keep.float()
        given = (*operands[:3], bias, *operands[4:])
        return fused_attention(*given)[0] if sinks is None else FusedWithSinks.apply(sinks, *given)


def _runs_fused(query: Tensor, dtype: torch.dtype) -> bool:
    return query.shape[-1] <= LARGEST_HEAD and runs_triton(query, dtype)


def runs_triton(states: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether Triton's kernels compute on the device of `states`, in `dtype`: a GPU's, see `as_on`."""
    return dtype != torch.float64 and _has_triton(states.device)


@torch.compiler.assume_constant_result  # a context variable would break the graph of a layer
def _has_triton(device: torch.device) -> bool:
    device_type = _DEVICE_TYPE.get()
    if (device_type or device.type) != "cuda":
        return False
    return device_type is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _product_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that autocast gives PyTorch's own attention: rotated queries and keys are float32."""
    device = query.device.type
    if query.dtype == torch.float64 or not (
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    ):
        return query.dtype
    return torch.get_autocast_dtype(device)


def _check_shapes(
    query: Tensor, stream: tuple[Tensor, Tensor], log_keep: Tensor | None, recent: tuple[Tensor | None, Tensor | None],
    hidden: Tensor | None, documents: Documents | None,
) -> None:  # fmt: skip
    batch, heads, time, channels = query.shape
    kv_heads = stream[0].shape[1]
    expected = (batch, kv_heads, time, channels)
    keys = [tuple(states.shape) for states in (*stream, *recent) if states is not None]
    of_bias = expected[:3] if log_keep is None else tuple(log_keep.shape)
    is_whole = (recent[0] is None) == (recent[1] is None)
    if any(shape != expected for shape in keys) or of_bias != expected[:3] or heads % kv_heads or not is_whole:
        raise ValueError(
            f"masked attention got query {tuple(query.shape)}, keys and values {keys}, log_keep {of_bias}; expected "
            "[batch, heads, time, head_dim], [batch, kv_heads, time, head_dim] and [batch, kv_heads, time] with heads "
            "a multiple of kv_heads: cut all to the same tokens, and do not repeat keys for a group of query heads."
        )
    if hidden is not None and (hidden.shape != (batch, time) or hidden.dtype != torch.bool):
        raise ValueError(
            f"hidden is {hidden.dtype} {tuple(hidden.shape)}; expected torch.bool {(batch, time)}, True at padding: "
            "invert the attention mask of the tokenizer."
        )
    if documents is not None and documents.first.shape != (batch, time):
        raise ValueError(
            f"documents are those of {tuple(documents.first.shape)} tokens; expected {(batch, time)}: make them from "
            "the starts of this very batch."
        )
