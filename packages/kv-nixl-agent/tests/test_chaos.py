"""One failure of any call of the port, at any moment, leaks nothing. Many random faults: `test_driver.py`."""

from typing import Any

import pytest
from helpers import make_pair, order

from kv_nixl_agent import AgentError


@pytest.mark.parametrize("call", ["register", "add_peer", "prepare", "make", "post", "check"])
def test_one_failure_anywhere_leaks_nothing(call: str) -> None:
    for skip in range(6):
        pair = make_pair()
        hits = [skip]
        original = pair.fabric.hit

        def hit(name, original=original, hits=hits):
            if name == call:
                hits[0] -= 1
                if hits[0] == -1:
                    raise AgentError("nixl-backend", "injected")
            original(name)

        fabric: Any = pair.fabric
        fabric.hit = hit
        refused = None
        try:
            pair.connect()
            pair.consumer.submit(order("a", [0], [1], notification=b"n", deadline_s=0.5))
            pair.run(20, step_s=0.1)
            assert "a" in pair.results
        except AgentError as error:
            refused = error.code
        pair.fabric.hit = original
        pair.consumer.close()
        assert pair.ports[1].open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}, (call, skip)
        assert pair.ports[1].peers == set()
        assert refused in {None, "metadata-rejected", "rows-unregistered", "peer-rows-unregistered", "bad-fence"}
