"""Count what a micro-batch launches and moves, on tensors without data: no GPU is needed, and nothing is timed.

python benchmarks/training_bytes.py experiment=qwen3_0p6b_cr4 training.activation_checkpointing=true
python benchmarks/training_bytes.py experiment=qwen3_0p6b_cr4 trainer.compile=true

Without trainer.compile each operation is a kernel. With it Inductor lowers and fuses the run's regions for an H100
and stops before it writes code. A kernel reads inputs once, and writes outputs once. Launches are all kernels; bytes
are those of glue, all but matrix products and attention, and apart those of attention. Counted on two and three layers,
and so of one; the optimizer's of a step, all else of a micro-batch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode, FusedSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dmc.models import token_losses
from dmc.training.compiled_layers import compile_layers
from dmc.training.config.run_config import run_config
from dmc.training.planning import fake_step as steps

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product")
ATTENTION = ("_scaled_dot_product", "masked_attention")
ROW_LOSSES = "row_losses"
"""The kernel of the losses over a vocabulary, which is no product."""
ASKS = ("empty", "new_empty", "detach", "_unsafe_view", "split", "sym_", "lift_fresh", "resize_")
"""What launches nothing."""
GATHERS = 2
"""Kernels by which attention's operator gathers the keys that count, before those that attend."""
OVERWRITES = ("copy_", "zero_", "fill_", "rand", "uniform_")
"""What does not read the tensor that it writes."""
GPU = torch.device("cuda", 0)
H100 = {"multi_processor_count": 132, "major": 9, "minor": 0, "warp_size": 32, "max_threads_per_block": 1024}
H100 |= {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048}
"""What Inductor asks of the GPU that it fuses for."""
PHASES = ("teacher", "forward", "loss", "backward", "optimizer")
GB = 1e9


class Glue(TorchDispatchMode):
    """Counts launches, bytes of those that are neither products nor attention, and bytes of attention, by phase."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let regions be compiled while this counts."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.launches, self.glue, self.attention = Counter[str](), Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        out = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        if function.is_view or function.namespace in ("prim", "prims") or name.startswith(ASKS):
            return out
        self.launches[self.phase] += 1
        moved = sum(map(bytes_of, _tensors((arguments, keywords, out))))
        if name.startswith(OVERWRITES):
            moved = sum(map(bytes_of, _tensors((arguments[1:], out))))
        if name == ROW_LOSSES:  # which reads the logits twice
            moved += sum(map(bytes_of, _tensors(arguments[:2])))
        if function.namespace == "dmc" and name.startswith(ATTENTION):
            self.launches[self.phase] += GATHERS if gathered_by(name, arguments) else 0
            self.glue[self.phase] += gathered_by(name, arguments)
        if name.startswith(ATTENTION):
            self.attention[self.phase] += moved
        elif not name.startswith(PRODUCTS):
            self.glue[self.phase] += moved
        return out

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count for a phase, and then go on with the one before."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def compiled(self, graph: Any, inputs: Any) -> Any:
        """Count the kernels of a region, and run it as it is written: a backend of torch.compile."""
        at_once = functorch.patch(force_non_lazy_backward_lowering=True)  # later constants have no data
        with inductor.patch(fx_graph_cache=False), at_once:
            return compile_fx.compile_fx(graph, inputs, inner_compile=self._counted)

    def _counted(self, graph: Any, inputs: Any, is_backward: bool = False, **_: Any) -> Any:
        copied = torch.fx.GraphModule(graph, deepcopy(graph.graph))
        launches, moved = kernels_of(copied, inputs, is_backward)
        attended = 0
        for node in graph.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and (name := node.target._opname).startswith(ATTENTION):
                parts = [value_of(part) for part in (*node.all_input_nodes, node)]
                attended += sum(map(bytes_of, _tensors(parts)))
                gathered = gathered_by(name, torch.fx.map_arg(node.args, value_of))
                launches, moved = launches + (GATHERS if gathered else 0), moved + gathered

        def run(*given: Any) -> Any:
            self.launches[self.phase] += launches
            self.glue[self.phase] += moved
            self.attention[self.phase] += attended
            with self.paused():
                return graph(*given)

        return make_boxed_func(run)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing."""
        counts = self.launches, self.glue, self.attention
        self.launches, self.glue, self.attention = Counter(), Counter(), Counter()
        try:
            yield
        finally:
            self.launches, self.glue, self.attention = counts


def value_of(node: torch.fx.Node) -> Any:
    """Return what a node of a graph was traced with."""
    return node.meta["val"]


def gathered_by(name: str, arguments: Any) -> int:
    """Count the bytes by which attention's operator gathers the keys that count; 0: it takes all."""
    if not name.startswith("masked_attention") or arguments[-1] is None:
        return 0
    key, value, log_keep, _, _, hidden = arguments[name.endswith("backward") :][1:7]
    if log_keep is None:
        return 0
    numbers = 5 * bytes_of(log_keep) + (0 if hidden is None else bytes_of(hidden))  # read, and three written, one read
    return numbers + 2 * (bytes_of(key) + bytes_of(value))


def kernels_of(graph: torch.fx.GraphModule, inputs: Any, is_backward: bool) -> tuple[int, int]:
    """Count the kernels that Inductor makes of a graph, as for a GPU, and the bytes of its loops; nothing is run."""
    symbols = (size for tensor in inputs for size in (tensor, *getattr(tensor, "shape", ())))
    shape_env = next((size.node.shape_env for size in symbols if isinstance(size, torch.SymInt)), None)
    compile_fx.view_to_reshape(graph)
    with V.set_fake_mode(compile_fx.fake_tensor_prop(graph, inputs)):
        compile_fx._recursive_record_original_output_strides(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        inputs = put_on_gpu(graph, inputs)
    with V.set_fake_mode(detect_fake_mode(inputs)), an_h100():
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=shape_env, is_backward=is_backward)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), DebugContext():
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            nodes = lowering.scheduler.nodes
            loops = [node for node in nodes if isinstance(node, (SchedulerNode, FusedSchedulerNode))]
            called = [node for node in nodes if isinstance(node, ExternKernelSchedulerNode)]
            launches = len(loops) + sum(not isinstance(node.node, MultiOutput) for node in called)
            return launches, sum(node.get_read_write_buffers_sizes() for node in loops)


def put_on_gpu(graph: torch.fx.GraphModule, inputs: Any) -> list[Any]:
    """Let a graph be one of a GPU, whose memory no tensor needs, and return its inputs there."""

    def put(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.new_empty_strided(value.shape, value.stride(), device=GPU)
        return GPU if isinstance(value, torch.device) else value

    with detect_fake_mode(inputs):
        for node in graph.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, put), map_aggregate(node.kwargs, put)
            if "val" in node.meta:
                node.meta["val"] = tree_map(put, node.meta["val"])
        return [put(value) for value in inputs]


@contextmanager
def an_h100() -> Iterator[None]:
    """Let Inductor find an H100 here."""
    found, capability = staticmethod(lambda *_: SimpleNamespace(**H100)), staticmethod(lambda *_: 90)
    asked = {"get_device_properties": found, "get_compute_capability": capability}
    has_triton = patch("torch._inductor.scheduler.has_triton", lambda: True)
    with patch.multiple(CudaInterface, **asked), has_triton:
        yield


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def bytes_of(tensor: Tensor) -> int:
    """Count a tensor's bytes, those of a repeated one once."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size()


def count(config: Any, num_layers: int) -> Glue:
    """Count a micro-batch of the first layers of a run's model, and its optimizer's step."""
    glue = Glue()
    with steps.fake_step(config, range(num_layers)) as step:
        module = step.module
        module.model.lm_head.most_chunks = None
        head, teacher = module.model.lm_head, module.teacher
        if config.trainer.compiles_layers:
            torch._dynamo.reset()
            torch.compiler.set_default_backend(glue.compiled)
            compile_layers(module.model, config.training.activation_checkpointing)
            if teacher is not None and teacher.owns_weights:
                compile_layers(teacher.model, False)
            with glue.paused():  # compiles
                step.micro_batch()
        if teacher is not None:
            read = teacher.read

            def reading(*given: Any) -> Any:
                with glue.during("teacher"):
                    return read(*given)

            teacher.read = reading  # type: ignore
        head.register_forward_pre_hook(lambda *_: setattr(glue, "phase", "loss"))
        head.register_forward_hook(lambda *_: setattr(glue, "phase", "forward"))
        head.register_full_backward_pre_hook(lambda *_: setattr(glue, "phase", "loss"))
        head.register_full_backward_hook(lambda *_: setattr(glue, "phase", "backward"))
        backward = Tensor.backward

        def going_back(loss: Tensor, **options: Any) -> None:
            with glue.during("backward"):
                backward(loss, **options)

        with patch.object(Tensor, "backward", going_back), glue:
            step.micro_batch()
            with glue.during("optimizer"):
                step.average_and_decide()
                step.optimizer.step()
    torch.compiler.set_default_backend(None)
    return glue


def main() -> None:
    """Print launches and gigabytes of each phase: of one layer, and of the whole model."""
    with initialize_config_dir(str(Path(__file__).parents[1] / "configs"), version_base=None):
        values: Any = OmegaConf.to_container(compose("train", overrides=sys.argv[1:]), resolve=True)
    config = run_config(values)
    token_losses.CHUNK_ELEMENTS = getattr(token_losses, "CHUNK_ELEMENTS_OF_GPU", token_losses.CHUNK_ELEMENTS)
    torch.manual_seed(0)
    fewer, more = count(config, 2), count(config, 3)
    layers, total = config.base.shape["num_hidden_layers"], Counter[str]()
    print(f"{'phase':<10}{'launches/layer':>16}{'GB/layer':>10}{'launches':>10}{'GB':>8}{'attention, GB':>15}")
    for phase in PHASES:
        whole = {}
        for name in ("launches", "glue", "attention"):
            first, second = (getattr(counted, name)[phase] for counted in (fewer, more))
            whole[name] = (second - first, first + (layers - 2) * (second - first))
            total[name] += 0 if phase == "optimizer" else whole[name][1]
        (launched, launches), (one, moved), (_, attended) = whole.values()
        print(f"{phase:<10}{launched:>16}{one / GB:>10.2f}{launches:>10}{moved / GB:>8.0f}{attended / GB:>15.0f}")
    name = "micro-batch"
    print(f"{name:<36}{total['launches']:>10}{total['glue'] / GB:>8.0f}{total['attention'] / GB:>15.0f}")


if __name__ == "__main__":
    main()
