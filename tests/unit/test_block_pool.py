import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from unit_support import pool_state

from preempt_offload._core import BlockError, BlockPool, CapacityError, OffloadError


@pytest.fixture
def pool():
    """Blocks 1 to 5, of which 1 (twice) and 2 are referenced."""
    pool = BlockPool(5)
    pool.claim(2)
    pool.retain([1])
    return pool


def test_a_claim_is_an_array_of_distinct_ids_with_one_reference_each():
    pool = BlockPool(100)
    blocks = pool.claim(70)
    assert blocks.dtype == np.uint32
    assert blocks.shape == (70,)
    assert blocks.tolist() == list(range(1, 71))
    assert pool_state(pool) == (30, 0, [1] * 70 + [0] * 30)


def test_a_claim_of_nothing_is_empty():
    blocks = BlockPool(0).claim(0)
    assert blocks.dtype == np.uint32
    assert blocks.shape == (0,)


def test_a_block_is_free_after_its_last_reference(pool):
    pool.release([1, 2])
    assert pool_state(pool) == (4, 0, [1, 0, 0, 0, 0])
    pool.release([1])
    assert pool_state(pool) == (5, 0, [0] * 5)


def test_blocks_may_come_as_a_numpy_array(pool):
    pool.retain(np.array([2], np.uint32))
    pool.release(np.array([2, 2, 1], np.int64))
    assert pool_state(pool) == (4, 0, [1, 0, 0, 0, 0])


@pytest.mark.parametrize("capacity", [-1, 2**32])
def test_a_capacity_that_no_id_can_count_is_refused(capacity):
    with pytest.raises(OverflowError):
        BlockPool(capacity)


def test_whether_a_pool_is_indexed_has_to_be_said_by_name():
    with pytest.raises(TypeError):
        BlockPool(4, True)


# Each with the texts that the error must name: the id and the bound.
WRONG_USE = {
    "claim beyond capacity": (lambda p: p.claim(4), CapacityError, ["4 ", "3 of 5"]),
    "release of a free block": (lambda p: p.release([3]), BlockError, ["block 3", "1..=5"]),
    "release of the null block": (lambda p: p.release([0]), BlockError, ["block 0", "1..=5"]),
    "release of a foreign id": (lambda p: p.release([6]), BlockError, ["block 6", "1..=5"]),
    "double free in one call": (lambda p: p.release([2, 2]), BlockError, ["block 2", "1..=5"]),
    "over-release": (lambda p: p.release([1, 2, 1, 1]), BlockError, ["block 1", "1..=5"]),
    "a wrong id after right ones": (lambda p: p.release([1, 2, 9]), BlockError, ["block 9"]),
    "retain of a free block": (lambda p: p.retain([1, 2, 4]), BlockError, ["block 4", "1..=5"]),
    "retain of a foreign id": (lambda p: p.retain([1, 77]), BlockError, ["block 77", "1..=5"]),
    "references of a foreign id": (lambda p: p.ref_count(6), BlockError, ["block 6", "1..=5"]),
    "references of the null block": (lambda p: p.ref_count(0), BlockError, ["block 0", "1..=5"]),
    "index of a free block": (lambda p: p.index(3, b"h", 0), BlockError, ["block 3", "1..=5"]),
    "index of a foreign id": (lambda p: p.index(6, b"h", 0), BlockError, ["block 6", "1..=5"]),
    "a hash too long to index": (lambda p: p.index(1, b"h" * 33, 0), ValueError, ["33", "32"]),
    "a hash too long to find": (lambda p: p.lookup(b"h" * 33, 0), ValueError, ["33", "32"]),
    "a negative claim": (lambda p: p.claim(-1), OverflowError, ["negative"]),
    "a claim of half a block": (lambda p: p.claim(0.5), TypeError, ["float"]),
    "a negative id": (lambda p: p.release([1, -1]), BlockError, ["block -1", "1..=5"]),
    "an id beyond 32 bits": (lambda p: p.release([1, 2**32]), BlockError, ["4294967296"]),
    "a name for an id": (lambda p: p.release([1, "2"]), TypeError, ["str"]),
    "a text for a hash": (lambda p: p.lookup("h", 0), TypeError, ["str"]),
    "a group beyond 16 bits": (lambda p: p.index(1, b"h", 2**16), OverflowError, []),
}


@pytest.mark.parametrize(("use", "error", "texts"), WRONG_USE.values(), ids=WRONG_USE)
def test_wrong_use_is_an_error_that_leaves_the_pool_as_it_was(use, error, texts):
    pool = BlockPool(5, indexed=True)
    pool.claim(2)
    pool.retain([1])
    before = pool_state(pool)
    with pytest.raises(error) as caught:
        use(pool)
    assert pool_state(pool) == before
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("block", [-1, 2**32])
def test_a_foreign_id_of_any_size_is_named(pool, block):
    with pytest.raises(BlockError, match=rf"block {block} .*1\.\.=5"):
        pool.release([block])


def test_capacity_error_counts_blocks():
    pool = BlockPool(5, indexed=True)
    pool.claim(3)
    pool.index(1, b"h", 0)
    pool.release([1])
    with pytest.raises(CapacityError) as caught:
        pool.claim(4)
    assert isinstance(caught.value, OffloadError)
    assert (caught.value.needed, caught.value.available, caught.value.capacity) == (4, 3, 5)


def test_without_an_index_nothing_is_found(pool):
    assert pool.index(1, b"hash", 0) is False
    assert pool.lookup(b"hash", 0) is None
    pool.release([1, 1])
    assert pool.num_evictable == 0


def test_an_indexed_block_is_found_by_hash_and_group_and_gets_a_reference():
    pool = BlockPool(3, indexed=True)
    pool.claim(1)
    assert pool.index(1, b"hash", 7) is True
    assert pool.lookup(b"hash", 6) is None
    assert pool.lookup(b"hashh", 7) is None
    assert pool.ref_count(1) == 1
    assert pool.lookup(b"hash", 7) == 1
    assert pool.ref_count(1) == 2


def test_a_hash_is_told_from_one_with_zeros_behind_it():
    pool = BlockPool(2, indexed=True)
    pool.claim(1)
    pool.index(1, b"h", 0)
    assert pool.lookup(b"h\0", 0) is None


def test_a_hash_has_one_block_and_a_block_one_hash():
    pool = BlockPool(3, indexed=True)
    pool.claim(2)
    assert pool.index(1, b"one", 0) is True
    assert pool.index(2, b"one", 0) is False
    assert pool.index(1, b"other", 0) is False
    assert pool.lookup(b"other", 0) is None
    assert pool.lookup(b"one", 0) == 1


def test_an_unreferenced_indexed_block_waits_until_a_claim_needs_it():
    pool = BlockPool(3, indexed=True)
    pool.claim(3)
    for block in (2, 1):
        pool.index(block, bytes([block]), 0)
        pool.release([block])
    assert pool_state(pool) == (0, 2, [0, 0, 1])
    assert pool.lookup(b"\1", 0) == 1
    pool.release([1])
    assert pool.claim(1).tolist() == [2], "the one unused for longest goes first"
    assert pool.lookup(b"\2", 0) is None
    assert pool.lookup(b"\1", 0) == 1


def test_a_free_block_is_claimed_before_one_that_can_still_be_found():
    pool = BlockPool(2, indexed=True)
    pool.claim(1)
    pool.index(1, b"h", 0)
    pool.release([1])
    assert pool.claim(1).tolist() == [2]
    assert pool.lookup(b"h", 0) == 1


def test_threads_never_own_the_same_block():
    num_threads, rounds = 8, 300
    pool = BlockPool(64, indexed=True)
    owners = np.zeros(65, np.int64)
    start = threading.Barrier(num_threads)

    def work(seed):
        rng = np.random.default_rng(seed)
        start.wait()
        for n in rng.integers(1, 24, rounds).tolist():
            try:
                blocks = pool.claim(n)
            except CapacityError as error:
                assert error.needed == n
                continue
            assert not owners[blocks].any()
            owners[blocks] = seed
            pool.index(int(blocks[0]), int(n).to_bytes(2, "little"), 0)
            assert (owners[blocks] == seed).all()
            owners[blocks] = 0
            pool.release(blocks)
        return True

    with ThreadPoolExecutor(num_threads) as threads:
        assert all(threads.map(work, range(1, num_threads + 1)))
    assert pool.num_free + pool.num_evictable == 64
    assert len(set(pool.claim(64).tolist())) == 64
