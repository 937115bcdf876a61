"""What comes from the hub is read once: by the first process of a machine; the others wait for its copy.

What is in the cache stays as it is, so that nothing needs a network once a run has been prepared.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download

from dmc.files import locked, written_whole
from dmc.ranks import is_first_of_node

_MOST_SECONDS = 1800  # that other processes wait: as long as for the first collective
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
TOKENIZER_FILES = MODEL_FILES[1:]


def wait_for_first(is_done: Callable[[], bool]) -> None:
    """Wait in the other processes of a machine until the first has done something; where it fails it ends them."""
    deadline = time.monotonic() + (0 if is_first_of_node() else _MOST_SECONDS)
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.1)


def once(file: Path, make: Callable[[], str], holds: Callable[[str], bool] = lambda content: True) -> str:
    """Return the content of a file, which the first process of a machine makes where it is missing.

    Args:
        file: the file.
        make: returns its content.
        holds: whether content that is there still holds; it is made anew otherwise.
    """

    def is_made() -> bool:
        return file.is_file() and holds(file.read_text())

    wait_for_first(is_made)
    if not is_made():
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_name(f".{file.name}.lock"), timeout=-1):  # machines may share the folder
            if not is_made():
                with written_whole(file) as partial:
                    partial.write_text(make())
    return file.read_text()


def local_copy(name: str, revision: str | None = None, files: Sequence[str] = MODEL_FILES) -> str:
    """Return the folder of a model or tokenizer of the hub; of a folder, or a name that cannot be fetched, itself.

    The copy of a name without a revision is what the hub had when it was first asked for.

    Args:
        name: a folder or hub name.
        revision: hub revision.
        files: patterns of the files to fetch.
    """
    if Path(name).is_dir():
        return name
    key = re.sub(r"[^A-Za-z0-9_.]+", "-", f"{name}@{revision} {files[0]}")

    def fetch() -> str:
        try:
            return snapshot_download(name, revision=revision, allow_patterns=list(files))
        except (OSError, ValueError):  # whoever opens it says why; the name in the file says that the others go on too
            return name

    def holds(found: str) -> bool:
        return Path(found).is_dir() or (found == name and not is_first_of_node())

    try:
        return once(Path(constants.HF_HUB_CACHE) / "copies" / key, fetch, holds)
    except OSError:  # the cache cannot be written
        return name
