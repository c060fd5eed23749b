import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before torch is imported, which reads it once. On a busy machine more threads than cores wait
# for each other, and the tiny models gain nothing from them.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from driver import Driver
from engine_support import SPEC
from vllm.config import KVTransferConfig, SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from preempt_offload import plugin, tiny_model


class Log(logging.Handler):
    """Keeps what is logged to it."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def warnings(self):
        return [r.getMessage() for r in self.records if r.levelno == logging.WARNING]

    @property
    def text(self):
        return "\n".join(map(logging.Formatter().format, self.records))

    def clear(self):
        self.records.clear()


@pytest.fixture
def log(monkeypatch):
    """What the package logs from INFO on, without what vLLM logs."""
    log, logger = Log(), logging.getLogger("vllm.preempt_offload")
    monkeypatch.setattr(logger, "handlers", [log])
    # Loggers remember whether they are heard; only this has them forget it.
    level = logger.level
    logger.setLevel(logging.INFO)
    yield log
    logger.setLevel(level)


@pytest.fixture
def registry(monkeypatch):
    """vLLM's registry of connectors as it is before any plugin has run; a copy."""
    registry = dict(KVConnectorFactory._registry)
    registry.pop(plugin.NAME, None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    # Registering wraps this; put back what is there now.
    wrapped = KVConnectorFactory.register_connector
    monkeypatch.setattr(KVConnectorFactory, "register_connector", wrapped)
    return registry


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def vllm_config(model):
    """Makes the config of an engine with our connector, as the command line would."""

    def make(extra=None, *, transfer=None, num_device_blocks=8, asynchronous=False, **engine_args):
        transfer = {"kv_connector": plugin.NAME, "kv_role": "kv_both"} | (transfer or {})
        engine_args = {
            "scheduler_cls": "preempt_offload.RecomputeScheduler",
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "block_size": 16,
        } | engine_args
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(kv_connector_extra_config=extra or {}, **transfer),
            **engine_args,
        ).create_engine_config()
        # vLLM turns it off on a CPU, where it only saves time.
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = num_device_blocks
        return config

    return make


@pytest.fixture
def drive(vllm_config):
    """Makes a ``Driver`` with the config of an engine."""

    def drive(
        extra=None,
        *,
        num_blocks=8,
        scheduler_cls=None,
        specs=(SPEC,),
        drafts=0,
        ranks=None,
        **config_args,
    ):
        config_args = {"enable_prefix_caching": False} | config_args
        config = vllm_config(extra, num_device_blocks=num_blocks, **config_args)
        vars(config.parallel_config).update(ranks or {})
        if drafts:
            # Its checks need a model to draft with.
            config.speculative_config = speculative = object.__new__(SpeculativeConfig)
            speculative.method = "draft_model"
            speculative.num_speculative_tokens = drafts
        return Driver(config, num_blocks, scheduler_cls, specs)

    return drive
