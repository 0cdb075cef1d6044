"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scheduler_helpers import config, hand_over
from stream_helpers import Prompt

import kv_scheduler_state
from kv_scheduler_state import SchedulerState, prompt_digest
from kv_scheduler_state.ticket.ticket import WHOLE_NUMBERS

PACKAGE = Path(__file__).parents[1]
TICKET_PAGE = PACKAGE.parents[1] / "docs" / "wire" / "ticket.md"


@pytest.mark.skipif(not TICKET_PAGE.is_file(), reason="the package is tested outside its repository")
def test_the_ticket_page_names_every_sealed_key_and_works_out_a_digest():
    page = TICKET_PAGE.read_text()
    prefill = SchedulerState(config(generation=1, dialect=15, null_block=0), secrets=[b"0123456789abcdef"])
    written = hand_over(prefill, [[1, 2, 3]], identity=Prompt()).params
    assert written is not None
    assert all(f"`{key}`" in page for key in {*written, *WHOLE_NUMBERS})
    assert prompt_digest([1, 2, 3]) in page


def test_the_examples_of_the_readme_run():
    examples = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    assert len(examples) > 1
    shared: dict[str, object] = {}  # a wrong twin goes on with what its example has made
    for example in examples:
        exec(compile(example, "README.md", "exec"), shared)


def test_the_readme_lists_every_error_code():
    readme = (PACKAGE / "README.md").read_text()
    sources = "".join(path.read_text() for path in Path(kv_scheduler_state.__file__).parent.rglob("*.py"))
    codes = set(re.findall(r'"((?:ticket|invalid|unknown|duplicate|illegal)-[a-z-]+)"', sources))
    assert len(codes) > 15
    assert not {code for code in codes if f"`{code}`" not in readme}
