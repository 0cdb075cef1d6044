"""Find every command of every page: in fences of the languages `sh` and `console`, and in code within sentences and tables.

A fence says its language, so that no block is taken for something else: `sh` holds lines to type, `console` lines after `$ ` with
what they print, `text` neither. Code within a sentence is a command if it begins with a program and goes on: `kv-nixl doctor`.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvdev.paths import ROOT
from kvdev.site.reference import configuration_page, errors_page, metric_names_page

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PageCommand", "commands_of", "faults_of", "read_pages"]

_LANGUAGES = {"sh", "console", "text", "python", "json", "yaml", "toml", "mermaid"}
_PROGRAM = (
    r"(?:\S*/)?(?:python3?|[a-z_]+\.py|vllm-adapter|kv-nixl|kv-handshake|kv-topology|vllm|vllm-router|uv|pip|pytest|git|docker"
    r"|kubectl|helm|kustomize|ray|serve|curl|pre-commit|promtool|mkdocs|ulimit|sudo|export|go|npm|apt|apt-get|conda|nvidia-smi)"
)
_VARIABLES = r"(?:[A-Z][A-Z_]*=\S* +)*"
_COMMAND = re.compile(rf"{_VARIABLES}{_PROGRAM} +\S.*|test (?:--long )?[a-z][a-z-]+", re.DOTALL)
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(\S*) *$")
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_REMARK = re.compile(r"(?:^|\s+)#(?: .*)?$")


@dataclass(frozen=True, slots=True)
class PageCommand:
    """A command as a page has it.

    Attributes:
        page: The page's path in the repository, or below `reference/` where it is written from the code.
        line: The number of its line, from 1.
        text: The command, continued lines joined.
        shown: The output that the page shows; None where it shows none.
        is_inline: Whether it stands in a sentence or a table.
    """

    page: str
    line: int
    text: str
    shown: str | None = None
    is_inline: bool = False

    @property
    def place(self) -> str:
        """Page and line, as an editor takes them."""
        return f"{self.page}:{self.line}"


def read_pages() -> dict[str, str]:
    """Return the text of every page for readers: all Markdown but change logs, and the pages written from the code."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    logs = re.compile(r"(^|/)(CHANGELOG\.md$|changelog\.d/)")
    pages = {name: (ROOT / name).read_text() for name in listed if not logs.search(name) and (ROOT / name).exists()}
    written = {"configuration": configuration_page, "metric-names": metric_names_page, "errors": errors_page}
    return pages | {f"reference/{name}.md": write() for name, write in written.items()}


def commands_of(page: str, text: str) -> list[PageCommand]:
    """Return the commands of a page, in order."""
    found: list[PageCommand] = []
    sentences: list[str] = []
    for line, language, content in _parts(text):
        if language == "console":
            found += _transcript(page, line, content)
        elif language == "sh":
            found += [PageCommand(page, line + number, one) for number, one in _statements(content)]
        sentences += ["" if language is not None else one for one in content]
        sentences += [""] * 2 * (language is not None)
    found += _in_sentences(page, "\n".join(sentences))
    return sorted(found, key=lambda command: command.line)


def faults_of(page: str, text: str) -> list[str]:
    """Return blocks in which a command could hide: without a language, or of another than they say."""
    faults = []
    for line, language, content in _parts(text):
        if language is not None and language not in _LANGUAGES:
            faults.append(f"{page}:{line - 1}: say the language of this block: {', '.join(sorted(_LANGUAGES))}")
        if language in {None, "text"}:
            typed = re.compile(
                rf"(\$ |{_VARIABLES}{_PROGRAM} )" if language else rf" {{4,}}(\$ )?{_VARIABLES}{_PROGRAM} "
            )
            faults += [
                f"{page}:{line + number}: a command outside of a block of the language `sh` or `console`: {one.strip()}"
                for number, one in enumerate(content)
                if typed.match(one)
            ]
    return faults


def _parts(text: str) -> Iterator[tuple[int, str | None, list[str]]]:
    """Yield the parts of a page: number of the first line, language (None: no fence), lines."""
    lines, begun, fence = [], 1, None
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if match and fence is None:
            yield begun, None, lines
            lines, begun, fence = [], number + 1, match
        elif match and fence is not None and match[2] == fence[2] and not match[3]:
            yield begun, fence[3], [one.removeprefix(fence[1]) for one in lines]
            lines, begun, fence = [], number + 1, None
        else:
            lines.append(line)
    yield begun, None if fence is None else fence[3], lines


def _statements(lines: list[str]) -> Iterator[tuple[int, str]]:
    r"""Yield the commands of a script with the place of their first line: `a \` and `b` in lines 0 and 1 give (0, "a b")."""
    joined, begun = "", 0
    for number, line in enumerate(lines):
        begun = begun if joined else number
        joined += _REMARK.sub("", line).strip()
        if joined.endswith("\\"):
            joined = joined[:-1].rstrip() + " "
        elif joined:
            yield begun, joined
            joined = ""


def _transcript(page: str, line: int, lines: list[str]) -> Iterator[PageCommand]:
    starts = [number for number, one in enumerate(lines) if one.startswith("$ ")]
    for start, end in pairwise([*starts, len(lines)]):
        more = next((n for n in range(start + 1, end) if not lines[n].startswith("> ")), end)
        command = "\n".join(one[2:] for one in lines[start:more])
        yield PageCommand(page, line + start, command, "\n".join(lines[more:end]))


def _in_sentences(page: str, text: str) -> Iterator[PageCommand]:
    for match in _INLINE.finditer(text):
        words = " ".join(match[1].replace("\\|", "|").split())
        if "\n\n" not in match[1] and _COMMAND.fullmatch(words):
            yield PageCommand(page, text.count("\n", 0, match.start()) + 1, words, is_inline=True)
