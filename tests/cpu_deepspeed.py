"""DeepSpeed's strategy on processors without a GPU: Lightning refuses them by one check of the accelerator."""

import sys

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy


def allow_cpu():
    """Let `deepspeed_zero*` run in this process over gloo."""
    from deepspeed.comm.torch import TorchBackend

    from dmc.training.strategies import zero

    # gloo alone: shared memory would be compiled first, for minutes; `deepspeed.comm.torch` may name torch itself
    sys.modules[TorchBackend.__module__].build_shm_op = lambda: None

    class CpuZeroStrategy(zero.ZeroStrategy):
        def __init__(self, config):
            super().__init__(config, process_group_backend="gloo")

        @property
        def root_device(self):
            return torch.device("cpu", 0)

        setup_environment = DDPStrategy.setup_environment

        def setup_distributed(self):
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    zero.ZeroStrategy = CpuZeroStrategy
