import dataclasses
import re

import pytest

from preempt_offload.config import HostBudget, OffloadConfig

GIB = 2**30
KEYS = {
    "cpu_bytes_to_use_per_rank": None,
    "cpu_bytes_to_use": None,
    "offload_host_memory_ratio": 1.0,
    "enable_offload_prefix_caching": False,
    "host_copy_threads": 2,
    "copy_method": "auto",
}
BYTES = ["cpu_bytes_to_use_per_rank", "cpu_bytes_to_use"]
WHOLE = [*BYTES, "host_copy_threads"]
NUMBERS = [*WHOLE, "offload_host_memory_ratio"]


def budget(extra, *, block_bytes=1000, num_device_blocks=8, num_ranks=1):
    return OffloadConfig.from_extra_config(extra).budget(
        block_bytes=block_bytes, num_device_blocks=num_device_blocks, num_ranks=num_ranks
    )


def test_the_keys_and_their_defaults():
    assert dataclasses.asdict(OffloadConfig.from_extra_config({})) == KEYS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu_bytes_to_use_per_rank", 17179869184),
        ("cpu_bytes_to_use", 1),
        ("offload_host_memory_ratio", 2),
        ("offload_host_memory_ratio", 0.25),
        ("enable_offload_prefix_caching", True),
        ("host_copy_threads", 7),
        ("copy_method", "torch"),
    ],
)
def test_a_key_is_taken_and_the_others_keep_their_defaults(log, key, value):
    assert dataclasses.asdict(OffloadConfig.from_extra_config({key: value})) == KEYS | {key: value}
    assert not log.records


@pytest.mark.parametrize("value", ["npu", "", 1, None])
def test_a_copy_method_that_does_not_exist_is_refused(value):
    with pytest.raises(ValueError, match=r"copy_method must be one of .*'ascend'"):
        OffloadConfig.from_extra_config({"copy_method": value})


@pytest.mark.parametrize("key", BYTES)
def test_null_bytes_are_as_not_given(key):
    config = OffloadConfig.from_extra_config({key: None, "offload_host_memory_ratio": 0.5})
    assert dataclasses.asdict(config) == KEYS | {"offload_host_memory_ratio": 0.5}


@pytest.mark.parametrize("key", ["offload_host_memory_ratio", "host_copy_threads"])
def test_null_is_no_number(key):
    with pytest.raises(ValueError, match=f"{key} must be a .*number, not None"):
        OffloadConfig.from_extra_config({key: None})


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", ["16", "16GiB", [16], {}, True, False])
def test_what_is_no_number_is_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} must be a .*number, not {re.escape(repr(value))}"):
        OffloadConfig.from_extra_config({key: value})


@pytest.mark.parametrize("key", WHOLE)
def test_fractions_of_whole_things_are_refused(key):
    with pytest.raises(ValueError, match=rf"{key} must be a whole number, not 2\.0"):
        OffloadConfig.from_extra_config({key: 2.0})


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [0, -1])
def test_what_is_not_above_zero_is_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} must be a .*number above zero, not {value}"):
        OffloadConfig.from_extra_config({key: value})


@pytest.mark.parametrize("value", [0.0, -0.5, float("inf"), float("-inf"), float("nan")])
def test_a_ratio_is_finite_and_above_zero(value):
    with pytest.raises(ValueError, match=f"offload_host_memory_ratio .* above zero, not {value}"):
        OffloadConfig.from_extra_config({"offload_host_memory_ratio": value})


@pytest.mark.parametrize("value", [1, 0, None, "true"])
def test_prefix_caching_is_true_or_false(value):
    text = f"enable_offload_prefix_caching must be true or false, not {value!r}"
    with pytest.raises(ValueError, match=text):
        OffloadConfig.from_extra_config({"enable_offload_prefix_caching": value})


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("cpu_bytes_per_rank", "cpu_bytes_to_use_per_rank"),
        ("cpu_byte_to_use", "cpu_bytes_to_use"),
        ("host_memory_ratio", "offload_host_memory_ratio"),
        ("enable_prefix_caching", "enable_offload_prefix_caching"),
        ("copy_threads", "host_copy_threads"),
        ("CPU_BYTES_TO_USE", "cpu_bytes_to_use"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(wrong, near):
    with pytest.raises(ValueError, match=f"unknown key '{wrong}'.*did you mean '{near}'") as caught:
        OffloadConfig.from_extra_config({wrong: 1})
    for key in KEYS:
        assert key in str(caught.value)


@pytest.mark.parametrize("wrong", ["", "zzz", 5])
def test_an_unknown_key_like_none_of_ours_still_lists_them(wrong):
    with pytest.raises(ValueError, match=f"unknown key {wrong!r}") as caught:
        OffloadConfig.from_extra_config({wrong: 1})
    for key in KEYS:
        assert key in str(caught.value)


def test_kv_load_failure_policy_is_told_where_it_belongs():
    with pytest.raises(ValueError, match=r"kv_load_failure_policy .* top level") as caught:
        OffloadConfig.from_extra_config({"kv_load_failure_policy": "recompute"})
    assert "unknown key" not in str(caught.value)


def test_bytes_per_rank_win_over_bytes_with_a_warning(log):
    extra = {"cpu_bytes_to_use_per_rank": 3000, "cpu_bytes_to_use": 9000}
    result = budget(extra | {"offload_host_memory_ratio": 0.5})
    assert (result.num_blocks, result.source) == (3, "cpu_bytes_to_use_per_rank")
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert "cpu_bytes_to_use_per_rank=3000 and cpu_bytes_to_use=9000" in record.getMessage()
    assert "the former wins" in record.getMessage()


def test_bytes_win_over_the_ratio(log):
    result = budget({"cpu_bytes_to_use": 9000, "offload_host_memory_ratio": 0.5})
    assert (result.num_blocks, result.source) == (9, "cpu_bytes_to_use")
    assert not log.records


@pytest.mark.parametrize("ratio", [0.25, 1, 2])
def test_the_ratio_counts_host_blocks_per_device_block(ratio):
    result = budget({"offload_host_memory_ratio": ratio}, num_device_blocks=100, num_ranks=16)
    assert (result.num_blocks, result.source) == (100 * ratio, "offload_host_memory_ratio")


def test_the_ratio_is_one_if_nothing_is_given():
    assert budget({}, num_device_blocks=77).num_blocks == 77


def test_bytes_are_divided_by_all_ranks():
    # DP2TP8 with 16 GiB: 8 GiB for each DP rank, over its 8 cards.
    result = budget({"cpu_bytes_to_use": 16 * GIB}, block_bytes=2**20, num_ranks=2 * 8)
    assert result.bytes_per_rank == GIB
    assert result.num_blocks == 1024


def test_bytes_per_rank_are_not_divided():
    result = budget({"cpu_bytes_to_use_per_rank": GIB}, block_bytes=2**20, num_ranks=16)
    assert result.bytes_per_rank == GIB


def test_a_rank_never_uses_more_than_it_may():
    result = budget({"cpu_bytes_to_use": 10_000}, block_bytes=300, num_ranks=3)
    assert result.num_blocks == 11
    assert result.bytes_per_rank == 3300


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        ({"cpu_bytes_to_use_per_rank": 999}, ["cpu_bytes_to_use_per_rank", "999 bytes"]),
        ({"cpu_bytes_to_use": 3999}, ["cpu_bytes_to_use ", "3999 bytes over 4 rank"]),
        ({"offload_host_memory_ratio": 0.12}, ["offload_host_memory_ratio", "0.12 of 8 device"]),
    ],
)
def test_less_than_one_block_is_an_error_that_names_the_numbers(extra, texts):
    with pytest.raises(ValueError, match=r"less than one KV block per rank.* 1000 bytes") as caught:
        budget(extra, num_ranks=4)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {"cpu_bytes_to_use_per_rank": 1000},
        {"cpu_bytes_to_use": 4000},
        {"offload_host_memory_ratio": 0.125},
    ],
)
def test_exactly_one_block_is_enough(extra):
    assert budget(extra, num_ranks=4).num_blocks == 1


@pytest.mark.parametrize(
    "extra",
    [
        {"offload_host_memory_ratio": 1e308},
        {"offload_host_memory_ratio": 1e300},
        {"cpu_bytes_to_use_per_rank": 10**400},
    ],
    ids=["beyond a float", "beyond an id", "beyond all"],
)
def test_more_blocks_than_can_be_counted_are_an_error(extra):
    with pytest.raises(ValueError, match=next(iter(extra))):
        budget(extra)


def test_the_text_of_a_budget():
    text = str(HostBudget(1024, 2**20, 16, "cpu_bytes_to_use"))
    assert text == (
        "1024 host blocks of 1048576 bytes per rank (1.000 GiB), 16.000 GiB over 16 rank(s), "
        "from cpu_bytes_to_use"
    )
