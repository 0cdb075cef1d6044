"""Long random lives of two engines, several prompts, several workers; every one of them must heal."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from model.explore import decode_world, pair_world, prefill_world


class HandOver(RuleBasedStateMachine):
    """Everything that may happen next, happens, in an order that Hypothesis chooses and shrinks."""

    @initialize(
        kind=st.sampled_from(("pair", "prefill", "decode")),
        requests=st.integers(1, 4),
        readers=st.integers(1, 3),
        workers=st.integers(1, 2),
        is_odd=st.booleans(),
    )
    def start(self, kind, requests, readers, workers, is_odd):
        if kind == "pair":
            self.world = pair_world(requests=requests, readers=readers, adversity=2)
        elif kind == "prefill":
            self.world = prefill_world(requests=requests, readers=readers, workers=workers, is_plain=is_odd)
        else:
            self.world = decode_world(requests=requests, readers=readers, fails_requests=is_odd)

    @rule(data=st.data())
    def happen(self, data):
        # The world checks every promise while the step happens, and raises ModelViolation.
        self.world.apply(data.draw(st.sampled_from(self.world.steps())))

    def teardown(self):
        if hasattr(self, "world"):
            self.world.heal()


TestHandOver = HandOver.TestCase
TestHandOver.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
