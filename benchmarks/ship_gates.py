"""Put gates of SmolLM2-135M into the package: python benchmarks/ship_gates.py RUN/final NAME --text CARD.md.

Numbers are rounded to 12 bits of mantissa, so that a wheel holds them in half their bytes: an error of 0.01 %, below
what a thousand tokens of calibration tell. The tokenizer stays with the base, and the card is the one given.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from dmc.gguf import SHIPPED_GATES, source_of
from dmc.models.weights import BASE_KEYS, GATES_NAME, find_base

ROOT = Path(__file__).resolve().parents[1]
DROPPED_BITS = 11
"""Of 23 of the mantissa."""


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers to fewer bits, the last ones 0."""
    bits = weight.contiguous().view(torch.int32)
    return ((bits + (1 << (DROPPED_BITS - 1))) & -(1 << DROPPED_BITS)).view(torch.float32)


def ship(final: Path, name: str, card: Path) -> Path:
    """Write the folder of shipped gates, and return it."""
    folder, base = SHIPPED_GATES / name, find_base(final)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: rounded(weight) for key, weight in load_file(final / GATES_NAME).items()}
    save_file(weights, folder / GATES_NAME, {"format": "pt"})
    config = json.loads((final / "config.json").read_text())
    config |= {BASE_KEYS[0]: "outputs/models/smollm2-135m", BASE_KEYS[1]: None}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    shutil.copy(final / "generation_config.json", folder)
    package = yaml.safe_load((ROOT / "configs" / "package" / "smollm2_135m.yaml").read_text())
    record = {"name": "smollm2-135m", "sha256": source_of(base)["sha256"], "package": package}
    (folder / "base.json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.copy(card, folder / "README.md")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("final", type=Path, help="folder of a run's gates")
    parser.add_argument("name", help="of the gates, such as smollm2-135m-cr4")
    parser.add_argument("--text", type=Path, required=True, help="the card, Markdown")
    given = parser.parse_args()
    print(ship(given.final, given.name, given.text))
