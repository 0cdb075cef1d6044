"""docs/security.md: its configuration is good, its commands run, its Secret would be accepted."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_adapter.config.keys import describe_keys, load_settings
from vllm_adapter.config.secrets import FleetSecrets
from vllm_adapter.config.whole import check_transfer_config

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
TEXT = PAGE.read_text() if PAGE.exists() else ""
BLOCKS: dict[str, list[str]] = {}
for _language, _code in re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL):
    BLOCKS.setdefault(_language, []).append(_code)

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not in the repository: there are no pages")


def test_the_configuration_is_good_and_whole() -> None:
    (text,) = BLOCKS["json"]
    settings, notes = load_settings(json.loads(text))
    assert settings.requires_seals
    assert notes == ()
    whole = {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_adapter", "kv_role": "kv_both"}
    assert check_transfer_config({**whole, "kv_connector_extra_config": json.loads(text)}).problems == ()


def test_every_key_that_is_named_exists() -> None:
    keys = set(describe_keys())
    named = set(re.findall(r"`((?:ticket|side_channel|unsigned)_\w+)`", TEXT))
    assert named <= keys
    assert {key for key in keys if key.startswith(("ticket_s", "side_channel", "unsigned"))} <= named


def test_the_commands_run_and_make_what_engines_accept(tmp_path: Path) -> None:
    for command in BLOCKS["sh"]:
        words = command.replace("kv-handshake", str(Path(sys.executable).with_name("kv-handshake")))
        words = words.replace("python3", sys.executable)
        subprocess.run(words, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o600
    assert len(FleetSecrets([str(tmp_path / "secrets")]).current[0]) == 64
    (tmp_path / "secrets").chmod(0o440)  # as Kubernetes mounts it
    assert len(FleetSecrets([str(tmp_path / "secrets")]).current[0]) == 64
    assert sorted(file.name for file in (tmp_path / "keys").iterdir()) == ["fleet.key", "fleet.key_secret"]


def test_the_mounted_mode_is_one_that_is_accepted() -> None:
    (manifest,) = BLOCKS["yaml"]
    assert set(re.findall(r"defaultMode: (\d+)", manifest)) == {"0440"}
