"""Time the host's part of a recorded decode step: scheduling, settings, what is read of the tokens; no kernel runs.

OMP_NUM_THREADS=1 python benchmarks/host_step.py
OMP_NUM_THREADS=1 python benchmarks/host_step.py --sequences 64,512 --rounds 400

The recorder of this program replays nothing, so that tokens are always the same; the rest is the engine's own code. The
cases take turns step by step: greedy requests, sampled ones, ones that may end at more tokens than the device is told
of, so that each step is scheduled anew, and ones with a prefix cache.
"""

import argparse
import time
from collections.abc import Callable

import torch
from timings import Table, add_output_option, medians
from transformers import LlamaConfig, LlamaForCausalLM

from dmc import SamplingParams
from dmc.runtime.decode_steps import Result
from dmc.runtime.engine_core import EngineCore
from dmc.runtime.input_processor import InputProcessor
from dmc.runtime.model_view import layout_of
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.prefix_cache import PrefixCache
from dmc.runtime.runner import Runner
from dmc.runtime.scheduler import Scheduler

LENGTH, PROMPT = 8192, 40
MODEL = {"vocab_size": 256, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
CASES = {
    "greedy": (SamplingParams(max_new_tokens=LENGTH - 64, temperature=0.0), False),
    "sampled, top_k": (SamplingParams(max_new_tokens=LENGTH - 64, top_k=20, seed=0), False),
    "greedy, not one ahead": (
        SamplingParams(max_new_tokens=LENGTH - 64, temperature=0.0, stop_token_ids=tuple(range(100, 109))),
        False,
    ),
    "greedy, prefix cache": (SamplingParams(max_new_tokens=LENGTH - 64, temperature=0.0), True),
}


class Nothing:
    """A recorder whose steps return what they returned when they were recorded, and do nothing."""

    def __call__(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """Record a step."""
        result = step()
        return lambda: result

    def drop(self) -> None:
        """Nothing is kept."""


def decoding(num_sequences: int, params: SamplingParams, keeps_prefixes: bool) -> EngineCore:
    """Let so many sequences decode."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": LENGTH}
    model = LlamaForCausalLM(LlamaConfig(**MODEL, **heads)).eval()
    cache = PagedCache(layout_of(model, None), num_sequences, 16, num_sequences * LENGTH // 16, LENGTH)
    runner = Runner(model, cache, "reference", record=Nothing())
    scheduler = Scheduler(cache, prefixes=PrefixCache(cache) if keeps_prefixes else None)
    core = EngineCore(scheduler, runner)
    inputs = InputProcessor(model, None, None, core)
    for index in range(num_sequences):
        core.add(inputs.request([*index.to_bytes(2, "big"), *range(PROMPT)], params))
    while len(scheduler.running) < num_sequences or any(len(one.logprobs) < 4 for one in core.by_sequence.values()):
        core.step()
    return core


def main() -> None:
    """Print milliseconds of a step of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="64,512", help="numbers of sequences")
    parser.add_argument("--rounds", type=int, default=200, help="steps of each case")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    add_output_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    table = Table(__file__, options.output)
    for count in map(int, options.sequences.split(",")):
        cores = {name: decoding(count, *case) for name, case in CASES.items()}
        steps = {name: core.step for name, core in cores.items()}
        table.add(f"{count} sequences", medians(steps, options.rounds, warm_up=10, clock=time.process_time))


if __name__ == "__main__":
    main()
