"""Put the results of a sweep into one table and plot: python scripts/collect.py folder=outputs/sweep."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from dmc.config.command_line import script


@script("collect")
def main(settings: DictConfig) -> None:
    from dmc.commands.study import collect
    from dmc.results.store import Store
    from dmc.results.tables import write_tables

    folder = Path(settings.folder)
    rows, unfinished = collect(folder)
    store = Store(folder / "cells.jsonl")
    for row in rows:
        store.append(row)
    print(write_tables(store, folder, keys=[row["key"] for row in rows]))
    if unfinished:
        print(f"\nnot finished: {', '.join(unfinished)}")


if __name__ == "__main__":
    main()
