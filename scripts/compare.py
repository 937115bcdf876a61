"""Compare methods: python scripts/compare.py 'models={base: DIR, cr4: DIR}' 'policies=[full,h2o]' 'budgets=[2,4]'.

A restart continues it; several processes and sweeps (-m) may share one output folder.
"""

from __future__ import annotations

from typing import Any

from hydra_command import CONFIGS, command


@command("compare", on_devices=True)
def main(settings: Any) -> None:
    from dmc.config import build_config
    from dmc.models.loading import load_with_tokenizer
    from dmc.results.compare import compare
    from dmc.results.grid import CompareConfig

    print(compare(build_config(CompareConfig, settings), CONFIGS, load_with_tokenizer))


if __name__ == "__main__":
    main()
