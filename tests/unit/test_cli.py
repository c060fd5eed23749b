import json
import subprocess

import pytest

import preempt_offload
from preempt_offload.cli import main


@pytest.fixture
def flags(capsys):
    """The flags that ``preempt-offload config`` prints, by name, as a shell reads them."""

    def run(*args):
        assert main(["config", *args]) == 0
        words = subprocess.run(
            ["sh", "-c", "printf '%s\\0' " + capsys.readouterr().out],
            capture_output=True,
            check=True,
        ).stdout.decode()
        *words, _ = words.split("\0")
        assert not len(words) % 2
        return dict(zip(words[::2], words[1::2], strict=True))

    return run


def test_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"{preempt_offload.__version__}\n"


def test_flags_for_vllm(flags):
    found = flags("vllm")
    assert set(found) == {"--scheduler-cls", "--kv-transfer-config"}
    assert found["--scheduler-cls"] == "preempt_offload.RecomputeScheduler"
    assert json.loads(found["--kv-transfer-config"]) == {
        "kv_connector": "PreemptOffloadConnector",
        "kv_connector_module_path": "preempt_offload",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {},
    }


def test_flags_for_a_decode_node_of_vllm_ascend(flags):
    found = flags("ascend-decode")
    assert set(found) == {"--additional-config", "--kv-transfer-config"}
    # Releases up to 0.24 read the one place, later ones the other.
    assert json.loads(found["--additional-config"]) == {
        "recompute_scheduler_enable": True,
        "scheduler_config": {"recompute_scheduler_enable": True},
    }
    transfer = json.loads(found["--kv-transfer-config"])
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("MultiConnector", "kv_consumer")
    pull, ours = transfer["kv_connector_extra_config"]["connectors"]
    assert pull["kv_connector"] == "MooncakeConnectorV1"
    assert ours["kv_connector"] == "PreemptOffloadConnector"
    assert {child["kv_role"] for child in (pull, ours)} == {"kv_consumer"}
    assert "kv_load_failure_policy" not in ours


@pytest.mark.parametrize(
    ("args", "extra"),
    [
        (["--bytes-per-rank", "17179869184"], {"cpu_bytes_to_use_per_rank": 2**34}),
        (["--bytes-per-rank", "16GiB"], {"cpu_bytes_to_use_per_rank": 2**34}),
        (["--bytes-per-rank", "3 mib"], {"cpu_bytes_to_use_per_rank": 3 * 2**20}),
        (["--ratio", "0.5"], {"offload_host_memory_ratio": 0.5}),
    ],
)
def test_a_budget_is_passed_on(flags, args, extra):
    transfer = json.loads(flags("vllm", *args)["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"] == extra


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["config"],
        ["config", "cuda"],
        ["config", "vllm", "--bytes-per-rank", "0"],
        ["config", "vllm", "--bytes-per-rank", "16GB"],
        ["config", "vllm", "--bytes-per-rank", "-1"],
        ["config", "vllm", "--ratio", "0"],
        ["config", "vllm", "--ratio", "nan"],
        ["config", "vllm", "--ratio", "1", "--bytes-per-rank", "1"],
        ["demo", "--requests", "3"],
    ],
)
def test_what_makes_no_sense_is_refused(capsys, args):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: preempt-offload")
