import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from unit_support import Memory

from preempt_offload._core import AddressError, BlockLayout

DEVICE, HOST = 0x1000, 0x9000
EVERYWHERE = [(0, 2**40)]


def pairs(*rows, dtype=np.uint32):
    return np.array(rows, dtype).reshape(-1, 3)


def layout_of(*segments, device_blocks=10, host_blocks=5, groups=3):
    return BlockLayout(device_blocks, host_blocks, groups, segments, EVERYWHERE, EVERYWHERE)


@pytest.fixture
def layout():
    """100 bytes per block in group 0, two segments apart in group 1, nothing in group 2."""
    return layout_of(
        (0, DEVICE, 100, 100, HOST, 100),
        (1, DEVICE + 1000, 64, 32, HOST + 500, 32),
        (1, DEVICE + 1640, 16, 16, HOST + 660, 16),
    )


def test_bytes_of_a_block_are_those_of_its_segments(layout):
    assert [layout.block_bytes(group) for group in range(3)] == [100, 48, 0]


def test_a_group_without_segments_has_nothing_to_copy(layout):
    for array in layout.descriptors("d2h", pairs((2, 1, 1), (2, 2, 2))):
        assert (array.dtype, array.shape) == (np.int64, (0,))
    assert layout.copy("h2d", pairs((2, 1, 1)), 2) == 0


def test_descriptors_are_three_equally_long_int64_arrays(layout):
    arrays = layout.descriptors("d2h", pairs((0, 1, 1), (0, 3, 2), (1, 5, 3)))
    assert [(a.dtype, a.shape) for a in arrays] == [(np.int64, (4,))] * 3


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_descriptors_are_written_into_an_array_as_far_as_there_is_room(layout, direction):
    rows = pairs((0, 1, 1), (0, 3, 2), (1, 5, 3))
    expected = np.array(layout.descriptors(direction, rows))
    for room in (0, 3, 4, 7):
        out = np.full((3, room), -1, np.int64)
        assert layout.write_descriptors(direction, rows, out) == 4
        assert np.array_equal(out[:, :4], expected[:, :room])
        assert (out[:, 4:] == -1).all()


@pytest.mark.parametrize(
    "out",
    [
        np.empty((2, 8), np.int64),
        np.empty((4, 8), np.int64),
        np.empty((3, 16), np.int64)[:, ::2],
        np.empty((8, 3), np.int64).T,
    ],
    ids=["two rows", "four rows", "gaps", "columns"],
)
def test_an_array_of_another_shape_is_refused(layout, out):
    with pytest.raises(ValueError, match=r"contiguous, of shape \(3, n\)"):
        layout.write_descriptors("d2h", pairs((0, 1, 1)), out)


def test_descriptors_of_a_store_and_of_a_load_are_mirror_images(layout):
    store = layout.descriptors("d2h", pairs((0, 2, 1), (1, 4, 3)))
    load = layout.descriptors("h2d", pairs((0, 2, 1), (1, 4, 3)))
    device = [DEVICE + 200, DEVICE + 1000 + 4 * 64, DEVICE + 1640 + 4 * 16]
    host = [HOST, HOST + 500 + 2 * 32, HOST + 660 + 2 * 16]
    assert [array.tolist() for array in store] == [device, host, [100, 32, 16]]
    assert [array.tolist() for array in load] == [host, device, [100, 32, 16]]


def test_neighbours_on_both_sides_become_one_copy(layout):
    src, dst, size = layout.descriptors("h2d", pairs((0, 4, 3), (0, 3, 2), (0, 6, 4)))
    assert src.tolist() == [HOST + 100, HOST + 300]
    assert dst.tolist() == [DEVICE + 300, DEVICE + 600]
    assert size.tolist() == [200, 100]


def test_the_order_in_memory_of_the_pairs_does_not_matter(layout):
    given = pairs((0, 4, 3), (0, 8, 1), (1, 5, 2))
    expected = [array.tolist() for array in layout.descriptors("d2h", given)]
    for view in (given[::-1], np.asfortranarray(given), np.repeat(given, 2, axis=0)[::2]):
        assert [array.tolist() for array in layout.descriptors("d2h", view)] == expected


def test_no_pairs_are_no_copies(layout):
    for array in layout.descriptors("d2h", pairs()):
        assert (array.dtype, array.shape) == (np.int64, (0,))
    assert layout.copy("h2d", pairs(), 2) == 0


WRONG_PAIRS = {
    "device block 0, the null block": ("d2h", [(0, 1, 1), (0, 0, 2)], ["device block 0", "1..=9"]),
    "device block out of range": ("h2d", [(0, 1, 1), (0, 10, 2)], ["device block 10", "1..=9"]),
    "host block 0": ("h2d", [(0, 1, 1), (0, 2, 0)], ["host block 0", "1..=5"]),
    "host block out of range": ("d2h", [(0, 1, 1), (0, 2, 6)], ["host block 6", "1..=5"]),
    "group out of range": ("d2h", [(0, 1, 1), (3, 2, 2)], ["group 3", "0..3"]),
    "host block stored to twice": ("d2h", [(0, 1, 4), (0, 2, 4)], ["host block 4"]),
    "device block loaded to twice": ("h2d", [(0, 7, 1), (1, 7, 2)], ["device block 7"]),
}


@pytest.mark.parametrize(("direction", "rows", "texts"), WRONG_PAIRS.values(), ids=WRONG_PAIRS)
def test_wrong_pairs_are_an_error_and_nothing_is_copied(direction, rows, texts):
    memory = Memory(device_blocks=10, host_blocks=5, size=8)
    layout = BlockLayout(
        10,
        5,
        3,
        [(g, memory.device.ctypes.data, 8, 8, memory.host.ctypes.data, 8) for g in (0, 1)],
        [(memory.device.ctypes.data, memory.device.nbytes)],
        [(memory.host.ctypes.data, memory.host.nbytes)],
    )
    before = memory.snapshot()
    for use in (layout.descriptors, lambda *args: layout.copy(*args, 1)):
        with pytest.raises(AddressError) as caught:
            use(direction, pairs(*rows))
        for text in texts:
            assert text in str(caught.value)
    memory.assert_unchanged(before)


def test_the_same_source_twice_is_allowed(layout):
    assert layout.descriptors("d2h", pairs((0, 1, 1), (0, 1, 3)))[0].tolist() == [DEVICE + 100] * 2


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (np.zeros((2, 2), np.uint32), ValueError, r"\(n, 3\), not \[2, 2\]"),
        (np.zeros(3, np.uint32), TypeError, "dimension"),
        (np.ones((1, 3), np.int64), TypeError, "int64.*uint32"),
        (np.ones((1, 3), np.float32), TypeError, "float32.*uint32"),
        ([[0, 1, 1]], TypeError, "list"),
    ],
    ids=["two columns", "one dimension", "int64", "float32", "a list"],
)
def test_pairs_of_a_wrong_shape_or_type_are_refused(layout, given, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        layout.descriptors("d2h", given)


@pytest.mark.parametrize("direction", ["", "D2H", "both"])
def test_a_direction_that_is_none_is_refused(layout, direction):
    for use in (layout.descriptors, lambda *args: layout.copy(*args, 1)):
        with pytest.raises(ValueError, match=f"\"{direction}\" is neither 'd2h' nor 'h2d'"):
            use(direction, pairs((0, 1, 1)))


# Device blocks 0..=9 of 10 bytes and host blocks 1..=5; the device has 100 bytes, the host 50.
WRONG_SEGMENTS = {
    "device starts early": ((0, 99, 10, 10, 500, 10), "segment 0.*device", [0x63]),
    "device ends late": ((0, 101, 10, 10, 500, 10), "segment 0.*device", [0x65, 0xC9]),
    "stride leads out": ((0, 100, 11, 10, 500, 10), "segment 0.*device", [0x64]),
    "host starts early": ((0, 100, 10, 10, 499, 10), "segment 0.*host", [0x1F3]),
    "host ends late": ((0, 100, 10, 10, 501, 10), "segment 0.*host", [0x227]),
    "host stride leads out": ((0, 100, 10, 10, 500, 11), "segment 0.*host", [0x1F4, 0x22A]),
    "blocks overlap": ((0, 100, 9, 10, 500, 10), "segment 0.*10 bytes.*stride of 9", []),
    "host blocks overlap": ((0, 100, 10, 10, 500, 8), "segment 0.*10 bytes.*stride of 8", []),
    "no bytes": ((0, 100, 10, 0, 500, 10), "segment 0.*0 bytes", []),
    "addresses overflow": ((0, 2**64 - 8, 10, 10, 500, 10), "segment 0.*do not add up", []),
    "strides overflow": ((0, 100, 2**63, 10, 500, 10), "segment 0.*do not add up", []),
}


@pytest.mark.parametrize(
    ("segment", "text", "addresses"), WRONG_SEGMENTS.values(), ids=WRONG_SEGMENTS
)
def test_a_segment_outside_its_region_is_refused(segment, text, addresses):
    regions = [(100, 100)], [(500, 50)]
    assert BlockLayout(10, 5, 1, [(0, 100, 10, 10, 500, 10)], *regions).block_bytes(0) == 10
    with pytest.raises(AddressError, match=text) as caught:
        BlockLayout(10, 5, 1, [segment], *regions)
    for address in addresses:
        assert hex(address) in str(caught.value)


def test_a_segment_may_not_span_two_regions():
    with pytest.raises(AddressError, match="segment 1"):
        BlockLayout(
            10,
            5,
            1,
            [(0, 100, 10, 5, 500, 5), (0, 150, 10, 5, 525, 5)],
            [(100, 100), (200, 100)],
            [(500, 50)],
        )


@pytest.mark.parametrize("group", [2, 2**16, 2**32 - 1])
def test_a_segment_of_a_group_that_the_layout_does_not_have_is_refused(group):
    with pytest.raises(AddressError, match=rf"group {group} is not .* 0\.\.2"):
        layout_of((group, DEVICE, 100, 100, HOST, 100), groups=2)


@pytest.mark.parametrize("stride", [48, 64])
@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_copies_move_the_blocks_named_and_nothing_else(stride, threads):
    memory = Memory(device_blocks=12, host_blocks=8, size=48, stride=stride)
    before_device, before_host = memory.device.copy(), memory.host.copy()
    out = pairs((0, 3, 1), (0, 4, 2), (0, 11, 8), (0, 7, 5))

    assert memory.layout.copy("d2h", out, threads) == 4 * 48
    expected = before_host.copy()
    expected[[0, 1, 7, 4]] = before_device[[3, 4, 11, 7], :48]
    np.testing.assert_array_equal(memory.host, expected)
    np.testing.assert_array_equal(memory.device, before_device)

    back = pairs((0, 1, 8), (0, 2, 1), (0, 9, 5))
    assert memory.layout.copy("h2d", back, threads) == 3 * 48
    after = before_device.copy()
    after[[1, 2, 9], :48] = before_device[[11, 3, 7], :48]
    np.testing.assert_array_equal(memory.device, after)
    np.testing.assert_array_equal(memory.host, expected)
    memory.assert_guards()


def test_a_large_copy_is_split_among_threads_to_the_byte():
    memory = Memory(device_blocks=30, host_blocks=29, size=300_001)
    ids = np.random.default_rng(1).permutation(np.arange(1, 30, dtype=np.uint32))
    out = np.stack([np.zeros(29, np.uint32), np.arange(1, 30, dtype=np.uint32), ids], axis=1)
    assert memory.layout.copy("d2h", out, 3) == 29 * 300_001
    np.testing.assert_array_equal(memory.host[ids - 1], memory.device[1:])
    memory.assert_guards()


def test_python_threads_may_copy_at_once():
    memory = Memory(device_blocks=257, host_blocks=256, size=40_000)
    shares = np.random.default_rng(2).permutation(np.arange(1, 257, dtype=np.uint32))
    shares = shares.reshape(8, 32)
    start = threading.Barrier(8)

    def store(share):
        start.wait()
        rows = np.stack([np.zeros_like(share), share, share[::-1]], axis=1)
        return memory.layout.copy("d2h", rows, 2)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(store, shares)) == [32 * 40_000] * 8
    for share in shares:
        np.testing.assert_array_equal(memory.host[share[::-1] - 1], memory.device[share])
    memory.assert_guards()


def test_a_copy_lets_other_python_threads_run():
    memory = Memory(device_blocks=33, host_blocks=32, size=1 << 20)
    ids = np.arange(1, 33, dtype=np.uint32)
    everything = np.stack([np.zeros_like(ids), ids, ids], axis=1)
    ran, gate = [], threading.Lock()
    gate.acquire()
    other = threading.Thread(target=lambda: (gate.acquire(), ran.append(True)))
    other.start()

    # From here on this thread keeps the GIL unless something gives it up of its own accord.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        gate.release()
        for _ in range(1000):
            memory.layout.descriptors("d2h", everything)
        assert not ran
        for _ in range(1000):
            memory.layout.copy("d2h", everything, 1)
            if ran:
                break
        assert ran
    finally:
        sys.setswitchinterval(interval)
        other.join()
