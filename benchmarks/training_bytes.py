"""Count what a micro-batch launches and moves, on tensors without data: no GPU is needed, and nothing is timed.

python benchmarks/training_bytes.py experiment=qwen3_0p6b_cr4 training.activation_checkpointing=true

Layers are those of code that is not compiled: each operation reads its inputs and writes its outputs. Products and the
attention kernel are left out; the rest is glue that moves bytes. Counted on two and three layers, and so of one.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmc.models import token_losses
from dmc.training.config.run_config import run_config
from dmc.training.planning import fake_step as steps

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product")
ROW_LOSSES = "row_losses"
"""The kernel of the losses over a vocabulary, which is no product."""
GB = 1e9


class Glue(TorchDispatchMode):
    """Counts launches, and gigabytes of those that are neither products nor attention, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.launches = "forward", Counter[str]()
        self.gigabytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        out = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view", "split", "sym_")):
            return out
        self.launches[self.phase] += 1
        if name == ROW_LOSSES:  # which reads the logits twice
            self._move(arguments[:2])
        if (function.namespace != "dmc" or name == ROW_LOSSES) and not name.startswith(PRODUCTS):
            self._move((arguments, keywords, out))
        return out

    def _move(self, values: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        self.gigabytes[self.phase] += sum(tensor.numel() * tensor.element_size() for tensor in tensors) / GB


def count(config: Any, num_layers: int) -> Glue:
    """Count a micro-batch of the first layers of a run's model: teacher, student, loss, backward."""
    with steps.fake_step(config, range(num_layers)) as step:
        module, glue = step.module, Glue()
        module.model.lm_head.most_chunks = None
        if module.teacher is not None:
            read = module.teacher.read

            def reading(*given: Any) -> Any:
                glue.phase = "teacher"
                found = read(*given)
                glue.phase = "forward"
                return found

            module.teacher.read = reading  # type: ignore
        head = module.model.lm_head
        head.register_forward_pre_hook(lambda *_: setattr(glue, "phase", "loss"))
        head.register_forward_hook(lambda *_: setattr(glue, "phase", "forward"))
        head.register_full_backward_pre_hook(lambda *_: setattr(glue, "phase", "loss"))
        head.register_full_backward_hook(lambda *_: setattr(glue, "phase", "backward"))
        backward = Tensor.backward

        def going_back(loss: Tensor, **options: Any) -> None:
            glue.phase = "backward"
            backward(loss, **options)

        Tensor.backward = going_back  # type: ignore
        try:
            with glue:
                step.micro_batch()
        finally:
            Tensor.backward = backward  # type: ignore
    return glue


def main() -> None:
    """Print launches and gigabytes of each phase: of one layer, and of the whole model."""
    with initialize_config_dir(str(Path(__file__).parents[1] / "configs"), version_base=None):
        values: Any = OmegaConf.to_container(compose("train", overrides=sys.argv[1:]), resolve=True)
    config = run_config(values)
    token_losses.CHUNK_ELEMENTS = getattr(token_losses, "CHUNK_ELEMENTS_OF_GPU", token_losses.CHUNK_ELEMENTS)
    torch.manual_seed(0)
    fewer, more = count(config, 2), count(config, 3)
    layers = config.base.shape["num_hidden_layers"]
    total = 0.0
    print(f"{'phase':<10}{'launches/layer':>16}{'GB/layer':>10}{'launches':>10}{'GB':>8}")
    for phase in ("teacher", "forward", "loss", "backward"):
        one = [getattr(more, name)[phase] - getattr(fewer, name)[phase] for name in ("launches", "gigabytes")]
        whole = [
            getattr(fewer, name)[phase] + (layers - 2) * one[place]
            for place, name in enumerate(("launches", "gigabytes"))
        ]
        total += whole[1]
        print(f"{phase:<10}{one[0]:>16.0f}{one[1]:>10.2f}{whole[0]:>10.0f}{whole[1]:>8.0f}")
    print(f"{'total':<46}{total:>8.0f}")


if __name__ == "__main__":
    main()
