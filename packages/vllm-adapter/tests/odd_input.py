"""Odd files, values and numbers, and commands that are run on them as a program is."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints
from unittest.mock import patch

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from vllm_adapter.cli import main
from vllm_adapter.cli.command import app

__all__ = [
    "NOBODY",
    "ODD_NUMBERS",
    "ODD_VALUES",
    "UNREADABLE",
    "WRONG",
    "Ended",
    "changed",
    "check_end",
    "numeric_options",
    "places",
    "program",
    "run",
]

NOBODY = ("127.0.0.1:1", "127.0.0.1:2")
"""Two places where nothing listens."""


class Ended(NamedTuple):
    """The end of a command."""

    code: int
    out: str
    err: str


class Stream(io.TextIOWrapper):
    """A stream of a program, whose bytes are kept."""

    def __init__(self, errors: str) -> None:
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding="utf-8", errors=errors)

    def text(self) -> str:
        self.flush()
        return self.kept.getvalue().decode()


def run(*words: str, stdin: bytes = b"") -> Ended:
    """Run a command as a program runs: whatever it raises would be a traceback."""
    out, err = Stream("strict"), Stream("backslashreplace")
    given_in = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with redirect_stdout(out), redirect_stderr(err), patch("sys.stdin", given_in):
        code = main(list(words))
    return Ended(code, out.text(), err.text())


@cache
def documented(command: str) -> set[int]:
    """Return the exit codes on a command's page of help."""
    epilog = program().commands[command].epilog or ""
    return {int(code) for code in re.findall(r"^  (\d)  ", epilog.partition("exit codes:")[2], re.MULTILINE)}


@cache
def program() -> TyperGroup:
    made = get_command(app)
    assert isinstance(made, TyperGroup)
    return made


def check_end(words: tuple[str, ...], ended: Ended) -> None:
    """Hold the end of a command against its page."""
    assert ended.code in documented(words[0]), ended
    assert "Traceback" not in ended.err
    if ended.code == 2:
        assert ended.err.strip()
        assert ended.out == ""
    if "--json" in words and (ended.out or ended.code in {0, 1}):
        json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def numeric_options() -> Iterator[tuple[str, str]]:
    """Yield (command, option) of every option that takes a number."""
    for command in app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if about and {int, float} & {kind, *get_args(kind)}:
                given = (about[0].default, *(about[0].param_decls or ()))  # the first name stands where a default may
                words = [word for word in given if isinstance(word, str) and word.startswith("--")]
                yield str(command.name), words[0] if words else f"--{name.replace('_', '-')}"


UNREADABLE: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n",
    "no UTF-8": b"\xff\xfe\x00\x01",
    "Latin-1": b'{"kv_role": "\xe9"}',
    "zero bytes": b"\0" * 100,
    "byte order mark": b'\xef\xbb\xbf{"kv_role": "kv_both"}',
    "no JSON": b"kv_role: kv_both",
    "half": b'{"kv_role": ',
    "digits": b"1" * 5000,
    "digits inside": b'{"kv_port": ' + b"1" * 5000 + b"}",
    **{f"lists {depth}": b"[" * depth + b"]" * depth for depth in (65, 950, 200_000)},
    **{f"open lists {depth}": b"[" * depth for depth in (1000, 200_000)},
    **{f"objects {depth}": b'{"a":' * depth + b"1" + b"}" * depth for depth in (500, 5000)},
}
WRONG: dict[str, bytes] = {
    "number": b"5",
    "text": b'"x"',
    "null": b"null",
    "true": b"true",
    "NaN": b"NaN",
    "infinity": b"-Infinity",
    "huge": b"1" * 400,
    "numbers": b"[1]",
    "lists": b"[[[]]]",
    "nulls": b"[null]",
    "surrogate": b'{"\\ud800": "\\ud800"}',
    "surrogates": b'[{"desk": "\\ud800", "error": "\\ud800", "socket": "\\u001b[2J"}]',
    "extra of lists": b'{"kv_connector_extra_config": []}',
    "odd values": b'{"kv_role": NaN, "kv_port": 1e999, "kv_connector": {}, "kv_connector_extra_config": {"backends": [[]]}}',
    "odd children": b'{"kv_connector": "MultiConnector", "kv_role": "kv_both", '
    b'"kv_connector_extra_config": {"connectors": [1, null, {"kv_connector_extra_config": 5}]}}',
    "hand-overs": b'[{"hand_overs": 5}]',
    "hand-over": b'[{"hand_overs": [{"request_id": "x"}]}]',
    "moments": b'[{"hand_overs": [{"moments": {"arrived": "x"}}]}]',
}

ODD_NUMBERS = [
    "nan", "inf", "-inf", "-1", "-1e-9", "0", "-0.0", "1e308", "1e400", "1e-320", "1e9", "4294967296", "9" * 400, "9" * 5000,
    "", " ", "x", "1_0", "0x10", "1,5", "\u0663", "1e", "--json",
]  # fmt: skip
ODD_VALUES = [
    None, True, False, 0, -1, 5, 2**64, 10**400, -(10**400), 1.5, 5e-324, 1e308, math.nan, math.inf, -math.inf,
    "", "x", "\ud800", "\x1b[2J", "1", "running", "dead", [], [1], [[]], [None], ["\ud800"], {}, {"a": 1}, {"state": 5},
    {"state": "dead"}, {"x": {}},
]  # fmt: skip


def places(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each field and entry."""
    below: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in below:
        yield (*at, key)
        yield from places(child, (*at, key))


def changed(value: Any, place: tuple[Any, ...], odd: object) -> Any:
    """Return a value with another thing in one place."""
    made = copy.deepcopy(value)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = odd
    return made
