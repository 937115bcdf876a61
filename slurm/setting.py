"""Print what settings lead to, a line each: python slurm/setting.py output_dir,seed experiment=llama2_7b_cr4."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dmc.config.command_line import check_torch_build, errors_in_one_line, plain_settings

CONFIGS = Path("configs").resolve()

with initialize_config_dir(str(CONFIGS), version_base="1.3"):
    settings = compose("train", overrides=plain_settings("train", sys.argv[2:], CONFIGS))
with errors_in_one_line():
    check_torch_build(settings)
for name in sys.argv[1].split(","):
    value = OmegaConf.select(settings, name)
    if value is None:
        sys.exit(f"error: {name} has no value: give it one")
    items = value if OmegaConf.is_list(value) else [value]
    print(*(f"{item:g}" if isinstance(item, float) else item for item in items))
