"""Settings: dataclasses that pydantic checks, objects named by `_target_`, and the command line of every script."""

from dmc.config.settings import build_config

__all__ = ["build_config"]
