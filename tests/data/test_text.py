import gzip
import io
import json
import shutil

import datasets
import pyarrow.parquet
import pytest

from dmc.data import TextSource, build_packed

ROWS = [{"text": f"row {number}", "number": number} for number in range(5)]


@pytest.fixture
def folder(tmp_path):
    """Return a folder that holds the same rows in every format."""
    dataset = datasets.Dataset.from_list(ROWS)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_csv(tmp_path / "rows.csv")
    dataset.save_to_disk(tmp_path / "saved")
    shutil.copy(tmp_path / "saved" / "data-00000-of-00001.arrow", tmp_path / "rows.arrow")
    shutil.rmtree(tmp_path / "saved")
    return tmp_path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv", "arrow"])
def test_every_format_yields_its_rows(suffix, folder):
    for source in (TextSource(str(folder / f"rows.{suffix}")), TextSource(str(folder), files=f"*.{suffix}")):
        source.check()
        assert list(source.documents()) == [row["text"] for row in ROWS]
        assert [row["text"] for row in source.stream()] == [row["text"] for row in ROWS]


def test_reading_local_files_leaves_no_copy_in_the_hub_cache(folder, monkeypatch):
    cache = folder / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    list(TextSource(str(folder / "rows.jsonl")).documents())
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) == 0


def test_folder_glob_and_file_read_whole_text_files(corpus):
    expected = [path.read_text() for path in sorted(corpus.iterdir())]
    (corpus / "below").mkdir()
    (corpus / "below" / "last.txt").write_text("below")
    assert list(TextSource(str(corpus)).documents()) == [*expected, "below"]
    assert list(TextSource(str(corpus / "*.txt")).documents()) == expected
    assert list(TextSource(str(corpus / "007.txt")).documents()) == [expected[7]]
    assert list(TextSource(str(corpus), files=["003.txt", "00[12].txt"]).documents()) == expected[1:4]


def test_file_name_with_glob_characters_is_literal(tmp_path):
    (tmp_path / "a[1].txt").write_text("literal")
    assert list(TextSource(str(tmp_path / "a[1].txt")).documents()) == ["literal"]


def test_text_is_utf8_without_byte_order_mark_and_with_its_line_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffZürich\r\n".encode())
    (tmp_path / "b.txt").write_bytes(b"\xffbroken")
    assert list(TextSource(str(tmp_path)).documents()) == ["Zürich\r\n", None]


def test_other_column_is_read_and_streamed_as_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "some words", "number": 3}\n')
    source = TextSource(str(tmp_path / "a.jsonl"), column="content")
    assert list(source.documents()) == ["some words"]
    assert list(source.read(source.stream())) == ["some words"]


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_wrong_weight_is_refused(weight):
    with pytest.raises(ValueError, match="must be a finite number > 0"):
        TextSource("corpus", weight=weight)


@pytest.mark.parametrize("name", ["missing.txt", "*.txt", "./missing", "/missing/folder"])
def test_missing_file_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No file matches .*missing|No file matches .*txt"):
        TextSource(name).check()


def test_missing_pattern_inside_a_folder_is_named(corpus):
    with pytest.raises(FileNotFoundError, match=r"No file matches '.*\*\.md'"):
        TextSource(str(corpus), files=["*.txt", "*.md"]).check()


def test_missing_column_lists_those_present(folder, tmp_path, tokenizer):
    source = TextSource(str(folder / "rows.jsonl"), column="content")
    with pytest.raises(ValueError, match=r"no column 'content'; it has \['number', 'text'\]"):
        build_packed(source, tokenizer, 2, tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_column_without_text_is_refused(folder):
    with pytest.raises(TypeError, match=r"Column 'number' .* holds int, expected text"):
        TextSource(str(folder / "rows.parquet"), column="number").check()


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_file_without_rows_is_an_empty_corpus(content, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"is empty|cannot be read as json"):
        TextSource(str(tmp_path / "a.jsonl")).check()


@pytest.mark.parametrize("content", [b'{"text": "a"', b'{"text": "\xff"}\n', b"PAR1"])
def test_file_of_another_kind_is_named(content, tmp_path):
    path = tmp_path / ("a.parquet" if content == b"PAR1" else "a.jsonl")
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{path.name}' cannot be read as {'parquet' if content == b'PAR1' else 'json'}"
    ):
        TextSource(str(path)).check()


def test_mixed_formats_are_refused(folder):
    with pytest.raises(ValueError, match=r"mixes \['arrow', 'csv', 'json', 'parquet'\] files; choose one kind"):
        TextSource(str(folder)).check()


def test_options_that_mean_nothing_are_refused(corpus):
    with pytest.raises(ValueError, match="split='validation' of the local files"):
        TextSource(str(corpus), split="validation")
    with pytest.raises(ValueError, match="needs a folder or a hub dataset"):
        TextSource(str(corpus / "000.txt"), files="*.txt").check()
    with pytest.raises(ValueError, match="streaming=True and cannot be cached"):
        TextSource(str(corpus), streaming=True).check()


def test_hub_dataset_is_loaded_with_its_options(monkeypatch):
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        dataset = datasets.Dataset.from_dict({"content": ["a", "b"], "number": [1, 2]})
        return dataset.to_iterable_dataset() if options["streaming"] else dataset

    monkeypatch.setattr("dmc.data.text.load_dataset", load_dataset)
    options = {"subset": "en", "split": "train[:1%]", "column": "content", "revision": "abc"}
    source = TextSource("owner/name", files="data/*.parquet", **options)
    source.check()
    assert list(source.documents()) == ["a", "b"]
    assert source.label == "owner/name:train[:1%]"
    expected = {"data_files": ["data/*.parquet"], "split": "train[:1%]", "revision": "abc", "streaming": False}
    assert calls[0] == (("owner/name", "en"), expected)
    streamed = TextSource("owner/name", streaming=True, **options)
    assert list(streamed.documents()) == ["a", "b"]
    assert source.description() == TextSource("owner/name", files="data/*.parquet", weight=2, **options).description()
    assert source.description() != TextSource("owner/name", files="data/*.parquet", **(options | {"revision": "x"}))


def test_unknown_hub_name_says_what_to_do(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub")

    monkeypatch.setattr("dmc.data.text.load_dataset", load_dataset)
    with pytest.raises(FileNotFoundError, match="'owner/name' is neither a local file, folder or glob nor a dataset"):
        TextSource("owner/name").check()


@pytest.mark.parametrize("most", [2**20, 96], ids=["all of them", "samples"])
def test_digest_tells_content_and_neither_place_nor_time(most, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("dmc.data.sources.DIGESTED_BYTES", most)
    monkeypatch.setattr("dmc.data.sources._BLOCK_BYTES", 8)

    def digest(name, **contents):
        (tmp_path / name).mkdir()
        for file, content in contents.items():
            (tmp_path / name / f"{file}.txt").write_text(content)
        return TextSource(str(tmp_path / name)).digest()

    plain = digest("plain", a="0123456789" * 20, b="", c="end")
    assert digest("copy", a="0123456789" * 20, b="", c="end") == plain
    assert digest("longer", a="0123456789" * 20 + "0", b="", c="end") != plain
    assert digest("moved", a="0123456789" * 20, b="e", c="nd") != plain
    assert digest("changed", a="1023456789" * 20, b="", c="end") != plain
    assert TextSource(str(folder / "rows.csv")).digest() != TextSource(str(folder / "rows.json")).digest()


WRITERS = {
    "jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "json": lambda rows: json.dumps(rows, indent=1).encode(),
    "parquet": lambda rows: parquet_of(rows),
}
WRITERS |= {"lines.json": WRITERS["jsonl"], "jsonl.gz": lambda rows: gzip.compress(WRITERS["jsonl"](rows))}


def parquet_of(rows):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_that_are_not_read_may_hold_anything(suffix, tmp_path):
    others = [None, "a word", 3, {"key": ["value"]}]
    for number, other in enumerate(others):
        row = {"text": f"text {number}", "other": other, f"only {number}": number}
        (tmp_path / f"{number}.{suffix}").write_bytes(WRITERS[suffix]([row]))
    source = TextSource(str(tmp_path), files=f"*.{suffix}")
    source.check()
    assert list(source.read(source.stream())) == [f"text {number}" for number in range(len(others))]


@pytest.mark.parametrize("suffix", [suffix for suffix in WRITERS if suffix != "parquet"])
def test_a_column_that_is_not_read_may_change_within_a_file(suffix, tmp_path):
    rows = [{"text": f"text {number}", "other": None if number < 5 else [number]} for number in range(9)]
    (tmp_path / f"rows.{suffix}").write_bytes(WRITERS[suffix](rows))
    assert list(TextSource(str(tmp_path)).documents()) == [row["text"] for row in rows]


def test_a_parquet_file_without_the_column_of_the_others_is_named(tmp_path):
    for number, column in enumerate(["text", "content"]):
        (tmp_path / f"{number}.parquet").write_bytes(parquet_of([{column: "words"}]))
    with pytest.raises(ValueError, match=rf"{tmp_path}/1.parquet has no column 'text'"):
        TextSource(str(tmp_path)).check()


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_chat_has_the_keys_that_were_written_in_every_format(suffix, tmp_path):
    def calling(name, arguments):
        call = {"function": {"name": name, "arguments": arguments}}
        return [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    chats = [calling("weather", {"city": "Bern"}), calling("add", {"numbers": [1, 2]})]
    (tmp_path / f"chats.{suffix}").write_bytes(WRITERS[suffix]([{"messages": chat} for chat in chats]))
    source = TextSource(str(tmp_path), messages="messages")
    assert list(source.read(source.stream())) == chats


@pytest.mark.parametrize(
    "content",
    ['{"text": "a"}\n{"text": "b"}', '{\n"text": "a"\n}\n\n{"text":\n"b"}', '[{"text": "a"},\n{"text": "b"}]\n'],
)
def test_json_is_lines_an_array_or_objects_of_several_lines(content, tmp_path):
    (tmp_path / "rows.json").write_text(content)
    assert list(TextSource(str(tmp_path)).documents()) == ["a", "b"]
