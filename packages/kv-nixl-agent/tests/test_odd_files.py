"""Odd files and numbers for `kv-nixl`: no traceback, a documented exit code, and JSON that is JSON."""

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from odd_ranks import ODD_VALUES, UNREADABLE, WRONG, changed, places

from kv_nixl_agent.tools import cli, report
from kv_nixl_agent.tools.remote import Measurement, RankRead

RANKS = [
    {"name": "0.0", "agent_metadata": "AAEC", "fence": [4096, 0, 16]},
    {"name": "0.1", "agent_metadata": "", "fence": [8, 1, 2]},
]
ODD_NUMBERS = [
    *(
        "nan",
        "inf",
        "-inf",
        "-1",
        "-1e-9",
        "0",
        "-0.0",
        "1e308",
        "1e400",
        "1e-320",
        "99999",
        "4294967296",
        "9" * 400,
        "9" * 5000,
    ),
    *("", " ", "x", "1_0", "0x10", "1,5", "\u0663", "--json"),
]


class Stream(io.TextIOWrapper):
    """A stream of a program, whose bytes are kept."""

    def __init__(self, errors):
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding="utf-8", errors=errors)

    def text(self):
        self.flush()
        return self.kept.getvalue().decode()


def run(*words, stdin=b""):
    """Run a command as a program is run; return its exit code, and what it says on both streams."""
    out, err = Stream("strict"), Stream("backslashreplace")
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")),
    ):
        try:
            cli.main(list(words))
        except SystemExit as stop:
            code = int(str(stop.code))
    said, complained = out.text(), err.text()
    documented = {int(each) for each in re.findall(r"^  (\d)  ", cli._EXIT_CODES, re.MULTILINE)}
    assert code in documented
    if code == 2:
        assert (said, bool(complained.strip())) == ("", True)
    elif "--json" in words:
        json.loads(said)
    return code, said, complained


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    """Measure nothing: each rank is told to be good."""

    def measured(ranks, *, most_bytes, timeout_s):
        assert 0 <= most_bytes <= 1 << 40
        assert 0 < timeout_s <= 3600
        return Measurement([RankRead(rank.name, read_gb_s=1.0) for rank in ranks])

    monkeypatch.setattr(cli, "measure_ranks", measured)


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_no_file_ends_the_command_with_a_traceback(more, tmp_path):
    (tmp_path / "folder").mkdir()
    odd = {"missing": "none.json", "folder": "folder", "no name": "a\0b", "long name": "x" * 300, "surrogate": "\ud800"}
    for name, content in {**UNREADABLE, **WRONG}.items():
        (tmp_path / f"{name}.json").write_bytes(content)
        odd[f"{name}.json"] = f"{name}.json"
    for name, file in odd.items():
        code, _, complained = run("measure", str(tmp_path / file), *more)
        assert code == 2, name
        assert " describes no ranks: " in complained
        assert complained.endswith("(invalid-ranks)\n")
        assert len(complained) < 6000


@given(st.sampled_from(list(places(RANKS))), st.sampled_from(ODD_VALUES))
@example((0, "name"), "\ud800")
@example((0, "fence"), [1, 2])
def test_a_rank_with_any_value_is_measured_or_refused(place, odd):
    code, said, _ = run("measure", stdin=json.dumps(changed(RANKS, place, odd)).encode())
    assert code in {0, 2}
    assert code == 2 or said.count("GB/s") == len(RANKS)


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("command", "option"),
    [("measure", "--bytes"), ("measure", "--timeout"), ("serve", "--port"), ("serve", "--sessions")],
)
def test_no_number_ends_a_command_with_a_traceback(command, option, monkeypatch):
    served = []
    monkeypatch.setattr(cli, "serve_peer", lambda _, port, *, sessions: served.append((port, sessions)))
    for number in ODD_NUMBERS:
        code, _, _ = run(command, option, number, stdin=json.dumps(RANKS).encode())
        is_number = re.fullmatch(r"[\d_]+|-0\.0|1e-320|1e308", number) is not None
        assert code == 2 or is_number, number
    assert all(0 <= port <= 65535 and sessions >= 0 for port, sessions in served)


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "0", "1e9"])
def test_a_time_is_refused_by_its_option_and_range(timeout):
    code, _, complained = run("measure", "--timeout", timeout, stdin=b"[]")
    assert code == 2
    assert "'--timeout'" in complained
    assert "is not between 0.001 s and 3600 s (out-of-range)" in " ".join(complained.split())


@pytest.mark.parametrize("host", ["a" * 300, "\ud800", "a\0b", "nowhere.invalid", "::1::", "256.0.0.1"])
def test_a_host_that_is_none_cannot_be_served_on(host):
    code, _, complained = run("serve", "--host", host, "--port", "0", "--sessions", "1")
    assert (code, "cannot serve on" in complained) == (3, True)


@pytest.mark.parametrize("port", ["9" * 5000, "65536", "\u0665", " 80", "-1", "0"])
def test_a_peer_is_host_and_port(port):
    code, _, complained = run("doctor", "--peer", f"127.0.0.1:{port}")
    assert (code, "is not HOST:PORT" in complained) == (2, True)


@pytest.mark.parametrize("host", ["a" * 300, "a\0b", "\ud800"])
def test_a_peer_whose_name_is_none_is_a_finding(host):
    bandwidth, finding = report._try_peer(host, 1)
    assert (bandwidth, finding.severity) == (None, "error")
