"""Fixture for every test with engines: a code that a counter gets as its label has a series before it occurs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_adapter.codes import code_table, codes_of
from vllm_adapter.observe.recorder import Recorder

__all__ = ["every_code_has_a_zero"]

ONCE_THEY_OCCUR = {"document-malformed"}
"""Codes of a malformed document, which have a series from then on."""


@pytest.fixture(autouse=True)
def every_code_has_a_zero(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare the codes that a test brings about with those that a scrape shows from the start; invented ones do not count."""
    seen: set[tuple[str, str]] = set()
    observe = Recorder.observe

    def observed(recorder: Recorder, key: str, value: object) -> None:
        seen.update([(key, value)] if isinstance(value, str) else [])
        observe(recorder, key, value)

    monkeypatch.setattr(Recorder, "observe", observed)
    yield
    real = {code for code, *_ in code_table()} - ONCE_THEY_OCCUR
    assert [(key, code) for key, code in seen if code in real and code not in codes_of(key)] == []
