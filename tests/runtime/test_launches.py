"""What a step asks of a GPU, counted and not timed: launches and waits for each layer, on a GPU that is none.

Operations of torch that only change how memory is seen are no launches. Backend functions that Triton has kernels for
count as those; others run as the reference's torch code, as they do on a GPU. The figures are those of today: a change
that needs more must say why, one that needs fewer lowers them.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from claimed_gpu import COPIES, GPU, ClaimedTensor, claim_model, claimed_gpu
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.compression import CompressionConfig
from dmc.kernels import reference
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import history_size
from dmc.runtime import runner
from dmc.runtime.paged_forward import PagedForward

SHALLOW, DEEP = 2, 4
ONE_LENGTH, RAGGED, THREE = [40] * 8, [5, 9, 14, 20, 27, 35, 44, 54], [5, 20, 54]
DATA_DEPENDENT = ("nonzero", "_local_scalar_dense", "masked_select", "unique2", "_unique2")


class Launches(TorchDispatchMode):
    """Counts what is launched on the GPU, and what the host waits for.

    Uploads are copies to the GPU of memory that may move: the host waits until all before them has run.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = device
        self.counts: Counter[str] = Counter()
        self.is_paused = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        out = function(*arguments, **(keywords or {}))
        if self.is_paused:
            return out
        given, made = (
            [leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor)] for item in (arguments, out)
        )
        name = function.overloadpacket.__name__
        on_gpu = [any(tensor.device.type == self.device for tensor in tensors) for tensors in (given, made)]
        takes_indices = name in ("index", "index_put", "index_put_", "_index_put_impl_")
        by_mask = takes_indices and any(
            argument is not None and argument.dtype == torch.bool for argument in arguments[1]
        )
        leaves = on_gpu[0] and bool(made) and not on_gpu[1]  # copied to the host
        self.counts["waits"] += (on_gpu[0] and name in DATA_DEPENDENT) or by_mask or leaves
        is_async = (keywords or {}).get("non_blocking", name == "copy_" and True in arguments[2:])
        places = {tensor.device.type for tensor in given + made}
        self.counts["uploads"] += name in COPIES and on_gpu[1] and "cpu" in places and not is_async
        self.counts["operations"] += any(on_gpu) and not function.is_view and name != "_unsafe_view"
        return out

    @contextlib.contextmanager
    def kernels(self, count: int) -> Iterator[None]:
        """Count so many kernels in place of what runs inside."""
        self.counts["kernels"] += count
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


KERNELS = {
    "paged_attention": 2,
    "prefill_attention": 1,
    "attention_received": 1,
    "compact": 2,
    "write_metadata": 1,
    "read_metadata": 1,
    "add_attention": 1,
    "nth_newest": 1,
    "eviction_candidate": 1,
    "evict": 2,
}
"""What Triton's backend launches; of attention with scores one more, and where the append has not counted chunks."""


def append_kernels(batch: ForwardBatch, config: CompressionConfig | None) -> int:
    """What `append_or_merge` of Triton's backend launches."""
    held_back = config is not None and config.delay > 0
    return (2 if batch.most_new == 1 else 3 + (history_size(config) > 0)) + held_back


class CountedBackend:
    """The reference, whose functions count as Triton's kernels where there are any."""

    def __init__(self, launches: Launches) -> None:
        self.launches = launches

    def __getattr__(self, name: str) -> Any:
        function = getattr(reference, name)
        if name not in (*KERNELS, "append_or_merge"):
            return function

        def counted(*arguments: Any, **options: Any) -> Any:
            kernels = KERNELS.get(name, 0) + bool(options.get("return_scores"))
            kernels += name == "paged_attention" and "chunk_ends" not in options
            if name == "append_or_merge":
                _, batch, _, config = arguments
                kernels = append_kernels(batch, config)
            with self.launches.kernels(kernels):
                return function(*arguments, **options)

        return counted


def counts_of(
    model: Any,
    policy: Any,
    lengths: list[int],
    decodes: bool,
    steps: int = 1,
    memory: int | None = None,
    joining: list[int] | None = None,
) -> list[Counter[str]]:
    """Count the first step, which feeds prompts of these lengths, or so many of decoding after it.

    Prompts of `joining` tokens come when the others decode.
    """
    launches, counts = Launches(), []
    with claimed_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "choose_backend", lambda *_: CountedBackend(launches))
        engine = Engine(claim_model(copy.deepcopy(model)), policy=policy, token_budget=None, memory=memory)
        generator = torch.Generator().manual_seed(0)

        def submit(length: int) -> None:
            prompt = torch.randint(80, (length,), generator=generator).tolist()
            warm = float(steps > 1 and length % 2)
            params = SamplingParams(max_new_tokens=6 + steps, temperature=warm, top_k=9, ignore_eos=True)
            engine.submit(prompt, params)

        for length in lengths:
            submit(length)
        for _ in range(2 if decodes else 0):
            engine.step()
        for length in joining or ():
            submit(length)
        read = ClaimedTensor.tolist

        def counted_read(tensor: ClaimedTensor) -> Any:
            launches.counts["waits"] += not launches.is_paused
            return read(tensor)

        patch.setattr(ClaimedTensor, "tolist", counted_read)
        for _ in range(steps):
            launches.counts.clear()
            with launches:
                engine.step()
            counts.append(launches.counts.copy())
        assert engine.cache.fields["key_pages"].device == GPU
    return counts


@pytest.fixture
def per_layer(make_stock: Any, make_compressed: Any) -> Callable[..., tuple[tuple[float, ...], int]]:
    """Return what counts (operations, kernels, waits) of one layer of a step, and all waits of the shallow model's.

    A layer's uploads are waits; those of a step come before anything runs.
    """

    def count(gates: dict | None, policy: Any, lengths: list[int], decodes: bool) -> tuple[tuple[float, ...], int]:
        found: list[Counter[str]] = []
        for layers in (SHALLOW, DEEP):
            model = make_stock(num_layers=layers) if gates is None else make_compressed(gates=gates, num_layers=layers)
            found += counts_of(model, policy, lengths, decodes)
        shallow, deep = found
        of_layer = {name: (deep[name] - shallow[name]) / (DEEP - SHALLOW) for name in deep}
        waits = of_layer["waits"] + of_layer["uploads"]
        return (of_layer["operations"], of_layer["kernels"], waits), shallow["waits"]

    return count


def assert_within(found: tuple[float, ...], budget: tuple[int, ...]) -> None:
    assert all(count <= most for count, most in zip(found, budget, strict=True)), f"{found} where {budget} are allowed"


HALF = Budget(ratio=2)


@pytest.mark.parametrize(
    ("gates", "policy", "operations", "kernels", "waits", "waits_in_all"),
    [
        (None, None, 33, 4, 0, 1),
        ({}, None, 34, 4, 0, 1),
        ({"delay": 4}, None, 34, 5, 0, 1),
        (None, policies.H2O(budget=HALF), 42, 14, 0, 2),
        (None, policies.H2O(budget=HALF, protect=0.1), 47, 14, 0, 2),
        (None, policies.TOVA(budget=HALF), 38, 12, 0, 2),
    ],
    ids=["full cache", "gates", "delayed gates", "H2O", "H2O, protected", "TOVA"],
)
def test_a_decode_step_stays_within_its_budget(
    gates: dict | None,
    policy: Any,
    operations: int,
    kernels: int,
    waits: int,
    waits_in_all: int,
    per_layer: Callable[..., tuple[tuple[float, ...], int]],
) -> None:
    in_one, in_all = per_layer(gates, policy, RAGGED, decodes=True)
    assert_within((*in_one, in_all), (operations, kernels, waits, waits_in_all))


class InGraphs(Exception):
    """Ends a compilation when it is known what it would launch."""


@pytest.fixture
def launched_by_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What each graph of inductor launches, that is then run as it was given."""
    counts: list[int] = []

    def count(nodes: list[Any]) -> None:
        counts.append(sum(not isinstance(node, NopKernelSchedulerNode) for node in nodes))
        raise InGraphs

    def compiled(graph: Any, inputs: Any) -> Any:
        before = len(counts)
        as_on_gpu = {"force_pointwise_cat": True, "_post_fusion_custom_pass": count}  # RoPE is one kernel there
        with torch._inductor.config.patch(as_on_gpu), contextlib.suppress(InductorError):
            compile_fx(copy.deepcopy(graph), inputs)
        assert len(counts) == before + 1
        return graph.forward

    torch._dynamo.reset()
    torch.compiler.set_default_backend(compiled)
    yield counts
    torch.compiler.set_default_backend(None)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("gates", "policy", "expected", "most"),
    [
        (None, None, 17, 20),
        ({}, None, 18, 20),
        ({"delay": 4}, None, 19, 20),
        (None, policies.H2O(budget=HALF), 37, 37),
    ],
    ids=["full cache", "gates", "delayed gates", "H2O"],
)
@pytest.mark.slow
def test_compiled_layers_launch_at_most_as_much(
    gates: dict | None,
    policy: Any,
    expected: int,
    most: int,
    make_stock: Any,
    make_compressed: Any,
    launched_by_graphs: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layer runs every graph once; what its attention launches is counted as it runs."""
    attention, found = Launches(device="cpu"), []

    def counted(attend: Any) -> Any:
        def inner(*arguments: Any, **options: Any) -> Any:
            with attention:
                return attend(*arguments, **options)

        return inner

    def uncounted(rotate: Any) -> Any:
        def inner(*arguments: Any) -> Any:
            with _disable_current_modes():  # under a mode nothing is compiled
                return rotate(*arguments)

        return inner

    for name in ("attend", "attend_plain"):
        monkeypatch.setattr(PagedForward, name, counted(getattr(PagedForward, name)))
    for layers in (SHALLOW, DEEP):
        model = make_stock(num_layers=layers) if gates is None else make_compressed(gates=gates, num_layers=layers)
        engine = Engine(model, policy=policy, kernels="reference", token_budget=None, compile=True)
        engine._runner._attention.backend = CountedBackend(attention)  # type: ignore[assignment]
        engine._runner._rotate = uncounted(engine._runner._rotate)
        for length in RAGGED:
            engine.submit(list(range(length)), SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True))
        engine.step()
        engine.step()
        attention.counts.clear()
        engine.step()
        found.append(attention.counts.copy())
    shallow, deep = found
    beside = [(deep[name] - shallow[name]) / (DEEP - SHALLOW) for name in ("operations", "kernels")]
    assert sum(launched_by_graphs) + sum(beside) == expected <= most, (launched_by_graphs, *beside)


@pytest.mark.parametrize(
    ("gates", "policy", "operations", "kernels"),
    [(None, None, 33, 4), ({}, None, 34, 5), ({"delay": 4}, None, 34, 6)],
    ids=["full cache", "gates", "delayed gates"],
)
def test_prompts_of_any_lengths_stay_within_one_budget(
    gates: dict | None,
    policy: Any,
    operations: int,
    kernels: int,
    per_layer: Callable[..., tuple[tuple[float, ...], int]],
) -> None:
    for lengths in (ONE_LENGTH, RAGGED):
        assert_within(per_layer(gates, policy, lengths, decodes=False)[0], (operations, kernels, 0))


def test_what_a_policy_sees_of_a_prompt_costs_the_same_however_long_it_is(
    per_layer: Callable[..., tuple[tuple[float, ...], int]],
) -> None:
    short, long = (per_layer(None, policies.H2O(budget=HALF), [length], decodes=False) for length in (40, 300))
    assert short == long


SMALL_BLOCKS = {"block_size": 4, "representatives": 2, "initial": 2, "local": 8, "chunk": 16}
NO_WAITS = [policies.StreamingLLM, policies.H2O, policies.SnapKV, policies.AdaKV, policies.ExpectedAttention]
NO_WAITS += [policies.Quest]
LIKE_THEM = [policies.LocalWindow, policies.TOVA, policies.VATP, policies.RoCo, policies.CaM, policies.PyramidKV]
LIKE_THEM += [policies.Random, policies.Marked]


@pytest.mark.parametrize(
    ("policy", "options", "of_prompt", "of_layer"),
    [
        *((policy, {}, 0, 0) for policy in NO_WAITS),
        *(pytest.param(policy, {}, 0, 0, marks=pytest.mark.slow) for policy in LIKE_THEM),
        pytest.param(policies.StreamingLLM, {"rerotate": True}, 0, 0, marks=pytest.mark.slow),
        pytest.param(policies.H2O, {"protect": 0.1}, 0, 0, marks=pytest.mark.slow),
        pytest.param(policies.PyramidKV, {"protect": 0.1}, 0, 0, marks=pytest.mark.slow),
        pytest.param(policies.AdaKV, {"official_blend": True}, 0, 0, marks=pytest.mark.slow),
        (policies.InfLLM, SMALL_BLOCKS, 0, 0),
        (policies.OmniKV, {"filter_layers": (0,)}, 0, 0),
        (policies.KVzip, {}, 1, 0),  # what an earlier turn, or a fork of it, has repeated
        (policies.CAKE, {}, 1, 0),  # the weights of all layers, of which the host counts budgets
        pytest.param(policies.D2O, {}, 1, 0, marks=pytest.mark.slow),
        (policies.CAKE, {"cascading": True}, 0, 1),  # the same before the next layer runs: it needs the room
        (policies.LAVa, {}, 0, 1),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_the_host_waits_for_no_layer_when_a_prompt_ends_or_decodes(
    policy: Any,
    options: dict[str, Any],
    of_prompt: int,
    of_layer: int,
    per_layer: Callable[..., tuple[tuple[float, ...], int]],
) -> None:
    made = policy(budget=HALF, **options)
    (_, _, waits), in_all = per_layer(None, made, [40], decodes=False)
    assert waits == of_layer and in_all <= 2 + of_prompt + SHALLOW * of_layer  # lengths before, tokens after it
    (_, _, waits), in_all = per_layer(None, made, THREE, decodes=True)
    assert waits == 0 and in_all <= 3


@pytest.mark.parametrize("gates", [None, {"action": "drop", "delay": 4}], ids=str)
def test_a_step_of_decoding_and_prompts_launches_at_most_three_times_what_decoding_does(
    gates: dict | None, make_stock: Any, make_compressed: Any
) -> None:
    model = make_stock() if gates is None else make_compressed(gates=gates)
    (decoding,) = counts_of(model, None, RAGGED, decodes=True)
    (mixed,) = counts_of(model, None, RAGGED, decodes=True, joining=[60, 23])
    launched = [launches["operations"] + launches["kernels"] for launches in (decoding, mixed)]
    assert launched[1] <= 3 * launched[0], launched
    assert mixed["waits"] == 1, mixed


@pytest.mark.parametrize("gates", [None, {}], ids=str)
def test_a_pool_that_grows_through_a_prompt_rarely_waits(
    gates: dict | None, make_stock: Any, make_compressed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmc.runtime.block_pool.FIRST_POOL_BLOCKS", 8)
    model = make_stock(num_layers=6) if gates is None else make_compressed(gates=gates, num_layers=6)
    (counts,) = counts_of(model, None, RAGGED, decodes=False)
    assert counts["waits"] <= 6, counts


@pytest.mark.parametrize(("gates", "steps"), [(None, 16), ({"action": "drop", "delay": 4}, 24)], ids=str)
def test_the_host_waits_once_a_step_through_new_blocks_and_draws(
    gates: dict | None, steps: int, make_stock: Any, make_compressed: Any
) -> None:
    model = make_stock() if gates is None else make_compressed(gates=gates)
    counts = counts_of(model, None, RAGGED, decodes=True, steps=steps, memory=185 * 2048)
    assert [count["waits"] for count in counts] == [1] * steps
