"""Serve models to clients of OpenAI's API.

A stock model with a policy: policy=h2o budget=4. Several: 'models={own: DIR, base: DIR, h2o: {path: DIR, policy: h2o,
budget: 4}}'. A model too large for one device: torchrun --nproc-per-node 2 scripts/serve.py model=DIR.
"""

from __future__ import annotations

import sys
from typing import Any

from dmc.config.folder import CONFIGS


def main(settings: Any) -> None:
    """Serve until told to stop.

    Raises:
        ImportError: the packages of the extra `serve` are missing.
    """
    try:
        from dmc.serving.config import read_config
        from dmc.serving.server import serve
    except ImportError as error:
        raise ImportError(f"serving needs more packages ({error}): pip install 'dmc-retrofit[serve]'") from error
    config = read_config(settings)
    names = ", ".join(config.models)
    serve(config, CONFIGS / "policy", lambda port: print(f"{names}: http://{config.host}:{port}", file=sys.stderr))
