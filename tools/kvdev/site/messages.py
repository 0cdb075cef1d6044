"""Collect every message that a user can see: log lines, texts of errors, findings and refusals of commands, from the source.

`docs/messages.md` is written from it by `dev.py check --fix`; `dev.py check` fails when it is not what the source says. A
message is a text of at least three words that is logged, raised, printed to stderr or made a finding. Values are shown by
name: `{peer}`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdev.paths import PACKAGES, ROOT
from kvdev.site.next_steps import next_step
from kvdev.steps import DevError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["PAGE", "Message", "check_messages", "collect", "messages_page"]

PAGE = ROOT / "docs" / "messages.md"

_LEVELS = {
    "info": "info", "warn": "warning", "warning": "warning", "warning_once": "warning", "error": "error", "exception": "error",
}  # fmt: skip
"""Methods of loggers, recorders and reports -> level."""
_LOGGERS = re.compile(r"(^|[._])(log|logger|recorder|_log)$")
_REFUSALS = frozenset({"BadParameter", "UsageError", "_Refused", "_Refusal"})
"""Exceptions by which a command refuses its arguments."""
_FINDINGS = {"ok": "ok", "note": "note", "refuse": "no-go"}
_CODE = re.compile(r"[a-z]+(-[a-z0-9]+)+")
_ONE_WORD_CODES = frozenset({"closed", "refused", "cancelled", "draining"})
_LEAST_WORDS = 3
_MOST_PART_WORDS = 5
_NO_NAMES = frozenset({"len", "str", "list", "sorted", "join", "for", "in", "self", "r", "f", "repr"})
_ORDER = ("no-go", "error", "refusal", "warning", "note", "ok", "info")


@dataclass(frozen=True, slots=True)
class Message:
    """A text that a user can see.

    Attributes:
        package: Package whose source holds it.
        level: error, warning, info, refusal of a command, or how a finding of a check is marked.
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
    """Return all messages of the five packages, by package, level, code and text."""
    found: set[Message] = set()
    for package in PACKAGES:
        source = ROOT / "packages" / package / "src"
        for file in sorted(source.rglob("*.py")):
            if "testing" not in file.parts and file.stem != "testing":
                found.update(_messages_of(package, file))
    return sorted(found, key=lambda one: (one.package, _ORDER.index(one.level), one.code, one.text))


def messages_page() -> str:
    """Return the page."""
    lines = [
        "# Messages",
        "",
        "Texts that the five packages log or raise, and findings of their checks, written from the source by",
        "`python3 tools/dev.py check --fix`. Values stand as `{name}`. Look for the words around a value; by symptom:",
        "[Troubleshoot](troubleshoot.md).",
        "",
        "An *error* is raised, or logged as one; a *refusal* is a command's; *no-go*, *note* and *ok* are findings of a check.",
    ]
    every = collect()
    for package in PACKAGES:
        lines += ["", f"## {package}", "", "| level | code | text | next step |", "|---|---|---|---|"]
        for one in (each for each in every if each.package == package):
            code = f"`{one.code}`" if one.code else ""
            step = one.advice or next_step(one.level, one.code, one.text)
            lines.append(f"| {one.level} | {code} | {_cell(one.text)} | {_cell(step)} |")
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


def _messages_of(package: str, file: Path) -> Iterator[Message]:
    tree = ast.parse(file.read_text())
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            level = _level_of(node, is_raised=id(node) in raised)
            text = _text_of(node, level) if level else ""
            if level and len(text.split()) >= _LEAST_WORDS and not _is_part(node, text):
                yield Message(package, level, _code_of(node), " ".join(text.split()), _advice_of(node, level))


def _is_part(node: ast.Call, text: str) -> bool:
    """Return whether a text only fills a helper's sentence, as in `raise _differ(code, "The attention window", ...)`."""
    return ast.unparse(node.func).startswith("_") and "{" not in text and len(text.split()) <= _MOST_PART_WORDS


def _level_of(node: ast.Call, *, is_raised: bool) -> str:
    """Return at which level a call shows its text; empty if it shows none."""
    if isinstance(node.func, ast.Attribute):
        receiver, method = ast.unparse(node.func.value), node.func.attr
        if method in _LEVELS and _LOGGERS.search(receiver):
            return _LEVELS[method]
        if method in _FINDINGS and receiver.endswith("findings"):
            return _FINDINGS[method]
        if method == "error" and receiver.endswith("parser"):
            return "refusal"
    name = ast.unparse(node.func).rpartition(".")[2]
    if name == "print" and any(each.arg == "file" and "stderr" in ast.unparse(each.value) for each in node.keywords):
        return "refusal"
    if is_raised and name in _REFUSALS:
        return "refusal"
    is_error = is_raised or name.endswith("Error") or (bool(_code_of(node)) and name[:1] != "_")
    return "error" if is_error else ""


def _strings(node: ast.Call) -> Iterator[str]:
    for argument in (*node.args, *(each.value for each in node.keywords if each.arg in {"message", "code"})):
        yield _words(argument)


def _text_of(node: ast.Call, level: str) -> str:
    """Return the longest text among the arguments; of a finding, which has advice too, its message."""
    if level in _FINDINGS.values():
        place = 1 if level == "ok" else 2
        return _words(node.args[place]) if len(node.args) > place else ""
    return max(_strings(node), key=len, default="")


def _advice_of(node: ast.Call, level: str) -> str:
    is_finding = level in _FINDINGS.values() and level != "ok"
    return _words(node.args[3]) if is_finding and len(node.args) > 3 else ""


def _code_of(node: ast.Call) -> str:
    for keyword in node.keywords:
        if keyword.arg == "code":
            return _words(keyword.value) if isinstance(keyword.value, ast.Constant) else ""
    constants = (each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str))
    return next((one for one in constants if _CODE.fullmatch(one) or one in _ONE_WORD_CODES), "")


def _words(node: ast.expr) -> str:
    """Return a text as it is written: f-strings with their values by name, parts that are added joined."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else _value(each) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left) + _words(node.right)
    return ""


def _value(node: ast.expr) -> str:
    """Return the name of a value: `{question.endpoint.host}` is {host}, `{len(ranks)}` is {ranks}."""
    names = re.findall(r"[A-Za-z]\w*", ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node))
    plain = [name for name in names if name not in _NO_NAMES]
    return "{" + (plain[-1].strip("_") if plain else "value") + "}"
