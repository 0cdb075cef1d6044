"""The tools that put a fault on live engines, without engines: each fault has words, and a limit leaves what it says."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import get_args

import pytest
from faults import KINDS, MISBEHAVIOURS, Fault, first_limit, limited, used_descriptors
from load import Asked, Pair, Prompt
from proxy import Behaviour

PROMPT = Prompt(7, "a prompt", 3)
PAIR = Pair("p", "d", "http://127.0.0.1:1", "http://127.0.0.1:1")


def test_each_fault_has_words_and_each_behaviour_of_the_proxy_is_tried() -> None:
    assert {"pass", *MISBEHAVIOURS} == set(get_args(Behaviour))
    assert not set(KINDS) & set(MISBEHAVIOURS)


def test_a_request_is_of_a_fault_when_it_was_under_way_then() -> None:
    fault = Fault("stop", "", ["p"], began_s=10.0, ended_s=20.0)
    spans = [(8.0, 9.0), (9.0, 11.0), (11.0, 19.0), (19.0, 21.0), (21.0, 22.0), (9.0, 21.0)]
    asked = [Asked(PROMPT, PAIR, began_s, ended_s, "decode", "text", "") for began_s, ended_s in spans]
    assert [fault.touches(each) for each in asked] == [False, True, True, True, False, True]
    assert [fault.covers(each) for each in asked] == [False, False, True, False, False, False]


OPENER = """
import os, sys
print("up", flush=True)
sys.stdin.readline()
n = 0
try:
    while n < 9:
        n += os.dup(0) > 0
except OSError:
    pass
print(n)
"""


@pytest.mark.parametrize("spare", [0, 1, 6])
def test_a_process_can_open_as_many_more_descriptors_as_are_left_to_it(spare: int) -> None:
    assert first_limit([0, 1, 3], 1) == 4
    with subprocess.Popen(
        [sys.executable, "-c", OPENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        with limited([process.pid], resource.RLIMIT_NOFILE, lambda pid: first_limit(used_descriptors(pid), spare)):
            assert process.communicate("go\n", timeout=10)[0] == f"{spare}\n"
