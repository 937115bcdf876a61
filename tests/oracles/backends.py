"""Which kernel backends can be tested on this machine's CPU."""

import torch

from dmc.kernels import BACKENDS, load_backend


def backends_here(head_dim=32):
    """Names of the backends that serve float32 caches here, the reference first."""
    return [name for name in BACKENDS if _runs_here(name, head_dim)]


def _runs_here(name, head_dim):
    try:
        return load_backend(name).supports(torch.float32, head_dim, 16, torch.device("cpu")) is None
    except ImportError:
        return False
