"""The tables of docs/support.md, filled from the tests: from their mark `proves`, their folder and their other marks.

`@pytest.mark.proves("dense, latent: streamed, host buffer")` fills the cells of these rows in these columns; ` = CODE` at its
end says that the test shows a refusal. The name of a row or column ends before a bracket.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product

from kvdev.paths import ROOT
from kvdev.steps import DevError

_PAGE = ROOT / "docs" / "support.md"
_LEVELS = {"host/engines": "E", "integration_tests/gpu": "G", "host/inside": "S"}
_STRONGER = {"E": {"E+"}, "e": {"E", "E+"}}
_TABLE = re.compile(r"^\|(?:family|case)\|.*\n(?:\|.*\n)+", re.MULTILINE)


def check_support(*, fix: bool = False) -> None:
    """Compare the page's tables with the tests, or write them.

    Raises:
        DevError: A cell or a code of a claim does not exist, or the page is out of date.
    """
    codes = (ROOT / "packages/vllm-adapter/src/vllm_adapter/codes.toml").read_text()
    cells: dict[tuple[str, ...], set[str]] = {}
    for file in (*ROOT.glob("integration_tests/**/*.py"), *ROOT.glob("packages/*/tests/**/*.py")):
        text = file.read_text()
        for claim, proof in read_claims(text, str(file)) if "mark.proves(" in text else ():
            places, _, code = claim.partition(" = ")
            if code and not (re.search(rf"^{code} = ", codes, re.MULTILINE) and code in text.replace(claim, "")):
                raise DevError(f"{file}: {claim!r}: codes.toml or the rest of the file does not have this code")
            for place in product(*(part.split(", ") for part in places.split(": "))):
                cells.setdefault(place, set()).add(f"`{code}`" if code else proof)
    page = _PAGE.read_text()
    filled = _TABLE.sub(lambda table: fill(table[0], cells), page)
    if cells:
        raise DevError(f"docs/support.md has no such rows or columns: {sorted(cells)}")
    if filled != page and not fix:
        raise DevError("docs/support.md is not what the tests say: `python3 tools/dev.py check --fix` writes it")
    _PAGE.write_text(filled)


def read_claims(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield each claim of a test file with its proof: a level, small where it runs weekly, with `+` on the newest vLLM, too."""
    level = next((level for part, level in _LEVELS.items() if part in name), "B")
    module = "".join(re.findall("^pytestmark = .*", text, re.MULTILINE))
    for function in (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)):
        calls = [node for mark in function.decorator_list for node in ast.walk(mark) if isinstance(node, ast.Call)]
        cases = [call for call in calls if ast.unparse(call.func) == "pytest.param"]
        whole = [mark for mark in function.decorator_list if "pytest.param(" not in ast.unparse(mark)]
        shared = "\n".join([module, *map(ast.unparse, whole)])
        for mark in (*cases, *whole):
            said = shared + ast.unparse(mark)
            own = level.lower() if re.search("LONG_ONLY|KVDEV_LONG", said) else level
            proof = own + "+" * ("mark.newest" in said)
            for call in (node for node in ast.walk(mark) if isinstance(node, ast.Call)):
                if ast.unparse(call.func) == "pytest.mark.proves":
                    yield from ((ast.literal_eval(claim), proof) for claim in call.args)


def fill(table: str, cells: dict[tuple[str, ...], set[str]]) -> str:
    """Return a table with the proofs of its cells, which are taken out of `cells`; a cell without any gets a dash."""
    head, rule, *rows = table.splitlines()
    columns, done = head.split("|")[2:-1], [head, rule]
    for first in (row.split("|")[1] for row in rows):
        found = [cells.pop((first.partition(" (")[0], column.partition(" (")[0]), set()) for column in columns]
        best = [{one for one in cell if not cell & _STRONGER.get(one, set())} for cell in found]
        said = [",".join(sorted(cell, key=lambda one: "EeGSB`".index(one[0]))) or "\u2013" for cell in best]
        done.append("|".join(["", first, *said, ""]))
    return "\n".join(done) + "\n"
