import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dmc.data import PackedTokens, StandardLibrarySource, build_packed, stdlib_documents

SPLITS = ("train", "validation", "calibration", "test")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Return a folder laid out like a standard library, of 200 modules."""
    folder = tmp_path / "lib"
    for number in range(200):
        path = folder / ("package" if number % 2 else "") / f"module{number:03}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = {number}\n")
    return folder


def test_splits_are_disjoint_real_code_of_some_megabytes() -> None:
    splits = {split: dict(stdlib_documents(split)) for split in SPLITS}
    names = [name for split in splits.values() for name in split]
    assert len(names) == len(set(names)) > 300
    assert all(list(split) == sorted(split) for split in splits.values())
    assert 0.85 < len(splits["train"]) / len(names) < 0.95
    assert all(len(split) >= 10 for split in splits.values())
    assert sum(len(text) for split in splits.values() for text in split.values()) > 5e6
    texts = {name: text for split in splits.values() for name, text in split.items()}
    assert "def dataclass(" in texts["dataclasses.py"]
    excluded = {"site-packages", "test", "tests", "encodings", "__pycache__", "idlelib", "pydoc_data"}
    assert not [name for name in names if excluded.intersection(name.split("/"))]


def test_split_of_a_file_depends_on_its_path_alone(library: Path) -> None:
    def names(folder: Path) -> dict[str, list[str]]:
        return {
            split: [name for name, _ in StandardLibrarySource(split, folder=str(folder)).files()] for split in SPLITS
        }

    before = names(library)
    for split, bounds in zip(SPLITS, [(0, 90), (90, 95), (95, 97), (97, 100)], strict=True):
        buckets = [int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100 for name in before[split]]
        assert all(bounds[0] <= bucket < bounds[1] for bucket in buckets)
    for number in range(0, 200, 8):
        (library / f"module{number:03}.py").unlink(missing_ok=True)
    after = names(library)
    assert all(set(after[split]) <= set(before[split]) for split in SPLITS)
    moved = library.rename(library.with_name("elsewhere"))
    assert names(moved) == after


def test_machine_specific_and_optional_files_are_left_out(library: Path) -> None:
    strange = ["_sysconfigdata__linux.py", "config-3.11-x86/a.py", "sitecustomize.py", "site-packages/numpy/a.py"]
    strange += ["dist-packages/a.py", "unittest/test/a.py", "sqlite3/tests/a.py", "tkinter/a.py", "encodings/cp1.py"]
    for name in strange:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("")
    names = [name for split in SPLITS for name, _ in StandardLibrarySource(split, folder=str(library)).files()]
    assert len(names) == 200
    assert not set(names) & set(strange)


def test_undecodable_file_is_a_counted_skip(
    library: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    source = StandardLibrarySource(folder=str(library))
    source.files()[3][1].write_bytes(b"# \xe9\n")
    packed = build_packed(source, tokenizer, 16, tmp_path / "cache")
    assert isinstance(packed, PackedTokens)
    assert packed.num_skipped == 1 and packed.num_documents == len(source.files()) - 1
    caplog.clear()
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    assert len(list(stdlib_documents("train"))) == packed.num_documents
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "skipped 1 undecodable" in record.getMessage()


def test_python_without_sources_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("")
    with pytest.raises(FileNotFoundError, match=r"Found 1 standard-library files .* at least 100.*TextSource"):
        StandardLibrarySource(folder=str(tmp_path)).check()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="split='held_out' is unknown; choose one of"):
        StandardLibrarySource("held_out")
    with pytest.raises(ValueError, match="split='held_out' is unknown"):
        next(stdlib_documents("held_out"))
    with pytest.raises(ValueError, match="weight=0 must be > 0"):
        StandardLibrarySource(weight=0)
