"""`uv.lock` as text: make its addresses neutral, and compare two locks by what they bind (versions and hashes)."""

from __future__ import annotations

import re
import tomllib

__all__ = ["NEUTRAL", "bindings", "is_neutral", "neutralise"]

NEUTRAL = "https://index.invalid/"
_REGISTRY = re.compile(r'(registry = ")(?!https://index\.invalid/)[^"]+(")')
_FILE = re.compile(r'((?:url|path) = ")(?!https://index\.invalid/)(?:https?|file)://[^"]*?([^"/#]+)("|#[^"]*")')
_ADDRESS = re.compile(r'https?://(?!index\.invalid/)|registry = "(?!https://index\.invalid/)')


def neutralise(text: str) -> str:
    """Rewrite every download address to a neutral one, keeping file names and hashes."""
    text = _REGISTRY.sub(rf"\g<1>{NEUTRAL}simple\g<2>", text)
    return _FILE.sub(rf"\g<1>{NEUTRAL}files/\g<2>\g<3>", text)


def is_neutral(text: str) -> bool:
    """Tell whether no address but the neutral one is left."""
    return _ADDRESS.search(text) is None


def bindings(text: str) -> dict[str, frozenset[str]]:
    """Return what a lock binds: `name==version` -> the hashes of its files."""
    found: dict[str, frozenset[str]] = {}
    for package in tomllib.loads(text).get("package", []):
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        key = f"{package['name']}=={package.get('version', '')}"
        found[key] = frozenset(file["hash"] for file in files if "hash" in file)
    return found
