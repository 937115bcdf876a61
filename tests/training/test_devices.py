"""A training step on a GPU: nothing lies on another device, no score matrix, and the host waits for nothing it queued.

There is no GPU: tensors without data refuse to be mixed and to be read.
"""

from types import SimpleNamespace

import pytest
import torch
from claimed_gpu import StepWatch, fake_gpu, put_on_gpu
from composing import composed, names
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dmc.compression import CompressionConfig
from dmc.config import build_config
from dmc.models import retrofit
from dmc.training import micro_batches, optimizer_step
from dmc.training.config import RunConfig
from dmc.training.module import RetrofitModule, train_gates_only
from dmc.training.stages import Plan
from dmc.training.strategies.parallelism import Parallelism, keep_rows
from dmc.training.teacher import Teacher

LENGTH = 509  # T x T is more than any other tensor here has
STOCK = {"bf16-mixed": "_scaled_dot_product_flash_attention", "32-true": "_scaled_dot_product_efficient_attention"}
DTYPES = {"bf16-mixed": torch.bfloat16, "32-true": torch.float32}


def fused_kernel(module, state, precision):
    """Name what computes attention in a step: PyTorch's own where there are neither gates nor documents."""
    is_plain = not module.has_gates or state.neuron_multiplier is not None
    is_stock = is_plain and not module.config.training.document_masking
    return STOCK[precision] if is_stock else "masked_attention"


@pytest.mark.parametrize("gate_input", ["neuron", "both", "query"])
def test_gates_alone_are_trained_on_the_device_that_gradients_are_on(make_stock, gate_input):
    model = retrofit(make_stock("qwen2"), CompressionConfig(gate_input=gate_input))
    train_gates_only(model)
    assert [*model.neuron_rows()]
    for parameter, rows in model.neuron_rows():
        parameter.grad = torch.ones_like(parameter)
        keep_rows(parameter, rows)
        assert parameter.grad[rows].eq(1).all() and parameter.grad.sum() == parameter.grad[rows].numel()
        elsewhere = torch.nn.Parameter(torch.zeros_like(parameter, device="meta"))
        elsewhere.grad = torch.ones_like(elsewhere)
        keep_rows(elsewhere, rows)


def build_module(run_values, make_stock, device, **training):
    """Make the module of a run whose model and teacher have no data, and what takes its steps."""
    run_values["training"] |= {"sequence_length": LENGTH, **training}
    if "distillation" in training:
        run_values["model"] = "somewhere"
    config = build_config(RunConfig, run_values)
    plan = Plan(config.training, config.target_ratio, config.compression)
    model = make_stock()
    if config.has_gates:
        model = retrofit(model, config.compression)
    module = RetrofitModule(put_on_gpu(model.train(), device), config, Parallelism(config))
    module._device = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    if "distillation" in training:
        module.teacher = Teacher(put_on_gpu(make_stock(), device), "somewhere", 1.0)
    return module, optimizer_step.OptimizerStep(plan, config.training)


def batch_of(module, device):
    """A micro-batch as the loader gives it, brought to the device as Lightning does."""
    with unset_fake_temporarily():
        input_ids = torch.randint(6, 80, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": input_ids, "position": torch.arange(2)}
        if module.config.training.document_masking:
            batch["document_starts"] = torch.zeros(2, LENGTH, dtype=torch.bool)
            batch["document_starts"][[0, 0, 0, 1], [0, 101, 301, 0]] = True
        batch = micro_batches.host_batch(batch)
    return move_data_to_device(batch, torch.device(device))


CASES = {name: (name, {}) for name in names("compression")} | {
    "gates_only": ("dmc_hidden", {"gates_only": True}),
    "gates_only, borrowed neuron": ("dmc", {"gates_only": True}),
    "distillation": ("dmc", {"distillation": {"weight": 0.5}}),
    "documents of the control": ("none", {"document_masking": True}),
    "documents, distillation": ("dmc", {"document_masking": True, "distillation": {"weight": 0.5}}),
    "documents, checkpointing": ("dms", {"document_masking": True, "activation_checkpointing": True}),
    "led weight": ("dmc", {"head_agreement_weight": 1.0, "ratio_control": {"gain": 0.5}}),
}
STEPS = [
    pytest.param(*CASES[name], precision, id=f"{name}-{precision}", marks=marks)
    for number, name in enumerate(CASES)
    for turn, precision in enumerate(STOCK)
    for marks in [() if (number + turn) % 2 else pytest.mark.slow]
]
"""The quick tier takes each case in one precision, in turn, and backward every second one."""
BACKWARDS = [
    pytest.param(*case, id=name, marks=() if number % 2 else pytest.mark.slow)
    for number, (name, case) in enumerate(CASES.items())
]


@pytest.fixture
def variant(run_values, request):
    """Put the settings of a file of configs/compression into the run's, which has one step of each stage."""
    stages = ["pretrain"] * 2 if request.param == "none" else ["zero_out", "retrofit", "solidify"]
    options = ["training=pretrain"] if request.param == "none" else []
    settings = composed(f"compression={request.param}", "base=tiny_llama", *options).compression
    run_values["compression"] = None if settings is None else settings.to_dict()
    run_values["training"]["stages"] = {name: {"length": f"{stages.count(name)} steps"} for name in stages}
    return request.param


@pytest.fixture
def finishing(monkeypatch):
    """What ends a step before the optimizer's; noted is when its figures are read, and on which device they wait."""
    noted = SimpleNamespace(reads=[], devices=set())
    trainer = SimpleNamespace(global_step=0, global_rank=0, loggers=[])

    class Late:
        def __init__(self, numbers):
            noted.devices.add(numbers.device.type)
            self.size = len(numbers)

        def read(self):
            noted.reads.append(trainer.global_step)
            return [0.5] * self.size

    def finish_step(module, optimization, optimizer, metrics):
        figures = optimization.average_and_decide(module, trainer.global_step, [metrics])
        optimization.clip_or_skip(module, optimizer, figures)
        optimization.read(trainer)
        optimization._pending = figures

    monkeypatch.setattr(optimizer_step, "LateNumbers", Late)
    return finish_step, trainer, noted


@pytest.mark.parametrize(("variant", "training", "precision"), STEPS, indirect=["variant"])
def test_a_step_on_a_gpu_reads_nothing_and_attends_by_a_fused_kernel(
    run_values, make_stock, finishing, variant, training, precision
):
    run_values["trainer"]["precision"] = precision
    with fake_gpu():
        module, optimization = build_module(run_values, make_stock, "cuda", **training)
        finish_step, trainer, noted = finishing
        optimizer = module.configure_optimizers()
        for step in (0, optimization.plan.total_steps - 1):
            trainer.global_step = step
            optimization.prepare(module, step)
            schedule = optimization.schedule_at(step)
            batch = batch_of(module, "cuda")
            with StepWatch(LENGTH) as watch:
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss, metrics = module(schedule, batch)
                assert {value.device.type for value in metrics.values()} == {"cuda"}
                for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                    parameter.grad = torch.empty_like(parameter)  # there is no backward on "cuda"
                finish_step(module, optimization, optimizer, metrics)
                optimizer.step()
            assert loss.device.type == optimizer.found_inf.device.type == "cuda"
            kernels = {fused_kernel(module, schedule.state, precision)}
            if module.teacher is not None:
                kernels.add("masked_attention" if module.config.training.document_masking else STOCK[precision])
            assert watch.kernels == {(name, DTYPES[precision]) for name in kernels}
            assert not watch.waits and not watch.quadratic
        states = [value for state in optimizer.state.values() for value in state.values()]
        assert noted.devices == {value.device.type for value in states} == {"cuda"}


@pytest.mark.parametrize(("variant", "training"), BACKWARDS, indirect=["variant"])
def test_backward_and_what_a_step_logs_stay_on_the_device(run_values, make_stock, finishing, variant, training):
    with fake_gpu("meta"):
        module, optimization = build_module(run_values, make_stock, "meta", **training)
        finish_step, trainer, noted = finishing
        optimizer = SimpleNamespace()
        for step in range(optimization.plan.total_steps):
            trainer.global_step = step
            optimization.prepare(module, step)
            schedule = optimization.schedule_at(step)
            batch = batch_of(module, "meta")
            with StepWatch(LENGTH) as watch:
                loss, metrics = module(schedule, batch)
                loss.backward()
                finish_step(module, optimization, optimizer, metrics)
            assert optimizer.found_inf.device.type == "meta"
            assert not watch.waits and not watch.quadratic
            backward = f"{fused_kernel(module, schedule.state, '32-true')}_backward"
            assert backward in {name for name, _ in watch.kernels}
        assert noted.devices == {"meta"}
        assert noted.reads == list(range(1, optimization.plan.total_steps))  # one a step, of the step before
