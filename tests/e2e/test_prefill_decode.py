"""Prefill and decode servers joined by NIXL, with the proxy of ``examples/pd`` before them.

Two decode servers share a prefill server: ``decode`` has host memory for every preempted request,
``cramped`` for few, so that it returns the others and the proxy sends them again. A single
ordinary server says what the answers should be.
"""

import asyncio
import dataclasses
import json
import re

import aiohttp
import pytest

pytest.importorskip("nixl", reason="NIXL works with KV caches on CPUs only in newer vLLM")

import servers
from harness import jobs
from servers import start

USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
PORTS = ("ordinary", "prefill", "decode", "cramped", "proxy", "cramped_proxy")
STRUCTURED = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
# Tokens in a step. On CPUs vLLM ends when it cuts the prompt of a request with a seed.
UNCHUNKED = "8192"
DEVICE_BLOCKS = 31
# Of 49152 bytes each.
CRAMPED_BLOCKS = 6

CROWD = jobs(seed=61, lengths=[40 + 11 * i % 150 for i in range(70)], max_tokens=60)
LATER = jobs(seed=62, lengths=[40 + 17 * i % 150 for i in range(40)], max_tokens=60)
RETURNED = jobs(seed=63, lengths=[40 + 13 * i % 150 for i in range(32)], max_tokens=90)


@pytest.fixture(scope="module")
def deployment(model, tmp_path_factory):
    """Yields the base URL and the log of each server by name."""
    folder = tmp_path_factory.mktemp("servers")
    model = str(servers.with_tokenizer(model, folder))
    ports = dict(zip(PORTS, servers.free_ports(len(PORTS)), strict=True))
    side_channels = servers.free_ports(3)
    prefill = start.prefill_flags(side_channels[0])
    ample = start.decode_flags(side_channels[1], {"offload_host_memory_ratio": 4})
    little = {"cpu_bytes_to_use_per_rank": CRAMPED_BLOCKS * 49152}
    cramped = start.decode_flags(side_channels[2], little)
    decode_only = [
        *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--no-enable-prefix-caching"),
        *("--max-num-batched-tokens", "32", "--enable-logging-iteration-details"),
    ]

    def server(name, flags, environment):
        return ports[name], start.vllm_server(model, ports[name]) + flags, environment

    roomy = ["--num-gpu-blocks-override", "600", "--max-num-batched-tokens"]
    both = [
        *(*servers.FLAGS, "--structured-outputs-config", STRUCTURED),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    commands = {
        "ordinary": server("ordinary", [*both, *roomy, UNCHUNKED], {}),
        "prefill": server("prefill", [*both, *roomy, "256", *prefill[0]], prefill[1]),
        "decode": server("decode", both + decode_only + ample[0], ample[1]),
        "cramped": server("cramped", both + decode_only + cramped[0], cramped[1]),
    }
    for name, decode in (("proxy", "decode"), ("cramped_proxy", "cramped")):
        command = start.proxy(ports[name], ports["prefill"], ports[decode])
        commands[name] = ports[name], command, {}
    with servers.running(commands, folder) as logs:
        yield {name: Server(f"http://{start.HOST}:{ports[name]}", logs[name]) for name in PORTS}


@dataclasses.dataclass
class Server:
    url: str
    log: object

    def ask_all(self, requests):
        """The answers to requests that are sent at once, each a path and a body."""

        async def run():
            timeout = aiohttp.ClientTimeout(600)
            async with aiohttp.ClientSession(self.url, timeout=timeout) as session:
                return await asyncio.gather(*(ask(session, *request) for request in requests))

        return asyncio.run(run())

    def counters(self):
        """Sums of the counters in /metrics over all labels, by name."""

        async def get():
            async with (
                aiohttp.ClientSession(self.url) as session,
                session.get("/metrics") as response,
            ):
                return await response.text()

        sums = {}
        for name, value in re.findall(r"^(\w[\w:]*)(?:\{.*\})? (\S+)$", asyncio.run(get()), re.M):
            sums[name] = sums.get(name, 0) + float(value)
        return sums

    def computed_tokens(self):
        """Tokens that went through the model."""
        iterations = re.findall(
            r"Iteration\(.* (\d+) context tokens.* (\d+) gen.* tokens", self.text()
        )
        return sum(int(context) + int(generation) for context, generation in iterations)

    def restored(self):
        """Numbers of tokens that were copied back, one for each restore."""
        loads = re.findall(
            r"Prepared preempt offload H2D load .*tokens (\d+) to (\d+)", self.text()
        )
        return [int(end) - int(first) for first, end in loads]

    def text(self):
        return self.log.read_text()


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
    expected = [said(a) for part in requests for a in deployment["ordinary"].ask_all(part)]
    answers = [said(a) for part in requests for a in proxy.ask_all(part)]

    counters, restored = decode.counters(), decode.restored()
    preemptions = counters["vllm:num_preemptions_total"]
    mismatches = sum(map(differ, answers, expected))
    resends = proxy.counters()["pd_proxy_resends_total"]
    record_servers(len(answers), int(preemptions), sum(restored), int(resends), mismatches)
    assert mismatches == 0
    assert preemptions >= 10
    assert len(restored) == preemptions
    assert resends == 0
    # One pull for each request, and nothing computed but a token for each token that came out:
    # of a prompt, vLLM computes the last token again to get the first one.
    assert counters["vllm:nixl_xfer_time_seconds_count"] == len(answers)
    assert decode.computed_tokens() == sum(len(answer["token_ids"]) for answer in answers)


def test_returned_requests_go_on_without_a_seam(deployment, record_servers):
    cramped, proxy = deployment["cramped"], deployment["cramped_proxy"]
    requests = mixed(RETURNED)
    expected = list(map(said, deployment["ordinary"].ask_all(requests)))
    answers = list(map(said, proxy.ask_all(requests)))

    counters, restored = cramped.counters(), cramped.restored()
    preemptions = counters["vllm:num_preemptions_total"]
    mismatches = sum(map(differ, answers, expected))
    resends = proxy.counters()["pd_proxy_resends_total"]
    returned = len(re.findall("is returned with stop_reason='recomputed'", cramped.text()))
    record_servers(len(answers), int(preemptions), sum(restored), int(resends), mismatches)
    assert mismatches == 0
    assert resends == returned > 0
    assert len(restored) == preemptions - returned > 0
    assert counters["vllm:nixl_xfer_time_seconds_count"] == len(answers) + returned
    # Where an answer was cut in the middle of a character, this is generated again.
    again = cramped.computed_tokens() - sum(len(answer["token_ids"]) for answer in answers)
    assert 0 <= again <= 3 * returned


# What a proxy would spoil if it went on with a request in the wrong way. The first four are
# resumed, of the others the whole answer is generated again.
PATTERN = "[a-f]{60}"
TOOL = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"where": {"type": "string", "pattern": f"^{PATTERN}$"}},
        "required": ["where"],
        "additionalProperties": False,
    },
}
KINDS = {
    "logprobs": lambda job: completion(job, logprobs=2),
    "streamed logprobs": lambda job: completion(job, logprobs=2, stream=True),
    "chat": lambda job: chat(job),
    "streamed chat": lambda job: chat(job, stream=True),
    "chat logprobs": lambda job: chat(job, logprobs=True, top_logprobs=2),
    "streamed chat logprobs": lambda job: chat(job, logprobs=True, top_logprobs=2, stream=True),
    "grammar": lambda job: completion(job, structured_outputs={"regex": PATTERN}),
    "streamed grammar": lambda job: completion(
        job, structured_outputs={"regex": PATTERN}, stream=True
    ),
    "stop": lambda job: completion(job, stop=[" w300"], stream=True),
    "penalty": lambda job: completion(job, frequency_penalty=0.5),
    "seed": lambda job: completion(job, temperature=0.5, seed=0),
    "tool": lambda job: chat(
        job,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice={"type": "function", "function": {"name": TOOL["name"]}},
        max_tokens=90,
    ),
}
SPECIAL = jobs(seed=64, lengths=[40 + 7 * i % 100 for i in range(48)], max_tokens=60)


def test_what_needs_more_than_tokens_is_unharmed(deployment, record_servers):
    cramped, proxy = deployment["cramped"], deployment["cramped_proxy"]
    before, sent_before = cramped.counters(), proxy.counters()
    restored_before = sum(cramped.restored())
    kinds = [kind for _ in range(4) for kind in KINDS]
    requests = [KINDS[kind](job) for kind, job in zip(kinds, SPECIAL, strict=True)]
    expected = list(map(said, deployment["ordinary"].ask_all(requests)))
    answers = list(map(said, proxy.ask_all(requests)))

    wrong = [kind for kind, *pair in zip(kinds, answers, expected, strict=True) if differ(*pair)]
    preemptions = cramped.counters()["vllm:num_preemptions_total"]
    preemptions -= before["vllm:num_preemptions_total"]
    resends = proxy.counters()["pd_proxy_resends_total"] - sent_before["pd_proxy_resends_total"]
    restored = sum(cramped.restored()) - restored_before
    record_servers(len(answers), int(preemptions), restored, int(resends), len(wrong))
    assert wrong == []
    assert resends >= 5
    assert {answer["called"] for answer in answers} == {"", "look"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 2}, "n must be 1"),
        ({"prompt": ["a", "b"]}, "one prompt per request"),
        ({"prompt_logprobs": 0}, "prompt_logprobs cannot be used"),
        ({"echo": True}, "echo cannot be used"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"model": "another"}, "does not exist"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_answered_is_refused(deployment, params, message):
    path, body = completion(SPECIAL[0], **params)

    async def refused():
        async with (
            aiohttp.ClientSession(deployment["proxy"].url) as session,
            session.post(path, json=body) as response,
        ):
            return response.status, await response.json()

    status, answer = asyncio.run(refused())
    assert 400 <= status < 500
    assert message in answer["error"]["message"]
