"""Generations as plain values, and ranks that serve their shards of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import Recorder

from dmc import Engine, SamplingParams
from dmc.models.tensor_parallel import load_shard


def report(engine: Engine, generations: list[Any]) -> dict[str, Any]:
    """Return everything that must not depend on how a model is served."""
    return {
        "tokens": [generation.token_ids for generation in generations],
        "others": [[alternative.token_ids for alternative in generation.alternatives] for generation in generations],
        "logprobs": [generation.logprobs for generation in generations],
        "slots": [generation.stats.slots.tolist() for generation in generations],
        "bytes_used": [generation.stats.bytes_used for generation in generations],
        "ratios": [generation.stats.achieved_ratio for generation in generations],
        "preemptions": sum(generation.stats.num_preemptions for generation in generations),
        "blocks": engine.blocks_in_use,
    }


def serve_shard(
    rank: int, folder: Path, memory: int | None, prompts: list[list[int]], params: list[SamplingParams], out: Path
) -> None:
    """Answer with one rank's part of a model and write the report to `out`, its suffix the rank."""
    model = load_shard(folder)
    engine = Engine(model, memory=memory, max_batch_size=len(prompts), prefix_cache=memory is None)
    found = report(engine, engine.generate(prompts, params))
    found["shape"] = list(model.model.layers[0].self_attn.k_proj.weight.shape)
    out.with_suffix(f".{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def serve_folders(folders: list[Path], prompts: list[list[int]], params: list[SamplingParams], out: Path) -> None:
    """Answer with this rank's part of each model, and write the reports, by the folders' names, from the first rank."""
    found = {}
    for folder in folders:
        engine = Engine(load_shard(folder), max_batch_size=len(prompts))
        found[folder.name] = report(engine, engine.generate(prompts, params))
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(found))


def serve_one_by_one(rank: int, folder: Path, prompts: list[list[int]], out: Path) -> None:
    """Answer one prompt after the other, and write how large the pool has become and what prefixes hold of it."""
    engine = Engine(load_shard(folder), max_batch_size=2, prefix_cache=True)
    for prompt in prompts:
        engine.generate([prompt], SamplingParams(max_new_tokens=1, temperature=0))
    found = engine.cache.allocator.num_blocks, engine.prefix_cache_bytes
    out.with_suffix(f".{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def sample_with_noise(
    rank: int, folder: Path, prompts: list[list[int]], params: list[SamplingParams], out: Path
) -> None:
    """Sample where ranks have different random states, and logits that differ as after another order of summing."""
    model = load_shard(folder)
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)

    def disturb(module: torch.nn.Module, given: tuple, logits: torch.Tensor) -> torch.Tensor:
        return logits + 0.05 * torch.randn(logits.shape, generator=generator)

    model.lm_head.register_forward_hook(disturb)
    generations = Engine(model).generate(prompts, params)
    found = [[generation.token_ids, generation.logprobs] for generation in generations]
    out.with_suffix(f".{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def replay_shard(
    rank: int, folder: Path, prompts: list[list[int]], params: list[SamplingParams], noise: float, out: Path
) -> None:
    """Answer as `serve_shard` does, with logits that differ between ranks, in steps that are recorded and replayed."""
    model, record = load_shard(folder), Recorder()
    generator = torch.Generator().manual_seed(rank)

    def disturb(module: torch.nn.Module, given: tuple, logits: torch.Tensor) -> torch.Tensor:
        return logits + noise * torch.randn(logits.shape, generator=generator)

    model.lm_head.register_forward_hook(disturb)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmc.runtime.engine.GpuRecorder", lambda device: record)
        patch.setattr("dmc.runtime.engine.why_not_recorded", lambda *_: None)
        engine = record.engine = Engine(model, max_batch_size=4, kernels="reference", cuda_graphs=True)
        found = report(engine, engine.generate(prompts, params))
    found["num_replayed"] = record.num_replayed
    out.with_suffix(f".{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def carry_shard(rank: int, folder: Path, cache: Path, texts: list[list[int]], out: Path) -> None:
    """Save a session's cache on each rank, damage one rank's, and go on from it once it is whole again."""
    model, (context, question) = load_shard(folder), texts
    greedy, engines = SamplingParams(max_new_tokens=12, temperature=0), (Engine(model), Engine(model))
    with engines[0].session() as session:
        session.feed(context)
        engines[0].save(session, cache)
        expected = session.generate(question, greedy)
    mine = cache / f"rank-{rank}-of-2" / "cache.safetensors"
    whole = mine.read_bytes()
    mine.write_bytes(whole[: -rank or None])
    with pytest.raises(ValueError, match="is damaged") as refusal:  # of the second rank's, on both
        engines[1].load(cache)
    mine.write_bytes(whole)
    with engines[1].load(cache) as session:
        tokens = session.generate(question, greedy).token_ids
    found = [expected.token_ids, tokens, str(refusal.value), engines[1].blocks_in_use]
    out.with_suffix(f".{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
