"""`dev.py demo`: a prefill and a decode engine with our connector, beside one engine that does the whole job alone."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

from kvdev.engines import EngineSpec, free_port, local_model, metric_sum, samples_of, start_all
from kvdev.paths import ROOT
from kvdev.steps import end_process, fail, note

_ANY_PROMPTS = (
    "Tell me a story about a lighthouse keeper who counts ships. " * 4,
    "In 1854 the first cable crossed the channel; explain how a signal travels through it. " * 7,
    "List the planets, their moons, and what each was named after, slowly and with care. " * 12,
    "One, two, three, four, five, six, seven, eight, nine, ten, and then back down again. " * 3,
)
_ANSWER_WITHIN_S = 120


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt_tokens: int
    text: str
    first_token_ms: float


def connector_config(role: str, **extra: object) -> dict[str, object]:
    """Return the one-line `--kv-transfer-config` of an engine with our connector."""
    config: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "vllm_adapter",
        "kv_role": role,
    }
    if extra:
        config["kv_connector_extra_config"] = extra
    return config


def run_demo(uv: Path, options: argparse.Namespace) -> int:
    """Run the demo; exit code 0 when the texts agree (with --corrupt: when they differ)."""
    python, model = local_model(uv, options.family, options.vllm)
    made = model / "prompts.json"  # prompts of a trained model; for random weights any text does
    prompts: Sequence[str] = json.loads(made.read_text()) if made.exists() else _ANY_PROMPTS
    note("starting three engines: prefill, decode, and one that does the whole job alone")
    with (
        tempfile.TemporaryDirectory(prefix="kvdev-") as folder,
        start_all(_specs(model, Path(folder), is_corrupt=options.corrupt), python) as (prefill, decode, alone),
        running_router([prefill.url], [decode.url]) as router_url,
    ):
        warm_up = ["a first request, to warm both paths up"]
        answers_of("first request of both ways", router_url, warm_up)
        answers_of("first request of one engine", alone.url, warm_up)
        before = decode.metrics()
        handed_over = answers_of("prefill, hand-over, decode", router_url, prompts)
        after = decode.metrics()
        by_itself = answers_of("one engine alone", alone.url, prompts)
        report = {"vllm": options.vllm, **_report(model, before, after, handed_over, by_itself)}
        _print_table(prompts, handed_over, by_itself, report)
        if options.json:
            print(json.dumps(report))
        if options.keep:
            body = json.dumps({"model": "tiny", "prompt": prompts[-1], "max_tokens": 16, "temperature": 0})
            print(f"\nrouter {router_url}; " + "; ".join(f"{e.url} (log {e.log})" for e in (prefill, decode, alone)))
            print(f"curl {router_url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
            print(f"curl {decode.url}/metrics | grep nixl\nCtrl-C ends them.", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                while decode.is_running:
                    time.sleep(1)
    return 0 if report["identical"] != options.corrupt else 1


def _specs(model: Path, folder: Path, *, is_corrupt: bool) -> list[EngineSpec]:
    """Return the three engines; a corrupt one has the tests' probes, which spoil a page of everything that it receives."""
    decode, environment = connector_config("kv_consumer"), dict[str, str]()
    if is_corrupt:
        decode["kv_connector_module_path"] = "probe_connector"
        probes = str(ROOT / "integration_tests" / "host" / "engines")
        environment = {"PYTHONPATH": probes, "KVDEV_PROBE_FOLDER": str(folder), "KVDEV_PROBE_CORRUPT": "1"}
    return [
        EngineSpec("prefill", model, "0", connector_config("kv_producer")),
        EngineSpec("decode", model, "1", decode, environment=environment),
        EngineSpec("alone", model, "1"),
    ]


@contextlib.contextmanager
def running_router(prefill: Sequence[str], decode: Sequence[str], *more: str) -> Iterator[str]:
    """Run the router as its own process on a free port, with further arguments; yield its base URL."""
    port = free_port()
    ends = [f"--prefill={url}" for url in prefill] + [f"--decode={url}" for url in decode]
    command = [sys.executable, str(ROOT / "tools" / "dev.py"), "router", "--port", str(port), *ends, *more]
    environment = {"KVDEV_UV": "", **os.environ}  # this is the environment that it needs
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None  # noqa: S101 - a pipe, for type checkers
    try:
        line = process.stdout.readline()
        if not line.startswith("router on "):
            fail(f"the router did not start: {line.strip() or 'no output'}")
        yield f"http://127.0.0.1:{port}"
    finally:
        end_process(process)
        process.stdout.close()


def openai_client(url: str, *, timeout_s: float) -> openai.AsyncOpenAI:
    """Return a client that asks once: no retries, no proxy of the environment, and a connection of its own per request."""
    plain = openai.DefaultAsyncHttpxClient(trust_env=False, headers={"Connection": "close"})
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s, http_client=plain)


def answers_of(about: str, url: str, prompts: Sequence[str]) -> list[_Answer]:
    """Ask for a greedy answer to each prompt in turn, showing progress on standard error."""
    bars = Console(stderr=True)

    async def ask_all() -> list[_Answer]:
        async with openai_client(url, timeout_s=_ANSWER_WITHIN_S) as client:
            return [await _ask(client, prompt) for prompt in track(prompts, about, console=bars)]

    try:
        return asyncio.run(ask_all())
    except openai.APITimeoutError:
        fail(f"{url} did not answer within {_ANSWER_WITHIN_S} s; the engines' logs are in .dev/logs")
    except openai.APIError as error:
        fail(f"{url} did not answer: {error.message[:500]}")


async def _ask(client: openai.AsyncOpenAI, prompt: str) -> _Answer:
    started = time.perf_counter()
    times_s: list[float] = []
    text, prompt_tokens = "", 0
    parts = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for part in parts:
        for choice in part.choices:
            times_s.append(time.perf_counter())
            text += choice.text
        prompt_tokens = part.usage.prompt_tokens if part.usage else prompt_tokens
    return _Answer(prompt_tokens, text, 1e3 * (min(times_s, default=math.inf) - started))


def _report(
    model: Path, before: str, after: str, handed_over: list[_Answer], by_itself: list[_Answer]
) -> dict[str, Any]:
    def grew(name: str, **labels: str) -> int:
        return round(metric_sum(after, name, **labels) - metric_sum(before, name, **labels))

    return {
        "connector": "vllm_adapter.NixlConnector",
        "requests": len(handed_over),
        "identical": [a.text for a in handed_over] == [a.text for a in by_itself],
        "kv_bytes": grew("vllm:nixl_bytes_transferred_sum"),
        "kv_bytes_expected": _expected_bytes(model, after, [a.prompt_tokens for a in handed_over]),
        "transfers": grew("vllm:nixl_xfer_time_seconds_count"),
        "failed_transfers": grew("vllm:nixl_num_failed_transfers_total"),
        "recomputed_prompt_tokens": grew("vllm:prompt_tokens_by_source_total", source="local_compute"),
        "ttft_ms": {
            "handed_over": round(statistics.median(a.first_token_ms for a in handed_over), 1),
            "alone": round(statistics.median(a.first_token_ms for a in by_itself), 1),
        },
    }


def _expected_bytes(model: Path, metrics_page: str, prompt_tokens: Sequence[int]) -> int:
    """Bytes that the model's geometry demands: whole blocks, K and V, every layer, float32."""
    config = json.loads((model / "config.json").read_text())
    block_tokens = int(samples_of(metrics_page, "vllm:cache_config_info")[0].labels["block_size"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_key_value_heads"] * head_dim * 4 * config["num_hidden_layers"]
    return sum(math.ceil(tokens / block_tokens) * block_tokens * token_bytes for tokens in prompt_tokens)


def _print_table(
    prompts: Sequence[str], handed_over: list[_Answer], by_itself: list[_Answer], report: dict[str, Any]
) -> None:
    texts = [("the prompt ends with", 3), ("prefill -> decode goes on", 5), ("one engine alone", 5)]
    columns = [Column(heading, overflow="fold", ratio=share) for heading, share in texts]
    columns += [Column(heading, justify="right", no_wrap=True) for heading in ("same", "tokens", "first token")]
    table = Table(*columns, title="One prompt, two ways", show_lines=True, expand=True)
    for prompt, ours, theirs in zip(prompts, handed_over, by_itself, strict=True):
        table.add_row(
            escape("..." + prompt[-48:]),
            shown(ours.text),
            shown(theirs.text),
            "yes" if ours.text == theirs.text else "NO",
            str(ours.prompt_tokens),
            f"{ours.first_token_ms:.0f} | {theirs.first_token_ms:.0f} ms",
        )
    console = Console(stderr=True, width=120)
    console.print(table)
    console.print(
        f"{report['transfers']} transfers, {report['kv_bytes']:,} bytes of KV (the geometry demands "
        f"{report['kv_bytes_expected']:,}), {report['recomputed_prompt_tokens']} prompt tokens recomputed by the decode "
        f"engine, texts {'identical' if report['identical'] else 'DIFFERENT'}",
        soft_wrap=True,
    )


def shown(text: str) -> str:
    """Return a text as one line of a table; what no terminal shows is spelt in escapes."""
    line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return escape(line.strip() or "(special tokens, which have no text)")
