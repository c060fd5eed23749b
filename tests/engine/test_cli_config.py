"""What ``preempt-offload config`` prints is what the real vLLM takes."""

import shlex

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from preempt_offload import AsyncRecomputeScheduler, PreemptOffloadConnector, RecomputeScheduler
from preempt_offload.cli import main


@pytest.fixture
def engine_args(capsys, model):
    def parse(*command):
        assert main(["config", *command]) == 0
        flags = capsys.readouterr().out.replace("\\\n", "")
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = ["--model", str(model), "--skip-tokenizer-init", *shlex.split(flags)]
        return EngineArgs.from_cli_args(parser.parse_args(args))

    return parse


def test_vllm_takes_the_flags_for_vllm(engine_args):
    args = engine_args("vllm", "--bytes-per-rank", "1GiB")
    config = args.create_engine_config()
    assert config.scheduler_config.get_scheduler_cls() in (
        RecomputeScheduler,
        AsyncRecomputeScheduler,
    )
    transfer = config.kv_transfer_config
    assert KVConnectorFactory.get_connector_class(transfer) is PreemptOffloadConnector
    assert transfer.kv_connector_extra_config == {"cpu_bytes_to_use_per_rank": 2**30}
    assert transfer.kv_load_failure_policy == "recompute"


def test_vllm_takes_the_flags_for_a_decode_node(engine_args):
    args = engine_args("ascend-decode", "--ratio", "2")
    assert args.additional_config["recompute_scheduler_enable"] is True
    children = args.kv_transfer_config.kv_connector_extra_config["connectors"]
    assert [child["kv_connector"] for child in children] == [
        "MooncakeConnectorV1",
        "PreemptOffloadConnector",
    ]
