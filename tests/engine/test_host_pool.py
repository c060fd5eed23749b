"""The host pool's memory: how much of it, where, and what is said of it."""

import itertools
import os
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from preempt_offload import host_memory, host_pool
from preempt_offload.host_pool import ALIGNMENT, allocate_pinned, chunks_of, cpus_near, pci_address

CPU, NPU = torch.device("cpu"), torch.device("meta")
MIB = 2**20


def sizes(rng):
    return [
        rng.choice((1, 5, 4096, 10_000, 1 << rng.randrange(30))) for _ in range(rng.randrange(40))
    ]


@pytest.mark.parametrize("seed", range(50))
def test_chunks_are_powers_of_two_that_hold_every_column_in_its_order(seed):
    columns = sizes(random.Random(seed))
    chunks = chunks_of(columns)
    assert list(itertools.chain(*(inside for _, inside in chunks))) == columns
    for capacity, inside in chunks:
        assert capacity.bit_count() == 1
        assert sum(-(-column // ALIGNMENT) * ALIGNMENT for column in inside) <= capacity
        assert inside


@pytest.mark.parametrize(("layers", "gib"), [(61, 37), (36, 17), (80, 100), (32, 16.5)])
def test_many_columns_take_little_more_than_they_need(layers, gib):
    column = int(gib * 2**30 / layers / 2)
    total = sum(capacity for capacity, _ in chunks_of([column] * 2 * layers))
    # Where one allocation would take up to twice as much.
    assert total < 1.04 * gib * 2**30 + 2 * column


def test_columns_are_memory_of_their_own_and_aligned():
    rng = random.Random(1)
    wanted = [rng.randrange(1, 20_000) for _ in range(30)]
    columns = allocate_pinned(wanted, CPU, None)
    assert [column.nbytes for column in columns] == wanted
    for i, column in enumerate(columns):
        column.fill_(i)
    assert all((column == i).all() for i, column in enumerate(columns))
    assert not any(column.data_ptr() % 64 for column in columns)


def test_no_columns_take_no_memory():
    assert allocate_pinned([], CPU, None) == []


def test_what_was_allocated_is_logged(log):
    allocate_pinned([3 * MIB, MIB // 2], CPU, None)
    (record,) = log.records
    assert record.getMessage().startswith("Allocated 0.004 GiB of host memory for 0.003 GiB in 0.")


def test_a_pool_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    # It needs 4 MiB of powers of two for 3.5 MiB.
    monkeypatch.setattr(host_memory, "available_bytes", lambda root: 4 * MIB)
    allocate_pinned([3 * MIB + MIB // 2], CPU, None)
    monkeypatch.setattr(host_memory, "available_bytes", lambda root: 4 * MIB - 1)
    with pytest.raises(
        ValueError, match=rf"need {4 * MIB} bytes .* lower .*cpu_bytes_to_use_per_r"
    ):
        allocate_pinned([3 * MIB + MIB // 2], CPU, None)


# ---- a device that is not there: what is asked of torch, and what is said when it fails ----


class Device:
    """The module of a device at an address on the bus."""

    def __init__(self, **ids):
        self.properties = SimpleNamespace(**ids)

    def get_device_properties(self, device):
        return self.properties


@pytest.fixture
def pinned(monkeypatch):
    """Sizes of what torch was asked to pin; the memory itself is plain."""
    asked, empty = [], torch.empty

    def pin(size, *, dtype, pin_memory):
        assert pin_memory
        asked.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pin)
    return asked


def test_memory_for_a_device_is_pinned_in_powers_of_two(pinned, log):
    allocate_pinned([MIB] * 3, NPU, Device())
    assert pinned == [2 * MIB, MIB]
    assert "Pinned 0.003 GiB of host memory for 0.003 GiB" in log.text


def test_memory_that_cannot_be_pinned_is_an_error_that_says_what_to_change(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match=rf"could not pin {MIB} bytes .* only 0; lower the host"):
        allocate_pinned([MIB], NPU, Device())


def test_a_long_allocation_tells_how_far_it_is(monkeypatch, pinned, log):
    told = threading.Event()
    monkeypatch.setattr(host_pool, "SECONDS_BETWEEN_LINES", 0.001)
    monkeypatch.setattr(log, "handle", lambda record: (log.emit(record), told.set()))
    pin = torch.empty

    def pin_slowly(*args, **kwargs):
        # Until a line has been logged since this began.
        told.clear()
        assert told.wait(60)
        return pin(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", pin_slowly)
    allocate_pinned([2**29] * 3, NPU, Device())
    assert "Allocating the host pool: 0.0 of 1.5 GiB after 0 s" in log.text
    assert "Allocating the host pool: 1.0 of 1.5 GiB" in log.text


def test_where_a_device_is_on_the_bus():
    module = Device(pci_domain_id=0, pci_bus_id=0x81, pci_device_id=0)
    assert pci_address(NPU, module) == "0000:81:00.0"
    assert pci_address(NPU, Device(name="Ascend910")) is None
    assert pci_address(CPU, None) is None


def test_the_cpus_near_a_device(tmp_path):
    assert cpus_near("0000:81:00.0", tmp_path) == set()
    folder = tmp_path / "sys/bus/pci/devices/0000:81:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("0-2,8,10-11\n")
    assert cpus_near("0000:81:00.0", tmp_path) == {0, 1, 2, 8, 10, 11}
    (folder / "local_cpulist").write_text("\n")
    assert cpus_near("0000:81:00.0", tmp_path) == set()


def test_memory_is_allocated_on_cpus_near_the_device(monkeypatch, pinned):
    before = os.sched_getaffinity(0)
    near = {min(before)}
    monkeypatch.setattr(host_pool, "cpus_near", lambda address: {*near, 100_000})
    pin, during = torch.empty, []
    monkeypatch.setattr(
        torch, "empty", lambda *a, **kw: (during.append(os.sched_getaffinity(0)), pin(*a, **kw))[1]
    )
    allocate_pinned([MIB], NPU, Device(pci_domain_id=0, pci_bus_id=1, pci_device_id=0))
    assert during == [near]
    assert os.sched_getaffinity(0) == before
    monkeypatch.setattr(host_pool, "cpus_near", lambda address: {100_000})
    allocate_pinned([MIB], NPU, Device(pci_domain_id=0, pci_bus_id=1, pci_device_id=0))
    assert during == [near, before]
