"""Where vllm-ascend reads the switch of its recompute scheduler from: its own config tells."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_ascend.ascend_config import AscendConfig
from vllm_ascend.core.recompute_scheduler import RecomputeSchedulerConfig

import ascend_image
from preempt_offload import cli, compat

ROOT = Path(__file__).parents[3]
SWITCH = {"recompute_scheduler_enable": True}
NESTED = {"scheduler_config": SWITCH}


def additional_config(text):
    """What a command in a text gives vllm-ascend."""
    return json.loads(re.search(r"--additional-config '(.*?)'", text, re.DOTALL)[1])


def is_on(config):
    """Whether vllm-ascend uses its recompute scheduler."""
    made = AscendConfig(config)
    where = made if hasattr(made, "recompute_scheduler_enable") else made.scheduler_config
    return where.recompute_scheduler_enable


@pytest.fixture
def decode_node(vllm_config):
    def make(additional_config, **engine_args):
        config = vllm_config(transfer={"kv_role": "kv_consumer"}, **engine_args)
        config.additional_config = additional_config
        return config

    return make


def test_off_by_default(decode_node):
    assert not is_on(decode_node({}))


def test_the_switch_at_the_top_is_read(decode_node):
    assert is_on(decode_node(SWITCH))


def test_the_nested_switch_alone_is_ignored_by_the_image_of_0_23(decode_node):
    assert is_on(decode_node(NESTED)) == (version("vllm-ascend") != "0.23.0")


@pytest.mark.parametrize(
    "page", ["README.md", "README.zh-CN.md", "docs/ascend.md", "examples/ascend/decode_node.sh"]
)
def test_what_we_document_is_read(decode_node, page):
    assert is_on(decode_node(additional_config((ROOT / page).read_text())))


def test_what_we_print_and_advise_is_read(decode_node, capsys):
    cli.main(["config", "ascend-decode"])
    for text in (capsys.readouterr().out, compat.recompute_flag()):
        assert is_on(decode_node(additional_config(text)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_scheduler_that_is_switched_on_is_known_to_ask_us(decode_node, asynchronous):
    config = decode_node(SWITCH, asynchronous=asynchronous)
    switched_on = RecomputeSchedulerConfig.initialize_from_config(config)
    prefix = "Async" if asynchronous else ""
    assert switched_on.scheduler_cls == f"{ascend_image.SCHEDULERS}.{prefix}RecomputeScheduler"
    assert compat.scheduler_advice(SimpleNamespace(scheduler_config=switched_on)) is None
