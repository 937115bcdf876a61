"""Time a prompt fed at once against the same prompt fed token by token, and against the full cache.

python benchmarks/prefill.py
python benchmarks/prefill.py --prompt_length 1024 --threads 1
"""

from __future__ import annotations

import argparse
import time

import torch
from timings import SHAPE, Table, add_output_option

from dmc import Engine, SamplingParams, retrofit
from dmc.compression import CompressionConfig
from dmc.models.build import random_model, twin
from dmc.results.synthetic_gates import set_synthetic_gates


def first_token_seconds(engine: Engine, prompt: list[int]) -> float:
    start = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_new_tokens=1, temperature=0.0), progress=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt_length", type=int, default=4096)
    parser.add_argument("--ratio", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=2)
    add_output_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stock = random_model(SHAPE, torch.float32, "cpu")
    compressed = retrofit(twin(stock), CompressionConfig())
    set_synthetic_gates(compressed, options.ratio)
    prompt = torch.randint(4096, (options.prompt_length,), generator=torch.Generator().manual_seed(0)).tolist()
    engines = {
        "full cache, at once": Engine(twin(stock)),
        f"CR {options.ratio:g}, at once": Engine(compressed),
        f"CR {options.ratio:g}, in chunks of 256": Engine(compressed, prefill_chunk_size=256),
        f"CR {options.ratio:g}, token by token": Engine(compressed, prefill_chunk_size=1),
    }
    first_token_seconds(engines["full cache, at once"], prompt[:256])  # warm-up, builds the kernels
    found = {name: 1e3 * first_token_seconds(engine, prompt) for name, engine in reversed(engines.items())}
    Table(__file__, options.output).add(f"a prompt of {options.prompt_length}", found)


if __name__ == "__main__":
    main()
