"""Time decode steps and prompts of a model on a CPU: generate() of transformers, the engine's full cache, gates.

OMP_NUM_THREADS=2 python benchmarks/cpu_speed.py --model outputs/models/smollm2-135m
OMP_NUM_THREADS=2 python benchmarks/cpu_speed.py --model outputs/models/smollm2-135m --decode 1x1024 --prefill none

The cases take turns, step by step and prompt by prompt, in one process. Gates are adapters of the hidden state that
drop tokens later, with random weights, and offsets at which a quarter of the tokens stays: as fast as learned ones, and
no better than chance. transformers runs twice: with the cache that it grows at every step, its default, and with a
preallocated one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from timings import SHAPE, Table, add_output_option, medians
from torch import Tensor
from transformers import DynamicCache, StaticCache

from dmc import Engine, SamplingParams, load_model, retrofit
from dmc.compression import CompressionConfig
from dmc.models.build import random_model, twin

DELAY = 32


def with_random_gates(model: Any, tokens: Tensor, ratio: float) -> Any:
    """Give a model gates that read its hidden state, keep one token of `ratio` of these tokens, and know nothing."""
    compression = CompressionConfig(action="drop", delay=DELAY, gate_input="hidden", target_ratio=ratio)
    compressed = retrofit(model, compression)
    generator = torch.Generator().manual_seed(0)

    def set_offsets(attention: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden, adapter = named["hidden_states"].float(), attention.gate_adapter
        rows = adapter.decision_rows
        weight = torch.randn(adapter.weight[rows].shape, generator=generator)
        logits = hidden[0] @ weight.T
        adapter.weight[rows] = weight.to(adapter.weight.dtype)
        adapter.bias[rows] = (compression.decision_offset - logits.quantile(1 / ratio, dim=0)).to(adapter.bias.dtype)

    hooks = [
        layer.self_attn.register_forward_pre_hook(set_offsets, with_kwargs=True)
        for layer in compressed.compressed_layers
    ]
    with torch.no_grad():
        compressed(tokens, use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return compressed


class EngineDecoder:
    """The engine with a model of either kind."""

    def __init__(self, model: Any, prompts: list[list[int]], new_tokens: int) -> None:
        self.engine = Engine(model, max_batch_size=len(prompts))
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self.requests = [self.engine.submit(prompt, params) for prompt in prompts]
        while not all(request.logprobs for request in self.requests):
            self.engine.step()

    def step(self) -> None:
        """Decode a token of each sequence."""
        self.engine.step()

    @property
    def ratio(self) -> float:
        """Compression ratio so far."""
        stats = [self.engine.stats(request) for request in self.requests]
        return sum(s.tokens_seen * s.slots.numel() for s in stats) / sum(int(s.slots.sum()) for s in stats)


class Stepwise:
    """generate() of transformers, stopped after each token: the next one is asked for by its streamer."""

    def __init__(self, model: Any, prompts: list[list[int]], new_tokens: int, is_static: bool) -> None:
        self._steps = self._run(model, prompts, new_tokens, is_static)
        next(self._steps)

    def step(self) -> None:
        """Decode a token of each sequence."""
        next(self._steps)

    @staticmethod
    @torch.no_grad()
    def _run(model: Any, prompts: list[list[int]], new_tokens: int, is_static: bool) -> Iterator[None]:
        """Do what generate()'s greedy loop does, which cannot be left and entered again."""
        tokens = torch.tensor(prompts)
        output = model(tokens, use_cache=True, logits_to_keep=1, past_key_values=DynamicCache())
        cache, length = output.past_key_values, tokens.shape[1]
        if is_static:
            cache = StaticCache(config=model.config, max_cache_len=length + new_tokens + 2)
            for index, layer in enumerate(output.past_key_values.layers):
                cache.update(layer.keys, layer.values, index)
        mask, given = torch.ones_like(tokens), {}
        chosen = output.logits[:, -1].argmax(-1, keepdim=True)
        while True:
            yield
            tokens = torch.cat((tokens, chosen), -1)
            mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), -1)
            given = model.prepare_inputs_for_generation(
                tokens, past_key_values=cache, attention_mask=mask, use_cache=True, next_sequence_length=1
            )
            chosen = model(**given, return_dict=True).logits[:, -1].float().argmax(-1, keepdim=True)


def prefills(cases: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """Return what computes a prompt and its first token, by case."""
    greedy, tokens = SamplingParams(max_new_tokens=1, temperature=0.0), torch.tensor([prompt])
    engines = {name: Engine(model) for name, model in cases.items() if name.startswith("engine")}

    @torch.no_grad()
    def transformers() -> None:
        cases["transformers"].generate(
            tokens, max_new_tokens=1, do_sample=False, attention_mask=torch.ones_like(tokens)
        )

    made = {"transformers": transformers}
    for name, engine in engines.items():
        made[name] = lambda engine=engine: engine.generate([prompt], greedy, progress=False)
    return made


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a stock model; none: random weights")
    parser.add_argument("--decode", default="1x1024,8x512,8x1024,1x6000", help="sequences x tokens, or none")
    parser.add_argument("--prefill", default="512,1024,2048,6000", help="tokens, or none")
    parser.add_argument("--ratio", type=float, default=4.0, help="the gates' compression ratio")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--steps", type=int, default=24, help="steps of each case")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each case")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    add_output_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model is None:
        stock = random_model(SHAPE, getattr(torch, options.dtype), "cpu").eval()
    else:
        stock = load_model(options.model, dtype=options.dtype).eval()
    generator, size = torch.Generator().manual_seed(0), stock.config.vocab_size
    gated = with_random_gates(twin(stock), torch.randint(size, (1, 512), generator=generator), options.ratio).eval()
    table = Table(__file__, options.output)
    for setting in () if options.decode == "none" else options.decode.split(","):
        batch, length = map(int, setting.split("x"))
        prompts = torch.randint(size, (batch, length), generator=generator).tolist()
        new_tokens = options.steps + 16
        engines = {
            "engine, full cache": EngineDecoder(stock, prompts, new_tokens),
            f"engine, gates CR {options.ratio:g}": EngineDecoder(gated, prompts, new_tokens),
        }
        cases: dict[str, Any] = {
            "transformers": Stepwise(stock, prompts, new_tokens, False),
            "transformers, static cache": Stepwise(stock, prompts, new_tokens, True),
            **engines,
        }
        found = medians({name: case.step for name, case in cases.items()}, options.steps, warm_up=4)
        held = ", ".join(f"{engine.ratio:.2f}" for engine in engines.values())
        table.add(f"{options.dtype}, step of {batch} x {length} tokens, CR held {held}", found)
    models = {"transformers": stock, "engine, full cache": stock, f"engine, gates CR {options.ratio:g}": gated}
    for length in () if options.prefill == "none" else map(int, options.prefill.split(",")):
        prompt = torch.randint(size, (length,), generator=generator).tolist()
        table.add(f"{options.dtype}, prompt of {length} tokens", medians(prefills(models, prompt), options.rounds))


if __name__ == "__main__":
    main()
