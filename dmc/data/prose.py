"""Prose that is installed: what packages say of themselves, what their code says of itself, manuals, licences."""

from __future__ import annotations

import glob
import hashlib
import html
import inspect
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from datasets import IterableDataset

from dmc.data.code import PackageSource, Split, StandardLibrarySource
from dmc.data.sources import Document, DocumentSource, file_stamps, files_digest, read_text

Form = Literal["plain", "repeated", "chats"]

MANUALS = (
    "/usr/share/doc/python3*/html/_sources/**/*.rst.txt",
    "/usr/share/perl/*/pod/*.pod",
    "/usr/share/doc/debian-handbook/html/en-US/*.html",
)
"""Where Debian's packages python3-doc, perl-doc and debian-handbook lie."""
DESCRIBED = ("torch", "sympy", "networkx", "numpy")
"""Packages whose docstrings are read."""
_LICENCES = re.compile(r"(?i)(licen[cs]e|copying|notice)")
_BOUNDS: tuple[tuple[int, Split], ...] = ((80, "train"), (87, "validation"), (94, "calibration"), (100, "test"))
_MIN_CHARACTERS, _MAX_CHARACTERS = 200, 40_000  # a longer document would fill the sequences of its split
_OURS = "dmc_retrofit-"
_DOCSTRING = 240  # characters of a docstring that are worth reading
_PASSAGE = 1_400  # characters of a passage that is said twice: two of them and their frame are some 1,000 tokens
_SPACE = re.compile(r"\s+")
_NAMES = re.compile(r"(?im)^.*copyright.*$")  # two copies of a licence differ in nothing else
_TAGS = re.compile(r"(?s)<(script|style|head)\b.*?</\1>|<[^>]*>")
REPEAT = ("Repeat the text above.", "Say that again, word for word.", "Please copy the passage I gave you.")
_DEFINITION = re.compile(r'(?s)\b(?:class|def)\s+(\w+)[^"#]*?:\s*\n\s*[rRuU]?"""(.*?)"""')
READ = ("Read this.", "Here is a text.", "I will ask about this later.", "Please keep this in mind.")
ASK = ("What does {name} do?", "Explain {name}.", "Tell me about {name}.", "How is {name} used?")


def fingerprint(text: str) -> bytes:
    """Return what two copies of a document have in common, whatever their spaces and whom a licence names."""
    return hashlib.sha256(_SPACE.sub(" ", _NAMES.sub("", text)).strip().lower().encode(errors="replace")).digest()


def split_of_text(text: str) -> Split:
    """Return the split of a document, by its fingerprint: about 80, 7, 7 and 6 % of them."""
    bucket = int.from_bytes(fingerprint(text)[:4], "big") % 100
    return next(split for bound, split in _BOUNDS if bucket < bound)


@dataclass(frozen=True)
class ProseSource(DocumentSource):
    """One split of the prose on this machine, each document once; the same for the same packages.

    It holds the READMEs and licences of installed packages, docstrings of the standard library and of some packages,
    and manuals, where there are any.
    """

    split: Split = "train"
    form: Form = "plain"
    """plain: as it is; repeated: passages that come again, at once or after another one; chats: questions about
    docstrings, and passages that the assistant is asked to repeat."""
    folders: Sequence[str] = MANUALS
    """Patterns of further files; what matches nothing is left out. Folders of your own text belong here."""
    packages: Sequence[str] = DESCRIBED
    """Packages whose docstrings are read; those that are not installed are left out."""
    seed: int = 0
    """Of what is drawn: passages, and questions."""
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name, kinds in (("split", Split), ("form", Form)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {list(get_args(kinds))}.")
        for name in ("folders", "packages"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        super().__post_init__()

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"prose:{self.form}:{self.split}"

    @property
    def has_loss_mask(self) -> bool:
        """Of chats the assistant's turns are trained on."""
        return self.form == "chats"

    def files(self) -> list[Path]:
        """Return all files that hold prose, sorted."""
        return sorted({*_texts_of_packages(), *self._manuals(), *(path for _, path in self._code())})

    def check(self) -> None:
        """Raise FileNotFoundError if there are none."""
        if not self.files():
            raise FileNotFoundError(
                "no installed package has a README, and no folder a text: give folders=[TEXT/*.txt]"
            )

    def description(self) -> dict[str, Any]:
        """Return the settings, and the files' names, sizes and times."""
        settings = {name: getattr(self, name) for name in ("split", "form", "folders", "packages", "seed")}
        rules = [_BOUNDS, _MIN_CHARACTERS, _MAX_CHARACTERS, _DOCSTRING, _PASSAGE, _OURS, REPEAT, READ, ASK]
        return {"prose": settings, "rules": rules, "stamps": file_stamps(self.files())}

    def digest(self) -> str:
        """Return a hash of the files."""
        return files_digest(self.files())

    def num_bytes(self) -> int:
        """Return the approximate size of the split: a fifth of code is docstrings."""
        before, share = 0, 0
        for bound, split in _BOUNDS:
            share, before = (bound - before if split == self.split else share), bound
        sizes = (path.stat().st_size / (5 if path.suffix == ".py" else 1) for path in self.files())
        return max(1, round(share / 100 * sum(sizes)))

    def stream(self) -> IterableDataset:
        """Stream the documents, in one shard: each is told from all before it."""
        return IterableDataset.from_generator(_rows, gen_kwargs={"source": self})

    def read(self, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
        """Yield the text or the chat of each row."""
        return (row["messages"] if self.form == "chats" else row["text"] for row in rows)

    def plain(self) -> Iterator[tuple[str, str]]:
        """Yield what each document of the split is about, empty if that is not known, and its text; each text once."""
        seen = set[bytes]()
        for split, name, text in _documents(tuple(self._manuals()), self._code()):
            text = text.strip()[:_MAX_CHARACTERS]
            if len(text) >= _MIN_CHARACTERS and (found := fingerprint(text)) not in seen:
                seen.add(found)
                if (split or split_of_text(text)) == self.split:
                    yield name, text

    def _manuals(self) -> list[Path]:
        found = {path for pattern in self.folders for path in glob.glob(pattern, recursive=True)}
        return sorted(path for path in map(Path, found) if path.is_file())

    def _code(self) -> tuple[tuple[Split, Path], ...]:
        return _code_of(tuple(self.packages))


@lru_cache(maxsize=1)
def _documents(
    manuals: tuple[Path, ...], code: tuple[tuple[Split, Path], ...]
) -> tuple[tuple[Split | None, str, str], ...]:
    """Read all documents, some tens of megabytes; None: their own text decides on the split."""
    found = list[tuple[Split | None, str, str]]()
    for path in _texts_of_packages():
        text = read_text(path) or ""
        found.append((None, "", text.partition("\n\n")[2] if path.name == "METADATA" else text))
    for path in manuals:
        text = read_text(path) or ""
        found.append((None, "", _without_tags(text) if path.suffix in (".html", ".htm") else text))
    for split, path in code:
        found += ((split, name, text) for name, text in _docstrings(path))
    return tuple(found)


def _texts_of_packages() -> list[Path]:
    """Return READMEs and licences of what is installed; ours changes too often to be text that figures stand on."""
    root = Path(sysconfig.get_paths()["purelib"])
    licences = (path for path in root.glob("*.dist-info/**/*") if _LICENCES.search(path.name) and path.suffix != ".py")
    texts = sorted(path for path in [*root.glob("*.dist-info/METADATA"), *licences] if path.is_file())
    return [path for path in texts if not path.relative_to(root).parts[0].startswith(_OURS)]


@lru_cache
def _code_of(packages: tuple[str, ...]) -> tuple[tuple[Split, Path], ...]:
    """List files of the standard library and of installed packages with their splits, which their docstrings share."""
    found = set[tuple[Split, Path]]()
    for split in get_args(Split):
        found.update((split, path) for _, path in StandardLibrarySource(split=split).files())
        for package in packages:
            with suppress(FileNotFoundError):
                found.update((split, path) for _, path in PackageSource([package], split=split).files())
    return tuple(sorted(found, key=lambda file: file[1]))


def _without_tags(page: str) -> str:
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(_TAGS.sub("", page)))


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of what a file of code defines, found by its form: parsing takes ten times as long."""
    for found in _DEFINITION.finditer(read_text(path) or ""):
        if len(text := inspect.cleandoc(found[2])) >= _DOCSTRING:
            yield found[1], text


def _rows(source: ProseSource) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng([source.seed, get_args(Split).index(source.split)])
    if source.form == "plain":
        yield from ({"text": text} for _, text in source.plain())
    elif source.form == "repeated":
        yield from ({"text": text} for text in _repeated(source.plain(), draw))
    else:
        yield from ({"messages": chat} for chat in _chats(source.plain(), draw))


def _passages(text: str) -> Iterator[str]:
    """Cut a text into passages that end at lines."""
    begin = 0
    while len(text) - begin >= _PASSAGE // 2:
        end = text.rfind("\n", begin + _PASSAGE // 2, begin + _PASSAGE)
        end = end if end > begin else begin + _PASSAGE
        yield text[begin:end].strip("\n")
        begin = end


def _repeated(texts: Iterable[tuple[str, str]], draw: np.random.Generator) -> Iterator[str]:
    """Say passages twice: at once, or the first again behind a second."""
    for _, text in texts:
        before = None
        for passage in _passages(text):
            if draw.random() < 0.5:
                yield f"{passage}\n\n{passage}"
            elif before is not None:
                yield f"{before}\n\n{passage}\n\n{before}"
            before = passage


def _chats(texts: Iterable[tuple[str, str]], draw: np.random.Generator) -> Iterator[list[dict[str, str]]]:
    """Ask about docstrings, one to three in a chat; have passages repeated."""
    turns = list[dict[str, str]]()
    for name, text in texts:
        if name:
            turns += [_turn("user", ASK, draw, name=name), {"role": "assistant", "content": text[:_PASSAGE]}]
            if draw.random() < 0.4 or len(turns) > 5:
                yield turns
                turns = []
        elif draw.random() < 0.5:
            for passage in _passages(text):
                given = f"{_turn('user', READ, draw)['content']}\n\n{passage}"
                kept = {"role": "assistant", "content": "I have read it."}
                answer = {"role": "assistant", "content": passage}
                yield [{"role": "user", "content": given}, kept, _turn("user", REPEAT, draw), answer]
                if draw.random() < 0.7:
                    break
    if turns:
        yield turns


def _turn(role: str, forms: Sequence[str], draw: np.random.Generator, **said: str) -> dict[str, str]:
    return {"role": role, "content": forms[int(draw.integers(len(forms)))].format(**said)}
