"""Odd answers of engines and of saved files: shown, or said to be unreadable, and no traceback."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_input import ODD_VALUES, UNREADABLE, WRONG, Ended, changed, check_end, places, run
from test_trace import answers as trace_answers

from vllm_adapter.cli import engines
from vllm_adapter.cli.values import misfit, parse_json
from vllm_adapter.observe import status_socket as folders
from vllm_adapter.observe.answers import Answer


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep real engines of this machine out of sight; of the module, as hypothesis has many examples."""
    made = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(made))
        patched.setattr(folders, "_TEMPORARY", made)
        yield made


STATUS: dict[str, Any] = {
    "schema": 1,
    "engine_id": "engine-0",
    "part": "0.0",
    "pid": 12,
    "thread": {"state": "running", "last_error": "", "ucx_requests": "zeroed", "errors": 0},
    "leases": 2,
    "leased_blocks": 3,
    "leased_bytes": 2048,
    "reads": 1,
    "reads_waiting_for_a_peer": 1,
    "streams": 1,
    "peers": 1,
    "quarantined_transfers": 1,
    "quarantined_bytes": 13312,
    "stalled_transfers": 1,
    "stalled_bytes": 5,
    "figures": {"transfers_done": 4.0, "bytes_moved": 8 << 20, "recent_bytes_per_s": 2.5e9},
    "is_draining": False,
    "is_silent": False,
    "is_asleep": False,
    "side_channel": "127.0.0.1:5600",
    "lease_s": 30.0,
    "heartbeat_s": 5.0,
    "compatibility_policy": "exact",
    "seals": [],
    "requires_seals": False,
    "is_encrypted": False,
    "ucx_tls": "",
    "oldest_requests": [
        {"request_id": "r1", "role": "x", "state": "leased", "age_s": 1.25, "waits_for": "the workers"}
    ],
    "oldest_leases": [{"request_id": "r1", "state": "granted", "left_s": 1.5, "readers_done": 0}],
    "oldest_reads": [{"request_id": "r2", "peer_engine_id": "p", "stage": "on the wire", "age_s": 0.5}],
    "oldest_streams": [{"request_id": "r3", "bytes": 5, "age_s": 0.5}],
    "peer_engines": [{"engine_id": "p", "ranks_read": ["0.0"], "silent_s": 0.5}],
}


def ask_of(content: bytes, folder: Path, *commands: tuple[str, ...]) -> list[Ended]:
    """Run commands that ask one process, whose answer is given."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as left, suppress(OSError):  # there since an earlier example
        left.bind(str(folder / "1-0.0-00.sock"))
    with patch.object(engines, "_exchange", lambda *_: (content, 1.0, 2.0)):
        ended = [run(*words, "--folder", str(folder)) for words in commands]
    for words, each in zip(commands, ended, strict=True):
        check_end(words, each)
    return ended


LOOKS = (("status", "--json"), ("status", "--requests"))


OBJECTS = [
    "byte order mark",
    *(name for name, content in WRONG.items() if content.startswith(b"{") and name != "surrogate"),
]
"""Answers of an engine of which nothing is known here, not even its name."""


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
@example(("pid",), [])
@example(("leased_bytes",), 10**400)
@example(("thread",), {"state": "dead"})
@example(("figures", "recent_bytes_per_s"), math.nan)
@example(("figures", "recent_bytes_per_s"), None)
@example(("figures", "transfers_done"), None)
@example(("schema",), math.nan)
def test_a_field_of_any_value_is_shown_or_the_answer_is_said_to_be_unreadable(
    folder: Path, place: tuple[Any, ...], odd: object
) -> None:
    found = ask_of(json.dumps(changed(STATUS, place, odd)).encode(), folder, *LOOKS)
    answer = changed(STATUS, place, odd)
    wrong = misfit(parse_json(json.dumps(answer), "it"), Answer)
    (trouble,) = json.loads(found[0].out)["troubles"] or [""]
    assert ("maybe it is an engine of another version" in trouble) is bool(wrong)
    assert wrong in trouble


def test_fields_of_the_wrong_type_are_named(tmp_path: Path) -> None:
    answer = json.dumps({**STATUS, "thread": 5}).encode()
    (status,) = ask_of(answer, tmp_path / "live", ("status", "--json"))
    (trouble,) = json.loads(status.out)["troubles"]
    assert trouble.endswith(
        "its answer cannot be read here, maybe it is an engine of another version: "
        "Expected `object | null`, got `int` - at `$.thread` (unreadable)"
    )


def test_a_good_answer_has_the_shape() -> None:
    assert misfit(STATUS, Answer) == ""
    for answer in trace_answers():
        assert misfit(answer, Answer) == ""


def test_an_answer_cannot_replace_when_and_where_it_was_asked(tmp_path: Path) -> None:
    answer = json.dumps({**STATUS, "socket": "/elsewhere", "received_s": 7.0}).encode()
    (ended,) = ask_of(answer, tmp_path / "live", ("status", "--json"))
    (told,) = json.loads(ended.out)["engines"]["engine-0"]
    assert (told["received_s"], Path(told["socket"]).parent) == (2.0, tmp_path / "live")


TRACE = trace_answers()


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
    found = changed(TRACE, place, odd)
    file.write_text(json.dumps(found))
    words = ("trace", "--folder", str(folder / "none"), "--with", str(file), *(("--json",) if as_json else ()))
    ended = run(*words)
    check_end(words, ended)
    wrong = any(misfit(answer, Answer) for answer in json.loads(file.read_text()))
    assert (ended.code == 2) is wrong
