"""The proxy of ``examples/pd``, where the decode server returns a request after any token.

The servers behind it are played here, because a real one cannot be told when to return a request;
``tests/e2e/test_prefill_decode.py`` has the real ones. Their model has a token for each byte and
goes on with a text that it knows. As vLLM does, they send a character when it is complete.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "pd"))

import proxy

PROMPT = list(b"Say: ")
ANSWER = "naïve \N{SNOWMAN} €\N{GRINNING FACE}!"
BYTES = list(ANSWER.encode())


class Servers:
    """Plays both servers.

    Args:
        returns: After how many tokens each round is returned; the next one is not.
        answers: What the model says in each round; the last one again and again.
    """

    def __init__(self, returns, answers=(ANSWER,)):
        self.returns = list(returns)
        self.answers = [list(answer.encode()) for answer in answers]
        self.prefills, self.decodes = [], []

    async def generate(self, request):
        body = await request.json()
        prompt = body.get("prompt", PROMPT)
        if body["kv_transfer_params"].get("do_remote_decode"):
            assert body["max_tokens"] == 1
            self.prefills.append(body)
            told = {"kv_transfer_params": {"remote": len(self.prefills)}}
            return web.json_response(
                told | {"prompt_token_ids": prompt, "choices": [{"prompt_token_ids": prompt}]}
            )
        assert body["kv_transfer_params"] == {"remote": len(self.prefills)}
        model = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        token_ids = model[len(prompt) - len(PROMPT) :]
        returned = self.returns.pop(0) if self.returns else None
        self.decodes.append(body)
        parts = self.parts(request.path, token_ids[:returned], returned is not None)
        if not body.get("stream"):
            return web.json_response(self.joined(parts))
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(f"data: {json.dumps(self.answer(part))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def parts(self, path, token_ids, returned):
        """What a stream has in its choices: a token each, and the end."""
        said = ""
        for i in range(len(token_ids)):
            text = bytes(token_ids[: i + 1]).decode(errors="ignore")
            yield self.part(path, text[len(said) :], [token_ids[i]])
            said = text
        end = {"finish_reason": "stop", "stop_reason": "recomputed" if returned else None}
        yield self.part(path, "", []) | end

    def part(self, path, text, token_ids):
        said = {"text": text} if path == proxy.COMPLETIONS else {"delta": self.delta(text)}
        return {"index": 0, "token_ids": token_ids, "finish_reason": None, **said}

    def delta(self, text):
        return {"content": text}

    def joined(self, parts):
        whole = {}
        for part in parts:
            proxy._append(whole, part)
        return self.answer(whole)

    def answer(self, choice):
        numbered = {"id": f"round {len(self.decodes)}", "created": len(self.decodes)}
        return numbered | {"object": "answer", "model": "bytes", "choices": [choice]}

    async def detokenize(self, request):
        token_ids = (await request.json())["tokens"]
        return web.json_response({"prompt": bytes(token_ids).decode(errors="replace")})


class ToolServers(Servers):
    """Their model calls a tool with its answer."""

    def delta(self, text):
        return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if text else {}


class SilentServers(Servers):
    """They end an answer without saying that it has ended."""

    def parts(self, *args):
        *parts, _ = super().parts(*args)
        return parts


def ask(servers, path, **params):
    """The chunks of a streamed answer, or the answer."""
    body = {"max_tokens": 50, "return_token_ids": True, **params}
    body |= {"prompt": PROMPT} if path == proxy.COMPLETIONS else {"messages": []}

    async def run():
        app = web.Application()
        app.add_routes(
            [web.post(path, servers.generate) for path in (proxy.COMPLETIONS, proxy.CHAT)]
        )
        app.add_routes([web.post("/detokenize", servers.detokenize)])
        async with contextlib.AsyncExitStack() as stack:
            behind = await stack.enter_async_context(TestServer(app))
            url = str(behind.make_url("")).rstrip("/")
            front = await stack.enter_async_context(TestServer(proxy.application(url, url)))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            response = await session.post(front.make_url(path), json=body)
            if not body.get("stream"):
                return await response.json()
            lines = (await response.text()).split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    return asyncio.run(run())


def said(answer):
    """Text and tokens of an answer that came to its end."""
    chunks = answer if isinstance(answer, list) else [answer]
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1].get("stop_reason") is None
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    text = "".join(part.get("text", part.get("content")) for part in parts)
    return text, [token for choice in choices for token in choice["token_ids"]]


@pytest.mark.parametrize("path", [proxy.COMPLETIONS, proxy.CHAT])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_returned_after_any_token_it_is_resumed(path, stream):
    for returned in range(len(BYTES) + 1):
        servers = Servers([returned, 2])
        answer = ask(servers, path, stream=stream, min_tokens=9)
        assert said(answer) == (ANSWER, BYTES)
        first, second, third = servers.decodes
        assert second["prompt"] == PROMPT + BYTES[: len(second["prompt"]) - len(PROMPT)]
        # Not more than a character is generated again.
        kept = len(second["prompt"]) - len(PROMPT)
        assert bytes(BYTES[:kept]).decode() == bytes(BYTES[:returned]).decode(errors="ignore")
        assert second["max_tokens"] == 50 - kept
        assert second["min_tokens"] == max(0, 9 - kept)
        assert len(third["prompt"]) >= len(second["prompt"])
        assert first["max_tokens"] == 50


@pytest.mark.parametrize("path", [proxy.COMPLETIONS, proxy.CHAT])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_cannot_be_resumed_is_repeated(path, stream):
    for returned in range(len(BYTES) + 1):
        servers = Servers([returned, 2])
        answer = ask(servers, path, stream=stream, stop=["?"])
        text, token_ids = said(answer)
        assert (text, token_ids) == (ANSWER, BYTES)
        assert [body.get("prompt", PROMPT) for body in servers.decodes] == [PROMPT] * 3


def test_another_answer_is_not_put_behind_the_first():
    params = {"seed": 0, "temperature": 1}
    answers = "nay", "naïve"
    whole = ask(Servers([2], answers), proxy.COMPLETIONS, **params)
    assert said(whole)[0] == "naïve"
    # The first two tokens are the same.
    same = ask(Servers([2], answers), proxy.COMPLETIONS, stream=True, **params)
    assert said(same)[0] == "naïve"
    *chunks, last = ask(Servers([3], answers), proxy.COMPLETIONS, stream=True, **params)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "nay"
    assert "generating it again gave another one" in last["error"]["message"]


def test_the_rest_of_a_character_may_be_another_one():
    answers = "a\N{SNOWMAN}", "a\N{SNOWMAN WITHOUT SNOW}"
    for stream in (False, True):
        text, token_ids = said(ask(Servers([3], answers), proxy.COMPLETIONS, stream=stream))
        assert text == answers[1]
        assert token_ids == list(text.encode())


def test_a_stream_with_tool_calls_ends_with_an_error():
    params = {"tools": [{"type": "function"}]}
    *chunks, last = ask(ToolServers([2]), proxy.CHAT, stream=True, **params)
    assert len(chunks) == 2
    assert "a stream with tool calls or reasoning cannot be resumed" in last["error"]["message"]
    whole = ask(ToolServers([2]), proxy.CHAT, **params)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["token_ids"] == BYTES


def test_what_comes_back_again_and_again_is_given_up(monkeypatch):
    monkeypatch.setattr(proxy, "MOST_RESENDS", 3)
    servers = Servers([0] * 4)
    answer = ask(servers, proxy.COMPLETIONS)
    assert "has returned the request 3 times" in answer["error"]["message"]
    assert len(servers.decodes) == 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_without_an_end_is_not_taken_for_a_whole_one(stream):
    answer = ask(SilentServers([]), proxy.COMPLETIONS, stream=stream)
    last = answer[-1] if stream else answer
    assert "has broken off its answer" in last["error"]["message"]
