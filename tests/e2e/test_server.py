"""The OpenAI server before two data-parallel ranks, in processes of their own, as it is deployed.

vLLM runs the DP ranks of a model without experts as engines that do not know of each other.
"""

import asyncio
import json
import re

import aiohttp
import pytest

import servers
from harness import jobs
from servers import load, start

RANKS = 2
CROWD = jobs(seed=47, lengths=[60 + 9 * i % 140 for i in range(RANKS * 26)], max_tokens=60)
HOST_BLOCKS = 120
TRANSFER = {
    "kv_connector": "PreemptOffloadConnector",
    "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BLOCKS * servers.BLOCK_BYTES},
}


@pytest.fixture
def server(model, tmp_path):
    """A server that preempts."""
    model = servers.with_tokenizer(model, tmp_path)
    (port,) = servers.free_ports(1)
    command = [
        *start.vllm_server(str(model), port),
        *servers.FLAGS,
        *("--data-parallel-size", str(RANKS), "--max-num-batched-tokens", "256"),
        *("--num-gpu-blocks-override", "31", "--no-enable-prefix-caching"),
        *("--scheduler-cls", "preempt_offload.RecomputeScheduler"),
        *("--kv-transfer-config", json.dumps(TRANSFER)),
    ]
    workers_apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with servers.running({"server": (port, command, workers_apart)}, tmp_path) as started:
        yield started["server"]


async def complete(session, job):
    body = {
        "model": "tiny",
        "prompt": list(job.prompt),
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with session.post("/v1/completions", json=body) as response:
        assert response.ok, await response.text()
        (choice,) = (await response.json())["choices"]
        return choice["token_ids"]


async def ask(url):
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(300)) as session:
        return await asyncio.gather(*(complete(session, job) for job in CROWD))


def test_requests_of_both_ranks_get_the_undisturbed_tokens(server, undisturbed, record_servers):
    tokens = asyncio.run(ask(server.url))
    assert dict(enumerate(tokens)) == undisturbed(CROWD)

    log = server.text()
    preemptions = [
        int(server.counters(f'engine="{rank}"')["vllm:num_preemptions_total"])
        for rank in range(RANKS)
    ]
    restored = load.restores(log)
    record_servers(len(CROWD), sum(preemptions), sum(restored), 0, 0)
    assert min(preemptions) >= 3
    # What operators look for. Which rank a line is of is not certain: vLLM writes the name of the
    # process apart from the line, and another process may come in between.
    for line in (
        r"Recompute preemption offload enabled for request \S+",
        r"Created preempt offload state for request \S+",
    ):
        assert len(re.findall(line, log)) == sum(preemptions), line
    assert len(restored) == sum(preemptions)
    assert min(restored) > 0
    # A rank that does not know of the others takes all bytes, and says so.
    assert log.count(f"{HOST_BLOCKS} host blocks of {servers.BLOCK_BYTES} bytes per rank") == RANKS
    assert log.count("cpu_bytes_to_use is not divided by the data-parallel size") == RANKS
    assert "CPU cache" not in log
