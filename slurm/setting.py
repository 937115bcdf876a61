"""Print what settings lead to, a list one item a line: python slurm/setting.py output_dir experiment=llama2_7b_cr4."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dmc.command_line import plain_settings

CONFIGS = Path("configs").resolve()

with initialize_config_dir(str(CONFIGS), version_base="1.3"):
    value = OmegaConf.select(compose("train", overrides=plain_settings("train", sys.argv[2:], CONFIGS)), sys.argv[1])
for item in [value] if isinstance(value, str) else value:
    print(f"{item:g}" if isinstance(item, float) else item)
