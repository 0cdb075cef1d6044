"""Expressions of the dashboard and the alert rules, and Prometheus' own tool to read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from kvdev.locking import exclusive
from kvdev.paths import ROOT, STATE

RULES: Final = ROOT / "deploy" / "prometheus" / "kv-transfer.rules.yaml"


def samples_read(expression: str) -> set[str]:
    """Return the names of the samples that an expression reads."""
    return set(re.findall(r"vllm:\w+", expression))


def panel_expressions() -> dict[str, str]:
    """Return the dashboard's expressions by `panel: curve`."""
    panels = json.loads((ROOT / "deploy" / "grafana" / "kv-transfer.json").read_text())["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", [])
    }


def find_promtool() -> Path | str:
    """Return promtool of this machine, or of Debian's package (19 MB), unpacked in `.dev`; or the reason why it is not here."""
    folder = STATE / "prometheus"
    if found := shutil.which("promtool"):
        return Path(found)
    with exclusive():
        if not (folder / "usr/bin/promtool").exists():
            (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
            # Lists of packages that the machine lacks are kept here, not in the system.
            apt = f"apt-get -q -o Dir::State::Lists={folder}/lists -o Dir::Cache={folder}"
            fetch = f"apt-get -q download prometheus || {{ {apt} update && {apt} download prometheus; }}"
            command = ["sh", "-c", f"({fetch}) && dpkg-deb -x prometheus_*.deb ."]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
            if done.returncode != 0:
                return f"promtool is not on the path, and Debian's package could not be unpacked: {done.stderr[-300:]}"
    return folder / "usr/bin/promtool"
