"""Learned KV-cache compression: retrofit, export, serve, compare. Importing it registers the compressed families."""

from dmc.models import load_model, retrofit
from dmc.runtime import Engine, SamplingParams

__version__ = "0.1.0"

__all__ = ["Engine", "SamplingParams", "__version__", "load_model", "retrofit"]
