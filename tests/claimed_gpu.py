"""A GPU that is none, so that an operation over two devices raises, in two forms.

`claimed_gpu`: tensors in main memory that claim to be on CUDA. Values are real, so whole engines run on it, `.item()`
and data-dependent shapes included. What CUDA allows is allowed: numbers (0-d tensors) from the CPU, CPU tensors as
indices, and copies.

`fake_gpu`: tensors without data on CUDA, gradients and autocast included, but no backward: that runs on "meta". Reading
a value raises on both. `StepWatch` counts what else would make host and device wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

from dmc.compression import relaxation
from dmc.kernels.cpu_build import cache_folder
from dmc.models.masked_attention import as_on

GPU = torch.device("cuda", 0)
COPIES = ("copy_", "_to_copy", "_copy_from")
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""
INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index")


class ClaimedTensor(torch.Tensor):
    """A tensor of the CPU that says it is on the GPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):
        sizes = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        claimed = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=GPU, **sizes)
        claimed.held = held
        return claimed

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        return _run(function, arguments, keywords or {})

    def record_stream(self, stream):
        """Nothing is reused while it is read."""

    def tolist(self):
        """Read the values, as any GPU tensor's may be."""
        return self.held.tolist()

    def __repr__(self, **_):
        return f"ClaimedTensor({self.held!r})"


class _Claim(TorchDispatchMode):
    """Also catches what is made on the GPU from nothing, or from a tensor of the CPU."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return _run(function, arguments, keywords or {})


class _Stream:
    """Stands for streams and their events: everything is done when it is asked for."""

    def __init__(self, device):
        self.device = device

    def wait_stream(self, other):
        """Wait for nothing."""

    wait_event = wait_stream

    def record_event(self):
        """Return what has happened already."""
        return self

    def synchronize(self):
        """Wait for nothing."""

    def query(self):
        """Say that all is done."""
        return True


@contextmanager
def claimed_gpu():
    """Let tensors be made on a GPU that is none; skips the test where no C++ compiler is there."""
    guard_devices()
    before = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch, _Claim(), torch.no_grad():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device="cuda") is made where no mode sees it
        try:
            yield GPU
        finally:
            torch._C._set_only_lift_cpu_tensors(before)


@functools.cache
def guard_devices():
    """Give a torch that was built without CUDA something to ask for its current device."""
    if torch.backends.cuda.is_built():
        return
    target = cache_folder() / f"guard_{torch.__version__}.so"
    if not target.exists():
        home, compiler = Path(torch.__file__).parent, shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            source, built = Path(folder) / "guard.cpp", Path(folder) / target.name
            source.write_text(GUARD)
            options = ["-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"]
            subprocess.run([compiler, str(source), *options, "-o", str(built)], check=True)
            built.replace(target)
    ctypes.CDLL(str(target))


@contextmanager
def fake_gpu(device="cuda"):
    """Let tensors without data be made on `device`, "cuda" or "meta", where attention picks a GPU's kernels."""
    guard_devices()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as modes:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(relaxation, "new_generator", lambda _: None)  # none there
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", _attention_of_gpu)
        if device == "meta":
            patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no such device
            patch.setattr(torch, "is_autocast_enabled", lambda *_: False)
            modes.enter_context(as_on("cuda"))
        else:
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _attention_of_gpu(
    query, key, value, *, is_causal, attn_mask = None, dropout_p = 0.0,
    scale = None, enable_gqa = False
):  # fmt: skip
    """Stand for PyTorch's attention, with the kernel that a GPU takes: a build for CPUs would compute T x T scores."""
    assert is_causal and attn_mask is None and not dropout_p
    if query.device.type != "meta" and torch.is_autocast_enabled("cuda"):
        query, key, value = (states.to(torch.bfloat16) for states in (query, key, value))
    group = query.shape[1] // key.shape[1]
    assert group == 1 or enable_gqa
    key, value = (states.repeat_interleave(group, 1) for states in (key, value))
    scale = scale or query.shape[-1] ** -0.5
    aten, states = torch.ops.aten, (query, key, value)
    if query.dtype == torch.float32:
        return aten._scaled_dot_product_efficient_attention(*states, None, True, 0.0, True, scale=scale)[0]
    return aten._scaled_dot_product_flash_attention(*states, 0.0, True, False, scale=scale)[0]


class StepWatch(TorchDispatchMode):
    """Notes the attention kernels that run, what is copied between devices, and what has the size of T x T.

    Args:
        length: T, a number that is no other size.
    """

    def __init__(self, length):
        super().__init__()
        self.length = length
        self.kernels = set()
        self.waits = []
        """Copies between host and device that one waits for the other in."""
        self.quadratic = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        out = function(*arguments, **keywords)
        name = function.overloadpacket.__name__
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        if (
            name in COPIES
            and len({tensor.device for tensor in (*given, *made)}) > 1
            and not keywords.get("non_blocking")
        ):
            self.waits.append(f"{name} {[(tensor.device.type, tuple(tensor.shape)) for tensor in (*given, *made)]}")
        if "scaled_dot_product" in name or function.namespace == "dmc":
            states = [tensor for tensor in given if tensor.dim() == 4]  # not what is read for each key
            self.kernels |= {(name, state.dtype) for state in states}
        self.quadratic += [f"{name} {tuple(tensor.shape)}" for tensor in made if tensor.numel() >= self.length**2]
        return out


def put_on_gpu(model, device="cuda"):
    """Put shapes of a model's parameters and buffers there, in place; under `fake_gpu`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return model


def claim_model(model):
    """Put a model's parameters and buffers there, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                held = ClaimedTensor(parameter.detach())
                module._parameters[name] = torch.nn.Parameter(held, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = ClaimedTensor(buffer)
    return model


def _run(function, arguments, keywords):
    name = function.overloadpacket.__name__
    tensors = []
    _map(lambda tensor: tensors.append(tensor), [arguments, *keywords.values()])
    goes_to = keywords.get("device")
    claimed = any(isinstance(tensor, ClaimedTensor) for tensor in tensors)
    if not claimed and goes_to is None:
        return function(*arguments, **keywords)
    if claimed and name not in COPIES:
        decisive = tensors[:1] if name in INDEXING and isinstance(tensors[0], ClaimedTensor) else tensors
        mixed = [tensor for tensor in decisive if not isinstance(tensor, ClaimedTensor) and tensor.dim() > 0]
        if mixed:
            raise RuntimeError(
                f"{function}: tensors on cuda:0 and on the cpu, {[tuple(tensor.shape) for tensor in mixed]}"
            )
    if goes_to is not None:
        claimed = torch.device(goes_to).type == "cuda"
        keywords = {**keywords, "device": torch.device("cpu")}
    elif name == "copy_":
        claimed = isinstance(arguments[0], ClaimedTensor)
    keywords = {key: value for key, value in keywords.items() if key != "pin_memory"}
    held = [_map(_held, argument) for argument in arguments]
    out = function(*held, **{key: _map(_held, value) for key, value in keywords.items()})
    if not claimed:
        return out
    out = _map(ClaimedTensor, out)
    return return_and_correct_aliasing(function, arguments, keywords, out) if _aliases(function) else out


def _held(tensor):
    return tensor.held if isinstance(tensor, ClaimedTensor) else tensor


def _map(change, item):
    """Change the tensors in nested lists and tuples (torch's own trees take three times as long)."""
    if isinstance(item, (list, tuple)):
        return [_map(change, part) for part in item]
    return change(item) if isinstance(item, torch.Tensor) else item


@functools.cache
def _aliases(function):
    return any(value.alias_info is not None for value in function._schema.returns)
