"""Print the output folder that settings lead to: python slurm/output_folder.py experiment=llama2_7b_cr4."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from dmc.command_line import plain_settings

CONFIGS = Path("configs").resolve()

with initialize_config_dir(str(CONFIGS), version_base="1.3"):
    print(compose("train", overrides=plain_settings("train", sys.argv[1:], CONFIGS)).output_dir)
