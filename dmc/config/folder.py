"""Folder of all settings. `dmc_cli` runs this file alone, for `import dmc` brings torch: nothing of `dmc` goes in."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE.parent, _PACKAGE)
CONFIGS = next(place / "configs" for place in _PLACES if (place / "configs" / "train.yaml").is_file())
"""Beside the package in a checkout, inside it where it is installed."""
