"""Print what settings lead to, a line each: python slurm/setting.py output_dir,seed experiment=llama2_7b_cr4."""

from __future__ import annotations

import sys

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dmc_cli.hydra_command import CONFIGS, exit_in_one_line

try:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = compose("train", overrides=sys.argv[2:])
except Exception as error:
    exit_in_one_line(error)
for name in sys.argv[1].split(","):
    value = OmegaConf.select(settings, name)
    if value is None:
        sys.exit(f"error: {name} has no value: give it one")
    items = value if OmegaConf.is_list(value) else [value]
    print(*(f"{item:g}" if isinstance(item, float) else item for item in items))
