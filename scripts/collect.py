"""Put the results of a sweep into one table and plot: python scripts/collect.py folder=outputs/sweep."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from dmc.command_line import script
from dmc.training.collect import collect, format_table, write_results


@script("collect")
def main(settings: DictConfig) -> None:
    folder = Path(settings.folder)
    results, unfinished = collect(folder)
    write_results(results, folder)
    print(format_table(results))
    if unfinished:
        print(f"\nnot finished: {', '.join(unfinished)}")


if __name__ == "__main__":
    main()
