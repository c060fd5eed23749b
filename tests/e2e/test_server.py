"""The OpenAI server, with engine and worker in processes of their own, as it is deployed."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest
from tokenizers import Tokenizer, models

from harness import BLOCK, VOCABULARY, jobs

CROWD = jobs(seed=47, lengths=[60 + 9 * i % 140 for i in range(26)], max_tokens=60)
TRANSFER = {
    "kv_connector": "PreemptOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"offload_host_memory_ratio": 4},
}


@pytest.fixture
def server(model, tmp_path):
    """Starts a server that preempts; yields its process, base URL and log file."""
    model = shutil.copytree(model, tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.save(str(model / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)),
        *("--max-model-len", "512", "--max-num-batched-tokens", "256"),
        *("--num-gpu-blocks-override", "31", "--no-enable-prefix-caching"),
        *("--scheduler-cls", "preempt_offload.RecomputeScheduler"),
        *("--kv-transfer-config", json.dumps(TRANSFER)),
    ]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


async def wait_until_healthy(session, process, log):
    while process.poll() is None:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get("/health") as response:
                if response.ok:
                    return
        await asyncio.sleep(0.2)
    raise AssertionError(f"the server ended:\n{log.read_text()[-5000:]}")


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


async def ask(process, url, log):
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(300)) as session:
        await wait_until_healthy(session, process, log)
        tokens = await asyncio.gather(*(complete(session, job) for job in CROWD))
        async with session.get("/metrics") as response:
            return tokens, await response.text()


def test_concurrent_clients_get_the_undisturbed_tokens(server, undisturbed):
    tokens, metrics = asyncio.run(ask(*server))
    assert dict(enumerate(tokens)) == undisturbed(CROWD)

    preemptions = float(re.search(r"^vllm:num_preemptions_total\{.*\} (\S+)", metrics, re.M)[1])
    log = server[2].read_text()
    assert preemptions >= 5
    # What operators look for, in the log of the engine's own process.
    for line in (
        r"Recompute preemption offload enabled for request \S+",
        r"Created preempt offload state for request \S+",
        r"Prepared preempt offload H2D load for request \S+",
    ):
        assert len(re.findall(line, log)) == preemptions, line
    assert "host blocks of 49152 bytes per rank" in log
