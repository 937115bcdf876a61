"""Draw what a model's gates do, or what a policy leaves: python scripts/analyse.py model=DIR.

A stock model with a training-free policy: policy=h2o budget=4. The ratios along a training run: run=DIR.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from dmc.analysis.run import AnalyseConfig, plan_analysis, run_analysis
from dmc.command_line import script
from dmc.config import build_config
from dmc.loading import load_with_tokenizer


@script("analyse")
def main(settings: DictConfig) -> None:
    values: Any = OmegaConf.to_container(settings, resolve=True)
    if values["model"]["path"] is None:
        values["model"] = None
    config = build_config(AnalyseConfig, values)
    paths = run_analysis(
        plan_analysis(config), config, lambda model: load_with_tokenizer(model.path, model.dtype, model.revision)
    )
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
