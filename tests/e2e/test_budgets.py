"""Host memory: enough, not enough for all, and not enough for one block."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness import BLOCK, Engine, jobs
from preempt_offload import tiny_model

CROWD = jobs(seed=11, lengths=[60 + 11 * i % 120 for i in range(26)], max_tokens=80)
DEVICE_BLOCKS = 31
# K and V in float32, in every layer.
BLOCK_BYTES = (
    2 * BLOCK * 4 * tiny_model.CONFIG["num_key_value_heads"] * tiny_model.CONFIG["head_dim"]
) * tiny_model.CONFIG["num_hidden_layers"]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("offload", "host_blocks"),
    [
        ({"offload_host_memory_ratio": 0.25}, 7),
        ({"offload_host_memory_ratio": 1}, 31),
        ({"offload_host_memory_ratio": 2}, 62),
        ({"cpu_bytes_to_use_per_rank": 12 * BLOCK_BYTES + 1}, 12),
        ({"cpu_bytes_to_use": 12 * BLOCK_BYTES, "enable_offload_prefix_caching": True}, 12),
    ],
    ids=["ratio 0.25", "ratio 1", "ratio 2", "12 blocks", "12 blocks, shared"],
)
def test_budget(model, undisturbed, record, caplog, offload, host_blocks, async_scheduling):
    with Engine(model, DEVICE_BLOCKS, offload=offload, async_scheduling=async_scheduling) as engine:
        pool = engine.offload.pool
        used = []
        outcome = engine.run(CROWD, before_step=lambda: used.append(pool.capacity - pool.num_free))
    record(outcome, CROWD)
    assert pool.capacity == host_blocks
    assert 0 < max(used) <= host_blocks

    assert outcome.tokens == undisturbed(CROWD)
    assert outcome.restored_tokens > 0
    stats = outcome.stats
    assert stats.preserved + stats.not_preserved == len(outcome.preemptions)
    short = [line for line in caplog.messages if "CPU cache" in line]
    assert len(short) == stats.not_preserved
    if host_blocks < DEVICE_BLOCKS:
        assert stats.not_preserved > 0
        assert outcome.recomputed_tokens > 0
        assert f"of {host_blocks}" in short[0]
    else:
        assert stats.not_preserved == 0
        assert outcome.recomputed_tokens == 0


def test_budget_below_one_block_is_an_error_at_start(model):
    start = (
        "from harness import BLOCK, Engine\n"
        f"Engine({str(model)!r}, 31, offload={{'cpu_bytes_to_use_per_rank': {BLOCK_BYTES - 1}}})"
    )
    engine = subprocess.run(
        [sys.executable, "-c", start], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert engine.returncode != 0
    assert (
        f"ValueError: cpu_bytes_to_use_per_rank ({BLOCK_BYTES - 1} bytes) is less than one KV "
        f"block per rank, which takes {BLOCK_BYTES} bytes; raise it"
    ) in engine.stderr
