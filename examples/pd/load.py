"""Sends requests to the proxy, and says what became of them.

    python examples/pd/load.py --requests 100 --concurrency 50

Prompts are random token ids, so any model will do. Preemptions are counted by the decode server,
resends by the proxy, and restored tokens in the decode server's log. The first request goes alone
and is not counted: with it the two servers make the connection that NIXL needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import NoReturn

import aiohttp
from tqdm import tqdm


class RequestError(Exception):
    """What the proxy has said instead of an answer."""


async def complete(
    session: aiohttp.ClientSession, body: dict[str, object], bar: tqdm[NoReturn]
) -> list[float]:
    """When each token came, in seconds since the request was sent.

    Args:
        session: Of the proxy.
        body: The request, streamed, with the usage in each chunk.
        bar: Goes on with each token.

    Raises:
        RequestError: The proxy has answered with an error, at once or after some tokens.
    """
    times: list[float] = []
    started = time.perf_counter()
    async with session.post("/v1/completions", json=body) as response:
        if not response.ok:
            raise RequestError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if "error" in chunk:
                raise RequestError(chunk["error"]["message"])
            new = chunk["usage"]["completion_tokens"] - len(times)
            times += [time.perf_counter() - started] * new
            bar.update(new)
    return times


async def counter(url: str, name: str) -> float:
    """The sum of a counter in /metrics over all its labels."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        metrics = await response.text()
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", metrics, re.M)))


async def until_ready(session: aiohttp.ClientSession) -> None:
    """Waits for the servers behind the proxy."""
    told = False
    while True:
        async with session.get("/health") as response:
            if response.ok:
                return
            why = (await response.json())["error"]["message"]
        if not told:
            print(f"waiting: {why}", file=sys.stderr)
        told = True
        await asyncio.sleep(0.5)


def restores(log: str) -> list[int]:
    """Numbers of tokens that were copied back to the device, one for each restored request.

    Args:
        log: What a server has logged.
    """
    loads = re.findall(r"Prepared preempt offload H2D load .*: tokens (\d+) to (\d+)", log)
    return [int(end) - int(first) for first, end in loads]


async def run(options: argparse.Namespace) -> None:
    """Sends all requests and prints the figures."""
    rng = random.Random(options.seed)
    lengths = [rng.randint(1, 2 * options.prompt_tokens) for _ in range(options.requests)]
    prompts = [[rng.randint(3, 500) for _ in range(length)] for length in lengths]
    places = asyncio.Semaphore(options.concurrency)
    all_times: list[list[float]] = []
    errors: list[Exception] = []

    async def one(prompt: list[int], bar: tqdm[NoReturn]) -> None:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": options.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        async with places:
            try:
                all_times.append(await complete(session, body, bar))
            except (RequestError, aiohttp.ClientError) as error:
                errors.append(error)
        bar.set_postfix(answered=len(all_times), failed=len(errors))

    async def figures() -> tuple[float, float, int]:
        return (
            await counter(options.decode, "vllm:num_preemptions_total"),
            await counter(options.proxy, "pd_proxy_resends_total"),
            sum(restores(options.decode_log.read_text())),
        )

    async with aiohttp.ClientSession(
        options.proxy,
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=2**25,
    ) as session:
        await until_ready(session)
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        with tqdm(desc="first request", total=options.max_tokens, unit="token") as bar:
            await one(prompts[0], bar)
        if errors:
            sys.exit(f"the first request failed: {errors[0]}")
        all_times.clear()
        before = await figures()
        started = time.perf_counter()
        total = options.requests * options.max_tokens
        with tqdm(desc=f"{options.requests} requests", total=total, unit="token") as bar:
            await asyncio.gather(*(one(prompt, bar) for prompt in prompts))
    seconds = time.perf_counter() - started
    preemptions, resends, restored = (
        new - old for new, old in zip(await figures(), before, strict=True)
    )

    print(f"answered         {len(all_times)} of {options.requests}")
    first = [times[0] for times in all_times]
    per_token = [(t[-1] - t[0]) / (len(t) - 1) for t in all_times if len(t) > 1]
    for name, values in (("TTFT", first), ("TPOT", per_token)):
        if not values:
            continue
        values = sorted(values)
        worst = values[-1 - len(values) // 100]
        print(
            f"{name:17}mean {1000 * statistics.mean(values):.0f} ms, "
            f"median {1000 * statistics.median(values):.0f} ms, p99 {1000 * worst:.0f} ms"
        )
    tokens = sum(map(len, all_times))
    print(f"tokens           {tokens}, {tokens / seconds:.0f}/s")
    print(f"preemptions      {preemptions:.0f}")
    print(f"restored tokens  {restored}")
    print(f"resends          {resends:.0f}")
    if errors:
        sys.exit(f"{len(errors)} requests failed, the first with: {errors[0]!r}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--proxy", default="http://127.0.0.1:8000", help="base URL")
    parser.add_argument("--decode", default="http://127.0.0.1:8200", help="base URL")
    parser.add_argument("--decode-log", type=Path, default=Path("pd-logs/decode.log"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=150, help="mean; up to twice that")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    try:
        asyncio.run(run(parser.parse_args()))
    except (aiohttp.ClientError, OSError) as error:
        sys.exit(f"load: {error}")


if __name__ == "__main__":
    main()
