"""Compiled decoder layers give what eager ones give, and are compiled once, whoever comes and goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.runtime.model_view import is_compiled, why_not_compiled

METHODS: dict[str, tuple[dict[str, Any] | None, Any]] = {
    "full cache": (None, None),
    "merge, delay 4": ({"delay": 4}, None),
    "drop, by query": ({"action": "drop", "delay": 4, "gate_input": "query"}, None),
    "every fourth": ({"decisions": "fixed", "weighting": "uniform", "window_size": None, "target_ratio": 4.0}, None),
    "H2O": (None, policies.H2O(budget=Budget(ratio=2))),
}
CASES = [
    ("merge, delay 4", "eager", True),
    ("H2O", "eager", False),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("full cache", "eager", True),
            ("drop, by query", "eager", False),
            ("every fourth", "eager", False),
            ("merge, delay 4", "inductor", False),
        )
    ),
]
"""Method, compiler ("eager" runs its graphs operation by operation), and whether steps are recorded."""
LENGTHS = (5, 40, 90, 17, 30)


@pytest.fixture
def compiler(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compile with this one, and forget what was compiled."""
    torch._dynamo.reset()
    torch.compiler.set_default_backend(request.param)
    yield request.param
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


class Replayed:
    """Records by doing each step again."""

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        return step

    def drop(self) -> None:
        pass


def num_graphs() -> int:
    """Graphs that have been compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(("method", "compiler", "is_recorded"), CASES, indirect=["compiler"])
def test_compiled_layers_give_the_eager_tokens_and_are_compiled_once(
    method: str,
    compiler: str,
    is_recorded: bool,
    make_stock: Any,
    make_compressed: Any,
    make_prompts: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates, policy = METHODS[method]
    monkeypatch.setattr("dmc.runtime.block_pool.FIRST_POOL_BLOCKS", 40)  # it grows
    model = make_stock(num_layers=3) if gates is None else make_compressed(gates=gates, num_layers=3)
    reason = why_not_compiled(model, Engine(model).cache.layout)
    if reason is not None:
        pytest.skip(reason)
    options: dict[str, Any] = {"policy": policy, "kernels": "reference", "max_batch_size": 6}
    if is_recorded:  # buckets, the scratch row, and buffers that stay
        monkeypatch.setattr("dmc.runtime.engine.GpuRecorder", lambda device: Replayed())
        monkeypatch.setattr("dmc.runtime.engine.why_not_recorded", lambda *_: None)
    eager, engine = Engine(model, **options), Engine(model, **options, compile=True, cuda_graphs=is_recorded)
    prompts = make_prompts(*LENGTHS)
    params = [
        SamplingParams(max_new_tokens=30, temperature=0.8, seed=0),
        SamplingParams(max_new_tokens=50, temperature=0),
        SamplingParams(max_new_tokens=12, seed=2, top_k=9),
        SamplingParams(max_new_tokens=25, temperature=0),
        SamplingParams(max_new_tokens=25, seed=3, top_p=0.9),
    ]
    before = num_graphs()
    engine.generate(make_prompts(7, 9), SamplingParams(max_new_tokens=4, temperature=0))  # two sequences
    engine.generate(make_prompts(7), SamplingParams(max_new_tokens=4, temperature=0))  # one
    warm = num_graphs()
    assert warm == before + 2 * (4 if gates is None else 5)  # of three layers together
    requests = []
    for prompt, sampling in zip(prompts, params, strict=True):
        requests.append(engine.submit(prompt, sampling))
        for _ in range(7):
            engine.step()
    engine.run(requests)
    assert num_graphs() == warm
    for request, expected in zip(requests, eager.generate(prompts, params), strict=True):
        assert request.generation is not None
        assert request.generation.token_ids == expected.token_ids
        assert request.generation.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert torch.equal(request.generation.stats.slots, expected.stats.slots)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_cannot_be_compiled_is_told(make_stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_stock()
    with pytest.raises(ValueError, match="compile=1: expected"):
        Engine(model, compile=1)  # type: ignore[arg-type]
    monkeypatch.setattr("dmc.runtime.model_view.decoder_layers", lambda model: [])
    with pytest.raises(ValueError, match=r"compile=True: LlamaForCausalLM has no decoder layers .* use compile=False"):
        Engine(model, compile=True)
    monkeypatch.undo()
    no_compiler = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    message = r"compile=True: torch.compile needs a C\+\+ compiler .*; use compile=False"
    with no_compiler, pytest.raises(ValueError, match=message):
        Engine(model, compile=True)


def test_auto_compiles_on_a_gpu_alone(make_stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_stock()
    on_cpu = Engine(model, compile="auto").cache.layout
    on_gpu = dataclasses.replace(on_cpu, device=torch.device("cuda"))
    assert [is_compiled(model, layout, "auto") for layout in (on_cpu, on_gpu)] == [False, True]
    monkeypatch.setattr("dmc.runtime.model_view.decoder_layers", lambda model: [])
    assert not is_compiled(model, on_gpu, "auto")
