"""Compare methods: python scripts/compare.py 'models={base: DIR, cr4: DIR}' policies=full,h2o budgets=2,4.

A restart continues it; several processes and sweeps (-m) may share one output folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dmc.config.command_line import script

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@script("compare")
def main(settings: DictConfig) -> None:
    from dmc.config import build_config
    from dmc.models.loading import load_with_tokenizer
    from dmc.results.compare import compare
    from dmc.results.grid import CompareConfig

    values: Any = OmegaConf.to_container(settings, resolve=True)
    print(compare(build_config(CompareConfig, values), CONFIGS, load_with_tokenizer))


if __name__ == "__main__":
    main()
