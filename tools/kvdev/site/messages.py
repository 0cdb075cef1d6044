"""Collect every text that a user of the five packages can see, from the source, and write the page of them.

`docs/messages.md` is written from it by `dev.py check --fix`; `dev.py check` fails when it is not what the source says. How
texts are found: `texts.py`. That none is missing is also seen from the other side: `seen_texts.py`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

from kvdev.paths import PACKAGES, ROOT
from kvdev.site.next_steps import next_step
from kvdev.site.texts import LEVELS, Text, texts_of
from kvdev.steps import DevError

__all__ = ["PAGE", "Message", "check_messages", "collect", "messages_page"]

PAGE = ROOT / "docs" / "messages.md"
_REST = (
    ("text", "parts of messages, and what commands print"),
    ("help", "help of commands"),
)


@dataclass(frozen=True, slots=True)
class Message:
    """A text that a user can see.

    Attributes:
        package: Package whose source holds it.
        level: Kind of text, of `kvdev.site.texts.LEVELS`.
        code: Its stable code, or empty.
        text: The text, values by name.
        advice: The next step that the message itself carries, or empty.
    """

    package: str
    level: str
    code: str
    text: str
    advice: str


def collect() -> list[Message]:
    """Return all texts of the five packages, by package, level, code and text; a part that is also a message is one."""
    found: list[Message] = []
    for package in PACKAGES:
        texts = _texts_of_package(package)
        messages = {one.text for one in texts if one.level != "text"}
        kept = [one for one in texts if one.level != "text" or one.text not in messages]
        kept.sort(key=lambda one: (LEVELS.index(one.level), one.code, one.text, one.advice))
        found += [Message(package, one.level, one.code, one.text, one.advice) for one in kept]
    return found


@cache
def _texts_of_package(package: str) -> set[Text]:
    texts: set[Text] = set()
    for file in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        if "testing" not in file.parts and file.stem != "testing":
            texts.update(texts_of(ast.parse(file.read_text())))
    return texts


def messages_page() -> str:
    """Return the page."""
    lines = [
        "# Messages",
        "",
        "Every text of the five packages that a user can see, written from the source by `python3 tools/dev.py check --fix`.",
        "Values stand as `{name}`. Look for the words around a value; by symptom: [Troubleshoot](troubleshoot.md).",
        "",
        "An *error* is raised, or logged as one; a *refusal* is a command's; *no-go*, *note* and *ok* are findings of a check.",
        "Help texts of metrics are in [Metrics](metrics.md) too, those of keys in `vllm-adapter config --explain`.",
    ]
    every = collect()
    for package in PACKAGES:
        mine = [one for one in every if one.package == package]
        lines += ["", f"## {package}", "", "| level | code | text | next step |", "|---|---|---|---|"]
        for one in mine:
            if one.level not in dict(_REST):
                code = f"`{one.code}`" if one.code else ""
                step = one.advice or next_step(one.level, one.code, one.text)
                lines.append(f"| {one.level} | {code} | {_cell(one.text)} | {_cell(step)} |")
        for level, title in _REST:
            rest = [f"| {_cell(one.text)} |" for one in mine if one.level == level]
            lines += ["", f"### {package}: {title}", "", "| text |", "|---|", *rest] if rest else []
    return "\n".join(lines) + "\n"


def check_messages(*, fix: bool) -> None:
    """Compare the page with the source, or write it.

    Raises:
        DevError: The page is not what the source says.
    """
    page = messages_page()
    if fix:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        raise DevError("docs/messages.md is not what the source says; run `python3 tools/dev.py check --fix`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").strip()
