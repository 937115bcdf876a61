"""DeepSpeed's strategy on processors without a GPU: Lightning refuses them by one check of the accelerator."""

import json
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


def describe_engines(rank, engines, file):
    """Write down what the parts of DeepSpeed that `ZeroStrategy` reads look like, on one rank.

    Args:
        rank: this process.
        engines: stage of each, and whether it computes in bfloat16.
        file: of what was found, in the order of the engines.
    """
    import deepspeed

    allow_cpu()
    deepspeed.init_distributed("gloo", verbose=False)
    file.write_text(json.dumps([_describe_engine(*engine) for engine in engines]))


def _describe_engine(stage, in_bfloat16):
    import deepspeed

    from dmc.training.strategies.zero import FLAT_WEIGHTS

    model = torch.nn.Linear(4, 3)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": in_bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, zero, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings, dist_init_required=False)
    weights = [name for name in FLAT_WEIGHTS if hasattr(zero, name)]
    flat = getattr(zero, weights[0])
    groups = FLAT_WEIGHTS[weights[0]]
    if groups is not None:
        for parameters, weight in zip(getattr(zero, groups), flat, strict=True):
            assert weight.numel() >= sum(parameter.numel() for parameter in parameters)
    if not in_bfloat16 and stage < 3:
        assert zero.check_grad_overflow is False, "DeepSpeed looks at float32 gradients by itself now"
    zero.check_grad_overflow = True
    applied = []
    for factor in (float("inf"), 1.0):
        loss = engine(torch.ones(1, 4, dtype=torch.bfloat16 if in_bfloat16 else torch.float32)).sum() * factor
        engine.backward(loss)
        engine.step()
        applied.append(engine.was_step_applied())
    return {
        "weights": weights,
        "they are flat, float32 and have AdamW's states": all(
            part.dim() == 1 and part.dtype == torch.float32 and "exp_avg_sq" in zero.optimizer.state[part]
            for part in flat
        ),
        "groups": groups,
        "a step that is not finite is applied": applied[0],
        "a finite step is applied": applied[1],
        "shape of a weight": list(getattr(model.weight, "ds_shape", model.weight.shape)),
    }
