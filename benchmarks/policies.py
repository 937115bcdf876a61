"""Time what policies add to decoding and to prefill on the CPU: interleaved, medians and ratios.

python benchmarks/policies.py
python benchmarks/policies.py --kv_heads 2 --decode 1,2048 8,2048 --prefill ""

A decode step of each policy, with its cache full, is compared with a step without one over as many entries; the prompt
of each policy with the same prompt fed whole into the full cache.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from timings import SHAPE, Case, Table, add_output_option, medians

import dmc.policies
from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.models.build import random_model, twin

DECODING = ["H2O", "TOVA", "StreamingLLM"]
PROMPTS = ["SnapKV", "PyramidKV", "AdaKV", "LAVa", "CAKE", "H2O"]
BEYOND = 32
"""Prompt tokens beyond the budget, so that the cache is full from the first generated token on."""


def existing(names: list[str]) -> list[str]:
    return [name for name in names if hasattr(dmc.policies, name)]


def random_prompt(vocab_size: int, length: int, seed: int) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(model: torch.nn.Module, name: str | None, budget: Budget | None) -> Engine:
    policy = None if name is None else getattr(dmc.policies, name)(budget=budget)
    return Engine(twin(model), policy=policy, token_budget=None)


def start_decoding(engine: Engine, vocab_size: int, batch: int, length: int, num_steps: int) -> None:
    """Feed prompts, until every sequence has its first token."""
    params = SamplingParams(max_new_tokens=num_steps, temperature=0.0)
    requests = [engine.submit(random_prompt(vocab_size, length, seed), params) for seed in range(batch)]
    while any(request.sequence.num_computed_tokens < length for request in requests):
        engine.step()


def decode_cases(model: Any, batch: int, length: int, rounds: int) -> dict[str, Case]:
    words = model.config.vocab_size
    engines = {"no policy": engine_of(model, None, None)}
    start_decoding(engines["no policy"], words, batch, length, rounds + 3)
    for name in existing(DECODING):
        engines[name] = engine_of(model, name, Budget(tokens=length))
        start_decoding(engines[name], words, batch, length + BEYOND, rounds + 3)
    return {name: engine.step for name, engine in engines.items()}


def prefill_cases(model: Any, length: int, ratio: float) -> dict[str, Case]:
    prompt, one = (
        random_prompt(model.config.vocab_size, length, seed=0),
        SamplingParams(max_new_tokens=1, temperature=0.0),
    )
    engines = {"no policy": engine_of(model, None, None)}
    engines.update({name: engine_of(model, name, Budget(ratio=ratio)) for name in existing(PROMPTS)})
    return {name: (lambda engine=engine: engine.generate([prompt], one, False)) for name, engine in engines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv_heads", type=int, nargs="*", default=[8, 2])
    parser.add_argument("--decode", nargs="*", default=["1,4096", "8,2048"], help="batch,entries")
    parser.add_argument("--prefill", nargs="*", type=int, default=[4096], help="prompt lengths")
    parser.add_argument("--ratio", type=float, default=4.0, help="compression ratio of the prompts")
    parser.add_argument("--decode_rounds", type=int, default=25)
    parser.add_argument("--prefill_rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    add_output_option(parser)
    options = parser.parse_args()
    table = Table(__file__, options.output)
    torch.set_num_threads(options.threads)
    for kv_heads in options.kv_heads:
        model = random_model({**SHAPE, "num_key_value_heads": kv_heads}, torch.float32, "cpu")
        for text in options.decode:
            batch, length = (int(number) for number in text.split(","))
            cases = decode_cases(model, batch, length, options.decode_rounds)
            found = medians(cases, options.decode_rounds)
            table.add(f"step of {batch} sequences, {kv_heads} KV heads, {length} entries each", found)
        for length in options.prefill:
            found = medians(prefill_cases(model, length, options.ratio), options.prefill_rounds)
            table.add(f"prompt of {length}, {kv_heads} KV heads, CR {options.ratio:g}", found)


if __name__ == "__main__":
    main()
