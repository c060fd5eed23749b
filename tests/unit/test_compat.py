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


def test_the_offload_connector_is_found_among_others_that_have_its_hooks():
    hooks = {"update_state_before_preempt": None, "has_preempted_request": None}
    ours = SimpleNamespace(scheduler_cooperates=None, **hooks)
    other = SimpleNamespace(**hooks)
    assert compat.find_offload_connector(ours) is ours
    assert compat.find_offload_connector(other) is None
    assert compat.find_offload_connector(None) is None
    multi = SimpleNamespace(_connectors=[other, ours], **hooks)
    assert compat.find_offload_connector(multi) is ours
    assert compat.find_offload_connector(SimpleNamespace(_connectors=[other, multi])) is ours
    assert compat.find_offload_connector(SimpleNamespace(_connectors=[other])) is None


@pytest.mark.parametrize(
    ("local_world_size", "local_engines", "ranks"), [(1, 1, 1), (8, 2, 16), (4, 0, 4)]
)
def test_ranks_on_this_machine(local_world_size, local_engines, ranks):
    parallel = SimpleNamespace(
        local_world_size=local_world_size, data_parallel_size_local=local_engines
    )
    assert compat.local_ranks(SimpleNamespace(parallel_config=parallel)) == ranks
