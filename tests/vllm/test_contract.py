"""What the cache's spec, manager and connector take of the pinned vLLM, and what the connector refuses."""

import ast
import dataclasses
import importlib.metadata
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm.v1.core.kv_cache_manager", reason="vLLM is not installed here")

from packaging.requirements import Requirement
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.outputs import KVConnectorOutput

from dmc.vllm.connector import DMCConnector, HeldReport
from dmc.vllm.spec import HeapManager, HeapSpec

pytestmark = pytest.mark.vllm

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
SPEC = HeapSpec(
    block_size=32, num_kv_heads=6, head_size=8, dtype=torch.float16, ratio=4.0, step_tokens=64, page_slots=16
)


def manager_of(spec=SPEC, num_blocks=20):
    groups = [KVCacheGroupSpec(["dmc.0"], spec)]
    config = KVCacheConfig(num_blocks, [], groups)
    return KVCacheManager(config, 512, spec.block_size, spec.block_size, enable_caching=False)


def settings():
    """vLLM's settings of a model on two ranks."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_producer=True),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )


def test_the_extra_is_the_version_that_these_tests_run_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = map(Requirement, extras["vllm"])
    assert wanted.name == "vllm" and importlib.metadata.version("vllm") in wanted.specifier
    assert [str(bound) for bound in wanted.specifier if bound.operator == "<"], "one minor version"


@pytest.mark.parametrize(
    ("ours", "base"),
    [(HeapManager, SingleTypeKVCacheManager), (DMCConnector, KVConnectorBase_V1), (HeapSpec, AttentionSpec)],
)
def test_methods_take_what_the_base_class_gives_them(ours, base):
    """The base classes are vLLM's own extension points, but none promises to stay."""
    for name, method in vars(ours).items():
        theirs = getattr(base, name, None)
        if name.startswith("__") or not inspect.isroutine(theirs) or name == "find_longest_cache_hit":
            continue
        found, expected = (inspect.signature(inspect.unwrap(f)) for f in (getattr(ours, name), theirs))
        assert [*found.parameters] == [*expected.parameters], name


def test_nothing_private_of_vllm_is_touched():
    """A name with an underscore is one that these files define."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "dmc" / "vllm").glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
    assert not {name for name in used - own if name.startswith("_") and not name.endswith("__")}


def test_registering_our_spec_leaves_vllm_its_own():
    assert KVCacheSpecRegistry.get_manager_class(SPEC) is HeapManager
    stock = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    assert KVCacheSpecRegistry.get_manager_class(stock) is not None


def test_a_block_has_the_bytes_of_its_pages_and_one_request_always_fits():
    assert SPEC.pages_per_block == 12 and SPEC.page_size_bytes == 12 * 16 * 2 * 8 * 2
    assert dataclasses.replace(SPEC, page_slots=None).pages_per_block == 6
    longest = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100))
    assert SPEC.max_memory_usage_bytes(longest) == 4 * SPEC.page_size_bytes
    assert SPEC.max_num_blocks_per_req(longest, 100) == 8  # as appended before and after blocks went back
    with pytest.raises(ValueError, match="page_slots=24: expected a divisor of vLLM's block_size=32"):
        dataclasses.replace(SPEC, page_slots=24)


def test_admission_counts_the_calibrated_ratio_and_what_others_still_take():
    assert SPEC.expected(20) == 1 and SPEC.expected(320) == 4  # 320 / 4 and 5 %, half a page, a page to append to
    assert SPEC.most_expected(320) == 6  # 48 pages for 128 unreported tokens, 22 for what 192 leave
    heap = manager_of().coordinator.single_type_managers[0]
    heap.allocate_new_blocks("a", 64, 64)
    heap.admit("a", 320)
    lacks = SPEC.expected(320) - 2
    assert heap.get_num_blocks_to_allocate("b", 320, [], 0, 0, 320, apply_admission_cap=True) == 6 + lacks
    assert heap.get_num_blocks_to_allocate("b", 64, [], 0, 0, 64) == 2


def test_the_connector_refuses_a_stock_models_cache():
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float16)
    stock = manager_of(spec)
    with pytest.raises(TypeError, match="one HeapSpec"):
        DMCConnector(settings(), KVConnectorRole.SCHEDULER, None).bind_kv_cache_manager(stock)


def test_a_report_counts_once_all_ranks_have_spoken():
    """The most pages of any rank, and the oldest step: no rank holds more than the scheduler believes."""
    manager = manager_of()
    connector = DMCConnector(settings(), KVConnectorRole.SCHEDULER, None)
    connector.bind_kv_cache_manager(manager)
    (heap,) = manager.coordinator.single_type_managers
    heap.allocate_new_blocks("a", 128, 128)
    heap.admit("a", 128)
    meta = connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"a": 128}))
    assert (meta.step, meta.started, meta.ended) == (1, {"a": heap.req_to_blocks["a"][0].block_id}, [])

    def tell(report):
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        return len(heap.req_to_blocks["a"])

    one, other = HeldReport(1, {"a": 13}), HeldReport(1, {"a": 25})
    assert tell(one) == tell(one.aggregate(HeldReport(0, {}))) == 4
    assert tell(one.aggregate(other)) == 3  # of 12 pages each
    heap.free("a")
    assert connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={})).ended == ["a"]


def test_a_report_from_before_a_preemption_is_void():
    heap = manager_of().coordinator.single_type_managers[0]
    heap.allocate_new_blocks("a", 128, 128)
    heap.admit("a", 128)
    heap.note_step(1, ["a"])
    heap.free("a")
    assert heap.take_changes()[1] == [], "the worker never heard of it"
    heap.allocate_new_blocks("a", 128, 128)
    heap.admit("a", 129)
    heap.note_step(2, ["a"])
    heap.report(1, {"a": 3})
    assert heap.held["a"].pages == 0 and len(heap.req_to_blocks["a"]) == 4
    heap.report(2, {"a": 14})
    assert heap.held["a"].pages == 14 and len(heap.req_to_blocks["a"]) == 4, "a token of its prompt is still to come"
