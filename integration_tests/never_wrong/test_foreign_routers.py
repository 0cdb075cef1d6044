"""Tickets through the routers of other projects, by what those put into their requests.

llm-d's sidecar (connector `nixlv2`) is played by a proxy in Go that decodes bodies into `map[string]any`, between two
HTTP servers. The exchanges are written down from the sources of llm-d-router 0.9 and Dynamo 1.6; neither program was run.
"""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from oracle.geometry import draw
from oracle.runner import Outcome, Play, Router, run

from kvdev.gotool import build_go

SEEDS = (2, 8, 9, 13, 19)  # of each at least one prompt is read; `draw` decides
# Both ask for a ticket with these six keys. Source: llm-d-router pkg/sidecar/proxy/connector_nixlv2.go; Dynamo
# components/src/dynamo/vllm/kv_connector_protocols.py, NixlConnectorProtocol.
SIX_KEYS: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
REQUEST: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 17,
    "temperature": 0.25,
    "seed": 12345,
    "stream": False,
    "stream_options": {"include_usage": True},
}


class Stub:
    """An engine's HTTP server: keeps what it is sent, answers with a ticket or with a text."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.ids: list[str | None] = []
        self.ticket = "null"
        self.status = 200
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                stub.bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
                stub.ids.append(self.headers["X-Request-Id"])
                # The ticket's text as the engine wrote it, digit by digit.
                answer = f'{{"id": "x", "choices": [], "kv_transfer_params": {stub.ticket}}}'.encode()
                self.send_response(stub.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Sidecar:
    """The Go proxy in front of a prefill and a decode engine."""

    def __init__(self, program: Path) -> None:
        self.prefill, self.decode = Stub(), Stub()
        self._process = subprocess.Popen(
            [program, self.prefill.url, self.decode.url], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        self.url = self._process.stdout.readline().strip()

    def ask(self, ticket: str) -> int:
        """Send one request through; prefill answers with this ticket. Returns the HTTP status."""
        self.prefill.ticket = ticket
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(REQUEST).encode(), {"X-Request-Id": "request-7"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    def carry(self, ticket: str) -> str:
        """Return the JSON text of the ticket that the decode engine gets."""
        assert self.ask(ticket) == 200
        return json.dumps(json.loads(self.decode.bodies[-1])["kv_transfer_params"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout
        self._process.stdout.close()
        self.prefill.close()
        self.decode.close()


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    source = Path(__file__).parent / "proxy" / "main.go"
    made = Sidecar(build_go(source, tmp_path_factory.mktemp("go") / "proxy"))
    yield made
    made.close()


def play(seed: int, router: Router) -> Outcome:
    """Run a case of the byte oracle in which tickets are asked for as these routers ask, and carried by one."""
    case = Play(draw(seed), router=router)
    case.ask = dict(SIX_KEYS)
    try:
        return case.run()
    finally:
        case.close()


@pytest.mark.full
def test_llm_d_asks_prefill_for_one_token_and_a_ticket(sidecar: Sidecar) -> None:
    assert sidecar.ask('{"remote_engine_id": "p"}') == 200
    sent = json.loads(sidecar.prefill.bodies[-1])
    assert sent["kv_transfer_params"] == SIX_KEYS
    assert {key: sent.pop(key) for key in ("max_tokens", "max_completion_tokens", "min_tokens", "stream")} == {
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "stream": False,
    }
    assert {*sent} == {*REQUEST} - {"max_tokens", "stream", "stream_options"} | {"kv_transfer_params"}


@pytest.mark.full
def test_llm_d_gives_decode_the_clients_request_with_the_ticket(sidecar: Sidecar) -> None:
    assert sidecar.ask('{"remote_engine_id": "p", "remote_port": 5600}') == 200
    assert json.loads(sidecar.decode.bodies[-1]) == {
        **REQUEST,
        "kv_transfer_params": {"remote_engine_id": "p", "remote_port": 5600},
    }
    assert sidecar.prefill.ids[-1] == sidecar.decode.ids[-1] == "request-7"


@pytest.mark.full
def test_without_a_ticket_decode_computes_the_prompt(sidecar: Sidecar) -> None:
    assert sidecar.ask("null") == 200
    assert json.loads(sidecar.decode.bodies[-1])["kv_transfer_params"] is None


@pytest.mark.full
def test_the_proxy_is_as_bad_with_numbers_as_gos_json(sidecar: Sidecar) -> None:
    assert json.loads(sidecar.carry('{"n": 9007199254740993, "text": "9007199254740993"}')) == {
        "n": 9007199254740992,
        "text": "9007199254740993",
    }


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_a_ticket_passes_through_go_unchanged_and_is_read(sidecar: Sidecar, seed: int) -> None:
    seen: list[tuple[str, str]] = []

    def carried(text: str) -> str:
        seen.append((text, sidecar.carry(text)))
        return seen[-1][1]

    outcome = play(seed, carried)
    assert outcome.codes == run(draw(seed)).codes
    assert outcome.read >= 1
    assert seen
    for before, after in seen:
        assert json.loads(before) == json.loads(after)
        assert _integers(before) <= _integers(after)  # 30.0 becomes 30; no 5600 becomes 5600.0 or 5.6e+03


def test_dynamo_hands_the_ticket_on_as_the_engine_returned_it() -> None:
    """Dynamo's prefill worker puts it into `disaggregated_params`, the decode worker takes it out again."""

    def carried(text: str) -> str:
        message = json.dumps({"disaggregated_params": {"kv_transfer_params": json.loads(text)}})
        return json.dumps(json.loads(message)["disaggregated_params"]["kv_transfer_params"])

    for seed in SEEDS:
        assert play(seed, carried).codes == run(draw(seed)).codes


def _integers(text: str) -> Counter[str]:
    """Count the numbers of a JSON text that are spelled as integers, by their spelling."""
    found: list[str] = []
    json.loads(text, parse_int=found.append)
    return Counter(found)
