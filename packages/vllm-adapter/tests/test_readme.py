"""README.md of this package: every module that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vllm_adapter

PAGE = Path(__file__).parents[1] / "README.md"
TEXT = PAGE.read_text() if PAGE.exists() else ""
SOURCE = Path(vllm_adapter.__file__).parent

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not in the repository: there are no pages")


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return str(text)


def test_modules_of_the_rooms_exist_where_the_table_has_them() -> None:
    rows = re.findall(r"^\| `([\w/]+/)` \| (.*) \|$", section("The rooms"), re.MULTILINE)
    folders = {f"{file.parent.relative_to(SOURCE)}/" for file in SOURCE.rglob("*.py")} - {"./", "cli/check/"}
    assert {room for room, _ in rows} == folders
    missing = [
        room + name
        for room, text in rows
        for name in re.findall(r"`(\w+\.py)`", text)
        if not (SOURCE / room / name).exists()
    ]
    assert missing == []
    (beside,) = re.findall(r"^\| beside them \| (.*) \|$", section("The rooms"), re.MULTILINE)
    assert [name for name in re.findall(r"`(\w+\.py)`", beside) if not (SOURCE / name).exists()] == []
