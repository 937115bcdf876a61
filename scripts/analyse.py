"""Draw what a model's gates do, or what a policy leaves: python scripts/analyse.py model.path=DIR.

A stock model with a training-free policy: policy=h2o budget=4. The ratios along a training run: run=DIR.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer

from dmc import load_model
from dmc.analysis.run import AnalyseConfig, plan_analysis, run_analysis
from dmc.config import build_config
from dmc.evaluation.grid import ComparedModel


def load(model: ComparedModel) -> tuple[Any, Any]:
    """Load a model, on the GPU if there is one, and its tokenizer if it has one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
    except (OSError, ValueError):
        tokenizer = None
    return load_model(model.path, dtype=model.dtype, revision=model.revision).to(device), tokenizer


@hydra.main(version_base="1.3", config_path="../configs", config_name="analyse")
def main(settings: DictConfig) -> None:
    try:
        values: Any = OmegaConf.to_container(settings, resolve=True)
        if values["model"]["path"] is None:
            values["model"] = None
        config = build_config(AnalyseConfig, values)
        paths = run_analysis(plan_analysis(config), config, load)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
