"""vLLM's CPU worker over a wheel for GPUs: it lacks two compiled operators, whose stand-ins these are."""

from __future__ import annotations

import contextlib

import torch

OPERATORS = torch.library.Library("_C", "FRAGMENT")
OPERATORS.define("greedy_argmax(Tensor logits) -> Tensor")
OPERATORS.define("init_cpu_memory_env(int[] nodes) -> ()")
OPERATORS.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CPU")
OPERATORS.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")

from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.triton_utils.dispatcher import register_kernels  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

from dmc.vllm.attention import LAYER_NAME  # noqa: E402
from dmc.vllm.plugin import register  # noqa: E402


class Worker(CPUWorker):
    """What `worker_cls` names: slots of tokens in blocks, which our cache does not use, are not computed."""

    def init_device(self):
        """Replace the fallback for machines without Triton, whose arguments vLLM 0.32 confuses."""
        register()  # in environments that have no entry points of ours
        super().init_device()
        register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": lambda *_: None})

    @property
    def cache(self):
        """The `WorkerCache` of this rank."""
        return self.vllm_config.compilation_config.static_forward_context[LAYER_NAME].cache

    def runner_module(self):
        """Where the class of the model's runner is from."""
        return type(self.model_runner).__mro__[1].__module__

    def pages_held(self):
        """The last step of this rank, and the pages that each request held after it."""
        return self.cache.report()

    def free_pages(self):
        """The stack of free pages after all requests have ended, and the number of all pages."""
        cache = self.cache
        cache.begin_step(10**6, {}, [*cache._rows])  # those that finished last would be told with the next step
        cache.is_told = False
        return cache.free_pages[: int(cache.num_free)].tolist(), len(cache.key_pages)

    def hidden_sizes_without_requests(self, num_tokens):
        """The shape of the hidden states of a forward pass as vLLM makes it to measure memory."""
        tokens = torch.arange(num_tokens)
        with set_forward_context(None, self.vllm_config):
            return [*self.get_model()(tokens, tokens).shape]


class Done:
    """Stands for a stream or an event: all is done when it is asked for."""

    def __getattr__(self, name):
        return lambda *_, **__: self


def claim_streams(monkeypatch):
    """Let vLLM copy tokens on a stream of its own, as it does on GPUs, where there are no streams."""
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: Done())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
