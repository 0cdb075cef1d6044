"""Documents say what the code does: the README's example, the embedding example, the tables."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kv_handshake.core import desk
from kv_handshake.errors import CODES
from kv_handshake.wire import limits as bounds
from kv_handshake.wire.factors import FACTOR_GROUPS
from kv_handshake.wire.messages import METADATA_FIELDS, Envelope

PACKAGE = Path(__file__).parent.parent
WIRE = PACKAGE.parent.parent / "docs" / "wire"
needs_docs = pytest.mark.skipif(not WIRE.exists(), reason="the documents are not beside the package")


def test_readme_lists_every_code():
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (\w+) \| ([\w ]+) \| (.+) \|$", (PACKAGE / "README.md").read_text(), re.MULTILINE
    )
    retry = {True: "yes", False: "no", None: "unknown"}
    assert rows == [(code, each.fault, retry[each.is_retry_safe], each.meaning) for code, each in CODES.items()]


def printed_by(*words):
    """Run Python with these words; return the lines that it prints."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_readme_examples_run_and_their_wrong_twins_are_refused():
    examples = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    good, another, own = printed_by("-c", "".join(examples))
    assert good == " engine-a 1024"
    assert another.startswith('factors-differ dtype: local "torch.float16", peer "torch.bfloat16"')
    assert own.startswith("factors-differ rope: local 2, peer null")


def test_embedded_engine_runs():
    lines = printed_by(str(PACKAGE / "examples" / "embedded_engine.py"))
    assert [line.endswith("True") for line in lines[:2]] == [True, True]
    assert 'factors-differ: dtype: local "float32", peer "float16"' in lines[2]


def absent(info):
    """Return how a table says which value stands for a key that is absent."""
    if info.required:
        return "refused"
    value = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
    return "nil" if value is None else str(value) if isinstance(value, int) else "empty"


def table(page, title):
    """Return the rows under a heading of a page of docs/wire, cell by cell, without the table's head."""
    (part,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", (WIRE / page).read_text(), re.MULTILINE | re.DOTALL)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in part.splitlines() if row.startswith("| `")]


def names(cell):
    return re.findall(r"`([\w-]+)`", cell)


@needs_docs
def test_protocol_page_describes_the_metadata():
    rows = [(name, *row[1:4]) for row in table("protocol.md", "Agent metadata") for name in names(row[0])]
    assert [(name, since, missing) for name, _, since, missing in rows] == [
        (each.key, str(max(2, each.wire.since)) if each.wire.since else "ours", absent(each.info))
        for each in METADATA_FIELDS
    ]
    assert [name for name, kind, _, _ in rows if kind.endswith("or nil")] == [
        each.key for each in METADATA_FIELDS if absent(each.info) == "nil"
    ]


@needs_docs
def test_protocol_page_describes_the_envelope():
    rows = table("protocol.md", "Envelope")
    fields = msgspec.structs.fields(Envelope)
    assert [(*names(row[0]), row[2]) for row in rows] == [(each.encode_name, absent(each)) for each in fields]
    assert all(row[1].endswith("or nil") is (row[2] == "nil") for row in rows)


@needs_docs
def test_protocol_page_has_the_limits():
    found = {
        row[0].strip("`"): int(re.split(r"\D", row[1])[0])
        for row in table("protocol.md", "Codes of a reader")
        if row[0][1].isupper()
    }
    assert found == {name: value for name, value in vars(bounds).items() if type(value) is int}


def raised_in(*modules):
    """Return the codes that modules name in calls."""
    text = "".join((PACKAGE / "src" / "kv_handshake" / f"{name}.py").read_text() for name in modules)
    return {
        *re.findall(r'(?:WireError|Verdict|refuse)\(\s*"([a-z-]+)"', text),
        *re.findall(r'code = "([a-z-]+)"', text),
    }


@needs_docs
def test_protocol_page_lists_the_codes():
    listener = {name for row in table("protocol.md", "Refusal") for name in names(row[0])}
    assert listener == raised_in("wire/queries", "core/server", "net/listener")
    reader = [name for row in table("protocol.md", "Codes of a reader") for name in names(row[0]) if name.islower()]
    assert {*reader} == (
        raised_in("wire/replies", "core/session", "wire/policy") | {"malformed-metadata", "invalid-metadata"}
    ) - {"first-rank-refused"}
    assert {*reader, *listener} <= {*CODES}


@needs_docs
def test_protocol_page_lists_the_refusals_of_asks():
    listed = [name for row in table("protocol.md", "Asks") for name in names(row[0])]
    assert {*listed} == {code for code in CODES if code.startswith("ask-")} - {"ask-unsupported"} | {"rate-limited"}
    row = next(row for row in table("protocol.md", "Asks") if row[0] == "`ask-busy`")
    limits = [desk.ASKS_PER_CONNECTION, desk.MOST_ASKS, desk.MOST_ASKED_BYTES]
    assert [int(number) for number in re.findall(r"\d+", row[1])] == limits


@needs_docs
def test_protocol_page_lists_the_reasons_of_dropped_notifications():
    source = (PACKAGE / "src" / "kv_handshake" / "wire" / "notifications.py").read_text()
    listed = {*names("".join(row[0] for row in table("protocol.md", "Notifications") if row[0][1].islower()))}
    assert listed == {*re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)*)"', "".join(re.findall(r"_unknown\(.*", source)))}


@needs_docs
def test_compatibility_page_lists_the_groups():
    page = (WIRE / "compatibility.md").read_text()
    (may_differ,) = re.findall(r"May differ: (.*?)\. Any other factor", page, re.DOTALL)
    assert {*names(may_differ)} == {name for name, group in FACTOR_GROUPS.items() if group == "may-differ"}
    (must_match,) = re.findall(r"Must match: (.*?)\. May differ", page, re.DOTALL)
    assert {*names(must_match)} == {name for name, group in FACTOR_GROUPS.items() if group == "must-match"}
    (informative,) = re.findall(r"^\| informative \| (.*?);", page, re.MULTILINE)
    assert {*names(informative)} == {name for name, group in FACTOR_GROUPS.items() if group == "informative"}
