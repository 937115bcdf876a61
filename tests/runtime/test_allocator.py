import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_memory import allocated_peak

from dmc.runtime.allocator import BlockAllocator, OutOfBlocksError


@pytest.mark.parametrize("again", [[0], [0, 1], [2, 2], [1, 2]])
def test_double_free_is_detected_and_nothing_is_given_back(again):
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    allocator.free(blocks[:2])
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(blocks[again])
    assert allocator.num_in_use == 1
    allocator.free(blocks[2:])
    assert sorted(allocator.allocate(4).tolist()) == [0, 1, 2, 3]


def test_a_pool_of_negative_size_is_refused():
    with pytest.raises(ValueError, match="num_blocks=-1: expected a number >= 0"):
        BlockAllocator(-1)


def test_freeing_needs_no_more_memory_however_large_the_pool():
    allocator = BlockAllocator(50_000)
    blocks = allocator.allocate(7)
    assert allocated_peak(lambda: allocator.free(blocks)) < 5_000  # a copy of the free list has 200,000 bytes
    assert allocator.num_in_use == 0


def test_blocks_that_kernels_took_and_gave_back_are_never_taken_for_freed_twice():
    allocator, generator = BlockAllocator(30), random.Random(0)
    held = []
    for _ in range(300):
        if generator.random() < 0.5 and held:  # as `compact` does
            block = held.pop(generator.randrange(len(held)))
            allocator.stack[int(allocator.height)] = block
            allocator.height += 1
        elif generator.random() < 0.5 and held:
            allocator.free(torch.tensor([held.pop(generator.randrange(len(held)))], dtype=torch.int32))
        elif allocator.num_free:  # as `append_or_merge` does
            allocator.height -= 1
            held.append(int(allocator.stack[int(allocator.height)]))
        assert allocator.num_in_use == len(held) == len(set(held))


def test_shared_blocks_come_back_with_their_last_holder():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    allocator.share(blocks[:2])
    allocator.share(blocks[:1])
    allocator.free(blocks)
    assert allocator.num_in_use == 2
    allocator.free(blocks[:2])
    assert allocator.num_in_use == 1
    allocator.grow(9)
    allocator.free(blocks[:1])
    assert allocator.num_in_use == 0 and not allocator.extra.any()
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(blocks[:1])


def test_more_blocks_than_are_in_use_are_never_given_back():
    allocator = BlockAllocator(3)
    allocator.allocate(1)
    allocator.height.fill_(3)  # a kernel has given it back
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(torch.tensor([0], dtype=torch.int32))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "grow"]), st.integers(0, 6)), max_size=25))
def test_any_history_keeps_blocks_disjoint_and_counted(history):
    allocator, held = BlockAllocator(4), []
    for verb, number in history:
        if verb == "grow":
            allocator.grow(allocator.num_blocks + number)
        elif verb == "free" and held:
            allocator.free(held.pop(number % len(held)))
        elif verb == "allocate":
            if number > allocator.num_free:
                said = f"{number} blocks were asked for, only {allocator.num_free} of {allocator.num_blocks} are free"
                with pytest.raises(OutOfBlocksError, match=said):
                    allocator.allocate(number)
            else:
                held.append(allocator.allocate(number))
        blocks = [block for blocks in held for block in blocks.tolist()]
        assert len(set(blocks)) == len(blocks) == allocator.num_in_use
        assert all(0 <= block < allocator.num_blocks for block in blocks)
        assert allocator.num_free + allocator.num_in_use == allocator.num_blocks
