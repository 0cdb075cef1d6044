"""The neutral lock: addresses go, what binds stays."""

from __future__ import annotations

from kvdev.lockfile import bindings, is_neutral, neutralise

LOCK = """
version = 1

[[package]]
name = "numpy"
version = "2.4.6"
source = { registry = "https://packages.example.org/simple" }
sdist = { url = "https://files.example.org/packages/ab/cd/numpy-2.4.6.tar.gz", hash = "sha256:aa", size = 3 }
wheels = [
    { url = "https://files.example.org/packages/ef/numpy-2.4.6-cp311-manylinux.whl#sha256=bb", hash = "sha256:bb" },
    { url = "file:///srv/wheels/numpy-2.4.6-cp312-manylinux.whl", hash = "sha256:cc" },
]

[[package]]
name = "torch"
version = "2.13.0+cpu"
source = { registry = "../wheels" }
"""


def test_no_address_is_left_and_file_names_and_hashes_stay() -> None:
    neutral = neutralise(LOCK)
    assert is_neutral(neutral)
    assert not is_neutral(LOCK)
    assert "example.org" not in neutral
    assert "/srv" not in neutral
    assert 'url = "https://index.invalid/files/numpy-2.4.6.tar.gz", hash = "sha256:aa"' in neutral
    assert bindings(neutral) == bindings(LOCK)
    assert bindings(LOCK)["numpy==2.4.6"] == {"sha256:aa", "sha256:bb", "sha256:cc"}


def test_neutralising_twice_changes_nothing() -> None:
    assert neutralise(neutralise(LOCK)) == neutralise(LOCK)
