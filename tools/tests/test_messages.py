"""The page of messages is what the source says, and every message that asks for something says what to do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvdev.paths import ROOT
from kvdev.site import messages
from kvdev.site.messages import check_messages, collect, messages_page
from kvdev.site.next_steps import next_step
from kvdev.steps import DevError

EVERY = collect()


def test_the_page_is_what_the_source_says() -> None:
    check_messages(fix=False)


def test_a_message_that_changed_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "messages.md"
    page.write_text(messages_page().replace("restart this engine", "restart that engine", 1))
    monkeypatch.setattr(messages, "PAGE", page)
    with pytest.raises(DevError, match="check --fix"):
        check_messages(fix=False)
    check_messages(fix=True)
    check_messages(fix=False)


def test_messages_of_each_kind_are_found() -> None:
    levels = {(one.package, one.level) for one in EVERY}
    for package in ("kv-handshake", "kv-topology", "kv-nixl-agent", "kv-scheduler-state", "vllm-adapter"):
        assert (package, "error") in levels
    assert {level for _, level in levels} >= {"error", "warning", "info", "refusal", "no-go", "note", "ok"}
    texts = {one.text for one in EVERY}
    for known in (
        "the transfer thread of engine {engine_id} has died; restart this engine",
        "kv_connector_extra_config has no key '{key}'{hint}",
        "request %s: its hand-off ticket is refused and the prompt computed here (%s: %s)",
    ):
        assert known in texts, known


def test_every_log_call_of_the_adapter_is_on_the_page() -> None:
    """Counted another way: by the words of the source, not by its syntax tree."""
    call = re.compile(
        r"(?:_logger|recorder)\.(?:info|warn|warning|warning_once|error|exception)\(\s*f?\"([^\"{%]{12,})"
    )
    told = "\n".join(one.text for one in EVERY)
    for file in (ROOT / "packages" / "vllm-adapter" / "src").rglob("*.py"):
        for beginning in call.findall(file.read_text()):
            assert beginning.strip() in told, f"{file.name}: {beginning}"


def test_messages_are_plain_and_have_a_next_step() -> None:
    for one in EVERY:
        assert one.level in {"ok", "info"} or one.advice or next_step(one.level, one.code, one.text), one
        assert not re.search(r"\b(xfer|dlist|notif|oops|failed to|unable to|please)\b", one.text, re.IGNORECASE), one
        assert not re.match(r"(error|warning|exception)\b:", one.text, re.IGNORECASE), one


def test_values_are_shown_by_name() -> None:
    call = ast.parse('fail(f"{question.endpoint.host} has {len(self._ranks)} of {40 + 2}")').body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert messages._text_of(call.value, "error") == "{host} has {ranks} of {value}"


def test_links_of_next_steps_lead_somewhere() -> None:
    page = messages_page()
    for target, anchor in set(re.findall(r"\]\(([a-z/]+\.md)(?:#([a-z-]+))?\)", page)):
        text = (ROOT / "docs" / target).read_text()
        slugs = {
            re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        }
        assert not anchor or anchor in slugs, (target, anchor)
