"""`python -m dmc COMMAND` is `dmc COMMAND`."""

from dmc_cli.table import main

if __name__ == "__main__":
    main()
