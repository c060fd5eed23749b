"""Prefill and decode servers joined by NIXL, with the proxy of ``examples/pd`` before them.

Two decode servers share a prefill server: ``decode`` has host memory for every preempted request,
``cramped`` for few, so that it returns the others and the proxy sends them again. The former has
the connectors in vLLM's ``MultiConnector``, the latter in ours and in the other order. A single
ordinary server says what the answers should be.
"""

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
import time

import aiohttp
import numpy as np
import pytest

pytest.importorskip("nixl", reason="NIXL works with KV caches on CPUs only in newer vLLM")

import servers
from harness import jobs
from servers import load, start

USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
PORTS = ("ordinary", "prefill", "decode", "cramped", "proxy", "cramped_proxy")
STRUCTURED = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
# Tokens in a step. On CPUs vLLM ends when it cuts the prompt of a request with a seed.
UNCHUNKED = "8192"
# Of a client, in seconds: whoever waits that long waits for ever.
TIMEOUT = aiohttp.ClientTimeout(600)
# Servers with /pause and /resume.
PAUSABLE = {"VLLM_SERVER_DEV_MODE": "1"}
DEVICE_BLOCKS = 31
CRAMPED_BLOCKS = 4

CROWD = jobs(seed=61, lengths=[40 + 11 * i % 150 for i in range(70)], max_tokens=120)
LATER = jobs(seed=62, lengths=[40 + 17 * i % 150 for i in range(30)], max_tokens=120)
RETURNED = jobs(seed=63, lengths=[40 + 13 * i % 150 for i in range(32)], max_tokens=90)


@pytest.fixture(scope="module")
def deployment(model, tmp_path_factory):
    """Yields the servers by name."""
    folder = tmp_path_factory.mktemp("servers")
    model = str(servers.with_tokenizer(model, folder))
    ports = dict(zip(PORTS, servers.free_ports(len(PORTS)), strict=True))
    side_channels = servers.free_ports(3)
    prefill = start.prefill_flags(side_channels[0])
    ample = start.decode_transfer({"offload_host_memory_ratio": 4})
    ample = start.decode_flags(side_channels[1], ample)
    little = {"cpu_bytes_to_use_per_rank": CRAMPED_BLOCKS * servers.BLOCK_BYTES}
    little = start.decode_transfer(little) | {"kv_connector": "PreemptOffloadMultiConnector"}
    little["kv_connector_extra_config"]["connectors"].reverse()
    cramped = start.decode_flags(side_channels[2], little)
    decode_only = [
        *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--no-enable-prefix-caching"),
        *("--max-num-batched-tokens", "32", "--enable-logging-iteration-details"),
    ]

    def server(name, flags, environment):
        return ports[name], start.vllm_server(model, ports[name]) + flags, environment

    roomy = ["--num-gpu-blocks-override", "1000", "--max-num-batched-tokens"]
    both = [
        *(*servers.FLAGS, "--structured-outputs-config", STRUCTURED),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    commands = {
        "ordinary": server("ordinary", [*both, *roomy, UNCHUNKED], {}),
        "prefill": server("prefill", [*both, *roomy, "256", *prefill[0]], prefill[1]),
        "decode": server("decode", both + decode_only + ample[0], ample[1] | PAUSABLE),
        "cramped": server("cramped", both + decode_only + cramped[0], cramped[1] | PAUSABLE),
    }
    for name, decode in (("proxy", "decode"), ("cramped_proxy", "cramped")):
        command = start.proxy(ports[name], ports["prefill"], ports[decode])
        commands[name] = ports[name], command, {}
    with servers.running(commands, folder) as started:
        yield started


def ask_all(server, requests):
    """The answers to requests that are sent at once, each a path and a body."""

    async def run():
        async with aiohttp.ClientSession(server.url, timeout=TIMEOUT) as session:
            return await asyncio.gather(*(ask(session, *request) for request in requests))

    return asyncio.run(run())


def ask_all_at_once(deployment, proxy, decode, requests):
    """As of ``ask_all``. The decode server gets all requests at the same time.

    Otherwise the number of preemptions would depend on which server is faster: requests that are
    decoded before the next ones come preempt nothing.
    """

    async def run():
        async with aiohttp.ClientSession(deployment[proxy].url, timeout=TIMEOUT) as session:
            async with held_back(deployment, decode, len(requests)):
                answers = asyncio.gather(*(ask(session, *request) for request in requests))
            return await answers

    return asyncio.run(run())


@contextlib.asynccontextmanager
async def held_back(deployment, decode, count):
    """So many requests begin here; the decode server begins when all their prompts are computed."""
    prefill, decode = deployment["prefill"], deployment[decode]
    name = "vllm:request_success_total"
    computed = prefill.counters()[name] + count
    await pause(decode)
    try:
        yield
        await until(name, computed, prefill)
    finally:
        await control(decode, "/resume")


async def pause(server):
    await control(server, "/pause", mode="keep", clear_cache="false")


async def control(server, path, **params):
    async with (
        aiohttp.ClientSession(server.url, raise_for_status=True) as session,
        session.post(path, params=params),
    ):
        pass


async def until(name, value, server):
    """Waits until the metric of the server has this value; returns all its metrics."""
    end = time.monotonic() + TIMEOUT.total
    while (counters := server.counters())[name] != value:
        assert time.monotonic() < end, f"{name} is {counters[name]}, not {value}"
        await asyncio.sleep(0)
    return counters


def computed_tokens(server):
    """Tokens that went through the model."""
    iterations = re.findall(
        r"Iteration\(.* (\d+) context tokens.* (\d+) gen.* tokens", server.text()
    )
    return sum(int(context) + int(generation) for context, generation in iterations)


async def ask(session, path, body):
    """An answer: of a stream, the chunks."""
    async with session.post(path, json=body) as response:
        assert response.ok, await response.text()
        if not body.get("stream"):
            return await response.json()
        lines = (await response.text()).splitlines()
        data = [line.removeprefix("data: ") for line in lines if line]
        assert data.pop() == "[DONE]"
        return [json.loads(chunk) for chunk in data]


def completion(job, **params):
    return "/v1/completions", {"prompt": list(job.prompt), **common(job, params)}


def chat(job, **params):
    content = " ".join(map(str, job.prompt))[: len(job.prompt)]
    messages = [{"role": "user", "content": content}]
    return "/v1/chat/completions", {"messages": messages, **common(job, params)}


def common(job, params):
    body = {
        "model": "tiny",
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **params,
    }
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    return body


def said(answer):
    """What a client gets, whether streamed or not."""
    chunks = answer if isinstance(answer, list) else [answer]
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    # Chat has an entry for each token, completions a list of all tokens.
    entries = _joined(logprobs, "content")
    return {
        "text": "".join(part.get("text") or part.get("content") or "" for part in parts),
        "called": "".join(call.get("name") or "" for call in calls),
        "arguments": "".join(call.get("arguments") or "" for call in calls),
        "prompt": chunks[0].get("prompt_token_ids") or choices[0].get("prompt_token_ids"),
        "token_ids": _joined(choices, "token_ids"),
        "tokens": _joined(logprobs, "tokens") or [entry["token"] for entry in entries],
        "offsets": _joined(logprobs, "text_offset"),
        "logprobs": _joined(logprobs, "token_logprobs") or [one["logprob"] for one in entries],
        "finish_reason": choices[-1]["finish_reason"],
        "stop_reason": choices[-1].get("stop_reason"),
        "usage": {key: chunks[-1]["usage"][key] for key in USAGE},
    }


def _joined(parts, key):
    return [value for part in parts for value in part.get(key) or ()]


def differ(answer, expected):
    close = pytest.approx(expected["logprobs"], abs=1e-3)
    return answer != expected | {"logprobs": close}


def mixed(all_jobs):
    """Every other one streamed."""
    return [completion(job, stream=i % 2 == 1) for i, job in enumerate(all_jobs)]


def test_preempted_requests_are_restored_from_host_memory(deployment, record_servers):
    decode, proxy = deployment["decode"], deployment["proxy"]
    requests = mixed(CROWD), mixed(LATER)
    expected = [said(a) for part in requests for a in ask_all(deployment["ordinary"], part)]
    answers = [
        said(answer)
        for part in requests
        for answer in ask_all_at_once(deployment, "proxy", "decode", part)
    ]

    counters, restores = decode.counters(), load.restores(decode.text())
    preemptions = counters["vllm:num_preemptions_total"]
    mismatches = sum(map(differ, answers, expected))
    resends = proxy.counters()["pd_proxy_resends_total"]
    record_servers(len(answers), int(preemptions), sum(restores), int(resends), mismatches)
    assert mismatches == 0
    assert preemptions >= 10
    assert len(restores) == preemptions
    assert resends == 0
    # One pull for each request, and nothing computed but a token for each token that came out:
    # of a prompt, vLLM computes the last token again to get the first one.
    assert counters["vllm:nixl_xfer_time_seconds_count"] == len(answers)
    assert computed_tokens(decode) == sum(len(answer["token_ids"]) for answer in answers)


def test_returned_requests_go_on_without_a_seam(deployment, record_servers):
    cramped, proxy = deployment["cramped"], deployment["cramped_proxy"]
    requests = mixed(RETURNED)
    expected = list(map(said, ask_all(deployment["ordinary"], requests)))
    answers = ask_all_at_once(deployment, "cramped_proxy", "cramped", requests)
    answers = list(map(said, answers))

    counters, restores = cramped.counters(), load.restores(cramped.text())
    preemptions = counters["vllm:num_preemptions_total"]
    mismatches = sum(map(differ, answers, expected))
    resends = proxy.counters()["pd_proxy_resends_total"]
    returned = returns(cramped)
    record_servers(len(answers), int(preemptions), sum(restores), int(resends), mismatches)
    assert mismatches == 0
    assert resends == returned > 0
    assert len(restores) == preemptions - returned > 0
    assert counters["vllm:nixl_xfer_time_seconds_count"] == len(answers) + returned
    # Where an answer was cut in the middle of a character, this is generated again.
    again = computed_tokens(cramped) - sum(len(answer["token_ids"]) for answer in answers)
    assert 0 <= again <= 3 * returned


def test_the_load_script_tells_what_happened(deployment):
    decode, proxy = deployment["decode"], deployment["proxy"]

    def counted():
        restores = load.restores(decode.text())
        return decode.counters()["vllm:num_preemptions_total"], sum(restores)

    before = counted()
    urls = [*("--proxy", proxy.url), *("--decode", decode.url), *("--decode-log", decode.log)]
    # Two of them are more than the device holds, so that two at the same time preempt one.
    size = [*("--requests", "24"), *("--concurrency", "24")]
    size += [*("--prompt-tokens", "100"), *("--max-tokens", "300")]
    told = subprocess.run(
        [sys.executable, load.__file__, *urls, *size], check=True, capture_output=True, text=True
    ).stdout
    preemptions, tokens = np.subtract(counted(), before)
    assert preemptions > 0
    assert re.search(r"^answered +24 of 24$", told, re.M)
    assert re.search(rf"^preemptions +{preemptions:.0f}$", told, re.M)
    assert re.search(rf"^restored tokens +{tokens:.0f}$", told, re.M)
    assert re.search(r"^resends +0$", told, re.M)


PATTERN = "[a-f]{120}"
SCHEMA = {
    "type": "object",
    "properties": {"where": {"type": "string", "pattern": f"^{PATTERN}$"}},
    "required": ["where"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "max_tokens": 150,
}
STREAMED_TOOL = "streamed tool"
# What a proxy would spoil if it went on with a request in the wrong way, by the right way. A call
# of a tool that has begun cannot be streamed again.
KINDS = {
    "resume": {
        "logprobs": lambda job: completion(job, logprobs=2),
        "streamed logprobs": lambda job: completion(job, logprobs=2, stream=True),
        "chat": lambda job: chat(job),
        "streamed chat": lambda job: chat(job, stream=True),
    },
    "repeat": {
        "chat logprobs": lambda job: chat(job, logprobs=True, top_logprobs=2),
        "streamed chat logprobs": lambda job: chat(job, logprobs=True, top_logprobs=2, stream=True),
        "grammar": lambda job: completion(job, structured_outputs={"regex": PATTERN}),
        "streamed grammar": lambda job: completion(
            job, structured_outputs={"regex": PATTERN}, stream=True
        ),
        "streamed JSON": lambda job: chat(job, response_format=JSON, max_tokens=150, stream=True),
        "stop": lambda job: completion(job, stop=[" w300"], stream=True),
        "penalty": lambda job: completion(job, frequency_penalty=0.5),
        "seed": lambda job: completion(job, temperature=0.5, seed=0),
        "tool": lambda job: chat(job, **TOOLS),
        STREAMED_TOOL: lambda job: chat(job, **TOOLS, stream=True),
    },
}
SPECIAL = jobs(seed=64, lengths=[80 + 7 * i % 100 for i in range(30)], max_tokens=120)


def resends(proxy):
    """How many requests went to the prefill server again, by how they went on."""
    name = "pd_proxy_resends_total"
    return {how: proxy.counters(f'how="{how}"')[name] for how in ("resume", "repeat")}


def returns(server):
    """How often the server has returned a request that it could not preserve."""
    return len(re.findall("is returned with stop_reason='recomputed'", server.text()))


def broken_off(kind, answer):
    """Whether the answer is an error that this kind of request may end with."""
    if kind != STREAMED_TOOL or "error" not in answer[-1]:
        return False
    return "a stream with tool calls or reasoning" in answer[-1]["error"]["message"]


@pytest.mark.parametrize("how", KINDS)
def test_what_needs_more_than_tokens_is_unharmed(how, deployment, record_servers):
    cramped, proxy = deployment["cramped"], deployment["cramped_proxy"]
    before, resent_before = cramped.counters(), resends(proxy)
    restored_before, returned_before = load.restores(cramped.text()), returns(cramped)
    kinds = list(itertools.islice(itertools.cycle(KINDS[how]), len(SPECIAL)))
    requests = [KINDS[how][kind](job) for kind, job in zip(kinds, SPECIAL, strict=True)]
    expected = map(said, ask_all(deployment["ordinary"], requests))
    answers = ask_all_at_once(deployment, "cramped_proxy", "cramped", requests)

    compared = [
        (kind, said(answer), right)
        for kind, answer, right in zip(kinds, answers, expected, strict=True)
        if not broken_off(kind, answer)
    ]
    wrong = [kind for kind, answer, right in compared if differ(answer, right)]
    preemptions = cramped.counters()["vllm:num_preemptions_total"]
    preemptions -= before["vllm:num_preemptions_total"]
    resent = {how: count - resent_before[how] for how, count in resends(proxy).items()}
    restored = load.restores(cramped.text())[len(restored_before) :]
    record_servers(len(answers), int(preemptions), sum(restored), int(resent[how]), len(wrong))
    assert wrong == []
    assert resent[how] >= 5
    assert sum(resent.values()) == resent[how]
    assert len(restored) == preemptions - (returns(cramped) - returned_before)
    for kind, answer, _ in compared:
        assert answer["called"] == ("look" if kind in ("tool", STREAMED_TOOL) else "")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (completion(SPECIAL[0], n=2), "n must be 1"),
        (completion(SPECIAL[0], prompt=["a", "b"]), "one prompt per request"),
        (completion(SPECIAL[0], prompt_logprobs=0), "prompt_logprobs cannot be used"),
        (completion(SPECIAL[0], echo=True), "echo cannot be used"),
        (completion(SPECIAL[0], max_tokens=-1), "max_tokens"),
        (completion(SPECIAL[0], model="another"), "does not exist"),
        (("/v1/completions", ["prompt"]), "must be a JSON object"),
        (chat(SPECIAL[0], messages=["hello"]), "messages"),
    ],
    ids=["n", "prompts", "prompt_logprobs", "echo", "max_tokens", "model", "list", "messages"],
)
def test_what_cannot_be_answered_is_refused(deployment, request_, message):
    path, body = request_

    async def refused():
        async with (
            aiohttp.ClientSession(deployment["proxy"].url) as session,
            session.post(path, json=body) as response,
        ):
            return response.status, await response.json()

    status, answer = asyncio.run(refused())
    assert 400 <= status < 500
    assert message in answer["error"]["message"]


# ---- clients and servers that go away; the last tests, because these do not come back ----

LONG = jobs(seed=65, lengths=[40], max_tokens=400)[0]


async def begun(deployment, session, job):
    """A stream of which the first chunk is there, and the task of the same request unstreamed.

    The decode server goes on with neither, so that they do not end meanwhile.
    """
    path, body = completion(job)
    async with held_back(deployment, "decode", 2):
        whole = asyncio.create_task(session.post(path, json=body))
        stream = asyncio.create_task(session.post(path, json=body | {"stream": True}))
    stream = await stream
    assert (await stream.content.readline()).startswith(b"data: ")
    await pause(deployment["decode"])
    assert deployment["decode"].counters()["vllm:num_requests_running"] > 0
    return stream, whole


def test_the_requests_of_clients_that_go_away_are_aborted(deployment):
    decode, proxy = deployment["decode"], deployment["proxy"]
    before, failures = decode.counters(), proxy.counters()["pd_proxy_failures_total"]

    async def go_away():
        async with aiohttp.ClientSession(proxy.url, timeout=TIMEOUT) as session:
            stream, whole = await begun(deployment, session, LONG)
            assert not whole.done()
            stream.close()
            whole.cancel()
            after = await until("vllm:num_requests_running", 0, decode)
            await control(decode, "/resume")
            return after

    after = asyncio.run(go_away())
    generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert 0 < generated < 2 * LONG.max_tokens
    assert proxy.counters()["pd_proxy_failures_total"] == failures
    assert "Traceback" not in proxy.text()


def test_clients_are_told_that_the_decode_server_is_gone(deployment):
    decode, proxy = deployment["decode"], deployment["proxy"]

    async def errors():
        async with aiohttp.ClientSession(proxy.url, timeout=TIMEOUT) as session:
            stream, whole = await begun(deployment, session, LONG)
            decode.kill()
            *_, last, done = filter(None, (await stream.text()).split("\n\n"))
            assert done == "data: [DONE]"
            return [
                json.loads(last.removeprefix("data: "))["error"],
                await error_of(await whole),
                *await refused_at_once(session),
            ]

    check_unreachable(asyncio.run(errors()), decode)


def test_clients_are_told_that_the_prefill_server_is_gone(deployment):
    deployment["prefill"].kill()

    async def errors():
        url = deployment["cramped_proxy"].url
        async with aiohttp.ClientSession(url, timeout=TIMEOUT) as session:
            return await refused_at_once(session)

    check_unreachable(asyncio.run(errors()), deployment["prefill"])


async def refused_at_once(session):
    """The errors that a request gets, streamed and not, and who asks whether all is well."""
    requests = completion(LONG), completion(LONG, stream=True)
    errors = [await error_of(await session.post(path, json=body)) for path, body in requests]
    return [*errors, await error_of(await session.get("/health"))]


async def error_of(response):
    error = (await response.json())["error"]
    assert response.status == error["code"]
    return error


def check_unreachable(errors, server):
    for error in errors:
        assert error["code"] == 502
        assert f"{server.url}/" in error["message"]
        assert "cannot be reached" in error["message"]
