"""Wheels of metadata alone: resolvers and installers look at nothing else, and a CUDA build would be several GB."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile


def bare_wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """Write the wheel of a package that requires others and contains no file."""
    stem = f"{name.replace('-', '_')}-{version}"
    wheel, info = folder / f"{stem}-py3-none-any.whl", f"{stem}.dist-info"
    with ZipFile(wheel, "w") as file:
        required = "".join(f"Requires-Dist: {need}\n" for need in needs)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return wheel
