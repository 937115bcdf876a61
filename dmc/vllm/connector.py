"""What vLLM's scheduler and workers tell each other of a compressed cache: who begins and ends, and pages held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from dmc.vllm.attention import LAYER_NAME
from dmc.vllm.spec import HeapManager


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to each worker, with each step."""

    step: int
    """Counts 1, 2, ..."""
    started: dict[str, int] = field(default_factory=dict)
    """First block of each request that begins in this step at position 0, for the first time or again."""
    ended: list[str] = field(default_factory=list)
    """Requests that finished, were aborted or preempted; they end before others start."""


@dataclass
class HeldReport(KVConnectorWorkerMetadata):
    """From each worker to the scheduler: what requests held right after a step, one or more steps ago."""

    step: int = 0
    """The newest step whose counts have reached the host; 0: none."""
    sub_pages: dict[str, int] = field(default_factory=dict)
    """Pages that all heads of a request held."""
    ranks: int = 1
    """Ranks that this is the report of."""

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> HeldReport:
        """Return what no rank exceeds: most pages, and fewest steps that they were counted after."""
        assert isinstance(other, HeldReport)
        most = {
            name: max(self.sub_pages.get(name, 0), other.sub_pages.get(name, 0))
            for name in self.sub_pages.keys() | other.sub_pages.keys()
        }
        return HeldReport(min(self.step, other.step), most, self.ranks + other.ranks)


class DMCConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries no keys or values: it takes the lengths of a compressed cache back to the scheduler."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.layers = vllm_config.compilation_config.static_forward_context
        self.num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self.step = 0
        self.manager: HeapManager | None = None

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        return False

    @override
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Find the manager of the one group of layers.

        Raises:
            TypeError: the model is not one of `dmc`'s.
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], HeapManager):
            raise TypeError("DMCConnector serves models that `dmc` exported, whose cache is one HeapSpec; leave it out")
        self.manager = managers[0]

    @override
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    @override
    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Tell the manager how long the prompt is, with what a preempted request had generated."""
        assert self.manager is not None
        self.manager.admit(request.request_id, request.num_tokens)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Number the step."""
        assert self.manager is not None
        self.step += 1
        self.manager.note_step(self.step, scheduler_output.num_scheduled_tokens)
        return StepMetadata(self.step, *self.manager.take_changes())

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take a report of all ranks; one that lacks a rank says nothing of the most pages."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, HeldReport) and report.ranks == self.num_ranks:
            assert self.manager is not None
            self.manager.report(report.step, report.sub_pages)

    @override
    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    @property
    def cache(self) -> Any:
        """The `WorkerCache` of this worker's model."""
        return self.layers[LAYER_NAME].cache

    @override
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: called after its attention metadata were built, before the model runs."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self.cache.begin_step(connector_metadata.step, connector_metadata.started, connector_metadata.ended)

    @override
    def build_connector_worker_meta(self) -> HeldReport:
        return HeldReport(*self.cache.report())

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    @override
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing."""

    @override
    def wait_for_save(self) -> None:
        """End a step, be it without a forward pass: what vLLM then runs to warm up is none of ours."""
        self.cache.is_told = False
