"""Replace the Mermaid sources of gathered pages by pictures; run with the Python of the `docs` environment.

`python draw_states.py FOLDER` draws every fenced Mermaid block below FOLDER once, as SVG beside its page: a reader's browser
loads nothing from elsewhere, and needs no script to see a state machine.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mmdr

_BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def draw_states(folder: Path) -> int:
    """Draw all state machines below `folder`; return how many there were."""
    count = 0
    for page in sorted(folder.rglob("*.md")):
        text = page.read_text()
        for number, match in enumerate(_BLOCK.finditer(text)):
            picture = page.with_name(f"{page.stem}-{number}.svg")
            picture.write_text(mmdr.render(match.group(1)).svg().replace('width="100%"', ""))
            before = text[: match.start()].rstrip().splitlines()
            heading = next((line.lstrip("# ") for line in reversed(before) if line.startswith("#")), page.stem)
            page.write_text(
                page.read_text().replace(match.group(0), f"![State machine: {heading}]({picture.name}){{ .states }}")
            )
            count += 1
    return count


if __name__ == "__main__":
    print(f"{draw_states(Path(sys.argv[1]))} state machines drawn")
