"""Figures of a small package whose structure is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdev.metrics import Metrics, format_table, measure

FILES = {
    "__init__.py": 'from ._a import f\n\n__version__ = "1"\n__all__ = ["f", "g", "__version__"]\n',
    "_a.py": "from . import _b\n\n\ndef f(a, b, c, d, e):\n    return [x for x in a if x and b or c]\n",
    "_b.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ._a import f\n",
    "_c.py": "from ._a import f\n\n\ndef g(self, a, b, c, d, e):\n    return f\n\n\ndef h(a, b, c, d, e, x, y):\n    return 1\n",
    "parts.py": '__all__ = ["P"]\n' + "\n" * 300,
    "testing.py": '__all__ = ["T", "U"]\n',
    "_p.py": "class A:\n    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n    f: int\n    z: int\n",
    "_q.py": "class B:\n    y: int\n" + "".join(f"    {c}: int\n" for c in "abcdef"),
    "_d.py": "def k(n):\n" + "".join(f"    if n == {i}:\n        return {i}\n" for i in range(11)),
}


@pytest.fixture
def measured(tmp_path: Path) -> Metrics:
    source = tmp_path / "packages" / "a-b" / "src" / "a_b"
    source.mkdir(parents=True)
    for name, text in FILES.items():
        (source / name).write_text(text)
    return measure(tmp_path, "a-b")


def test_names_are_counted_where_they_are_public(measured: Metrics) -> None:
    assert (measured.top_level_names, measured.submodule_names, measured.testing_names) == (2, 1, 2)


def test_outliers_are_named(measured: Metrics) -> None:
    assert measured.long_modules == [("a_b.parts", 301)]
    assert measured.signatures == [("a_b._c.h", 7)]
    assert measured.complex_functions == [("a_b._d.k", 12)]


def test_cycles_count_imports_for_types_and_not_the_package_itself(measured: Metrics) -> None:
    assert measured.cycles == [["a_b._a", "a_b._b"]]


def test_duplicates_are_argument_lists_and_runs_of_fields(measured: Metrics) -> None:
    assert measured.duplicates == [
        ["a_b._a.f(a, b, c, d, e)", "a_b._c.g(a, b, c, d, e)"],
        ["a_b._p.A (6 fields)", "a_b._q.B"],
    ]


def test_the_table_holds_every_figure(measured: Metrics) -> None:
    table = format_table([measured])
    for words in (
        "| import cycles | 1 | 1 |",
        "301 lines: a_b.parts",
        "7 arguments: a_b._c.h",
        "complexity 12: a_b._d.k",
    ):
        assert words in table
