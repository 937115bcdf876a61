"""What PyTorch's allocator hands out on a CPU while something runs: the oracle of the planner."""

import gc
import itertools
import json
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from dmc.compression import GateMode, GateTrace, compression_loss
from dmc.models import next_tokens, retrofit, with_token_losses
from dmc.models.token_losses import LossWeights, sequence_weights
from dmc.training.strategies import build_strategy
from dmc.training.teacher import Teacher


def allocated_peak(work):
    """Return the largest number of bytes that were allocated at once, from the profiler's log of the allocator."""
    gc.collect()  # what others left must not be freed while this runs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    del kept
    return max(itertools.accumulate(event.nbytes() for event in events))


def train_steps(config, shape, num_steps=2, strategy=None):
    """Make a model and train it as a run does; the gradients of the last step are left."""
    training, mixed = config.training, config.trainer.precision == "bf16-mixed"
    model = AutoModelForCausalLM.from_config(shape)
    if config.has_gates:
        model = retrofit(model, config.compression)
    if training.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if strategy is not None:
        strategy._lightning_module = SimpleNamespace(model=model)
        strategy.parallelize(strategy.lightning_module.model, "")
    teacher = Teacher(AutoModelForCausalLM.from_config(shape), "", 1.0) if config.distillation is not None else None
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
    input_ids = torch.zeros(training.micro_batch_size, training.sequence_length, dtype=torch.long)
    for _ in range(num_steps):
        for index in range(2):
            waits = strategy is not None and index == 0
            with strategy.block_backward_sync() if waits else nullcontext():
                if index == 0:
                    optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed and strategy is None):
                    loss = _loss(model, input_ids, teacher)
                loss.backward()
                del loss
        optimizer.step()
    return model, optimizer


def held_and_peak(config, shape, strategy):
    """Train, and return this rank's bytes of weights, gradients and Adam's states, and of the allocated peak."""
    held = {}

    def work():
        model, optimizer = kept = train_steps(config, shape, strategy=strategy)
        parameters = list(model.parameters())
        states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        gradients = [parameter.grad for parameter in parameters]
        for name, group in (("weights", parameters), ("gradients", gradients), ("optimizer states", states)):
            held[name] = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in group)
        return kept

    peak = allocated_peak(work)
    return held, peak


def write_held_and_peak(rank, config, shape, out):
    """Do the same on one of several gloo ranks, and write it to `out`, its suffix the rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    strategy = build_strategy(config)
    strategy.make_mesh("cpu")
    out.with_suffix(f".{rank}").write_text(json.dumps(held_and_peak(config, shape, strategy)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _loss(model, input_ids, teacher=None):
    targets = next_tokens(input_ids)
    shares = sequence_weights(targets) / len(targets)
    given = {
        "use_cache": False,
        "targets": targets,
        "loss_weights": LossWeights(shares, None if teacher is None else shares),
    }
    if not hasattr(model, "compression"):
        return with_token_losses(model)(input_ids, **given).total
    trace = GateTrace()
    mode = GateMode(noise_seeds=list(range(len(input_ids))))
    taught = None if teacher is None else teacher.read(input_ids)
    losses = model(input_ids, gate_mode=mode, gate_trace=trace, teacher_output=taught, **given)
    return losses.total + compression_loss(trace.stacked_alpha(), 2.0)


@contextmanager
def rank_of(config, num_ranks):
    """Let this process be the first of several, whose collectives return at once; give the run's strategy."""
    torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        strategy = build_strategy(config)
        strategy.make_mesh("cpu")
        yield strategy
    finally:
        torch.distributed.destroy_process_group()
