"""A prefill and a decode engine that hand over in a stream, for `explore`."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from kv_scheduler_state.errors import SchedulerStateError

from .promises import ModelViolation, Step
from .stream_decode import StreamDecode
from .stream_prefill import StreamPrefill
from .stream_words import StreamSetting

_HEAL_STEPS: Final = 300
_HEAL_TICKS: Final = 12


class StreamWorld:
    """Both engines, and one clock."""

    def __init__(self, setting: StreamSetting) -> None:
        self.prefill = StreamPrefill(setting)
        self.decode = StreamDecode(self.prefill, setting)
        self.now_s = 0.0
        self.ticks = setting.ticks
        self.deaths = setting.deaths
        self._is_punctual = not setting.ticks
        self._is_healing = False

    def steps(self) -> list[Step]:
        """Return everything that may happen next."""
        rare: list[Step] = [("tick",)] if self.ticks else []
        if self.deaths:
            rare.append(("die",))
        return [*rare, *self.prefill.steps(), *self.decode.steps()]

    def different_steps(self) -> list[Step]:
        """Return `steps`; the requests differ by the pages that they get."""
        return self.steps()

    def apply(self, step: Step) -> None:
        """Let one of `steps` happen.

        Raises:
            ModelViolation: if the code under test breaks a promise, or refuses a lawful step.
        """
        try:
            if step[0] == "tick":
                self.ticks -= 1
                self.now_s += 1.0
                self.prefill.now_s = self.now_s
                self.decode.tick(self.now_s, is_punctual=self._is_healing and self._is_punctual)
            elif step[0] == "die":
                self.deaths -= 1
                self.prefill.is_dead = True
            elif step[0].startswith("p-"):
                self.prefill.apply(step)
            else:
                self.decode.apply(step, self.now_s)
            self.prefill.settle()
            self._check()
        except SchedulerStateError as error:
            raise ModelViolation(f"{step} was refused: {error}") from None

    def _check(self) -> None:
        """Look for slots that two requests hold, and for questions that have an answer."""
        streams = self.prefill.state._producers.streams._streams.values()
        slots = [each.record.fence[0] for each in streams if each.record.fence is not None]
        if len(slots) != len(set(slots)):
            raise ModelViolation(f"slots {slots} are held once each")
        for stream in streams:
            state = stream.record.state
            for asker, (_, wants_final, _) in stream.parked.items():
                is_early = state in {"early", "opening", "plain", "plain-again", "voided", "stale"} or wants_final
                is_awaited = self.decode.state_of(asker) in {"asking", "asking-final", "awaiting"}
                is_answered = state in {"streamed", "voiding", "taken-back"}
                if not (is_early or is_answered) or not is_awaited:
                    raise ModelViolation(f"a question is parked although '{state}' has an answer, or nobody waits")

    def key(self) -> bytes:
        """Return a digest that is equal for states with equal futures."""
        whole = self.ticks, self.deaths, self.now_s, self.prefill.key(), self.decode.key()
        return blake2b(repr(whole).encode(), digest_size=16).digest()

    def heal(self) -> tuple[Step, ...]:
        """Do everything that is left to do, without faults, until nothing is left.

        Raises:
            ModelViolation: if something is left although every part did its work.
        """
        path: list[Step] = []
        self.ticks, self.deaths = _HEAL_TICKS, 0
        self._is_healing = True
        while len(path) < _HEAL_STEPS:
            step = self.decode.heal_step() or self.prefill.heal_step()
            if step is None:
                if not self.leftovers():
                    return tuple(path)
                # These have no reader any more, or some part waits for a deadline.
                step = ("tick",) if self.ticks else self.prefill.expire_one()
            if step is None:
                break
            self.apply(step)
            path.append(step)
        raise ModelViolation(f"something never ends: {self.leftovers()} after {path[-8:]}")

    def leftovers(self) -> list[str]:
        """Return everything that should not be left at the end."""
        return [*self.prefill.leftovers(), *self.decode.leftovers()]
