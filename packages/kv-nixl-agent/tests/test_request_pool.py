"""UCX's request pool: when it is changed, and when it is left alone. The real library is in `integration_tests/real_io`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_nixl_agent.nixl import side_effects
from kv_nixl_agent.nixl.side_effects import SWITCH, RequestPool, State
from kv_nixl_agent.tools.report import judge_peer_deaths
from kv_nixl_agent.tools.selftest import ReadPath

LIBRARIES = sorted({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line})
ONE_SIDED = ReadPath("host", "host", "0..inf", "zero-copy", "cma/memory")
EMULATED = ReadPath("host", "host", "0..inf", "software emulation", "tcp/lo")
NEW = {"libucs": {"a"}, "libucp": {"b"}}


@pytest.fixture(autouse=True)
def _no_switch(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)


def outcome(monkeypatch, before, after) -> State:
    """Return the state of a pool with these libraries loaded before it was watched, and before it is zeroed."""
    pool = RequestPool()
    monkeypatch.setattr(side_effects, "_loaded", lambda: before)
    pool.watch()
    monkeypatch.setattr(side_effects, "_loaded", lambda: after)
    pool.zero()
    return pool.state


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        ({}, {}, "not-loaded"),
        ({"libucs": {"a"}}, NEW, "already-in-use"),
        ({}, {"libucs": {"/nowhere/libucs.so"}, "libucp": {"/nowhere/libucp.so"}}, "unknown-build"),
        ({}, {"libucs": {"/a/libucs.so", "/b/libucs.so"}, "libucp": {"/a/libucp.so"}}, "unknown-build"),
        ({}, {"libucs": {LIBRARIES[0]}}, "unknown-build"),
        ({}, {"libucs": {LIBRARIES[0]}, "libucp": {LIBRARIES[0]}}, "unknown-build"),
    ],
)
def test_only_a_library_that_is_known_and_new_to_the_process_is_changed(monkeypatch, before, after, state):
    assert outcome(monkeypatch, before, after) == state


def test_a_version_that_was_not_measured_is_left_alone(monkeypatch):
    asked = []

    def ucp_get_version(*parts):
        asked.append(parts)
        for part, value in zip(parts, (1, 24, 0), strict=True):
            part._obj.value = value

    library = SimpleNamespace(ucp_get_version=ucp_get_version)
    monkeypatch.setattr(side_effects, "_open", lambda _: library)
    assert outcome(monkeypatch, {}, NEW) == "unknown-build"
    assert len(asked) == 1


def test_only_memory_that_may_be_written_is_written() -> None:
    own = bytearray(16)
    start = ctypes.addressof((ctypes.c_char * 16).from_buffer(own))
    assert side_effects._may_write(start, 16)
    code = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value or 0
    assert not side_effects._may_write(code, 16)
    assert not side_effects._may_write(8, 16), "nothing is mapped there"


@pytest.mark.parametrize("word", ["n", "no", "off", "0", "N", "false"])
def test_the_switch_leaves_ucx_as_it_is(monkeypatch, word):
    monkeypatch.setenv(SWITCH, word)
    assert outcome(monkeypatch, {}, NEW) == "off"


@pytest.mark.parametrize("earlier", [False, True])
def test_ucx_that_another_part_loaded_before_it_was_watched_is_left_alone(monkeypatch, earlier):
    """Also between two agents: the first one needs no UCX, another part loads it, and the second agent looks again."""
    pool = RequestPool()
    if earlier:
        monkeypatch.setattr(side_effects, "_loaded", dict)
        pool.watch()
        pool.zero()
    monkeypatch.setattr(side_effects, "_loaded", lambda: NEW)
    if earlier:
        pool.watch()
    pool.zero()
    assert pool.state == "already-in-use"


@pytest.mark.parametrize("fault", [PermissionError("no"), None])
def test_a_list_of_mapped_files_that_cannot_be_read_stops_no_start(monkeypatch, tmp_path, fault):
    odd = tmp_path / "maps"
    odd.write_bytes(b"7f00-7f01 r-xp 0 00:1 1    /v/\xff\xfe.bin\n")

    def read(path: Path, **how: Any) -> str:
        if fault is not None:
            raise fault
        with odd.open(**how) as file:
            return file.read()

    monkeypatch.setattr(Path, "read_text", read)
    pool = RequestPool()
    pool.watch()
    monkeypatch.setattr(side_effects, "_loaded", lambda: NEW)
    pool.zero()
    assert pool.state == ("already-in-use" if fault is not None else "unknown-build")


def test_libraries_are_found_by_the_names_that_wheels_and_distributions_give_them(monkeypatch):
    lines = [
        "7f00-7f01 r-xp 0 00:1 1    /v/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0",
        "7f01-7f02 rw-p 0 00:1 1    /v/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0",
        "7f03-7f04 r-xp 0 00:1 2    /usr/lib/libucs.so.0",
        "7f05-7f06 r-xp 0 00:1 3    /v/nixl_cu12.libs/ucx/libuct_cma.so.0.0.0",
        "7f07-7f08 rw-p 0 00:0 0    [heap]",
    ]
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "\n".join(lines))
    assert side_effects._loaded() == {
        "libucp": {"/v/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0"},
        "libucs": {"/usr/lib/libucs.so.0"},
    }


@pytest.mark.parametrize(
    ("paths", "state", "severity"),
    [
        ([ONE_SIDED], "unknown-build", "ok"),
        ([ONE_SIDED, EMULATED], "zeroed", "ok"),
        ([ONE_SIDED, EMULATED], "unknown-build", "warning"),
        ([EMULATED], "already-in-use", "warning"),
        ([EMULATED], "off", "warning"),
    ],
)
def test_the_doctor_warns_where_a_consumer_can_end_its_producer(paths, state, severity):
    finding = judge_peer_deaths(paths, state)
    assert (finding.name, finding.severity) == ("peer-deaths", severity)
    assert ("SIGSEGV" in finding.message) == (EMULATED in paths)
