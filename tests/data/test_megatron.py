"""Tokens that Megatron-LM has indexed are read as they are."""

import struct

import numpy as np
import pytest

from dmc.data import MegatronSource, TextSource, build_packed

CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def write(prefix, documents, dtype=np.uint16):
    """Write documents of sequences as Megatron-LM's IndexedDatasetBuilder does."""
    sequences = [sequence for document in documents for sequence in document]
    prefix.with_suffix(".bin").write_bytes(
        b"".join(np.array(sequence, dtype=dtype).tobytes() for sequence in sequences)
    )
    lengths, bounds, pointers, pointer = [len(sequence) for sequence in sequences], [0], [], 0
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    for length in lengths:
        pointers.append(pointer)
        pointer += length * np.dtype(dtype).itemsize
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00")
        file.write(struct.pack("<Q", 1))
        file.write(struct.pack("<B", CODES[dtype]))
        file.write(struct.pack("<Q", len(lengths)))
        file.write(struct.pack("<Q", len(bounds)))
        file.write(np.array(lengths, dtype=np.int32).tobytes())
        file.write(np.array(pointers, dtype=np.int64).tobytes())
        file.write(np.array(bounds, dtype=np.int64).tobytes())


def make_documents(seed=0):
    generator = np.random.default_rng(seed)
    return [
        [generator.integers(0, 100, generator.integers(1, 20)).tolist() for _ in range(generator.integers(1, 4))]
        for _ in range(30)
    ]


@pytest.mark.parametrize("dtype", CODES)
def test_windows_are_the_documents_one_behind_the_other(dtype, tmp_path, tokenizer):
    documents = make_documents()
    write(tmp_path / "corpus", documents, dtype)
    source = MegatronSource(str(tmp_path / "corpus"))
    source.check()
    packed = build_packed(source, tokenizer, 16, tmp_path / "cache", document_starts=True)
    flat, starts = [], set()
    for document in documents:
        starts.add(len(flat))
        flat += [token for sequence in document for token in sequence]
    assert packed.tokens.num_documents == 30 and len(packed.tokens) == len(flat)
    for index in range(len(packed)):
        item = packed[index]
        assert item["input_ids"].tolist() == flat[16 * index : 16 * index + 16]
        expected = [place == 0 or 16 * index + place in starts for place in range(16)]
        assert item["document_starts"].tolist() == expected
    assert not (tmp_path / "cache").exists()


def test_tokens_and_text_are_blended(tmp_path, tokenizer):
    write(tmp_path / "corpus", make_documents())
    (tmp_path / "a.txt").write_text("words " * 100)
    sources = [MegatronSource(str(tmp_path / "corpus"), weight=3), TextSource(str(tmp_path / "a.txt"))]
    blend = build_packed(sources, tokenizer, 16, tmp_path / "cache")
    assert 260 < [blend[position]["source"] for position in range(400)].count(0) < 340


def test_files_that_are_not_what_they_should_be_are_refused(tmp_path, tokenizer):
    prefix = tmp_path / "corpus"
    source = MegatronSource(str(prefix))
    with pytest.raises(FileNotFoundError, match=r"corpus\.idx does not exist: prefix="):
        source.check()
    write(prefix, make_documents())
    index, tokens = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    bad = [
        (b"", tokens, "does not begin with MMIDIDX"),
        (b"PK" + index[2:], tokens, "does not begin with MMIDIDX"),
        (index[:9] + struct.pack("<Q", 2) + index[17:], tokens, "version 2 and type 8"),
        (index[:17] + b"\x06" + index[18:], tokens, "version 1 and type 6: expected version 1 and an integer type"),
        (index[:-8], tokens, "is cut off"),
        (index, tokens[:-2], "its index tells"),
        (index[:34] + struct.pack("<i", 999) + index[38:], tokens, "do not stand one behind the other"),
    ]
    for index_content, token_content, message in bad:
        prefix.with_suffix(".idx").write_bytes(index_content)
        prefix.with_suffix(".bin").write_bytes(token_content)
        with pytest.raises(ValueError, match=message):
            source.check()
    write(prefix, [[[5, 299, 300]]])
    with pytest.raises(ValueError, match="holds token 300, the tokenizer has 300: not its text"):
        build_packed(source, tokenizer, 2, tmp_path / "cache")
    with pytest.raises(ValueError, match="holds token ids, not text"):
        next(source.documents())
    with pytest.raises(ValueError, match="weight=0"):
        MegatronSource("corpus", weight=0)


@pytest.mark.parametrize(("dtype", "wrong"), [(np.uint16, 300), (np.int32, 300), (np.int32, -1), (np.int16, -7)])
@pytest.mark.parametrize("place", [0, 2**20 + 5])
def test_every_id_is_a_word_of_the_tokenizer(dtype, wrong, place, tmp_path, tokenizer):
    ids = np.zeros(2**20 + 9, dtype=dtype)
    ids[place] = wrong
    write(tmp_path / "corpus", [[ids]], dtype)
    with pytest.raises(ValueError, match=rf"holds token {wrong}, the tokenizer has 300: not its text"):
        build_packed(MegatronSource(str(tmp_path / "corpus")), tokenizer, 16, tmp_path / "cache")
    assert not [*(tmp_path / "cache").glob("ranges/[!.]*")]


def test_the_range_of_many_ids_is_read_once(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("dmc.data.megatron._BLOCK_TOKENS", 100)
    write(tmp_path / "corpus", make_documents())
    source = MegatronSource(str(tmp_path / "corpus"))
    build_packed(source, tokenizer, 16, tmp_path / "cache")
    monkeypatch.setattr("dmc.data.megatron._range_of", None)
    build_packed(source, tokenizer, 16, tmp_path / "cache")
    with pytest.raises(ValueError, match="holds token 99, the tokenizer has 60"):
        source.check_ids(60, tmp_path / "cache")
