"""A module per command of `dmc_cli/table.py`: its settings and its `main`, which takes their values."""
