"""Time a kernel backend on the CPU against SDPA over a contiguous cache: interleaved, medians and ratios.

python benchmarks/decode_kernels.py
python benchmarks/decode_kernels.py --dtype bfloat16 --threads 1 --block_size 64 --decode 8,8,4,16384,128 --prefill

Decode steps start with cold caches. The ragged lengths are uniform in 1..L/2, so their mean is L/4; "dense" is the same
kernel at length L, and the ratio of the two is what compression gains. The rest is what SDPA loses on grouped queries.
"one long" has one head of length L, the others a hundredth: for its bytes as fast as "ragged" if work is dealt evenly.
"""

import argparse
import dataclasses

import torch
from timings import Case, Table, add_output_option, medians
from torch import Tensor
from torch.nn import functional

from dmc.compression import CompressionConfig
from dmc.kernels import load_backend
from dmc.kernels.base import LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import history_size

DECODE = ["8,8,4,4096,64", "8,8,4,4096,128", "8,8,4,16384,64", "8,8,4,16384,128", "1,2,4,16384,64"]
PREFILL = ["1,8,1,4096,64", "1,8,4,1024,64", "1,8,1,2048,128"]
OPTIONS = {"kernels": "cpu", "dtype": "float32", "threads": 2, "rounds": 7, "block_size": 16, "ratio": 4.0}
FLUSHED_BYTES = 64 << 20


def scattered(states: Tensor, order: Tensor, block_size: int) -> Tensor:
    """Cut [B, H, L, D] into pages, block i of the flattened heads becoming page `order[i]`."""
    pages = torch.empty(order.numel(), block_size, states.shape[-1], dtype=states.dtype)
    pages[order] = states.view(pages.shape)
    return pages


def decode_cases(shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Case]:
    batch, heads, group, length, dim = shape
    dtype, block = getattr(torch, options.dtype), options.block_size
    backend, scaling = load_backend(options.kernels), dim**-0.5
    query = torch.randn(batch, heads * group, dim).to(dtype)
    key, value = (torch.randn(batch, heads, length, dim).to(dtype) for _ in range(2))
    order = torch.randperm(batch * heads * length // block)
    pages = scattered(key, order, block), scattered(value, order, block), order.int().view(batch, heads, -1)
    full = torch.full((batch, heads), length, dtype=torch.int32)
    ragged = torch.linspace(1, length / 2, batch * heads)[torch.randperm(batch * heads)].int().view(batch, heads)
    one_long = torch.full_like(full, max(1, length // 100))
    one_long[0, 0] = length
    folded, unfolded = query.view(batch, heads, group, dim), query[:, :, None]
    sdpa = functional.scaled_dot_product_attention
    return {
        "SDPA, enable_gqa": lambda: sdpa(unfolded, key, value, enable_gqa=True),
        "SDPA, group folded": lambda: sdpa(folded, key, value),
        f"{options.kernels}, dense": lambda: backend.paged_attention(query, *pages, full, scaling),
        f"{options.kernels}, ragged": lambda: backend.paged_attention(query, *pages, ragged, scaling),
        f"{options.kernels}, one long": lambda: backend.paged_attention(query, *pages, one_long, scaling),
    }


def empty_layer(config: CompressionConfig | None, heads: tuple[int, int], length: int, like: Tensor) -> LayerCache:
    """Make an empty layer for `heads` (batch, KV heads) of up to `length` tokens; `like` has the shape of a page."""
    (block, dim), device = like.shape, like.device
    capacity, size = -(-length // block), history_size(config)
    num_blocks = heads[0] * heads[1] * capacity
    return LayerCache(
        key_pages=like.new_zeros(num_blocks, block, dim),
        value_pages=like.new_zeros(num_blocks, block, dim),
        free_blocks=torch.randperm(num_blocks, device=device).int(),
        num_free=torch.tensor([num_blocks], dtype=torch.int32, device=device),
        block_tables=torch.zeros(*heads, capacity, dtype=torch.int32, device=device),
        lengths=torch.zeros(heads, dtype=torch.int32, device=device),
        history_key=like.new_zeros(*heads, size, dim),
        history_value=like.new_zeros(*heads, size, dim),
        history_decisions=torch.zeros(*heads, size, dtype=torch.bool, device=device),
        history_omega=torch.zeros(*heads, size, device=device),
    )


def prefill_cases(shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Case]:
    batch, heads, group, length, dim = shape
    dtype, scaling = getattr(torch, options.dtype), dim**-0.5
    backend, sdpa = load_backend(options.kernels), functional.scaled_dot_product_attention
    query = torch.randn(batch * length, heads * group, dim).to(dtype)
    key, value = (torch.randn(batch * length, heads, dim).to(dtype) for _ in range(2))
    decisions = torch.rand(batch * length, heads) > 1 / options.ratio
    omega = torch.rand(batch * length, heads) + 0.01
    prompts = ForwardBatch(list(range(batch)), [0] * batch, [length] * batch, query.device)

    def append(config: CompressionConfig | None) -> tuple[LayerCache, ForwardBatch, VisibleKeys]:
        new, tokens = dataclasses.replace(prompts), NewTokens(key, value)
        if config is not None:
            tables = key.new_ones(batch * (length + config.delay), dim)
            new.rotary, tokens = (tables, tables), NewTokens(key, value, decisions, omega)
        layer = empty_layer(config, (batch, heads), length, key.new_empty(options.block_size, dim))
        return layer, new, backend.append_or_merge(layer, new, tokens, config)

    def attend(config: CompressionConfig | None) -> Case:
        layer, new, seen = append(config)
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        return lambda: backend.prefill_attention(query, *pages, new, seen, scaling)

    at_once, delayed = CompressionConfig(), CompressionConfig(delay=16)
    dense = [states.unflatten(0, (batch, length)).transpose(1, 2).contiguous() for states in (query, key, value)]
    return {
        "causal SDPA": lambda: sdpa(*dense, is_causal=True, enable_gqa=True),
        f"attention, merge, CR {options.ratio:g}": attend(at_once),
        f"attention, merge, CR {options.ratio:g}, delay 16": attend(delayed),
        "attention, full cache": attend(None),
        f"append_or_merge, CR {options.ratio:g}": lambda: append(at_once),
        f"append_or_merge, CR {options.ratio:g}, delay 16": lambda: append(delayed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in OPTIONS.items():
        parser.add_argument(f"--{option}", type=type(default), default=default)
    for name, default in (("decode", DECODE), ("prefill", PREFILL)):
        parser.add_argument(f"--{name}", nargs="*", default=default, help="batch,kv_heads,group,length,head_dim")
    add_output_option(parser)
    options = parser.parse_args()
    table = Table(__file__, options.output)
    other = torch.zeros(FLUSHED_BYTES, dtype=torch.uint8)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    for name, make, flush in (("decode", decode_cases, True), ("prefill", prefill_cases, False)):
        for text in getattr(options, name):
            shape = tuple(int(number) for number in text.split(","))
            settings = options.dtype, options.block_size, options.threads
            title = name + ", B{} KV{} x{} L{} d{}, {}, pages of {}, {} threads".format(*shape, *settings)
            before = (lambda: other.add_(1)) if flush else (lambda: None)
            table.add(title, medians(make(shape, options), options.rounds, before=before))


if __name__ == "__main__":
    main()
