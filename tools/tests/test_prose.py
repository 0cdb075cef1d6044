"""Openings that the house rule for prose refuses, and those that it lets pass."""

from __future__ import annotations

import pytest

from kvdev.prose import OPENERS, pronoun_openings


@pytest.mark.parametrize("word", sorted(OPENERS))
def test_a_docstring_that_opens_with_a_pronoun_is_refused(word: str) -> None:
    for text in (
        f'"""{word.title()} the loop tells."""\n',
        f'def f():\n    """{word} the loop tells."""\n',
        f'class A:\n    """{word.title()}\n    the loop tells."""\n    x: int\n    """{word.upper()} x means."""\n',
        f"x = 1  # {word} the loop tells\n",
        f"# {word.title()} the loop tells\nx = 1\n",
    ):
        assert pronoun_openings(text), text


@pytest.mark.parametrize("word", sorted(OPENERS))
@pytest.mark.parametrize("name", ["reply", "*replies", "first, second", "reply (bytes)", "kv.Error", "`reply`"])
def test_the_description_of_a_field_that_opens_with_a_pronoun_is_refused(name: str, word: str) -> None:
    docstring = (
        f'    """Sum.\n\n    Args:\n        good: The sum.\n        {name}: {word.title()} peers say.\n    """\n'
    )
    assert pronoun_openings(f"def f():\n{docstring}") == [(6, f"{word.title()} peers say.")]
    assert pronoun_openings(f"class A:\n{docstring}") == [(6, f"{word.title()} peers say.")]


@pytest.mark.parametrize(
    "text",
    [
        '"""Callbacks that the loop invokes, one per peer; what they return is ignored."""\n',
        '"""Onefold, whatsit, whole: other words."""\n',
        '"""`one` is a name."""\nx = "What?"\n',
        "# A comment goes on in its second line\n# which may begin with any word.\nx = 1\n",
        "# ---- one\nx = 1\n",
        "x = 1  # noqa: E501\n",
        'def f():\n    """Sum.\n\n    Args:\n        reply: Bytes, and what they mean.\n            One each.\n    """\n',
        'def f():\n    """Sum.\n\n    The table says it all: what is sent, and who sends it.\n    """\n',
        'x = "# what is in a string is no comment"\n',
    ],
)
def test_other_openings_pass(text: str) -> None:
    assert pronoun_openings(text) == []


def test_the_line_and_its_text_are_told() -> None:
    text = 'import os\n\n\ndef f():\n    """Which is it?\n\n    More.\n    """\n    # one more\n    return os\n'
    assert pronoun_openings(text) == [(5, "Which is it?"), (9, "one more")]
