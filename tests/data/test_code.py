import hashlib

import pytest

from dmc.data import PackageSource, PackedTokens, StandardLibrarySource, build_packed

SPLITS = ("train", "validation", "calibration", "test")


@pytest.fixture
def library(tmp_path):
    """Return a folder laid out like a standard library, of 200 modules."""
    folder = tmp_path / "lib"
    for number in range(200):
        path = folder / ("package" if number % 2 else "") / f"module{number:03}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = {number}\n")
    return folder


def with_text(source):
    return {name: path for name, path in source.files() if path.stat().st_size}


def test_splits_are_disjoint_real_code_of_some_megabytes():
    sources = {split: StandardLibrarySource(split) for split in SPLITS}
    splits = {split: dict(zip(with_text(source), source.documents(), strict=True)) for split, source in sources.items()}
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


def test_split_of_a_file_depends_on_its_path_alone(library):
    def names(folder):
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


def test_machine_specific_and_optional_files_are_left_out(library):
    strange = ["_sysconfigdata__linux.py", "config-3.11-x86/a.py", "sitecustomize.py", "site-packages/numpy/a.py"]
    strange += ["dist-packages/a.py", "unittest/test/a.py", "sqlite3/tests/a.py", "tkinter/a.py", "encodings/cp1.py"]
    for name in strange:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("")
    names = [name for split in SPLITS for name, _ in StandardLibrarySource(split, folder=str(library)).files()]
    assert len(names) == 200
    assert not set(names) & set(strange)


def test_undecodable_file_is_a_counted_skip_and_an_empty_one_is_none(library, tmp_path, tokenizer):
    source = StandardLibrarySource(folder=str(library))
    source.files()[3][1].write_bytes(b"# \xe9\n")
    source.files()[5][1].write_bytes(b"")
    packed = build_packed(source, tokenizer, 16, tmp_path / "cache")
    assert isinstance(packed, PackedTokens)
    assert packed.tokens.num_skipped == 1 and packed.tokens.num_documents == len(source.files()) - 2


def test_python_without_sources_says_how_to_go_on(tmp_path):
    (tmp_path / "os.py").write_text("")
    with pytest.raises(FileNotFoundError, match=r"Found 1 standard-library files .* at least 100.*TextSource"):
        StandardLibrarySource(folder=str(tmp_path)).check()


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="split='held_out' is unknown; choose one of"):
        StandardLibrarySource("held_out")
    with pytest.raises(ValueError, match=r"weight=0 of '.*' must be a finite number > 0"):
        StandardLibrarySource(weight=0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package of 100 modules and a folder of tests."""
    folder = tmp_path / "parcel"
    for name in ["__init__", *(f"inner/module{number:02}" for number in range(100)), "tests/test_parcel"]:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_splits_hold_every_source_but_the_tests_once(package):
    names = [name for split in SPLITS for name, _ in PackageSource(["parcel"], split).files()]
    expected = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.py")}
    assert len(names) == 101
    assert set(names) == expected - {"parcel/tests/test_parcel.py"}
    assert len(PackageSource(["parcel"]).files()) > 80


def test_documents_are_the_files_of_all_packages_in_order(package):
    source = PackageSource(["sympy", "parcel"], "validation", weight=2.0)
    files = source.files()
    assert {name.split("/")[0] for name, _ in files} == {"sympy", "parcel"}
    documents = [text for shard in range(3) for text in source.read(source.stream().shard(3, shard))]
    assert documents == [path.read_text() for path in with_text(source).values()]
    assert source.num_bytes() == sum(path.stat().st_size for _, path in files)


def test_description_changes_with_a_file_and_not_with_the_weight(package):
    before = PackageSource(["parcel"]).description()
    assert PackageSource(["parcel"], weight=3.0).description() == before
    path = PackageSource(["parcel"]).files()[5][1]
    path.write_text("changed = True\n")
    assert PackageSource(["parcel"]).description() != before
    assert PackageSource(["sympy"]).description()["packages"]["sympy"].count(".")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"packages": []}, r"packages=\[\]: expected a list of installed packages"),
        ({"packages": "sympy"}, "packages='sympy': expected a list"),
        ({"packages": ["sympy"], "weight": 0}, "weight=0 of '.*' must be a finite number > 0"),
    ],
)
def test_bad_values_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PackageSource(**arguments)


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match="'nosuchpackage' is not installed"):
        PackageSource(["nosuchpackage"]).check()
