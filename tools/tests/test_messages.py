"""The page of messages is what the source says, and every message that asks for something says what to do."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from kvdev.paths import ROOT
from kvdev.site import messages
from kvdev.site.messages import check_messages, collect, messages_page
from kvdev.site.next_steps import next_step
from kvdev.site.texts import Text, texts_of
from kvdev.steps import DevError

EVERY = collect()
OF_VLLM = {"Avg xfer time (ms)", "P90 xfer time (ms)"}
"""Names in the log line of vLLM's own connector, which ours keeps."""


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
        "request %s: its hand-over ticket is refused and the prompt computed here (%s: %s)",
    ):
        assert known in texts, known


def test_every_log_call_of_the_adapter_is_on_the_page() -> None:
    """Counted another way: by the words of the source, not by its syntax tree."""
    call = re.compile(
        r"(?:_log|_logger|recorder)\.(?:info|warn|warning|warning_once|error|exception)"
        r"\(\s*(?:\"[a-z-]+\",\s*)?f?\"([^\"{%]{12,})"
    )
    told = "\n".join(one.text for one in EVERY)
    for file in (ROOT / "packages" / "vllm-adapter" / "src").rglob("*.py"):
        for beginning in call.findall(file.read_text()):
            is_cause = " " not in beginning
            assert is_cause or beginning.strip() in told, f"{file.name}: {beginning}"


def test_messages_are_plain_and_have_a_next_step() -> None:
    for one in EVERY:
        assert one.level in {"ok", "info", "text", "help"} or one.advice or next_step(one.level, one.code, one.text), (
            one
        )
        if one.text in OF_VLLM:
            continue
        assert not re.search(r"\b(xfer|dlist|notif|oops|failed to|unable to|please)\b", one.text, re.IGNORECASE), one
        assert not re.match(r"(error|warning|exception)\b:", one.text, re.IGNORECASE), one


def test_what_is_logged_or_refused_is_no_part_of_another_message() -> None:
    for one in EVERY:
        if one.level in {"no-go", "warning", "refusal", "note"} and not one.advice:
            step = next_step(one.level, one.code, one.text)
            assert "part of another message" not in step, one
            assert "caller's mistake" not in step, one


def test_values_are_shown_by_name() -> None:
    assert [one.text for one in found('fail(f"{question.endpoint.host} has {len(self._ranks)} of {40 + 2}")')] == [
        "{host} has {ranks} of {value}"
    ]


def found(source: str) -> list[Text]:
    return list(texts_of(ast.parse(textwrap.dedent(source))))


def test_a_text_is_found_however_it_gets_to_the_user() -> None:
    """Through a variable, a condition, a function's result, a constant, a table, a pair with its code, an option's help."""
    seen = found(
        '''
        _LATE = "the answer came too late"
        TABLE = {"a-code": "a row of a table"}

        def read(peer):
            """No text: this is documentation."""
            problem = f"no answer of {peer}"
            if peer:
                raise WireError("peer-silent", problem)
            raise WireError("peer-late", _LATE if peer else _reason(peer))

        def _reason(peer):
            return "the peer has " + peer + " left us"

        def refuse(peer):
            return "no-such-peer", f"there is no peer {peer}"

        def tell(self, peer):
            self._log.warning("some-cause", "this peer is slow: %s", peer)
            print(f"the peer {peer} is here")

        @app.command("show")
        def _show(peer: Annotated[str, typer.Option(help="The peer to show.")]):
            """Show one of the peers."""
        '''
    )
    assert {(one.level, one.code, one.text) for one in seen} == {
        ("error", "peer-silent", "no answer of {peer}"),
        ("error", "peer-late", "the answer came too late"),
        ("error", "peer-late", "the peer has {peer} left us"),
        ("error", "no-such-peer", "there is no peer {peer}"),
        ("warning", "", "this peer is slow: %s"),
        ("text", "", "the peer {peer} is here"),
        ("text", "", "a row of a table"),
        ("help", "", "The peer to show."),
        ("help", "", "Show one of the peers."),
    }


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
