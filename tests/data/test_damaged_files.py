"""A file that cannot be read is named, with the line where it has lines; what can be read is read as it is written."""

import gzip
import json
import lzma

import pytest
from fsspec.compression import available_compressions

from dmc.data import TextSource

ROWS = [{"text": f"words of row {number}"} for number in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(source):
    return list(source.read(source.stream()))


@pytest.mark.parametrize("place", [0, 1, 39])
def test_broken_line_of_one_of_several_files_is_named(place, tmp_path, monkeypatch):
    monkeypatch.setattr("dmc.data.sources.JSON_LINES_SHARD", 100)
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_bytes(LINES)
    lines = LINES.splitlines(keepends=True)
    lines[place] = b'{"text": "ends nowhere\n'
    (tmp_path / "3.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"line {place + 1} of {tmp_path}/3.jsonl: "):
        read(TextSource(f"{tmp_path}/*.jsonl"))


DAMAGES = {
    "jsonl.gz": [("cut", gzip.compress(LINES)[:-20]), ("none", LINES)],
    "jsonl.xz": [("cut", lzma.compress(LINES)[:-20]), ("none", LINES)],
    "json": [("cut", json.dumps(ROWS).encode()[:-20])],
    "csv": [("cut", b'text,other\n"a","b"\n"c","d","e"\n')],
    "parquet": [("none", b"PAR1" + b"0" * 100)],
}


@pytest.mark.parametrize(
    ("suffix", "content"), [(suffix, content) for suffix, kinds in DAMAGES.items() for _, content in kinds],
    ids=[f"{suffix}-{name}" for suffix, kinds in DAMAGES.items() for name, _ in kinds],
)  # fmt: skip
def test_damaged_file_of_several_is_named_in_one_line(suffix, content, tmp_path):
    good = {"jsonl.gz": gzip.compress(LINES), "jsonl.xz": lzma.compress(LINES), "json": json.dumps(ROWS).encode()}
    good["csv"] = b"text,other\na,b\n"
    for number in range(3):
        if suffix in good:
            (tmp_path / f"{number}.{suffix}").write_bytes(good[suffix])
    (tmp_path / f"1.{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as") as error:
        read(TextSource(f"{tmp_path}/*.{suffix}"))
    assert f"{tmp_path}/1.{suffix}" in str(error.value) and "repair the file" in str(error.value)


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_a_csv_is_read_as_it_is_written(suffix, tmp_path):
    texts = ["nan", "NULL", "NA", "None", "007", "1e3", "True", "a word", ""]
    content = ("text,number\n" + "".join(f'"{text}",{n}\n' for n, text in enumerate(texts))).encode()
    (tmp_path / f"rows.{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert read(TextSource(str(tmp_path / f"rows.{suffix}"))) == texts


@pytest.mark.skipif("zstd" in available_compressions(), reason="zstandard is installed")
def test_a_compression_that_python_lacks_is_named(tmp_path):
    (tmp_path / "rows.jsonl.zst").write_bytes(bytes.fromhex("28b52ffd"))
    with pytest.raises(ValueError, match=r"rows.jsonl.zst is compressed by zstd.*pip install zstandard"):
        TextSource(str(tmp_path)).check()
