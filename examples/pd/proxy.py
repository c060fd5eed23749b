"""A proxy before one prefill and one decode server of vLLM, for completions and chat.

    python examples/pd/proxy.py --port 8000 \
        --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

A request goes to the prefill server for one token, and with what this says of its KV blocks
(``kv_transfer_params``) to the decode server, whose answer the client gets. If the decode server
has to return a request (``stop_reason="recomputed"``), the proxy goes on by itself:

- *resume*: prompt and generated tokens, as token ids, are the prompt of the next round. Most
  requests can be resumed.
- *repeat*: where the next round would lack what vLLM knows only of generated tokens (the state of
  a grammar, of a seed, of penalties; see ``REPEATED``), the request is sent again as it came. A
  client that streams gets only what is new, and an error if the answer turns out to be another.

Needs aiohttp and prometheus_client, which vLLM has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import Counter, generate_latest

Json = dict[str, Any]

# What all chunks of an answer have in common.
HEAD = ("id", "object", "created", "model")
# The values of a choice that go on from chunk to chunk.
TEXTS = {"text", "content", "reasoning", "reasoning_content"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RECOMPUTED = "recomputed"
# Rounds in which a request may come back before the client gets an error.
MOST_RESENDS = 100

# What the next round would not go on with, so that the whole answer has to be generated again.
REPEATED = {
    "stop",
    "seed",
    "response_format",
    "structured_outputs",
    "tools",
    "functions",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "thinking_token_budget",
    "repetition_detection",
}
# What one answer, or a prompt whose KV another server has computed, cannot give.
REFUSED = {
    "best_of",
    "echo",
    "kv_transfer_params",
    "prompt_embeds",
    "prompt_logprobs",
    "suffix",
    "use_beam_search",
}
# What the prefill server has no use for, whose token is thrown away.
NOT_FOR_PREFILL = REPEATED - {"tools", "functions"} | {"logprobs", "stream_options", "top_logprobs"}
# Of these, 0 is not the same as nothing.
ZERO_MEANS_SOMETHING = {"prompt_logprobs", "seed"}

REQUESTS = Counter("pd_proxy_requests", "Requests that clients have sent")
RESENDS = Counter("pd_proxy_resends", "Requests that went to the prefill server again", ["how"])
FAILURES = Counter("pd_proxy_failures", "Requests that ended with an error")
for how in ("resume", "repeat"):
    RESENDS.labels(how)


class RequestError(Exception):
    """What the client is told instead of an answer, or in the middle of a stream."""

    def __init__(self, status: int, error: Json | str) -> None:
        super().__init__(error)
        self.status = status
        if isinstance(error, str):
            error = {"message": error, "type": "ProxyError", "param": None, "code": status}
        self.body = {"error": error}


class BrokenOffError(RequestError):
    """A request came back whose answer cannot go on where it stopped."""

    def __init__(self, why: str) -> None:
        super().__init__(
            503,
            "the decode server returned the request in the middle of its answer, and "
            f"{why}; send it again, if possible without stream",
        )


class Servers:
    """The two servers behind the proxy."""

    def __init__(self, session: aiohttp.ClientSession, prefill: str, decode: str) -> None:
        self.session = session
        self.prefill_url = prefill
        self.decode_url = decode

    async def prefill(self, path: str, body: Json) -> tuple[Json, list[int]]:
        """Computes a prompt; returns the transfer parameters and the prompt's token ids."""
        only_prompt = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
        only_prompt |= {
            "stream": False,
            "max_tokens": 1,
            "min_tokens": 0,
            "return_token_ids": True,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        if path == CHAT:
            only_prompt["max_completion_tokens"] = 1
        answer = await self.ask(self.prefill_url + path, only_prompt)
        params = answer.get("kv_transfer_params")
        if not params:
            raise RequestError(502, "the prefill server has no KV connector for P/D")
        holder = answer if path == CHAT else answer["choices"][0]
        return params, holder["prompt_token_ids"]

    async def decode(self, path: str, body: Json) -> AsyncIterator[Json]:
        """Yields the chunks of a streamed answer that have a choice."""
        body = {key: value for key, value in body.items() if key != "stream_options"}
        body |= {"stream": True, "return_token_ids": True}
        async with self._response("POST", self.decode_url + path, body) as response:
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                chunk = json.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    raise RequestError(502, chunk["error"])
                if chunk["choices"]:
                    yield chunk

    async def ask(self, url: str, body: Json) -> Json:
        """Posts a request that is not streamed."""
        async with self._response("POST", url, body) as response:
            answer: Json = await response.json()
            return answer

    async def check_health(self) -> None:
        """Sees that both take requests.

        Raises:
            RequestError: One of them does not.
        """
        for url in (self.prefill_url, self.decode_url):
            async with self._response("GET", url + "/health"):
                pass

    @contextlib.asynccontextmanager
    async def _response(
        self, method: str, url: str, body: Json | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self.session.request(method, url, json=body) as response:
                await _check(response)
                yield response
        except aiohttp.ClientError as error:
            raise RequestError(502, f"{url} cannot be reached or breaks off: {error!r}") from error

    async def whole_characters(self, model: str | None, token_ids: list[int]) -> list[int]:
        """The tokens without those at the end that are only a part of a character."""
        while token_ids:
            # A character has at most four bytes, and a token at least one.
            body = {"model": model, "tokens": token_ids[-4:]}
            answer = await self.ask(self.decode_url + "/detokenize", body)
            if not answer["prompt"].endswith("\N{REPLACEMENT CHARACTER}"):
                break
            token_ids = token_ids[:-1]
        return token_ids


class Exchange:
    """One request and its answer, however many rounds it takes.

    Attributes:
        token_ids: What has been generated and given to the client.
        text: The text of these tokens.
    """

    def __init__(self, servers: Servers, path: str, body: Json) -> None:
        if not isinstance(body, dict):
            raise RequestError(400, "the request must be a JSON object")
        refused = sorted(_used(body, REFUSED))
        if refused:
            raise RequestError(400, f"{', '.join(refused)} cannot be used with this proxy")
        if (body.get("n") or 1) != 1:
            raise RequestError(400, "this proxy gives one answer per request: n must be 1")
        prompt = body.get("prompt")
        if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
            raise RequestError(400, "this proxy takes one prompt per request")
        self._servers = servers
        self._path = path
        self._body = body
        self._chat = path == CHAT
        self.token_ids: list[int] = []
        self.text = ""
        self._prompt_ids: list[int] = []
        self._head: Json = {}
        self._offset = 0
        # What the next round brings once more.
        self._known_ids: list[int] = []
        self._known_text = ""
        # Whether the client was given something that cannot be told from text and tokens.
        self._opaque = False
        self._prompt_told = False

    @property
    def usage(self) -> Json:
        """The tokens so far, as the client would count them."""
        prompt, completion = len(self._prompt_ids), len(self.token_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    @property
    def _repeats(self) -> bool:
        body = self._body
        return bool(_used(body, REPEATED)) or (
            self._chat and (bool(body.get("logprobs")) or _has_media(body))
        )

    # ---- the two forms of an answer ----

    async def stream(self) -> AsyncIterator[Json]:
        """Yields the chunks of one uninterrupted answer."""
        options = self._body.get("stream_options") or {}
        async with contextlib.aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                if options.get("continuous_usage_stats"):
                    chunk["usage"] = self.usage
                yield chunk
        if options.get("include_usage"):
            yield self._head | {"choices": [], "usage": self.usage}

    async def whole(self) -> Json:
        """The answer in one piece."""
        return await (self._repeat_until_whole() if self._repeats else self._join_chunks())

    async def _repeat_until_whole(self) -> Json:
        for _ in range(MOST_RESENDS + 1):
            params, _ = await self._servers.prefill(self._path, self._body)
            url = self._servers.decode_url + self._path
            answer = await self._servers.ask(url, self._body | {"kv_transfer_params": params})
            if answer["choices"][0].get("stop_reason") != RECOMPUTED:
                return answer
            RESENDS.labels("repeat").inc()
        raise _too_often()

    async def _join_chunks(self) -> Json:
        joined: Json = {}
        try:
            async with contextlib.aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    (choice,) = chunk.pop("choices")
                    _append(joined, chunk | {"choice": choice})
        except BrokenOffError:
            return await self._repeat_until_whole()
        choice = joined.pop("choice")
        if self._chat:
            joined["object"] = "chat.completion"
            choice["message"] = choice.pop("delta")
        return joined | {"choices": [choice], "usage": self.usage}

    # ---- rounds ----

    async def _chunks(self) -> AsyncIterator[Json]:
        path, body = self._path, self._body
        for resends in range(MOST_RESENDS + 1):
            params, prompt_ids = await self._servers.prefill(path, body)
            if not resends:
                self._prompt_ids = prompt_ids
            if path == COMPLETIONS:
                body = body | {"prompt": prompt_ids}
            finished = returned = False
            # Tokens without a text yet. If the request is returned, they are forgotten.
            held: Json = {}
            chunks = self._servers.decode(path, body | {"kv_transfer_params": params})
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    (choice,) = chunk["choices"]
                    self._head = self._head or {key: chunk[key] for key in HEAD}
                    finished = choice.get("finish_reason") is not None
                    if choice.get("stop_reason") == RECOMPUTED:
                        returned = True
                        choice["finish_reason"] = choice["stop_reason"] = None
                    if self._chat and path == COMPLETIONS:
                        choice["delta"] = {"content": choice.pop("text")}
                    self._drop_known(choice)
                    _append(held, choice)
                    if self._is_due(held, begins=not (resends or self.token_ids)):
                        yield self._told(held)
                        held = {}
            if not finished:
                raise RequestError(502, "the decode server has broken off its answer")
            if not returned:
                return
            if self._repeats:
                body = self._repeated()
                RESENDS.labels("repeat").inc()
            else:
                path, body = COMPLETIONS, await self._resumed()
                RESENDS.labels("resume").inc()
        raise _too_often()

    async def _resumed(self) -> Json:
        """The request for what is still to come."""
        if self._opaque:
            raise BrokenOffError("an answer with reasoning cannot be resumed")
        body = self._body
        # Tokens may have come together with a text that is not all of theirs.
        token_ids = await self._servers.whole_characters(body.get("model"), self.token_ids)
        if body.get("return_token_ids") or body.get("logprobs") is not None:
            self._known_ids = self.token_ids[len(token_ids) :]
        else:
            self.token_ids = token_ids
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if not self._chat:
            limit = body.get("max_tokens", 16)
        dropped = {"truncate_prompt_tokens"}
        if self._chat:
            dropped |= {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
        return {key: value for key, value in body.items() if key not in dropped} | {
            "prompt": self._prompt_ids + token_ids,
            "max_tokens": None if limit is None else limit - len(token_ids),
            "min_tokens": max(0, (body.get("min_tokens") or 0) - len(token_ids)),
        }

    def _repeated(self) -> Json:
        """The request as it came, of whose answer a part is known."""
        if self._opaque:
            raise BrokenOffError("a stream with tool calls or reasoning cannot be resumed")
        self._known_ids, self._known_text = list(self.token_ids), self.text
        return self._body

    # ---- chunks ----

    def _drop_known(self, choice: Json) -> None:
        """Takes out of a chunk's choice what the client has already."""
        choice.pop("prompt_token_ids", None)
        token_ids = choice["token_ids"] = choice.get("token_ids") or []
        said, key = self._said(choice)
        text = said.get(key) or ""
        num_known, len_known = len(self._known_ids), len(self._known_text)
        if (
            token_ids[:num_known] != self._known_ids[: len(token_ids)]
            or text[:len_known] != self._known_text[: len(text)]
        ):
            raise BrokenOffError("generating it again gave another one")
        self._known_ids = self._known_ids[len(token_ids) :]
        self._known_text = self._known_text[len(text) :]
        choice["token_ids"] = token_ids[num_known:]
        said[key] = text[len_known:]
        logprobs = choice.get("logprobs") or {}
        for key, values in logprobs.items():
            logprobs[key] = values and values[num_known:]

    def _is_due(self, choice: Json, *, begins: bool) -> bool:
        """Whether the client is to get this now."""
        said, key = self._said(choice)
        return bool(
            said[key]
            or choice.get("finish_reason")
            or self._other(choice)
            or (begins and "role" in said)
            # An answer that is repeated is cut at any token.
            or (self._repeats and choice["token_ids"])
        )

    def _told(self, choice: Json) -> Json:
        """The chunk for the client; from now on the client has it."""
        chunk = dict(self._head)
        said, key = self._said(choice)
        token_ids = choice["token_ids"]
        self.token_ids += token_ids
        self.text += said[key]
        self._opaque = self._opaque or self._other(choice)
        logprobs = choice.get("logprobs") or {}
        if logprobs.get("text_offset"):
            # Where the text of each token begins in the whole answer.
            shift = self._offset - logprobs["text_offset"][0]
            logprobs["text_offset"] = [offset + shift for offset in logprobs["text_offset"]]
            self._offset = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        if not self._body.get("return_token_ids"):
            del choice["token_ids"]
        elif not self._prompt_told:
            self._prompt_told = True
            (chunk if self._chat else choice)["prompt_token_ids"] = self._prompt_ids
        return chunk | {"choices": [choice]}

    def _said(self, choice: Json) -> tuple[Json, str]:
        """Where the text of a choice is."""
        return (choice["delta"], "content") if self._chat else (choice, "text")

    def _other(self, choice: Json) -> bool:
        """Whether a choice says something beside its text."""
        delta = choice.get("delta", {})
        return any(value for key, value in delta.items() if key not in ("role", "content"))


def _used(body: Json, keys: set[str]) -> set[str]:
    """Which of these a request uses."""
    zeros = {key for key in keys & ZERO_MEANS_SOMETHING if body.get(key) is not None}
    return zeros | {key for key in keys if body.get(key)}


def _has_media(body: Json) -> bool:
    """Whether a chat has more than text."""
    messages = (message for message in body.get("messages") or () if isinstance(message, dict))
    contents = (message.get("content") for message in messages)
    parts = (part for parts in contents if isinstance(parts, list) for part in parts)
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def _append(joined: Json, part: Json) -> None:
    """Joins the values of chunks: texts and lists are appended, others replaced."""
    for key, value in part.items():
        if isinstance(value, dict):
            joined[key] = joined.get(key) or {}
            _append(joined[key], value)
        elif key in TEXTS or isinstance(value, list):
            before = joined.get(key)
            joined[key] = before + value if before and value else before or value
        else:
            joined[key] = value


def _too_often() -> RequestError:
    return RequestError(503, f"the decode server has returned the request {MOST_RESENDS} times")


async def _check(response: aiohttp.ClientResponse) -> None:
    if not response.ok:
        text = await response.text()
        try:
            error = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            error = text
        raise RequestError(response.status, error)


async def answer(request: web.Request) -> web.StreamResponse:
    """Answers a client."""
    REQUESTS.inc()
    response = None
    try:
        body = await request.json()
        exchange = Exchange(request.app[SERVERS], request.path, body)
        if not body.get("stream"):
            return web.json_response(await exchange.whole())
        async with contextlib.aclosing(exchange.stream()) as chunks:
            async for chunk in chunks:
                if response is None:
                    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                    await response.prepare(request)
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    except (RequestError, aiohttp.ClientConnectionResetError, json.JSONDecodeError) as error:
        gone = request.transport is None or request.transport.is_closing()
        if response is not None and (gone or isinstance(error, aiohttp.ClientConnectionResetError)):
            # The client has gone away before it could be noticed in another way.
            return response
        FAILURES.inc()
        if isinstance(error, json.JSONDecodeError):
            error = RequestError(400, f"the request is not JSON: {error}")
        if response is None:
            return web.json_response(error.body, status=error.status)
        await response.write(b"data: " + json.dumps(error.body).encode() + b"\n\n")
    assert response is not None
    await response.write(b"data: [DONE]\n\n")
    return response


async def models(request: web.Request) -> web.Response:
    """The models of the decode server."""
    servers = request.app[SERVERS]
    async with servers.session.get(servers.decode_url + "/v1/models") as response:
        return web.json_response(await response.json(), status=response.status)


async def metrics(request: web.Request) -> web.Response:
    """The proxy's own counters, for Prometheus."""
    return web.Response(body=generate_latest(), headers={"Content-Type": "text/plain"})


async def health(request: web.Request) -> web.Response:
    """Says whether the proxy and both servers can take requests."""
    try:
        await request.app[SERVERS].check_health()
    except RequestError as error:
        return web.json_response(error.body, status=error.status)
    return web.Response()


SERVERS = web.AppKey("servers", Servers)


def application(prefill: str, decode: str) -> web.Application:
    """The proxy between these base URLs."""

    async def connected(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            # How long a step or a new connection takes depends on the load. A server that is gone
            # refuses connections, and of a machine that is gone the system tells.
            timeout=aiohttp.ClientTimeout(total=None),
            # A server may close a connection that waits for its next request just when that comes.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            # A line of a stream may have the token ids of a long prompt.
            read_bufsize=2**25,
        ) as session:
            app[SERVERS] = Servers(session, prefill, decode)
            yield

    app = web.Application(client_max_size=2**28)
    app.cleanup_ctx.append(connected)
    app.add_routes(
        [
            web.post(COMPLETIONS, answer),
            web.post(CHAT, answer),
            web.get("/v1/models", models),
            web.get("/metrics", metrics),
            web.get("/health", health),
        ]
    )
    return app


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", default="http://127.0.0.1:8100", help="base URL")
    parser.add_argument("--decode", default="http://127.0.0.1:8200", help="base URL")
    options = parser.parse_args()
    app = application(options.prefill, options.decode)
    # A client that goes away ends its requests to the servers, too.
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
