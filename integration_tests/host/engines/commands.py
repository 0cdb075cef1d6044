"""The `vllm-adapter` command beside running engines, and a client whose time its traces are compared with."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from fleets import VLLM, Fleet, client

from kvdev.engines import local_model

__all__ = ["adapter", "parts", "time_to_first_token"]


def adapter(*words: str, code: int | None = 0) -> str:
    """Return what `vllm-adapter`, as installed beside vLLM, prints."""
    python, _ = local_model(Path(os.environ["KVDEV_UV"]), "dense", VLLM)
    command = [str(python.with_name("vllm-adapter")), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert code is None or done.returncode == code, done
    return done.stdout


def parts(engine: str) -> dict[str, dict[str, Any]]:
    """Return the answers of an engine's processes, by part; the engine by its id or side channel."""
    (answers,) = json.loads(adapter("status", engine, "--json", "--timeout", "60"))["engines"].values()
    return {str(answer["part"]): answer for answer in answers}


def time_to_first_token(pair: Fleet, name: str, text: str) -> float:
    """Return the time that a client waits for the first token of a streamed answer through the router."""
    body = {"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}

    async def stream() -> float:
        # Not by the openai client, whose own time would count as time that the trace does not explain.
        async with client() as session:
            began_s = time.monotonic()
            async with session.post(
                pair.router + "/v1/completions", json=body, headers={"X-Request-Id": name}
            ) as reply:
                assert reply.status == 200, await reply.text()
                lines = [(time.monotonic() - began_s, raw) async for raw in reply.content]
                return next(waited_s for waited_s, raw in lines if raw.startswith(b"data: {"))

    return asyncio.run(stream())
