"""Fleet secrets: read from files and the environment, read again when they change, shown nowhere."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest
from factories import write_secret

from vllm_adapter.config.secrets import FleetSecrets
from vllm_adapter.errors import ConfigurationError

OLD, NEW = b"0123456789abcdef-old", b"0123456789abcdef-new"


def test_the_order_is_that_of_the_sources_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_secret(tmp_path / "a", b" " + NEW + b" \n\n" + OLD + b"\r\n")
    second = write_secret(tmp_path / "b", b"another secret of a file")
    monkeypatch.setenv("KV_SECRETS", f"{OLD.decode()} the-last-of-them-all")
    secrets = FleetSecrets([first, second, "env:KV_SECRETS"])
    assert secrets.current == (NEW, OLD, b"another secret of a file", b"the-last-of-them-all")


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_modes_of_mounted_secrets_are_accepted(tmp_path: Path, mode: int) -> None:
    assert FleetSecrets([write_secret(tmp_path / "a", OLD, mode)]).current == (OLD,)


@pytest.mark.parametrize("mode", [0o444, 0o404, 0o460, 0o644, 0o666])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        FleetSecrets([write_secret(tmp_path / "a", OLD, mode)])
    assert caught.value.code == "insecure-secret-file"
    assert f"{mode:04o}" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"short", OLD + b"\nshort"])
def test_a_file_without_a_usable_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigurationError) as caught:
        FleetSecrets([write_secret(tmp_path / "a", content)])
    assert caught.value.code == "invalid-secret"
    assert OLD.decode() not in str(caught.value)


def test_a_change_is_seen_within_a_second_and_once(tmp_path: Path) -> None:
    file = write_secret(tmp_path / "a", OLD)
    secrets = FleetSecrets([file])
    assert not secrets.changed(1.0)
    write_secret(tmp_path / "a", NEW + b"\n" + OLD)
    assert not secrets.changed(1.5), "looked at a moment ago"
    assert secrets.changed(2.0)
    assert secrets.current == (NEW, OLD)
    assert not secrets.changed(3.0)
    os.utime(file, ns=(5, 5))
    assert not secrets.changed(4.0), "touched, but the same"


@pytest.mark.parametrize("content", [b"", b"short", None])
def test_a_change_for_the_worse_changes_nothing_and_is_said_once(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = FleetSecrets([write_secret(tmp_path / "a", OLD)])
    if content is None:
        (tmp_path / "a").unlink()
    else:
        write_secret(tmp_path / "a", content)
    with caplog.at_level(logging.INFO, logger="vllm.vllm_adapter"):
        assert not any(secrets.changed(float(n)) for n in range(1, 9))
    assert secrets.current == (OLD,)
    assert len(caplog.records) == 1
    write_secret(tmp_path / "a", NEW)
    assert secrets.changed(10.0)


def test_no_secret_is_shown_or_pickled(tmp_path: Path) -> None:
    secrets = FleetSecrets([write_secret(tmp_path / "a", OLD)])
    assert OLD.decode() not in repr(secrets)
    with pytest.raises(TypeError):
        pickle.dumps(secrets)


def test_a_file_that_was_mended_is_read(tmp_path: Path) -> None:
    secrets = FleetSecrets([write_secret(tmp_path / "a", OLD)])
    write_secret(tmp_path / "a", NEW + b"\n" + OLD, 0o644)
    assert not secrets.changed(1.0)
    (tmp_path / "a").chmod(0o400)
    assert secrets.changed(3.0)
    assert secrets.current == (NEW, OLD)


def test_a_secret_of_the_environment_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SECRETS", os.fsdecode(b"\xff" * 20))
    assert FleetSecrets(["env:KV_SECRETS"]).current == (b"\xff" * 20,)


def test_a_folder_in_the_place_of_a_secret_file_costs_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(ConfigurationError, match="directory"):
            FleetSecrets([str(tmp_path)])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(("name", "words"), [("\ud800", "cannot be the name"), ("KV_NONE", "has no KV_NONE")])
def test_a_variable_without_a_secret_is_refused_by_its_name(name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        FleetSecrets([f"env:{name}"])
    assert caught.value.code == "invalid-secret"
