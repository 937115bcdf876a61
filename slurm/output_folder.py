"""Print the output folder that settings lead to: python slurm/output_folder.py experiment=llama2_7b_cr4."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

with initialize_config_dir(str(Path("configs").resolve()), version_base="1.3"):
    print(compose("train", overrides=sys.argv[1:]).output_dir)
