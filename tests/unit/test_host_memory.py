import pytest

from preempt_offload.host_memory import available_bytes, check_fits

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.fixture
def machine(tmp_path):
    """Writes what the kernel would tell below a root of its own, and returns that root."""

    def write(*, available_kib=None, limit=None, current=None, stat=None):
        (tmp_path / "proc").mkdir()
        cgroup = tmp_path / "sys/fs/cgroup"
        cgroup.mkdir(parents=True)
        if available_kib is not None:
            (tmp_path / "proc/meminfo").write_text(
                "MemTotal:       24618616 kB\n"
                "MemFree:          999999 kB\n"
                f"MemAvailable:   {available_kib} kB\n"
                "Buffers:          123456 kB\n"
            )
        for name, value in [("max", limit), ("current", current), ("stat", stat)]:
            if value is not None:
                (cgroup / f"memory.{name}").write_text(f"{value}\n")
        return tmp_path

    return write


def test_without_a_cgroup_it_is_what_the_kernel_estimates(machine):
    assert available_bytes(machine(available_kib=5 * MIB)) == 5 * GIB


def test_a_cgroup_without_a_limit_does_not_count(machine):
    root = machine(available_kib=5 * MIB, limit="max", current=4 * GIB)
    assert available_bytes(root) == 5 * GIB


def test_a_cgroup_leaves_its_limit_less_what_it_uses(machine):
    root = machine(available_kib=5 * MIB, limit=4 * GIB, current=3 * GIB)
    assert available_bytes(root) == GIB


def test_file_pages_that_the_kernel_drops_first_are_not_in_use(machine):
    stat = f"anon {GIB}\nfile {2 * GIB}\nactive_file {GIB}\ninactive_file {MIB}\nslab 5"
    root = machine(available_kib=5 * MIB, limit=4 * GIB, current=3 * GIB, stat=stat)
    assert available_bytes(root) == GIB + MIB


def test_the_machine_can_have_less_than_the_cgroup_allows(machine):
    root = machine(available_kib=2, limit=4 * GIB, current=GIB)
    assert available_bytes(root) == 2 * KIB


def test_a_limit_without_the_use_says_nothing(machine):
    assert available_bytes(machine(available_kib=7, limit=GIB)) == 7 * KIB


def test_it_is_unknown_where_the_kernel_tells_nothing(tmp_path):
    assert available_bytes(tmp_path) is None


def test_this_machine_tells():
    assert available_bytes() > 0


def test_what_fits_exactly_fits(machine):
    check_fits(5 * KIB, "some_key", root=machine(available_kib=5))


def test_what_does_not_fit_is_an_error_that_names_both_numbers_and_the_key(machine):
    root = machine(available_kib=3 * MIB)
    with pytest.raises(ValueError, match="lower some_key") as caught:
        check_fits(3 * GIB + 1, "some_key", root=root)
    assert f"{3 * GIB + 1} bytes (3.00 GiB)" in str(caught.value)
    assert f"only {3 * GIB} (3.00 GiB)" in str(caught.value)


def test_a_cgroup_over_its_limit_fits_nothing(machine):
    root = machine(available_kib=3, limit=GIB, current=GIB + 1)
    with pytest.raises(ValueError, match="lower some_key"):
        check_fits(1, "some_key", root=root)


def test_where_nothing_is_known_nothing_is_refused(tmp_path):
    check_fits(2**60, "some_key", root=tmp_path)


def test_every_rank_on_the_machine_counts(machine):
    root = machine(available_kib=3 * MIB)
    check_fits(GIB, "some_key", num_ranks=3, root=root)
    with pytest.raises(ValueError, match=r"4\.00 GiB\) for 4 rank\(s\).* lower some_key"):
        check_fits(GIB, "some_key", num_ranks=4, root=root)
