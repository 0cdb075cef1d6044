"""Appends a conformance vector; published ones must stay as they are.

    python packages/kv-handshake/tests/vector_source.py NAME KIND HEX MEANING EXPECT

EXPECT is a JSON object of the values that a correct implementation reads. Frames "as vLLM writes them" were written by the
metadata classes of that release; they are in `data/vllm_frames.json`.
"""

import hashlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
DATA_FILE = HERE.parent / "src" / "kv_handshake" / "vectors.json"
LOCK_FILE = HERE / "data" / "vectors.lock"


def lock_line(vector):
    text = json.dumps(vector, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()} {vector['name']}"


def main(name, kind, data, meaning, expect):
    vectors = json.loads(DATA_FILE.read_text())["vectors"]
    vectors.append({"name": name, "kind": kind, "hex": data, "meaning": meaning, "expect": json.loads(expect)})
    lines = ",\n".join("  " + json.dumps(vector, sort_keys=True) for vector in vectors)
    DATA_FILE.write_text('{"format": "kv-handshake-vectors", "version": 1, "vectors": [\n' + lines + "\n]}\n")
    LOCK_FILE.write_text("".join(lock_line(vector) + "\n" for vector in vectors))


if __name__ == "__main__":
    main(*sys.argv[1:])
