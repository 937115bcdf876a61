"""Layers of a cache with scattered blocks, streams of random tokens, and comparisons of two backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dmc.compression import CompressionConfig
from dmc.kernels.base import LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import history_size
from dmc.kernels.pages import quantize

THETA = 100.0


def make_layer(
    config: CompressionConfig | None,
    *,
    num_rows: int = 3,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    max_blocks: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    in_8_bits: bool = False,
) -> LayerCache:
    """Make an empty layer whose pages and rings are full of garbage and whose free stack is shuffled."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = num_rows * kv_heads * max_blocks + 2
    heads, size = (num_rows, kv_heads), history_size(config)
    keeps_mean = config is not None and config.action == "merge" and config.window_size is None
    key, value = torch.randn(2, num_blocks, block_size, head_dim, generator=generator).to(dtype).unbind()
    key_scales = value_scales = None
    if in_8_bits:
        (key, key_scales), (value, value_scales) = quantize(key), quantize(value)
    return LayerCache(
        key_scales=key_scales,
        value_scales=value_scales,
        key_pages=key,
        value_pages=value,
        free_blocks=torch.randperm(num_blocks, generator=generator).int(),
        num_free=torch.tensor([num_blocks], dtype=torch.int32),
        block_tables=torch.zeros(*heads, max_blocks, dtype=torch.int32),
        lengths=torch.zeros(heads, dtype=torch.int32),
        history_key=torch.full((*heads, size, head_dim), 9.0, dtype=dtype),
        history_value=torch.full((*heads, size, head_dim), -9.0, dtype=dtype),
        history_decisions=torch.ones(*heads, size, dtype=torch.bool),
        history_omega=torch.full((*heads, size), 3.0),
        mean=torch.zeros(*heads, 2 * head_dim) if keeps_mean else None,
        weight=torch.zeros(heads) if keeps_mean else None,
    )


def fill(layer: LayerCache, lengths: torch.Tensor) -> LayerCache:
    """Give the heads blocks off the stack for `lengths` [C, H]; their slots hold the pages' noise."""
    for row, of_row in enumerate(lengths.tolist()):
        for head, length in enumerate(of_row):
            for block in range(-(-length // layer.block_size)):
                layer.num_free -= 1
                layer.block_tables[row, head, block] = layer.free_blocks[int(layer.num_free)]
    layer.lengths.copy_(lengths)
    return layer


def copy_to(item: Any, device: torch.device | str) -> Any:
    """Copy a layer, a batch, tokens, or what is seen, tensor by tensor, to a device."""
    if isinstance(item, ForwardBatch):
        rotary = None if item.rotary is None else (item.rotary[0].to(device), item.rotary[1].to(device))
        return dataclasses.replace(item, device=device, rotary=rotary)
    if dataclasses.is_dataclass(item):
        return type(item)(*(copy_to(getattr(item, field.name), device) for field in dataclasses.fields(item)))
    if isinstance(item, dict):
        return {name: copy_to(value, device) for name, value in item.items()}
    if isinstance(item, tuple):
        return tuple(copy_to(value, device) for value in item)
    return item.clone().to(device) if isinstance(item, torch.Tensor) else item


class Stream:
    """Random tokens of some sequences, in time; half of them merge."""

    def __init__(self, layer: LayerCache, config: CompressionConfig | None, rows: list[int], time: int) -> None:
        generator = torch.Generator().manual_seed(1)
        head_dim = layer.key_pages.shape[-1]
        shape = (len(rows), time, layer.lengths.shape[1])
        self.config, self.rows = config, rows
        dtype = layer.history_key.dtype
        self.key, self.value = torch.randn(2, *shape, head_dim, generator=generator).to(dtype).unbind()
        self.decisions = torch.rand(shape, generator=generator) < 0.5
        self.omega = torch.rand(shape, generator=generator) + 0.01

    def tokens(self, begin: int | list[int], end: int | list[int]) -> tuple[ForwardBatch, NewTokens]:
        """Cut tokens begin..end-1 out, of each sequence its own where there are several numbers; of some maybe none."""
        begins, ends = ([bound] * len(self.rows) if isinstance(bound, int) else bound for bound in (begin, end))
        given = enumerate(zip(begins, ends, strict=True))
        feeds = [(i, first, last - first) for i, (first, last) in given if last > first]
        members, begins, num_new = (list(column) for column in zip(*feeds, strict=True))
        batch = ForwardBatch([self.rows[i] for i in members], begins, num_new)
        place = torch.tensor(members)[batch.sequence], batch.positions
        if self.config is None:
            return batch, NewTokens(self.key[place], self.value[place])
        cos, sin = rotary_tables(batch.extended(self.config.delay).positions, self.key.shape[-1])
        batch.rotary = cos.to(self.key), sin.to(self.key)
        return batch, NewTokens(self.key[place], self.value[place], self.decisions[place], self.omega[place])


def rotary_tables(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = THETA ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = positions.clamp_min(0)[..., None] * torch.cat((frequencies, frequencies))
    scale = torch.ones(head_dim)
    scale[-1] = 0
    return angles.cos() * scale, angles.sin() * scale


def assert_same_state(actual: LayerCache, expected: LayerCache, tolerance: float) -> None:
    """Compare all that a head owns: block ids, lengths and history exactly, pooled states within the tolerance."""
    for name in ("free_blocks", "num_free", "lengths", "block_tables", "history_decisions"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
    for name in ("key", "value"):  # a number of 8 bits may be rounded to the other neighbor
        pages, scales = getattr(expected, f"{name}_pages"), getattr(expected, f"{name}_scales")
        if scales is not None:
            difference = getattr(actual, f"{name}_pages").cpu().int() - pages.int()
            assert difference.abs().max() <= 1
            assert tolerance > 1e-3 or (difference != 0).float().mean() <= 0.01
            given = getattr(actual, f"{name}_scales").cpu()
            torch.testing.assert_close(given, scales, rtol=max(tolerance, 1e-6), atol=0)
    pages = () if expected.scales else ("key_pages", "value_pages")
    for name in (*pages, "history_key", "history_value", "history_omega", "mean", "weight"):
        wanted = getattr(expected, name)
        if wanted is not None:
            given = getattr(actual, name).cpu().float()
            torch.testing.assert_close(
                given, wanted.float(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
            )


def assert_same_view(actual: VisibleKeys, expected: VisibleKeys, tolerance: float) -> None:
    """Compare what queries see; recent tokens and open slots only where they exist."""
    assert torch.equal(actual.slots.cpu().long(), expected.slots.long())
    for given_states, wanted_states in ((actual.recent, expected.recent), (actual.open_slot, expected.open_slot)):
        assert (given_states is None) == (wanted_states is None)
        if given_states is None or wanted_states is None:
            continue
        exists = wanted_states.exists
        assert torch.equal(given_states.exists.cpu(), exists)
        for name in ("key", "value"):
            given, wanted = getattr(given_states, name), getattr(wanted_states, name)
            torch.testing.assert_close(
                given.cpu()[exists].float(), wanted[exists].float(), rtol=tolerance, atol=tolerance
            )
