import itertools

import numpy as np
import pytest
from unit_support import plan, pool_state

from preempt_offload._core import BlockPool, CapacityError, RequestTable, StateError

NOBODY = {"Storing": 0, "Ready": 0, "Loading": 0, "Mirrored": 0}


class Core:
    """A pool and a table of one group with 4 tokens per block, unless told otherwise."""

    def __init__(self, capacity=8, block_tokens=(4,)):
        self.pool = BlockPool(capacity, indexed=True)
        self.table = RequestTable(self.pool, block_tokens)
        self._events = itertools.count()

    def ready(self, request_id, num_tokens, *device_blocks, hashes=()):
        """Stores a request; returns the plan."""
        event = next(self._events)
        result = self.table.begin_store(request_id, event, num_tokens, device_blocks, hashes)
        assert self.table.complete_store(request_id, event, True)
        return plan(result)

    def mirrored(self, request_id, num_tokens, *device_blocks, hashes=()):
        result = self.ready(request_id, num_tokens, *device_blocks, hashes=hashes)
        self.table.settle(request_id)
        return result

    def state(self):
        ids = ("a", "b", "c", "d")
        return pool_state(self.pool), self.table.counts(), [self.table.status(i) for i in ids]


@pytest.fixture
def core():
    return Core()


def test_a_new_table_knows_nobody(core):
    assert core.table.counts() == NOBODY
    assert core.table.status("a") is None


def test_the_life_of_a_request(core):
    table, pool = core.table, core.pool
    pairs, mirrored, shared = table.begin_store("a", 7, 6, [[10, 11]])
    assert (pairs.dtype, pairs.shape) == (np.uint32, (2, 3))
    assert pairs.tolist() == [[0, 10, 1], [0, 11, 2]]
    assert (mirrored, shared) == (0, 0)
    assert table.status("a") == ("Storing", 6)
    assert table.counts() == NOBODY | {"Storing": 1}

    assert table.complete_store("a", 7, True) is True
    assert table.status("a") == ("Ready", 6)

    assert plan(table.begin_load("a", 0, 5, [[20, 21]])) == ([(0, 20, 1), (0, 21, 2)], 0, 0)
    assert table.status("a") == ("Loading", 5)

    table.finish_load("a", True)
    assert table.status("a") == ("Mirrored", 5)
    assert pool_state(pool) == (7, 0, [1] + [0] * 7), "the partial block has changed since"

    assert table.release("a") is True
    assert table.status("a") is None
    assert table.counts() == NOBODY
    assert pool.num_free == 8


def test_a_failed_store_leaves_nothing(core):
    core.table.begin_store("a", 0, 6, [[10, 11]])
    assert core.table.complete_store("a", 0, False) is False
    assert core.table.status("a") is None
    assert core.pool.num_free == 8


def test_a_failed_load_leaves_nothing(core):
    core.ready("a", 6, [10, 11])
    core.table.begin_load("a", 0, 6, [[20, 21]])
    core.table.finish_load("a", False)
    assert core.table.status("a") is None
    assert core.pool.num_free == 8


def test_only_what_is_new_is_stored_again(core):
    core.mirrored("a", 6, [10, 11])
    pairs, mirrored, shared = core.ready("a", 9, [20, 21, 22])
    assert [(group, device) for group, device, _ in pairs] == [(0, 21), (0, 22)]
    assert (mirrored, shared) == (1, 0)
    loaded, _, _ = plan(core.table.begin_load("a", 0, 9, [[30, 31, 32]]))
    assert [(device, host) for _, device, host in loaded] == [
        (30, 1),
        *((d + 10, h) for _, d, h in pairs),
    ]


def test_a_settled_request_keeps_no_block_with_tokens_it_may_not_have(core):
    core.ready("a", 12, [10, 11, 12])
    core.table.settle("a", 11)
    assert core.table.status("a") == ("Mirrored", 11)
    assert pool_state(core.pool) == (6, 0, [1, 1] + [0] * 6)
    pairs, mirrored, _ = core.ready("a", 12, [20, 21, 22])
    assert [device for _, device, _ in pairs] == [22]
    assert mirrored == 2


def test_a_request_settled_with_more_than_it_stored_keeps_what_it_stored(core):
    core.ready("a", 8, [10, 11])
    core.table.settle("a", 100)
    assert core.table.status("a") == ("Mirrored", 8)


def test_blocks_computed_on_the_device_are_not_loaded(core):
    core.ready("a", 10, [10, 11, 12])
    assert plan(core.table.begin_load("a", 8, 10, [[20, 21, 22]])) == ([(0, 22, 3)], 0, 0)


def test_a_load_may_need_no_block_at_all(core):
    core.ready("a", 8, [10, 11])
    pairs, _, _ = core.table.begin_load("a", 8, 8, [[20, 21]])
    assert (pairs.dtype, pairs.shape) == (np.uint32, (0, 3))


def test_lookahead_blocks_are_neither_stored_nor_loaded(core):
    pairs, _, _ = core.ready("a", 5, [10, 11, 12, 13])
    assert [device for _, device, _ in pairs] == [10, 11]
    loaded, _, _ = plan(core.table.begin_load("a", 0, 5, [[20, 21, 22]]))
    assert [device for _, device, _ in loaded] == [20, 21]


def test_null_blocks_keep_their_place(core):
    pairs, _, _ = core.ready("a", 16, [0, 0, 20, 21])
    assert [device for _, device, _ in pairs] == [20, 21]
    loaded, _, _ = plan(core.table.begin_load("a", 0, 16, [[0, 0, 30, 31]]))
    assert loaded == [(0, 30, pairs[0][2]), (0, 31, pairs[1][2])]


def test_a_short_block_table_ends_where_the_tokens_end(core):
    pairs, _, _ = core.ready("a", 16, [20, 21])
    loaded, _, _ = plan(core.table.begin_load("a", 0, 16, [[0, 0, 30, 31]]))
    assert loaded == [(0, 30, pairs[0][2]), (0, 31, pairs[1][2])]


def test_groups_count_their_own_blocks():
    core = Core(capacity=8, block_tokens=[4, 8])
    pairs, _, _ = core.ready("a", 12, [10, 11, 12], [13, 14])
    assert [(group, device) for group, device, _ in pairs] == [
        (0, 10),
        (0, 11),
        (0, 12),
        (1, 13),
        (1, 14),
    ]
    loaded, _, _ = plan(core.table.begin_load("a", 8, 12, [[20, 21, 22], [23, 24]]))
    assert [(group, device) for group, device, _ in loaded] == [(0, 22), (1, 24)]


def test_a_released_request_keeps_its_blocks_while_a_copy_uses_them(core):
    table = core.table
    table.begin_store("a", 0, 8, [[10, 11]])
    core.ready("b", 8, [12, 13])
    table.begin_load("b", 0, 8, [[14, 15]])
    assert table.release("a") is True
    assert table.release("a") is False
    assert table.release("b") is True
    assert table.status("a") is None
    assert table.status("b") is None
    assert core.pool.num_free == 4
    assert table.complete_store("a", 0, True) is False
    assert core.pool.num_free == 6
    table.finish_load("b", True)
    assert core.pool.num_free == 8
    assert table.counts() == NOBODY


def test_an_id_cannot_be_stored_again_while_its_old_copy_is_under_way(core):
    core.table.begin_store("a", 0, 4, [[10]])
    core.table.release("a")
    with pytest.raises(StateError, match='"a" is released'):
        core.table.begin_store("a", 1, 4, [[11]])
    core.table.complete_store("a", 0, True)
    core.table.begin_store("a", 1, 4, [[11]])
    assert core.table.status("a") == ("Storing", 4)


def test_mirrors_give_way_the_one_unused_for_longest_first(core):
    for request_id, block in [("a", 10), ("b", 12), ("c", 14)]:
        core.ready(request_id, 8, [block, block + 1])
    for request_id in ("b", "a", "c"):
        core.table.settle(request_id)
    core.table.begin_store("d", 9, 12, [[16, 17, 18]])
    assert core.table.status("b") is None
    assert core.table.status("a") is not None
    assert core.table.status("c") is not None


def test_ready_requests_do_not_give_way(core):
    core.ready("a", 16, [10, 11, 12, 13])
    core.mirrored("b", 12, [14, 15, 16])
    with pytest.raises(CapacityError, match=r"5 .* 4 of 8") as caught:
        core.table.begin_store("c", 9, 20, [[17, 18, 19, 20, 21]])
    assert (caught.value.needed, caught.value.available, caught.value.capacity) == (5, 4, 8)
    assert core.table.counts() == NOBODY | {"Ready": 1, "Mirrored": 1}


def test_equal_hashes_share_a_block_once_it_is_stored(core):
    hashes = [[b"one", b"two"]]
    core.table.begin_store("a", 0, 10, [[10, 11, 12]], hashes)
    _, _, shared = core.table.begin_store("b", 1, 10, [[13, 14, 15]], hashes)
    assert shared == 0, "the blocks of the first are not complete yet"
    for event, request_id in enumerate(["a", "b"]):
        core.table.complete_store(request_id, event, True)
        core.table.release(request_id)
    assert (core.pool.num_free, core.pool.num_evictable) == (6, 2)

    pairs, mirrored, shared = core.ready("c", 10, [16, 17, 18], hashes=hashes)
    assert [device for _, device, _ in pairs] == [18]
    assert (mirrored, shared) == (0, 2)


def test_hashes_of_other_groups_are_other_blocks():
    core = Core(capacity=8, block_tokens=[4, 4])
    core.ready("a", 4, [10], [11], hashes=[[b"h"], []])
    pairs, _, shared = core.ready("b", 4, [12], [13], hashes=[[], [b"h"]])
    assert len(pairs) == 2
    assert shared == 0


def test_a_failed_store_shares_nothing(core):
    core.table.begin_store("a", 0, 4, [[10]], [[b"h"]])
    core.table.complete_store("a", 0, False)
    assert core.ready("b", 4, [11], hashes=[[b"h"]])[2] == 0


def test_release_all_forgets_requests_and_hashes(core):
    core.ready("a", 8, [10, 11], hashes=[[b"one", b"two"]])
    core.mirrored("b", 4, [12])
    core.table.begin_store("c", 50, 4, [[13]], [[b"three"]])
    core.table.release_all()
    assert [core.table.status(request_id) for request_id in "abc"] == [None] * 3
    assert (core.pool.num_free, core.pool.num_evictable) == (7, 0)
    assert core.table.complete_store("c", 50, True) is False
    assert (core.pool.num_free, core.pool.num_evictable) == (8, 0)
    _, _, shared = core.ready("d", 12, [14, 15, 16], hashes=[[b"one", b"two", b"three"]])
    assert shared == 0


# "a" is Storing under event 3, "b" Ready, "c" Mirrored (4 tokens each), "d" unknown; 5 blocks free.
WRONG_USE = {
    "store of a storing request": (
        lambda t: t.begin_store("a", 9, 4, [[20]]),
        StateError,
        ['"a" is Storing'],
    ),
    "store of a ready request": (
        lambda t: t.begin_store("b", 9, 4, [[20]]),
        StateError,
        ['"b" is Ready'],
    ),
    "store beyond capacity": (
        lambda t: t.begin_store("d", 9, 28, [list(range(20, 27))]),
        CapacityError,
        ["7 host blocks", "6 of 8"],
    ),
    "store of too few block tables": (
        lambda t: t.begin_store("d", 9, 4, []),
        ValueError,
        ["0 block tables", "1 KV cache group"],
    ),
    "store of too many block tables": (
        lambda t: t.begin_store("d", 9, 4, [[20], [21]]),
        ValueError,
        ["2 block tables", "1 KV cache group"],
    ),
    "store with a hash too long": (
        lambda t: t.begin_store("d", 9, 4, [[20]], [[b"h" * 33]]),
        ValueError,
        ["33", "32"],
    ),
    "store of negative tokens": (
        lambda t: t.begin_store("d", 9, -4, [[20]]),
        OverflowError,
        ["negative"],
    ),
    "end of a store unknown": (lambda t: t.complete_store("d", 3, True), StateError, ['"d"']),
    "end of a store ended": (
        lambda t: t.complete_store("b", 0, True),
        StateError,
        ['"b" is Ready'],
    ),
    "end under another event": (lambda t: t.complete_store("a", 4, True), StateError, ['"a"']),
    "load of an unknown request": (lambda t: t.begin_load("d", 0, 4, [[20]]), StateError, ['"d"']),
    "load of a storing request": (
        lambda t: t.begin_load("a", 0, 4, [[20]]),
        StateError,
        ['"a" is Storing'],
    ),
    "load of a mirrored request": (
        lambda t: t.begin_load("c", 0, 4, [[20]]),
        StateError,
        ['"c" is Mirrored'],
    ),
    "load of more than is stored": (
        lambda t: t.begin_load("b", 0, 5, [[20, 21]]),
        StateError,
        ['"b"', "5 tokens", "4 are stored"],
    ),
    "load into too few blocks": (
        lambda t: t.begin_load("b", 0, 4, [[]]),
        StateError,
        ["group 0", "0 device blocks", "1 block"],
    ),
    "load of too many block tables": (
        lambda t: t.begin_load("b", 0, 4, [[20], [21]]),
        ValueError,
        ["2 block tables", "1 KV cache group"],
    ),
    "end of a load unknown": (lambda t: t.finish_load("d", True), StateError, ['"d"']),
    "end of a load not begun": (lambda t: t.finish_load("b", True), StateError, ['"b" is Ready']),
    "settling an unknown request": (lambda t: t.settle("d"), StateError, ['"d"']),
    "settling a storing request": (lambda t: t.settle("a"), StateError, ['"a" is Storing']),
    "settling a mirrored request": (lambda t: t.settle("c"), StateError, ['"c" is Mirrored']),
}


@pytest.mark.parametrize(("use", "error", "texts"), WRONG_USE.values(), ids=WRONG_USE)
def test_wrong_use_is_an_error_that_leaves_everything_as_it_was(core, use, error, texts):
    core.ready("b", 4, [10])
    core.mirrored("c", 4, [11])
    core.table.begin_store("a", 3, 4, [[12]])
    before = core.state()
    with pytest.raises(error) as caught:
        use(core.table)
    for text in texts:
        assert text in str(caught.value)
    assert core.state() == before


def test_a_load_of_a_block_that_was_not_stored_is_an_error(core):
    core.ready("a", 8, [0, 11])
    before = core.state()
    with pytest.raises(StateError, match='block 0 of group 0 of request "a"'):
        core.table.begin_load("a", 0, 8, [[20, 21]])
    assert core.state() == before


@pytest.mark.parametrize("block_tokens", [[], [4, 0]])
def test_blocks_have_tokens(block_tokens):
    with pytest.raises(ValueError, match="tokens per block must be positive"):
        RequestTable(BlockPool(4), block_tokens)


def test_the_table_keeps_its_pool_alive():
    table = RequestTable(BlockPool(1), [4])
    table.begin_store("a", 0, 4, [[10]])
    with pytest.raises(CapacityError):
        table.begin_store("b", 0, 4, [[10]])
