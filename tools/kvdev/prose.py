"""Check how prose begins: a docstring or comment opens with a verb or a noun, not with a pronoun.

"Whom the loop tells" needs a second reading, "Callbacks that the loop invokes" does not.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

__all__ = ["OPENERS", "pronoun_openings"]

OPENERS = frozenset({"what", "whatever", "which", "who", "whoever", "whom", "whomever", "whose", "one"})
# Quotation marks and brackets may stand before the first word; a ruled line (`-----`) is no prose.
_FIRST_WORD = re.compile(r"[\"'(*]*([A-Za-z]+)(?![\w.(/-])")

# `name: description` as it stands under Args, Attributes or Raises: `*args`, `first, second`, `values (list)`, `Error`.
_FIELD = re.compile(r"\s+[*`]*\w[\w.`]*(?:, [*`]*\w[\w.`]*)*(?: \([^)]*\))?: +(\S.*)")


def pronoun_openings(text: str) -> list[tuple[int, str]]:
    """Return (line, first line of the prose) of each docstring and each comment that opens with one of `OPENERS`.

    Descriptions of arguments and attributes (`name: ...`) in a docstring are held to the same rule. Of comments on several
    lines only the first counts; a line that follows another may begin with any word.
    """
    found = [(line, prose) for line, prose in (*_docstrings(text), *_comments(text)) if _opens_badly(prose)]
    return sorted(found)


def _opens_badly(prose: str) -> bool:
    match = _FIRST_WORD.match(prose)
    return match is not None and match.group(1).lower() in OPENERS


def _docstrings(text: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            # A string after a field describes the field: it is held to the same rule.
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str) and value.strip():
                    found.append((statement.lineno, value.strip().splitlines()[0]))
                    found += _descriptions(value, statement.lineno)
    return found


def _descriptions(docstring: str, first_line: int) -> list[tuple[int, str]]:
    """Return (line, description) of each indented `name: description`; `first_line` is the docstring's own."""
    matches = ((number, _FIELD.match(line)) for number, line in enumerate(docstring.split("\n"), first_line))
    return [(number, match.group(1)) for number, match in matches if match is not None]


def _comments(text: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    last_own_line = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        stands_alone = not token.line[:column].strip()
        if not (stands_alone and last_own_line == line - 1):
            found.append((line, token.string.lstrip("#").strip()))
        if stands_alone:
            last_own_line = line
    return found


def main(folders: list[str]) -> int:
    """Print the openings to rewrite in the Python files of these folders; return 1 when there are any."""
    count = 0
    for file in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        for line, prose in pronoun_openings(file.read_text()):
            count += 1
            print(f"{file}:{line}: {prose}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
