"""Odd files and numbers for every command: no traceback, a documented exit code, and JSON that is JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from odd_input import NOBODY, ODD_NUMBERS, UNREADABLE, WRONG, check_end, numeric_options, program, run
from test_trace import answers as trace_answers

pytestmark = pytest.mark.usefixtures("no_engines")


# ---------------------------------------------------------------------------------------------------------------- files

READERS = [
    ("config", "--check", "{file}"),
    ("config", "--check", "{file}", "--json"),
    ("trace", "--with", "{file}"),
    ("trace", "--with", "{file}", "--json"),
    ("trace", "--list", "--with", "{file}", "--json"),
    ("check", *NOBODY, "--prefill-config", "{file}", "--json"),
    ("check", *NOBODY, "--decode-config", "{file}"),
]


def odd_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, path) of files that cannot be read, and of those that hold something else."""
    (folder / "folder").mkdir()
    yield "missing", str(folder / "none.json")
    yield "folder", str(folder / "folder")
    yield "no name", "a\0b"
    yield "long name", str(folder / ("x" * 300))
    yield "surrogate", "\ud800"
    for name, content in {**UNREADABLE, **WRONG}.items():
        file = folder / "odd.json"
        file.write_bytes(content)
        yield name, str(file)


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_no_file_ends_a_command_with_a_traceback(reader: tuple[str, ...], tmp_path: Path) -> None:
    for name, file in odd_files(tmp_path):
        ended = run(*(word.format(file=file) for word in reader))
        check_end(reader, ended)
        is_saved = reader[0] == "trace" and name == "surrogates"  # answers with odd texts, and without a hand-over
        assert ended.code == (3 if is_saved else 1 if reader[0] == "config" else 2), (name, ended)


def test_what_is_wrong_is_said_with_a_code_and_what_is_right(tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    for content, words, said in (
        (b"\xff", ("config", "--check"), "is no UTF-8 text: "),
        (b"[" * 5000, ("config", "--check"), "is nested more than 64 levels deep (not-json)"),
        (b"{", ("check", *NOBODY, "--prefill-config"), " is no JSON: "),
        (
            b"{}",
            ("trace", "--with"),
            "was not written by `vllm-adapter trace --save`: Expected `array`, got `object`",
        ),
        (
            WRONG["hand-over"],
            ("trace", "--with"),
            "Object missing required field `moments` - at `$[0].hand_overs[0]` (unreadable)",
        ),
        (
            WRONG["moments"],
            ("trace", "--with"),
            "Expected `float | null`, got `str` - at `$[0].hand_overs[0].moments[...]`",
        ),
    ):
        file.write_bytes(content)
        ended = run(*words, str(file))
        assert str(file) in ended.err
        assert said in ended.err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(trace_answers()))
    for file in (str(tmp_path / "no" / "x.json"), str(tmp_path), "a\0b", "\ud800"):
        ended = run("trace", "--with", str(saved), "--save", file)
        check_end(("trace",), ended)
        assert (ended.code, "cannot be written" in ended.err) == (2, True)


# -------------------------------------------------------------------------------------------------------------- numbers

WORDS = {
    "status": ("status", "--folder", "{folder}"),
    "revoke": ("revoke", "prefill-0", "--folder", "{folder}"),
    "trace": ("trace", "--with", "{saved}"),
    "check": ("check", *NOBODY),
    "config": ("config", "--explain"),
}
NUMERIC = list(numeric_options())


def test_every_command_and_number_is_tried() -> None:
    assert set(program().commands) == set(WORDS)
    assert {option for _, option in NUMERIC} >= {
        "--timeout",
        "--watch",
        "--ttft",
        "--gbps",
        "--dialect",
        "--prefill-tp",
    }


@pytest.mark.parametrize(("command", "option"), NUMERIC)
def test_no_number_ends_a_command_with_a_traceback(command: str, option: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(trace_answers()))
    words = tuple(word.format(folder=tmp_path, saved=saved) for word in WORDS[command])
    for number in ODD_NUMBERS:
        ended = run(*words, option, number, "--json")
        check_end((*words, "--json"), ended)
        if not number.isdigit() and not _is_finite(number):
            assert ended.code == 2, (number, ended)


def _is_finite(number: str) -> bool:
    try:
        return math.isfinite(float(number))
    except ValueError:
        return False


@pytest.mark.parametrize("command", ["status", "check"])
def test_a_time_is_refused_by_its_option_and_range(command: str, tmp_path: Path) -> None:
    words = [word.format(folder=tmp_path) for word in WORDS[command]]
    for number in ("nan", "inf", "-1", "0", "1e9"):
        ended = run(*words, "--timeout", number)
        said = f"--timeout must be 0.001 s at least and 3600 s at most, got {float(number):g}"
        assert ended == (2, "", f"vllm-adapter: {said} (out-of-range)\n")
