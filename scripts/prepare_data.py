"""`dmc prepare-data` as a file."""

from dmc_cli.table import run

if __name__ == "__main__":
    run("prepare_data")
