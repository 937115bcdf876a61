"""The sources of installed packages are a corpus that is the same wherever the same versions are installed."""

from pathlib import Path

import pytest

from dmc.data import PackageSource

SPLITS = ("train", "validation", "calibration", "test")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package of 100 modules and a folder of tests."""
    folder = tmp_path / "parcel"
    for name in ["__init__", *(f"inner/module{number:02}" for number in range(100)), "tests/test_parcel"]:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_splits_hold_every_source_but_the_tests_once(package: Path) -> None:
    names = [name for split in SPLITS for name, _ in PackageSource(["parcel"], split).files()]
    expected = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.py")}
    assert len(names) == 101
    assert set(names) == expected - {"parcel/tests/test_parcel.py"}
    assert len(PackageSource(["parcel"]).files()) > 80


def test_documents_are_the_files_of_all_packages_in_order(package: Path) -> None:
    source = PackageSource(["sympy", "parcel"], "validation", weight=2.0)
    files = source.files()
    assert {name.split("/")[0] for name, _ in files} == {"sympy", "parcel"}
    documents = [text for shard in range(3) for text in source.documents(shard, 3)]
    assert documents == [path.read_text() for _, path in files]
    assert source.num_bytes() == sum(path.stat().st_size for _, path in files)


def test_description_changes_with_a_file_and_not_with_the_weight(package: Path) -> None:
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
        ({"packages": ["sympy"], "weight": 0}, "weight=0 must be > 0"),
    ],
)
def test_bad_values_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackageSource(**arguments)


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="'nosuchpackage' is not installed"):
        PackageSource(["nosuchpackage"]).check()
