import importlib.util
from types import SimpleNamespace

import pytest

from preempt_offload import compat


def test_this_environment_has_no_vllm():
    assert importlib.util.find_spec("vllm") is None


@pytest.mark.parametrize(
    "version", ["0.23.0", "0.23.0+cpu", "0.23.0rc2", "0.23.0.post1", "0.32.0", "0.32.0+cpu"]
)
def test_a_tested_version_passes_in_silence(log, version):
    compat.check_version(version)
    assert not log.records


@pytest.mark.parametrize("version", ["0.23.1", "0.23.17.dev3+gabc", "0.24.0", "0.28.3", "0.32.1"])
def test_an_untested_version_in_range_warns(log, version):
    compat.check_version(version)
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert "untested" in record.getMessage()
    assert version in record.getMessage()


@pytest.mark.parametrize("version", ["0.22.9", "0.9.2", "0.33.0", "0.33.0rc1", "1.0.0", "1.23.0"])
def test_a_version_out_of_range_is_refused_with_the_range(version):
    with pytest.raises(ImportError, match=r"supports vLLM 0\.23 to 0\.32; this is") as caught:
        compat.check_version(version)
    assert version in str(caught.value)


@pytest.mark.parametrize("version", ["dev", "", "v0.23.0", "0.23"])
def test_a_version_that_is_none_warns(log, version):
    compat.check_version(version)
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert repr(version) in record.getMessage()


# The first two as vLLM 0.23 knows requests, the others as 0.32 does.
@pytest.mark.parametrize(
    ("counts", "under_way"),
    [
        ({"num_output_placeholders": 0}, False),
        ({"num_output_placeholders": 1}, True),
        ({"num_output_placeholders": 0, "num_stale_output_tokens": 0}, False),
        ({"num_output_placeholders": 2, "num_stale_output_tokens": 0}, True),
        ({"num_output_placeholders": 0, "num_stale_output_tokens": 3}, True),
        (
            {
                "num_output_placeholders": 0,
                "num_stale_output_tokens": 3,
                "drop_stale_output": True,
            },
            False,
        ),
    ],
)
def test_outputs_are_under_way_if_they_will_be_delivered(counts, under_way):
    request = SimpleNamespace(**({"drop_stale_output": False} | counts))
    assert compat.outputs_under_way(request) is under_way


def test_the_offload_connector_is_found_by_its_hook():
    hook = SimpleNamespace(update_state_before_preempt=None)
    other = SimpleNamespace()
    assert compat.find_offload_connector(hook) is hook
    assert compat.find_offload_connector(other) is None
    assert compat.find_offload_connector(None) is None
    multi = SimpleNamespace(_connectors=[other, hook])
    assert compat.find_offload_connector(multi) is hook
    assert compat.find_offload_connector(SimpleNamespace(_connectors=[other, multi])) is hook
    assert compat.find_offload_connector(SimpleNamespace(_connectors=[other])) is None


class Scheduler:
    """A scheduler of somebody else's."""


@pytest.mark.parametrize(
    ("chosen", "advised"),
    [
        (None, True),
        ("vllm.v1.core.sched.scheduler.Scheduler", True),
        ("vllm.v1.core.sched.async_scheduler.AsyncScheduler", True),
        ("preempt_offload.RecomputeScheduler", False),
        ("vllm_ascend.core.recompute_scheduler.RecomputeScheduler", False),
        (Scheduler, False),
    ],
)
def test_advice_is_for_those_whose_scheduler_never_asks(chosen, advised):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=chosen))
    advice = compat.scheduler_advice(config)
    assert (advice is not None) is advised
    if advised:
        assert "--scheduler-cls preempt_offload.RecomputeScheduler" in advice


def test_a_scheduler_class_of_vllm_is_advised_against_too():
    stock = type("Scheduler", (), {"__module__": "vllm.v1.core.sched.scheduler"})
    config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=stock))
    assert "--scheduler-cls" in compat.scheduler_advice(config)


def test_under_vllm_ascend_the_advice_is_its_own_switch_in_both_places(monkeypatch, tmp_path):
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None))
    assert (
        '--additional-config \'{"recompute_scheduler_enable": true, '
        '"scheduler_config": {"recompute_scheduler_enable": true}}\''
    ) in compat.scheduler_advice(config)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([{"size": 1000}, {"size": 600}], 160),
        ([{"size": 1000, "block_stride": 0}, {"size": 600, "block_stride": 0}], 160),
        ([{"size": 1000, "block_stride": 40}, {"size": 1000, "block_stride": 60}], 100),
        ([{"size": 1000, "block_stride": 100}, {"size": 500, "block_stride": 0}], 150),
    ],
    ids=["an allocation each", "unpacked", "places in one allocation", "both"],
)
def test_bytes_of_a_block_count_every_allocation_once(tensors, expected):
    tensors = [SimpleNamespace(**tensor) for tensor in tensors]
    config = SimpleNamespace(kv_cache_tensors=tensors, num_blocks=10)
    assert compat.block_bytes(config) == expected


@pytest.mark.parametrize(
    ("engine_id", "size", "hidden"),
    [
        ("8f1d_dp0", 1, True),
        ("8f1d_dp12", 1, True),
        ("8f1d_dp0", 2, False),
        ("8f1d", 1, False),
        ("8f1d_dp0_x", 1, False),
        (None, 1, False),
    ],
)
def test_a_hidden_data_parallel_size_is_seen_by_the_engine_id(engine_id, size, hidden):
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
        parallel_config=SimpleNamespace(data_parallel_size=size),
    )
    assert compat.hides_data_parallel_size(config) is hidden
