"""The pool in the host's memory against plain tensors."""

import torch

from dmc.runtime.slow_pool import FIRST_BLOCKS, CopyStream, SlowPool

RUNS = {0: [2, 3], 4: [6, 7, 8]}
HEADS, DIM, BLOCK = 2, 3, 4


def test_rows_keep_what_was_written_while_the_pool_grows():
    generator = torch.Generator().manual_seed(0)
    pool = SlowPool(RUNS, (HEADS, 2, DIM), torch.float32, 9, 3, BLOCK, CopyStream(torch.device("cpu")))
    length = FIRST_BLOCKS * BLOCK // 2
    keys, values = torch.randn(2, 2, 9, HEADS, length, DIM, generator=generator)  # by row and layer
    for begin in range(0, length, 50):  # not a multiple of the block
        for row in (0, 2):
            for layer in (2, 3, 6, 7, 8):
                part = slice(begin, begin + 50)
                pool.write(layer, row, begin, keys[row // 2, layer, :, part], values[row // 2, layer, :, part])
    assert pool.bytes_allocated(0) == 5 * length * HEADS * 2 * DIM * 4
    assert pool.bytes_allocated(1) == 0
    for row in (0, 2):
        key, value = pool.read(7, row, length - 3)
        assert torch.equal(key, keys[row // 2, 7, :, : length - 3])
        assert torch.equal(value, values[row // 2, 7, :, : length - 3])
    chosen = [torch.tensor([0, 5, 99]), torch.tensor([1, 2])]
    packed = pool.fetch(4, [2, 0], chosen).on_device()
    assert packed.shape == (5, 3, HEADS, 2, DIM)
    for i, layer in enumerate((6, 7, 8)):
        assert torch.equal(packed[:3, i, :, 0], keys[1, layer][:, chosen[0]].transpose(0, 1))
        assert torch.equal(packed[3:, i, :, 1], values[0, layer][:, chosen[1]].transpose(0, 1))


def test_freed_blocks_serve_others():
    pool = SlowPool(RUNS, (HEADS, 2, DIM), torch.float32, 9, 2, BLOCK, CopyStream(torch.device("cpu")))
    ones = torch.ones(HEADS, FIRST_BLOCKS * BLOCK, DIM)
    for row in (0, 1, 0, 1):
        pool.write(2, row, 0, ones * row, ones)
        assert torch.equal(pool.read(2, row, 7)[0], ones[:, :7] * row)
        pool.free(row)
        pool.free(row)
        assert pool.bytes_allocated(row) == 0
    assert pool.num_blocks == FIRST_BLOCKS
