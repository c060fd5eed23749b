"""The OpenAI server, with engine and worker in processes of their own, as it is deployed."""

import asyncio
import json
import re

import aiohttp
import pytest

import servers
from harness import jobs
from servers import start

CROWD = jobs(seed=47, lengths=[60 + 9 * i % 140 for i in range(26)], max_tokens=60)
TRANSFER = {
    "kv_connector": "PreemptOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"offload_host_memory_ratio": 4},
}


@pytest.fixture
def server(model, tmp_path):
    """Starts a server that preempts; yields its base URL and log file."""
    model = servers.with_tokenizer(model, tmp_path)
    (port,) = servers.free_ports(1)
    command = [
        *start.vllm_server(str(model), port),
        *servers.FLAGS,
        *("--max-num-batched-tokens", "256"),
        *("--num-gpu-blocks-override", "31", "--no-enable-prefix-caching"),
        *("--scheduler-cls", "preempt_offload.RecomputeScheduler"),
        *("--kv-transfer-config", json.dumps(TRANSFER)),
    ]
    with servers.running({"server": (port, command, {})}, tmp_path) as logs:
        yield f"http://{start.HOST}:{port}", logs["server"]


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
        tokens = await asyncio.gather(*(complete(session, job) for job in CROWD))
        async with session.get("/metrics") as response:
            return tokens, await response.text()


def test_concurrent_clients_get_the_undisturbed_tokens(server, undisturbed):
    url, log_file = server
    tokens, metrics = asyncio.run(ask(url))
    assert dict(enumerate(tokens)) == undisturbed(CROWD)

    preemptions = float(re.search(r"^vllm:num_preemptions_total\{.*\} (\S+)", metrics, re.M)[1])
    log = log_file.read_text()
    assert preemptions >= 5
    # What operators look for, in the log of the engine's own process.
    for line in (
        r"Recompute preemption offload enabled for request \S+",
        r"Created preempt offload state for request \S+",
        r"Prepared preempt offload H2D load for request \S+",
    ):
        assert len(re.findall(line, log)) == preemptions, line
    assert "host blocks of 49152 bytes per rank" in log
