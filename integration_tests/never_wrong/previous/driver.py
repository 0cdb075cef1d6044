"""A simulated engine of one release in a process of its own, driven by JSON lines; runs in that release's environment.

    driver.py FOLDER NAME VLLM    FOLDER holds that release's `engines.py`; NAME names the engine, VLLM its version of vLLM.

It only uses what the simulated engines of both releases offer. Between two commands the engine goes on stepping.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
from typing import Any

# Answers have the real standard output to themselves: NIXL writes to descriptor 1.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, sys.argv[1])

Engine: Any = importlib.import_module("engines").Engine


def main() -> None:
    engine = Engine(sys.argv[2], factors={"model": "m", "dtype": "f", "vllm_version": sys.argv[3]})
    answer({"ready": sys.argv[2]})
    try:
        while True:
            if not select.select([sys.stdin], [], [], 0.002)[0]:
                engine.step()
                continue
            line = sys.stdin.readline()
            if not line:
                return
            answer(obey(engine, json.loads(line)))
    finally:
        engine.close()


def answer(value: object) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def obey(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Perform one command and return its answer."""
    if order["do"] == "prefill":
        request, ticket = engine.prefill(order["tokens"])
        return {"id": request, "ticket": ticket}
    if order["do"] == "decode":
        request = engine.start_decode(order["ticket"], order["tokens"], hit_blocks=order.get("hit_blocks", 0))
        is_ok = engine.wait_received(request)
        if is_ok:
            engine.assert_has(request, order["source"], order["tokens"], hit_blocks=order.get("hit_blocks", 0))
        engine.finish(request)
        return {"ok": is_ok}
    assert order["do"] == "idle"
    engine.wait_idle(within_s=60)
    return {"held": list(engine.held)}


if __name__ == "__main__":
    main()
