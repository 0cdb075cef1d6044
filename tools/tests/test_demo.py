"""The demo without engines: families at once, answers through the client, figures from a page of metrics."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvdev import demo
from kvdev.families import FAMILIES
from kvdev.paths import ROOT
from kvdev.steps import DevError

IS_LONG = os.environ.get("KVDEV_LONG") == "1"


def dev(*words: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, ROOT / "tools/dev.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", [["--family"], ["--list-families"]])
def test_families_are_listed_at_once(words: list[str]) -> None:
    done = dev("demo", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(FAMILIES)


def test_an_unknown_family_is_answered_with_those_there_are() -> None:
    done = dev("demo", "--family", "dens")
    assert done.returncode == 1
    assert "no family named 'dens'" in done.stderr
    assert all(name in done.stderr for name in FAMILIES)


async def served(events: list[Any], status: int, prompts: list[str]) -> AsyncIterator[str]:
    """Serve one answer to every completion request; yield the address."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompts.append(body["prompt"])
        assert (body["temperature"], body["stream"], body["ignore_eos"]) == (0, True, True)
        answer = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in events:
            await asyncio.sleep(0.05)
            await answer.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def event(text: str | None, tokens: int | None = None) -> dict[str, Any]:
    choices = [] if text is None else [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]
    usage = {"prompt_tokens": tokens, "completion_tokens": 2, "total_tokens": 9} if tokens else None
    return {"id": "c", "object": "text_completion", "created": 1, "model": "tiny", "choices": choices, "usage": usage}


def asked(events: list[Any], *, status: int = 200, prompts: tuple[str, ...] = ("one", "two")) -> tuple[Any, list[str]]:
    seen: list[str] = []
    answered: list[int] = []

    async def run() -> Any:
        async for url in served(events, status, seen):
            answers = await demo._ask_all(url, prompts, lambda: answered.append(1))
            assert len(answered) == len(prompts)
            return answers

    return asyncio.run(run()), seen


def test_answers_are_put_together_from_the_stream() -> None:
    began = time.perf_counter()
    answers, seen = asked([event("one "), event("room"), event(None, 250), "[DONE]"])
    assert seen == ["one", "two"]
    assert [(answer.text, answer.prompt_tokens) for answer in answers] == [("one room", 250)] * 2
    assert all(50 <= answer.first_token_ms < 1e3 * (time.perf_counter() - began) - 100 for answer in answers)


@pytest.mark.parametrize(
    ("events", "status", "words"),
    [
        ([event("a"), {"error": {"message": "the engine died", "code": 500}}], 200, "the engine died"),
        ([], 503, "did not answer"),
    ],
)
def test_an_answer_that_ends_in_an_error_ends_the_demo_with_its_words(
    events: list[Any], status: int, words: str
) -> None:
    with pytest.raises(DevError, match=words):
        asked(events, status=status)


def test_text_that_no_terminal_shows_is_spelt() -> None:
    assert demo._shown(" a\nb\x1b[0m") == "a\\nb\\x1b[0m"
    assert demo._shown("") == "(special tokens, which have no text)"


def test_prompts_are_those_that_were_made_with_the_model(tmp_path: Path) -> None:
    assert demo._prompts(tmp_path) == demo._ANY_PROMPTS
    (tmp_path / "prompts.json").write_text('["from the model"]')
    assert list(demo._prompts(tmp_path)) == ["from the model"]


@pytest.mark.skipif(not IS_LONG, reason="starts six vLLM engines (two minutes); `test --long tools` runs it")
@pytest.mark.timeout(900)
def test_the_demo_shows_equal_texts_and_with_a_changed_byte_different_ones() -> None:
    for words, is_same in (([], True), (["--corrupt"], False)):
        command: list[str | Path] = [sys.executable, ROOT / "tools/dev.py", "demo", "--json", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        assert (report["identical"], report["failed_transfers"]) == (is_same, 0)
        assert report["kv_bytes"] == report["kv_bytes_expected"] > 0
        if is_same:
            assert report["recomputed_prompt_tokens"] == 0
            last = f"{report['transfers']} transfers, {report['kv_bytes']:,} bytes of KV"
            assert last in (ROOT / "README.md").read_text()
