"""vLLM's CPU worker over a wheel for GPUs: it lacks three compiled operators, whose stand-ins these are."""

from __future__ import annotations

import torch

OPERATORS = torch.library.Library("_C", "FRAGMENT")
OPERATORS.define("greedy_argmax(Tensor logits) -> Tensor")
OPERATORS.define("init_cpu_memory_env(int[] nodes) -> ()")
OPERATORS.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CPU")
OPERATORS.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")

from vllm.triton_utils.dispatcher import register_kernels  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

from dmc.vllm.plugin import register  # noqa: E402


class Worker(CPUWorker):
    """What `worker_cls` names: slots of tokens in blocks, which our cache does not use, are not computed."""

    def init_device(self):
        """Replace the fallback for machines without Triton, whose arguments vLLM 0.32 confuses."""
        register()  # in environments that have no entry points of ours
        super().init_device()
        register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": lambda *_: None})
