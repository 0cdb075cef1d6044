"""Odd files, numbers and answers for every command: no traceback, a documented exit code, and JSON that is JSON."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_input import captured, places, put
from test_status import SCHEDULER, WORKER
from test_trace import answers as trace_answers
from typer.core import TyperGroup
from typer.main import get_command

from vllm_adapter.cli import engines, main
from vllm_adapter.cli.command import app
from vllm_adapter.observe import answers
from vllm_adapter.observe.answers import Answer

NOBODY = ("127.0.0.1:1", "127.0.0.1:2")
"""Two places where nothing listens."""
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
    None, True, 0, -1, 2**64, 10**400, -(10**400), 1.5, 5e-324, 1e308, math.nan, math.inf, -math.inf, "", "\ud800", "\x1b[2J",
    "1", "running", "dead", [], [1], [[]], [None], ["\ud800"], {}, {"a": 1}, {"state": 5}, {"state": "dead"}, {"x": {}},
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep real engines of this machine out of sight; of the module, as hypothesis has many examples."""
    made = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(made))
        patched.setattr(answers, "_TEMPORARY", made)
        yield made


class Ended(NamedTuple):
    """The end of a command."""

    code: int
    out: str
    err: str


def run(*words: str) -> Ended:
    """Run a command as a program runs, where whatever it raises would be a traceback; check its end by its page of help."""
    ended = Ended(*captured(lambda: main(list(words))))
    program = get_command(app)
    assert isinstance(program, TyperGroup)
    exits = (program.commands[words[0]].help or "").partition("exit codes:")[2]
    assert str(ended.code) in re.findall(r"^  (\d)  ", exits, re.MULTILINE), ended
    assert "Traceback" not in ended.err
    assert ended.code != 2 or (ended.err.strip() and not ended.out)
    if "--json" in words and (ended.out or ended.code in {0, 1}):
        json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return ended


def misfit(answer: object) -> str:
    """Return how an answer differs from the shape that commands read; empty if it does not."""
    try:
        msgspec.convert(answer, Answer)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------------------------------------- files

READERS = [
    ("config", "--check", "{file}"),
    ("config", "--check", "{file}", "--json"),
    ("trace", "--with", "{file}"),
    ("trace", "--list", "--with", "{file}", "--json"),
    ("check", *NOBODY, "--prefill-config", "{file}", "--json"),
    ("check", *NOBODY, "--decode-config", "{file}"),
]


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_no_file_ends_a_command_with_a_traceback(reader: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    files = {"missing": "none.json", "folder": "folder", "no name": "a\0b", "long name": "x" * 300, "no text": "\ud800"}
    for name, content in {**UNREADABLE, **WRONG}.items():
        files[name] = f"{name}.json"
        (tmp_path / files[name]).write_bytes(content)
    for name, file in files.items():
        ended = run(*(word.format(file=tmp_path / file) for word in reader))
        is_saved = reader[0] == "trace" and name == "surrogates"  # answers with odd texts, and without a hand-over
        assert ended.code == (3 if is_saved else 1 if reader[0] == "config" else 2), (name, ended)


def test_what_is_wrong_is_said_with_a_code_and_what_is_right(tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    for content, words, said in (
        (b"\xff", ("config", "--check"), "is not UTF-8 text: "),
        (b"[" * 5000, ("config", "--check"), "is nested more than 64 levels deep (not-json)"),
        (b"{", ("check", *NOBODY, "--prefill-config"), " is not JSON: "),
        (b"{}", ("trace", "--with"), "has another shape than in this version: Expected `array`, got `object`"),
        (WRONG["hand-over"], ("trace", "--with"), "field `moments` - at `$[0].hand_overs[0]` (unreadable)"),
        (WRONG["moments"], ("trace", "--with"), "got `str` - at `$[0].hand_overs[0].moments[...]`"),
    ):
        file.write_bytes(content)
        ended = run(*words, str(file))
        assert str(file) in ended.err
        assert said in ended.err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for file in (str(tmp_path / "no" / "x.json"), str(tmp_path), "a\0b", "\ud800"):
        ended = run("trace", "--save", file)
        assert (ended.code, "cannot be written" in ended.err) == (2, True)


# -------------------------------------------------------------------------------------------------------------- numbers

NUMERIC = {
    ("status", "--folder", "{folder}"): ("--timeout", "--watch"),
    ("revoke", "prefill-0", "--folder", "{folder}"): ("--timeout",),
    ("trace", "--with", "{saved}"): ("--ttft",),
    ("check", *NOBODY): ("--timeout", "--gbps", "--prefill-tp"),
}


@pytest.mark.parametrize("words", NUMERIC, ids=" ".join)
def test_no_number_ends_a_command_with_a_traceback(words: tuple[str, ...], tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(trace_answers()))
    for option in NUMERIC[words]:
        for number in ODD_NUMBERS:
            ended = run(*(word.format(folder=tmp_path, saved=saved) for word in words), option, number, "--json")
            with suppress(ValueError):
                if number.isdigit() or math.isfinite(float(number)):
                    continue
            assert ended.code == 2, (option, number, ended)


def test_a_time_is_refused_by_its_option_and_range(tmp_path: Path) -> None:
    for number in ("nan", "inf", "-1", "0", "1e9"):
        said = f"--timeout must be 0.001 s at least and 3600 s at most, got {float(number):g}"
        assert run("status", "--timeout", number) == (2, "", f"vllm-adapter: {said} (out-of-range)\n")


# -------------------------------------------------------------------------------------------------------------- answers

STATUS: dict[str, Any] = {
    **SCHEDULER,
    **WORKER,
    "schema": 1,
    "stalled_bytes": 5,
    "is_draining": False,
    "seals": [],
    "oldest_leases": [{"request_id": "r1", "state": "granted", "left_s": 1.5, "readers_done": 0}],
    "oldest_streams": [{"request_id": "r3", "bytes": 5, "age_s": 0.5}],
    "peer_engines": [{"engine_id": "p", "ranks_read": ["0.0"], "silent_s": 0.5}],
}
TRACE = trace_answers()
LOOKS = (("status", "--json"), ("status", "--requests"))
OBJECTS = ("byte order mark", "extra of lists", "odd children")
"""Answers of an engine of which nothing is known here, not even its name."""


def ask_of(content: bytes, folder: Path, *commands: tuple[str, ...]) -> list[Ended]:
    """Run commands that ask one process, whose answer is given."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as left, suppress(OSError):  # there since an earlier example
        left.bind(str(folder / "1-0.0-00.sock"))
    with patch.object(engines, "_exchange", lambda *_: (content, 1.0, 2.0)):
        return [run(*words, "--folder", str(folder)) for words in commands]


@pytest.mark.parametrize("name", [*UNREADABLE, *WRONG])
def test_an_answer_that_is_none_is_a_trouble_of_that_process(name: str, tmp_path: Path) -> None:
    *ended, _ = ask_of({**UNREADABLE, **WRONG}[name], tmp_path / "live", *LOOKS, ("trace", "--list", "--json"))
    troubles = json.loads(ended[0].out)["troubles"]
    assert len(troubles) == (name not in OBJECTS)
    for trouble in troubles:
        assert "1-0.0-00.sock: " in trouble
        assert trouble.endswith("(unreadable)" if name != "empty" else "does not know 'status'")
    assert [each.code for each in ended] == [int(bool(troubles))] * len(LOOKS)


@settings(max_examples=30)
@given(st.sampled_from(list(places(STATUS))), st.sampled_from(ODD_VALUES))
@example(("thread",), 5)
@example(("leased_bytes",), 10**400)
@example(("thread",), {"state": "dead"})
@example(("figures", "recent_bytes_per_s"), math.nan)
@example(("figures", "transfers_done"), None)
def test_a_field_of_any_value_is_shown_or_the_answer_is_said_to_be_unreadable(
    folder: Path, place: tuple[Any, ...], odd: object
) -> None:
    answer = json.dumps(put(STATUS, place, odd))
    found = ask_of(answer.encode(), folder, *LOOKS)
    wrong = misfit(json.loads(answer))
    (trouble,) = json.loads(found[0].out)["troubles"] or [""]
    assert trouble.endswith(f"has another shape than in this version: {wrong} (unreadable)") is bool(wrong)


def test_an_answer_cannot_replace_when_and_where_it_was_asked(tmp_path: Path) -> None:
    answer = json.dumps({**STATUS, "socket": "/elsewhere", "received_s": 7.0}).encode()
    (ended,) = ask_of(answer, tmp_path / "live", ("status", "--json"))
    (reported,) = json.loads(ended.out)["engines"][STATUS["engine_id"]]
    assert (reported["received_s"], Path(reported["socket"]).parent) == (2.0, tmp_path / "live")


@settings(max_examples=60)
@given(st.sampled_from(list(places(TRACE))), st.sampled_from(ODD_VALUES), st.booleans())
@example((2, "hand_overs", 0, "moments", "arrived"), 5e-324, False)
@example((2, "hand_overs", 0, "peer_engine_id"), None, False)
@example((3, "hand_overs", 0, "bytes"), None, True)
@example((3, "heard_s"), None, True)
def test_a_saved_answer_with_any_value_is_shown_or_refused(
    folder: Path, place: tuple[Any, ...], odd: object, as_json: bool
) -> None:
    file = folder / "saved.json"
    file.write_text(json.dumps(put(TRACE, place, odd)))
    ended = run("trace", "--folder", str(folder / "none"), "--with", str(file), *(["--json"] if as_json else []))
    wrong = any(misfit(answer) for answer in json.loads(file.read_text()))
    assert (ended.code == 2) is wrong
