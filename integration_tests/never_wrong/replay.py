"""Play one case again and say how it went: `replay.py SEED` or `replay.py 'Case(...)'`."""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "sim"))

from oracle import geometry
from oracle.runner import run


def main() -> int:
    text = sys.argv[-1]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    case = geometry.draw(int(text)) if text.isdigit() else eval(text, dict(vars(geometry)))
    print(case)
    try:
        print(run(case))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
