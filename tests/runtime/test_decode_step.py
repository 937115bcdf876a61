"""A recorded step of decoding, replayed with other contents of its buffers, is the step itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.runtime.decode_step import DecodeSteps, why_not_recorded

METHODS: dict[str, dict[str, Any] | None] = {
    "full cache": None,
    "merge": {},
    "merge, exact": {"window_size": None},
    "merge, delay 4": {"delay": 4},
    "drop, delay 4": {"action": "drop", "delay": 4},
    "every fourth": {"decisions": "fixed", "weighting": "uniform", "window_size": None, "target_ratio": 4.0},
}
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2")


class Tape(TorchDispatchMode):
    """Records operations as a CUDA graph does: each again, out of and into the memory that it first had.

    It raises where the host waits for a value, or a shape depends on one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in READS, f"{name} waits for the device"
        out = function(*arguments, **(keywords or {}))
        if not function.is_view:
            self.calls.append((function, arguments, keywords or {}, out))
        return out

    def replay(self) -> None:
        """Do all of it once more."""
        for function, arguments, keywords, out in self.calls:
            again = function(*arguments, **keywords)
            if not function._schema.is_mutable:
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)


class Recorder:
    """Records steps on any device; what the recording itself did is taken back."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.num_recorded, self.num_replayed = engine, 0, 0

    def __call__(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_recorded += 1
        cache, tape = self.engine.cache, Tape()
        written = [*cache.fields._tensors.values(), cache.allocator.stack, cache.allocator.height]
        written += [cache.tally.slots, cache.tally.blocks]
        before = [each.clone() for each in written]
        with tape:
            result = step()
        for each, was in zip(written, before, strict=True):
            each.copy_(was)

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            tape.replay()
            return result

        return replay


@pytest.mark.parametrize("method", METHODS)
def test_a_recorded_step_replayed_through_arrivals_finishes_and_growth_gives_the_eager_tokens(
    method: str, make_stock: Any, make_compressed: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmc.runtime.paged_cache.FIRST_POOL_BLOCKS", 40)  # it grows
    gates = METHODS[method]
    model = make_stock() if gates is None else make_compressed(gates=gates)
    eager = Engine(model, kernels="reference")
    engine = Engine(model, kernels="reference", max_batch_size=3, token_budget=64)
    record = Recorder(engine)
    runner = engine._runner
    runner._decode_steps = DecodeSteps(runner._decode, record, engine.cache.layout.device)
    prompts = make_prompts(5, 40, 90, 17)
    params = [
        SamplingParams(max_new_tokens=count, temperature=0.0 if number % 2 else 0.8, seed=number)
        for number, count in enumerate((40, 70, 12, 35))
    ]
    expected = eager.generate(prompts, params)
    requests = []
    for prompt, each in zip(prompts, params, strict=True):
        requests.append(engine.submit(prompt, each))
        for _ in range(7):
            engine.step()
    engine.run(requests)
    for request, own in zip(requests, expected, strict=True):
        assert request.generation is not None
        assert request.generation.token_ids == own.token_ids
        assert request.generation.logprobs == pytest.approx(own.logprobs, abs=1e-5)
        ours, theirs = request.generation.stats, own.stats
        assert torch.equal(ours.slots, theirs.slots)
        torch.testing.assert_close(ours.mean_slots, theirs.mean_slots)
        assert ours.mean_bytes_allocated == theirs.mean_bytes_allocated
    assert 4 <= record.num_recorded < record.num_replayed / 10  # again when tables or pool have moved
    assert engine.cache.place > 0
    assert engine.blocks_in_use == 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_cuda_graph_gives_the_eager_tokens(
    method: str, make_stock: Any, make_compressed: Any, make_prompts: Any
) -> None:
    gates = METHODS[method]
    model = (make_stock() if gates is None else make_compressed(gates=gates)).cuda()
    prompts, params = make_prompts(5, 40, 90, 17, 3, 61), SamplingParams(max_new_tokens=60, temperature=0)
    expected = Engine(model).generate(prompts, params)
    for ours, own in zip(Engine(model, cuda_graphs=True).generate(prompts, params), expected, strict=True):
        assert ours.token_ids == own.token_ids
        assert torch.equal(ours.stats.slots, own.stats.slots)


def test_what_cannot_be_recorded_is_told(make_stock: Any) -> None:
    model = make_stock()
    with pytest.raises(ValueError, match="cuda_graphs=True: the model is on cpu, not on a GPU; use cuda_graphs=False"):
        Engine(model, cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs=1: expected True or False"):
        Engine(model, cuda_graphs=1)  # type: ignore[arg-type]
    layout = Engine(model).cache.layout.__class__(2, 2, 16, torch.float32, torch.device("cuda"))
    assert why_not_recorded(layout, None, model.config) is None
    assert "H2O reads" in str(why_not_recorded(layout, policies.H2O(budget=Budget(ratio=2)), model.config))
    model.config.rope_parameters = {"rope_type": "dynamic"}
    assert "by positions" in str(why_not_recorded(layout, None, model.config))
