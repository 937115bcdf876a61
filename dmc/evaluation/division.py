"""How processes that share a folder divide cells: each is claimed before it is run."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence

from dmc.claims import ClaimedError, claim
from dmc.evaluation.grid import Cell
from dmc.evaluation.row_store import FINISHED, RowStore

CLAIMS = "claims"
"""Folder beside the rows, with a file for each cell that is being run."""
PAUSE = 1.0
"""Seconds between two looks at cells that other processes run."""
logger = logging.getLogger(__name__)


def divide(cells: Sequence[Cell], store: RowStore) -> Generator[Cell, None, None]:
    """Give the cells that no other process runs, one by one; each is claimed until the next is asked for.

    Cells that another process runs are passed over. At the end it is waited for: they are taken over if it dies, and
    left alone when it writes their row, also that of a failure, which the next start tries again.

    Args:
        cells: those to run.
        store: whose rows say what is finished; the claims lie beside it.
    Raises:
        OSError: a claim cannot be written.
    """
    if not cells:
        return
    folder = store.path.parent / CLAIMS
    folder.mkdir(exist_ok=True)
    before = {row["key"]: row for row in store.rows()}

    def is_tried(cell: Cell) -> bool:
        row = next((row for row in store.rows() if row["key"] == cell.key), None)
        return row is not None and (row["status"] in FINISHED or row != before.get(cell.key))

    waiting, told = list(cells), False
    while waiting:
        held = []
        for cell in waiting:
            try:
                with claim(folder / cell.key):
                    if not is_tried(cell):
                        yield cell
            except ClaimedError as error:
                held.append(cell)
                last = error
        if len(held) == len(waiting):
            if not told:
                logger.warning("waiting for cells that other processes run (%d): %s", len(held), last)
            told = True
            time.sleep(PAUSE)
        waiting = held
