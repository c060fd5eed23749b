import pytest


@pytest.fixture
def log(caplog):
    """What the package logs, from INFO on."""
    caplog.set_level("INFO", logger="vllm.preempt_offload")
    return caplog
