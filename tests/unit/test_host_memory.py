import os
import resource
from types import SimpleNamespace

import pytest

from preempt_offload import host_memory
from preempt_offload.host_memory import (
    available_bytes,
    check_fits,
    check_locked_memory,
    check_shared_memory,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
NO_LIMIT_IN_V1 = 0x7FFFFFFFFFFFF000


class Machine:
    """Writes what the kernel would tell below a root of its own."""

    def __init__(self, root):
        self.root = root

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def memory(self, available_kib):
        self.write(
            "proc/meminfo",
            "MemTotal:       24618616 kB\n"
            "MemFree:          999999 kB\n"
            f"MemAvailable:   {available_kib} kB\n"
            "Buffers:          123456 kB",
        )

    def cgroup(self, limit, use=None, stat="", folder=""):
        folder = f"sys/fs/cgroup/{folder}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.stat", stat)
        if use is not None:
            self.write(f"{folder}/memory.current", use)

    def cgroup_v1(self, limit, use, stat="", folder=""):
        folder = f"sys/fs/cgroup/memory/{folder}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", use)
        self.write(f"{folder}/memory.stat", stat)

    def is_in(self, *lines):
        self.write("proc/self/cgroup", "\n".join(lines))


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.memory(5 * MIB)
    return machine


def test_without_a_cgroup_it_is_what_the_kernel_estimates(machine):
    assert available_bytes(machine.root) == 5 * GIB


def test_a_cgroup_without_a_limit_does_not_count(machine):
    machine.cgroup("max", 4 * GIB)
    assert available_bytes(machine.root) == 5 * GIB


def test_a_cgroup_leaves_its_limit_less_what_it_uses(machine):
    machine.cgroup(4 * GIB, 3 * GIB)
    assert available_bytes(machine.root) == GIB


def test_file_pages_that_the_kernel_drops_first_are_not_in_use(machine):
    machine.cgroup(
        4 * GIB,
        3 * GIB,
        f"anon {GIB}\nfile {2 * GIB}\nactive_file {GIB}\ninactive_file {MIB}\nslab 5",
    )
    assert available_bytes(machine.root) == GIB + MIB


def test_the_machine_can_have_less_than_the_cgroup_allows(machine):
    machine.memory(2)
    machine.cgroup(4 * GIB, GIB)
    assert available_bytes(machine.root) == 2 * KIB


def test_a_limit_without_the_use_says_nothing(machine):
    machine.cgroup(GIB)
    assert available_bytes(machine.root) == 5 * GIB


@pytest.mark.parametrize("tightest", ["a/b/c", "a/b", "a", ""])
def test_the_tightest_of_nested_cgroups_counts(machine, tightest):
    machine.is_in("0::/a/b/c")
    for folder in ("a/b/c", "a/b", "a", "", "a/other"):
        machine.cgroup((3 if folder == tightest else 4) * GIB, GIB, folder=folder)
    machine.cgroup(0, 0, folder="a/other")
    assert available_bytes(machine.root) == 2 * GIB


def test_cgroups_of_version_1(machine):
    machine.is_in("12:pids:/a", "9:hugetlb,memory:/a/b", "0::/elsewhere")
    machine.cgroup_v1(NO_LIMIT_IN_V1, GIB, folder="a/b")
    assert available_bytes(machine.root) == 5 * GIB
    machine.cgroup_v1(3 * GIB, GIB, f"inactive_file 7\ntotal_inactive_file {KIB}", folder="a")
    assert available_bytes(machine.root) == 2 * GIB + KIB
    machine.cgroup_v1(2 * GIB, GIB)
    assert available_bytes(machine.root) == GIB


def test_in_a_container_the_path_may_be_that_of_the_host(machine):
    machine.is_in("4:memory:/docker/0a1b2c", "0::/../system.slice")
    machine.cgroup_v1(2 * GIB, GIB)
    assert available_bytes(machine.root) == GIB


def test_it_is_unknown_where_the_kernel_tells_nothing(tmp_path):
    assert available_bytes(tmp_path) is None


def test_this_machine_tells():
    assert available_bytes() > 0


def test_what_fits_exactly_fits(machine):
    machine.memory(5)
    check_fits(5 * KIB, "some_key", root=machine.root)


def test_what_does_not_fit_is_an_error_that_names_both_numbers_and_the_key(machine):
    machine.memory(3 * MIB)
    with pytest.raises(ValueError, match="lower some_key") as caught:
        check_fits(3 * GIB + 1, "some_key", root=machine.root)
    assert f"{3 * GIB + 1} bytes (3.00 GiB)" in str(caught.value)
    assert f"only {3 * GIB} bytes (3.00 GiB)" in str(caught.value)


def test_a_cgroup_over_its_limit_fits_nothing(machine):
    machine.cgroup(GIB, GIB + 1)
    with pytest.raises(ValueError, match="lower some_key"):
        check_fits(1, "some_key", root=machine.root)


def test_where_nothing_is_known_nothing_is_refused(tmp_path):
    check_fits(2**60, "some_key", root=tmp_path)


def test_every_rank_on_the_machine_counts(machine):
    machine.memory(3 * MIB)
    check_fits(GIB, "some_key", num_ranks=3, root=machine.root)
    with pytest.raises(ValueError, match=r"4\.00 GiB\) for 4 rank\(s\).* lower some_key"):
        check_fits(GIB, "some_key", num_ranks=4, root=machine.root)


def test_a_rank_that_comes_late_does_not_count_the_others_twice(machine):
    machine.memory(3 * MIB)
    check_fits(2 * GIB, "some_key", num_ranks=4, at_start=8 * GIB, root=machine.root)
    with pytest.raises(ValueError, match=r"8\.00 GiB\) for 4 rank\(s\), but only .*7\.00 GiB"):
        check_fits(2 * GIB, "some_key", num_ranks=4, at_start=7 * GIB, root=machine.root)
    with pytest.raises(ValueError, match=r"4\.00 GiB\) for 1 rank\(s\), but only .*3\.00 GiB"):
        check_fits(4 * GIB, "some_key", num_ranks=2, at_start=8 * GIB, root=machine.root)


def test_what_was_available_at_the_start_is_kept(monkeypatch):
    first = host_memory.available_at_start()
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    assert host_memory.available_at_start() == first


# ---- /dev/shm and locked memory ----


def test_pinned_pools_must_fit_into_shared_memory(machine):
    (machine.root / "dev/shm").mkdir(parents=True)
    found = os.statvfs(machine.root)
    size = found.f_blocks * found.f_frsize
    check_shared_memory(size // 4, "some_key", num_ranks=4, root=machine.root)
    with pytest.raises(ValueError, match=r"for 4 rank\(s\), but /dev/shm has only") as caught:
        check_shared_memory(size // 4 + 1, "some_key", num_ranks=4, root=machine.root)
    needed = 4 * (size // 4 + 1)
    assert f"need {needed} bytes" in str(caught.value)
    assert f"only {size} bytes" in str(caught.value)
    assert f"--shm-size={-(-needed // GIB)}g" in str(caught.value)
    assert "lower some_key" in str(caught.value)


def test_without_shared_memory_nothing_is_refused(tmp_path):
    check_shared_memory(2**60, "some_key", root=tmp_path)


@pytest.fixture
def limit(monkeypatch, machine):
    """Sets the limit on locked memory, and the capabilities of this process."""

    def set_limit(num_bytes, capabilities="0000000000000000"):
        machine.write("proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities}\n")
        fake = SimpleNamespace(
            RLIMIT_MEMLOCK=resource.RLIMIT_MEMLOCK,
            RLIM_INFINITY=resource.RLIM_INFINITY,
            getrlimit=lambda which: {resource.RLIMIT_MEMLOCK: (num_bytes, 2**60)}[which],
        )
        monkeypatch.setattr(host_memory, "resource", fake)
        return machine.root

    return set_limit


def test_pinned_pools_must_be_within_the_limit_on_locked_memory(limit):
    with pytest.raises(ValueError, match="--ulimit memlock=-1, or lower some_key") as caught:
        check_locked_memory(GIB, "some_key", root=limit(64 * KIB))
    assert f"needs {GIB} bytes (1.00 GiB)" in str(caught.value)
    assert f"RLIMIT_MEMLOCK is {64 * KIB} bytes" in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "capabilities"),
    [
        (GIB, "0000000000000000"),
        (resource.RLIM_INFINITY, "0000000000000000"),
        # CAP_IPC_LOCK, alone and in a container that is privileged.
        (0, "0000000000004000"),
        (0, "000001ffffffffff"),
    ],
)
def test_nothing_is_refused_where_the_limit_does_not_matter(limit, num_bytes, capabilities):
    check_locked_memory(GIB, "some_key", root=limit(num_bytes, capabilities))


def test_other_capabilities_do_not_lift_it(limit):
    with pytest.raises(ValueError, match="RLIMIT_MEMLOCK is 0 bytes"):
        check_locked_memory(GIB, "some_key", root=limit(0, "000001ffffffbfff"))
