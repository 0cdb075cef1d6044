"""The demo without engines: families at once, answers through the client, and with `--long` on engines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvdev import demo
from kvdev.cli import FAMILIES
from kvdev.paths import ROOT
from kvdev.steps import DevError

IS_LONG = os.environ.get("KVDEV_LONG") == "1"


def dev(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/dev.py"), "demo", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_families_are_listed_at_once_and_an_unknown_one_is_answered_with_those_there_are() -> None:
    done = dev("--list-families")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(FAMILIES)
    done = dev("--family", "dens")
    assert done.returncode == 2
    assert all(name in done.stderr for name in FAMILIES)


def part(text: str | None, tokens: int | None = None) -> dict[str, Any]:
    choices = [] if text is None else [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]
    usage = {"prompt_tokens": tokens, "completion_tokens": 2, "total_tokens": 9} if tokens else None
    return {"id": "c", "object": "text_completion", "created": 1, "model": "tiny", "choices": choices, "usage": usage}


def asked(*parts: dict[str, Any]) -> Any:
    """Return what the demo makes of a streamed answer, whose parts are 50 ms apart."""

    async def complete(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for one in parts:
            await asyncio.sleep(0.05)
            await answer.write(f"data: {json.dumps(one)}\n\n".encode())
        return answer

    async def run() -> Any:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", complete)])
        async with TestServer(app) as server, demo.openai_client(str(server.make_url("")), timeout_s=5) as client:
            return await demo._ask(client, "a prompt")

    return asyncio.run(run())


def test_an_answer_is_put_together_from_its_stream_and_an_error_ends_the_demo() -> None:
    answer = asked(part("one "), part("room"), part(None, 250))
    assert (answer.text, answer.prompt_tokens) == ("one room", 250)
    assert 50 <= answer.first_token_ms < 1000
    with pytest.raises(openai.APIError, match="the engine died"):
        asked(part("a"), {"error": {"message": "the engine died", "code": 500}})
    with pytest.raises(DevError, match="did not answer"):
        demo.answers_of("", "http://127.0.0.1:1", ["a prompt"])


def test_text_that_no_terminal_shows_is_spelt() -> None:
    assert demo.shown(" a\nb\x1b[0m") == "a\\nb\\x1b[0m"
    assert demo.shown("") == "(special tokens, which have no text)"


@pytest.mark.skipif(not IS_LONG, reason="starts six vLLM engines (two minutes); `test --long tools` runs it")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [[], ["--corrupt"]])
def test_the_demo_shows_equal_texts_and_with_a_changed_byte_different_ones(words: list[str]) -> None:
    done = dev("--json", *words, timeout_s=400)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["identical"], report["failed_transfers"]) == (not words, 0)
    assert report["kv_bytes"] == report["kv_bytes_expected"] > 0
    if not words:
        assert report["recomputed_prompt_tokens"] == 0
        last = f"{report['transfers']} transfers, {report['kv_bytes']:,} bytes of KV"
        assert last in (ROOT / "README.md").read_text()
