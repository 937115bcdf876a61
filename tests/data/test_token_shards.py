import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from dmc.checksums import file_checksum
from dmc.data import PackedTokens, TokenShards
from dmc.data.token_shards import ShardIndex, ShardRecord, damage_of, is_whole, shard_path


@pytest.fixture
def flat() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16)


def write(folder: Path, flat: np.ndarray, lengths: list[int]) -> ShardIndex:
    folder.mkdir(exist_ok=True)
    records, start = [], 0
    for shard, length in enumerate(lengths):
        path = shard_path(folder, shard)
        flat[start : start + length].tofile(path)
        records.append(ShardRecord(length, 1, 0, 0, 2 * length, file_checksum(path)))
        start += length
    assert start == len(flat)
    return ShardIndex("key", "uint16", tuple(records))


@pytest.mark.parametrize("lengths", [[500], [1, 499], [0, 0, 250, 0, 250, 0], [7] * 71 + [3]])
def test_every_slice_equals_that_of_the_flat_array(lengths: list[int], flat: np.ndarray, tmp_path: Path) -> None:
    write(tmp_path, flat, lengths)
    shards = TokenShards(tmp_path, lengths, "uint16")
    assert len(shards) == 500 and shards.dtype == np.uint16 and np.array_equal(shards, flat)
    bounds = np.random.default_rng(1).integers(-10, 520, (300, 2)).tolist()
    assert all(np.array_equal(shards[start:stop], flat[start:stop]) for start, stop in bounds)
    packed, expected = PackedTokens(shards, 13), PackedTokens(flat, 13)
    assert len(packed) == len(expected)
    assert all(torch.equal(packed[i]["input_ids"], expected[i]["input_ids"]) for i in range(len(packed)))


def test_shards_are_pickled_by_path(flat: np.ndarray, tmp_path: Path) -> None:
    write(tmp_path, flat, [250, 250])
    dataset = PackedTokens(TokenShards(tmp_path, [250, 250], "uint16"), 100)
    expected = dataset[2]["input_ids"]  # maps both files
    content = pickle.dumps(dataset)
    assert len(content) < 1000
    assert torch.equal(pickle.loads(content)[2]["input_ids"], expected)


def test_flipped_bit_anywhere_is_seen(flat: np.ndarray, tmp_path: Path) -> None:
    index = write(tmp_path, flat, [100, 0, 400])
    assert is_whole(tmp_path, index)
    for shard, place in [(0, 0), (0, 199), (2, 0), (2, 433), (2, 799)]:
        path = shard_path(tmp_path, shard)
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
        assert damage_of(path, index.shards[shard]) == "has a wrong checksum"
        assert not is_whole(tmp_path, index)
        content[place] ^= 1
        path.write_bytes(content)
    assert is_whole(tmp_path, index)


def test_large_folder_is_checked_by_all_sizes_and_some_shards(
    flat: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write(tmp_path, flat, [50] * 10)
    read = []
    monkeypatch.setattr("dmc.data.token_shards._CHECKED_BYTES", 400)
    monkeypatch.setattr("dmc.data.token_shards.damage_of", lambda path, _: read.append(path.name))
    assert is_whole(tmp_path, index)
    assert sorted(read) == ["00000.bin", "00002.bin", "00005.bin", "00007.bin"]
    shard_path(tmp_path, 9).write_bytes(b"short")
    assert not is_whole(tmp_path, index)
    shard_path(tmp_path, 9).unlink()
    assert not is_whole(tmp_path, index)


def test_index_survives_its_file() -> None:
    index = ShardIndex("key", "int32", (ShardRecord(3, 1, 0, 0, 12, 5), ShardRecord(4, 2, 1, 0, 16, 6)))
    assert ShardIndex.from_json(index.to_json()) == index
    assert (index.total("num_tokens"), index.total("num_empty")) == (7, 1)


def test_slices_with_steps_are_refused(flat: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 1, not 2"):
        TokenShards(tmp_path, [500], "uint16")[::2]
