"""The scheduler side with the real request machines and plain values in place of a host."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from factories import facts

from kv_scheduler_state import GroupConfig, SchedulerConfig, SchedulerState
from vllm_adapter.cache.facts import CacheGroup, EngineFacts
from vllm_adapter.fleet_secrets import FleetSecrets
from vllm_adapter.scheduler.prefill_chunks import ScheduledTokens
from vllm_adapter.scheduler.side import Arrival, Ending, SchedulerSide
from vllm_adapter.steps import RankRegistration

BLOCK = 16
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
STATE_GROUP = CacheGroup("state", BLOCK, 0, 0, ("layers.1",))


class Listener:
    """A side channel that only remembers."""

    port = 1

    def __init__(self) -> None:
        self.served: list[dict[Any, bytes]] = []
        self.is_closed = False

    def replace(self, envelopes: Any) -> None:
        self.served.append(dict(envelopes))

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Parts:
    """The concrete parts of a scheduler side, as `wiring.SchedulerParts` makes them."""

    facts: EngineFacts
    uses_host_buffer: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    listener: Listener = field(default_factory=Listener)
    secrets: FleetSecrets | None = None

    def make_state(self) -> SchedulerState:
        kinds = {"state": GroupConfig("state", BLOCK), "attention": GroupConfig("full", BLOCK)}
        values: dict[str, Any] = {
            "groups": tuple(kinds[group.kind] for group in self.facts.groups),
            "fence_slots": 4,
            "fence_seed": 100,
            "null_block": 0,
            "uses_host_buffer": self.uses_host_buffer,
            "reserved_id_prefixes": ("HB:", "PUSH_REG:"),
            **self.changes,
        }
        return SchedulerState(SchedulerConfig(self.facts.engine_id, "10.0.0.1", 5600, **values))

    def make_fleet_secrets(self) -> FleetSecrets | None:
        return self.secrets

    def make_listener(self) -> Listener:
        return self.listener


@dataclass
class Prompt:
    """A prompt of which two different ones have different digests."""

    text: str
    refusal: str = ""

    def digest(self, tokens: int) -> str | None:
        if self.refusal or tokens > len(self.text):
            return None
        return hashlib.sha256(self.text[:tokens].encode()).hexdigest()


class Engine:
    """A scheduler side, its clock, and the plan of its latest step."""

    def __init__(self, name: str = "engine", *, groups: tuple[CacheGroup, ...] = (), **changes: Any) -> None:
        layers = CacheGroup("attention", BLOCK, 0, 0, ("layers.0",))
        groups = groups or (layers,)
        uses_host_buffer = changes.pop("uses_host_buffer", False)
        self.facts = facts(engine_id=name, groups=groups, group_ids=tuple(range(len(groups))))
        self.parts = Parts(self.facts, uses_host_buffer, changes)
        self.now_s = 0.0
        self.side = SchedulerSide(self.facts, self.parts, lambda: self.now_s)  # type: ignore[arg-type]
        self.side.serve({(0, 0): b"envelope"})

    @property
    def state(self) -> Any:
        return self.side._state

    def step(self, preempted: tuple[str, ...] = (), scheduled: tuple[ScheduledTokens, ...] = ()) -> Any:
        return self.side.build_step(preempted, scheduled).plan

    def allocate(
        self, request_id: str, blocks: list[int], *, external: int = 0, hits: int = 0, preemptions: int = 0
    ) -> None:
        groups = [blocks for _ in self.facts.groups]
        new = [blocks[hits:] for _ in self.facts.groups]
        self.side.allocated(request_id, groups, new, external_tokens=external, preemptions=preemptions)

    def prefill(self, request_id: str, text: str, **ending: Any) -> dict[str, Any] | None:
        """Compute a prompt and finish it; return its ticket."""
        blocks = list(range(1, 2 + (len(text) - 1) // BLOCK))
        self.side.arrived(Arrival(request_id, PREFILL, len(text), Prompt(text)))
        self.allocate(request_id, blocks)
        self.step()
        return self.end(request_id, text, blocks, **ending)

    def end(self, request_id: str, text: str, blocks: list[int], **ending: Any) -> dict[str, Any] | None:
        ending = {"reason": "length", "computed_tokens": len(text), "identity": Prompt(text), **ending}
        keeps, ticket = self.side.finished(Ending(request_id, **ending), [blocks for _ in self.facts.groups])
        assert keeps is (ticket is not None)
        return ticket

    def admit(self, request_id: str, ticket: Any, text: str) -> None:
        self.side.arrived(Arrival(request_id, ticket, len(text), Prompt(text)))

    def report(
        self, *, sent: tuple[str, ...] = (), received: tuple[str, ...] = (), failed: tuple[str, ...] = ()
    ) -> None:
        self.side.update_output(sent=sent, received=received, failed=failed)

    def refusals(self) -> list[str]:
        return (self.side.take_stats() or {}).get("ticket_refusal_codes", [])


TEXT = "a prompt of forty characters, no more..."


def test_the_module_loads_without_the_host_and_without_torch() -> None:
    code = (
        "import sys, vllm_adapter.scheduler.side; assert not {'vllm', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_prompt_goes_from_engine_to_engine() -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT)
    assert ticket is not None
    assert ticket["remote_block_ids"] == [[1, 2, 3]]
    consumer.admit("d", ticket, TEXT)
    assert consumer.side.external_tokens("d", 16) == (24, True)
    consumer.allocate("d", [4, 5, 6], external=24, hits=1)
    (order,) = consumer.step().reads
    assert (order.local_blocks[0].ids, order.local_blocks[0].first_token, order.tokens) == ((5, 6), 16, 40)
    consumer.report(received=("d",))
    assert consumer.end("d", TEXT, [4, 5, 6]) is None
    producer.report(sent=("p",))
    assert not producer.state.live_count
    assert not consumer.state.live_count


@pytest.mark.never_wrong("A1")
def test_a_ticket_of_another_prompt_is_refused_and_the_prompt_computed_here() -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT)
    consumer.admit("d", ticket, TEXT.replace("forty", "sixty"))
    assert consumer.refusals() == ["ticket-prompt"]
    assert consumer.side.external_tokens("d", 0) == (0, False)
    consumer.admit("honest", ticket, TEXT)
    assert consumer.side.external_tokens("honest", 0) == (40, True)


@pytest.mark.never_wrong("A1")
def test_a_prompt_that_an_engine_cannot_identify_is_refused_by_its_own_code() -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT)
    unknown = Prompt(TEXT, refusal="ticket-media-unidentified")
    consumer.side.arrived(Arrival("d", ticket, len(TEXT), unknown))
    assert consumer.refusals() == ["ticket-media-unidentified"]
    unbound = producer.prefill("q", TEXT, identity=unknown)
    assert unbound is not None
    assert unbound["kv_prompt"] == ""
    consumer.admit("e", unbound, TEXT)
    assert consumer.refusals() == ["ticket-prompt-unidentified"]


@pytest.mark.never_wrong("A5")
def test_tokens_in_flight_are_not_promised() -> None:
    """Drafts of a step that still runs may be rejected: 37 tokens are counted, 33 are known to be kept."""
    decode = Engine("D", bidirectional=True)
    producer = Engine("P")
    text = TEXT[:30]
    decode.admit("d", producer.prefill("p", text), text)
    decode.side.external_tokens("d", 0)
    decode.allocate("d", [1, 2], external=30)
    decode.step()
    decode.report(received=("d",))
    decode.allocate("d", [1, 2, 3])
    ticket = decode.end("d", text + "abc", [1, 2, 3, 4], reason="stop", computed_tokens=37, in_flight_tokens=4)
    assert ticket is not None
    assert ticket["remote_num_tokens"] == 33
    assert ticket["remote_block_ids"] == [[1, 2, 3]]


@pytest.mark.never_wrong("A5")
def test_a_state_that_has_seen_tokens_in_flight_is_not_handed_back() -> None:
    engine = Engine("P", groups=(CacheGroup("attention", BLOCK, 0, 0, ("layers.0",)), STATE_GROUP))
    engine.side.arrived(Arrival("p", PREFILL, 41, Prompt(TEXT + "."), drop_tail=bool))
    engine.allocate("p", [1, 2, 3])
    engine.step()
    assert engine.end("p", TEXT, [1, 2, 3], computed_tokens=41, in_flight_tokens=1) is None


@pytest.mark.never_wrong("B2")
@pytest.mark.parametrize("prefix", ["HB:", "PUSH_REG:"])
def test_a_ticket_that_names_an_id_which_cannot_be_notified_is_refused_at_arrival(prefix: str) -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT)
    assert ticket is not None
    consumer.admit("d", {**ticket, "remote_request_id": f"{prefix}x"}, TEXT)
    assert consumer.refusals() == ["ticket-id-reserved"]
    assert consumer.step().reads == ()
    assert producer.prefill(f"{prefix}p", TEXT) is None


@pytest.mark.never_wrong("B7")
def test_siblings_wait_for_the_first_read_and_then_read_nothing() -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT)
    for name in ("d0", "d1", "d2"):
        consumer.admit(name, ticket, TEXT)
    assert consumer.side.external_tokens("d0", 0) == (40, True)
    consumer.allocate("d0", [1, 2, 3], external=40)
    assert consumer.side.external_tokens("d1", 0) == (None, False)
    assert [order.request_id for order in consumer.step().reads] == ["d0"]
    consumer.report(received=("d0",))
    assert consumer.side.external_tokens("d1", 32) == (0, False)
    for name in ("d1", "d2"):
        consumer.allocate(name, [1, 2, 4], hits=2)
    assert consumer.step().reads == ()  # the one read has told the peer
    for name in ("d0", "d1", "d2"):
        consumer.end(name, TEXT, [1, 2, 3])
    assert not consumer.state.live_count


@pytest.mark.never_wrong("B7")
def test_an_aborted_sibling_passes_its_read_on() -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT)
    for name in ("d0", "d1"):
        consumer.admit(name, ticket, TEXT)
        consumer.side.external_tokens(name, 0)
    consumer.allocate("d0", [1, 2, 3], external=40)
    consumer.step()
    consumer.end("d0", TEXT, [1, 2, 3], reason="abort")
    plan = consumer.step()
    assert (plan.cancels, plan.passes, plan.reads) == (("d0",), ("d0",), ())
    assert consumer.side.external_tokens("d1", 0) == (None, False)
    consumer.report(received=("d0",), failed=("d0",))
    assert consumer.side.external_tokens("d1", 0) == (40, True)
    consumer.allocate("d1", [4, 5, 6], external=40)
    assert [order.request_id for order in consumer.step().reads] == ["d1"]


@pytest.mark.never_wrong("B10")
def test_a_lack_of_blocks_takes_the_oldest_lease_back_and_waits_for_it() -> None:
    producer = Engine("P")
    assert not producer.side.has_pending_block_frees()
    for name in ("p0", "p1"):
        producer.now_s += 1
        assert producer.prefill(name, TEXT) is not None
    producer.step()
    assert producer.side.has_pending_block_frees()
    assert producer.side.has_pending_block_frees()  # the same one is still on its way
    assert producer.step().revokes == ("p0",)
    producer.report(sent=("p0",))
    assert producer.side.has_pending_block_frees()
    assert producer.step().revokes == ("p1",)
    producer.now_s += 60
    assert not producer.side.has_pending_block_frees()  # the workers do not answer: preempt after all
    producer.report(sent=("p1",))
    assert not producer.side.has_pending_block_frees()


@pytest.mark.never_wrong("C1")
def test_without_a_free_slot_nothing_is_handed_over() -> None:
    producer = Engine("P", fence_slots=1)
    assert producer.prefill("p0", TEXT) is not None
    assert producer.state.fence_slots_used == 1
    assert producer.prefill("p1", TEXT) is None
    producer.report(sent=("p0",))
    assert producer.prefill("p2", TEXT) is not None


def test_a_prompt_beyond_the_lease_quota_is_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    producer = Engine("P", max_leases=1)
    assert producer.prefill("p0", TEXT) is not None
    assert producer.prefill("p1", TEXT) is None
    assert (producer.side.take_stats() or {})["withheld_ticket_codes"] == ["lease-quota"]
    assert "p1" not in caplog.text
    producer.report(sent=("p0",))
    assert producer.prefill("p2", TEXT) is not None


@pytest.mark.never_wrong("C1")
def test_a_ticket_covers_the_blocks_of_its_tokens_and_no_spare_one() -> None:
    producer = Engine("P")
    producer.side.arrived(Arrival("p", PREFILL, len(TEXT), Prompt(TEXT)))
    producer.allocate("p", [1, 2, 3, 4])
    producer.step()
    ticket = producer.end("p", TEXT, [1, 2, 3, 4], computed_tokens=42)
    assert ticket is not None
    assert (ticket["remote_num_tokens"], ticket["remote_block_ids"]) == (40, [[1, 2, 3]])


@pytest.mark.never_wrong("C7")
def test_a_restart_has_a_new_generation_also_when_it_is_told_late() -> None:
    """A cache reset preempts between steps: the next step allocates first and tells of the preemption then."""
    producer = Engine("P")
    producer.side.arrived(Arrival("p", PREFILL, len(TEXT), Prompt(TEXT)))
    producer.allocate("p", [1, 2, 3])
    (first,) = producer.step().fences
    assert producer.side.reset_cache()
    producer.allocate("p", [4, 5, 6], preemptions=1)
    plan = producer.step(preempted=("p",))
    (second,) = plan.fences
    assert plan.restarts == ("p",)
    assert (second.slot, second.generation != first.generation) == (first.slot, True)
    producer.side.update_output(sent=(), received=(), failed=(), registrations={(0, 0): RankRegistration(1, b"e", 1)})
    ticket = producer.end("p", TEXT, [4, 5, 6])
    assert ticket is not None
    assert ticket["kv_fence"] == [second.slot, second.generation]
    assert "kv_fence" in ticket


def test_while_the_registration_is_unknown_no_ticket_is_written() -> None:
    producer = Engine("P")
    producer.side.arrived(Arrival("p", PREFILL, len(TEXT), Prompt(TEXT)))
    assert producer.side.reset_cache()
    producer.allocate("p", [1, 2, 3])
    orders = producer.side.build_step((), ())
    assert orders.question == 1
    assert producer.end("p", TEXT, [1, 2, 3]) is None
    registration = RankRegistration(2, b"new", 1)
    producer.side.update_output(sent=(), received=(), failed=(), registrations={(0, 0): registration})
    assert producer.parts.listener.served[-1] == {(0, 0): b"new"}
    ticket = producer.prefill("q", TEXT)
    assert ticket is not None
    assert ticket["kv_generation"] == 2


def test_a_refused_allocation_of_a_parked_request_is_reported_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    consumer, producer = Engine("D"), Engine("P")
    consumer.admit("d", producer.prefill("p", TEXT), TEXT)
    consumer.side.external_tokens("d", 0)
    consumer.allocate("d", [1, 2, 3], external=1000)
    assert "allocation was refused" in caplog.text
    plan = consumer.step()
    assert (plan.failures, plan.reads) == (("d",), ())
    consumer.report(received=("d",), failed=("d",))
    assert consumer.side.external_tokens("d", 0) == (0, False)
    assert [order.is_notify_only for order in consumer.step().reads] == [True]


def test_reads_under_way_are_void_after_a_reset() -> None:
    consumer, producer = Engine("D"), Engine("P")
    consumer.admit("d", producer.prefill("p", TEXT), TEXT)
    consumer.side.external_tokens("d", 0)
    consumer.allocate("d", [1, 2, 3], external=40)
    consumer.step()
    assert consumer.side.reset_cache()
    assert consumer.step().voids == ("d",)


def test_a_copy_to_the_mirror_that_was_refused_keeps_the_ticket_back(caplog: pytest.LogCaptureFixture) -> None:
    producer = Engine("P", uses_host_buffer=True)
    producer.side.arrived(Arrival("p", PREFILL, len(TEXT), Prompt(TEXT)))
    producer.allocate("p", [1, 2, 3])
    plan = producer.step(scheduled=(ScheduledTokens("p", [[1, 2]], True, 0, 24),))
    assert (plan.saves, plan.completes) == ((("p", ((1, 2),)),), ())
    plan = producer.step(scheduled=(ScheduledTokens("p", [[3]], False, 24, 16),))
    assert (plan.saves, plan.completes) == ((("p", ((2, 3),)),), ("p",))
    producer.side.arrived(Arrival("q", PREFILL, len(TEXT), Prompt(TEXT)))
    producer.step(scheduled=(ScheduledTokens("q", [[1, 2, 3]], True, 0, 40),))  # never allocated
    assert "copy to the mirror was refused" in caplog.text
    assert producer.end("p", TEXT, [1, 2, 3]) is not None
    producer.allocate("q", [1, 2, 3])
    assert producer.end("q", TEXT, [1, 2, 3]) is None


def test_a_request_without_a_ticket_costs_the_machines_nothing() -> None:
    engine = Engine()
    engine.side.arrived(Arrival("local", None, 40))
    assert not engine.side.follows("local")
    assert engine.side.external_tokens("local", 0) == (0, False)
    assert engine.end("local", TEXT, [1, 2, 3]) is None
    assert not engine.state.live_count
    engine.side.close()
    assert engine.parts.listener.is_closed


def write_secret(file: Path, *secrets: str) -> FleetSecrets:
    file.unlink(missing_ok=True)
    file.write_text("\n".join(secrets))
    file.chmod(0o440)
    return FleetSecrets([str(file)])


def sealing_side(secrets: FleetSecrets | None, now: Any = time.monotonic, **changes: Any) -> SchedulerSide:
    parts: Any = Parts(facts(), secrets=secrets, changes=changes)
    return SchedulerSide(facts(), parts, now)


def finished_ticket(side: SchedulerSide, request_id: str) -> dict[str, Any]:
    side.arrived(Arrival(request_id, PREFILL, 32))
    side.allocated(request_id, [[1, 2]], [[1, 2]], external_tokens=0, preemptions=0)
    _, ticket = side.finished(Ending(request_id, "length", 32), [[1, 2]])
    assert ticket is not None
    return ticket


@pytest.mark.never_wrong("A7")
def test_a_changed_ticket_is_computed_here_counted_and_logged_by_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = sealing_side(write_secret(tmp_path / "p", "a" * 16))
    reader = sealing_side(write_secret(tmp_path / "d", "a" * 16))
    ticket = finished_ticket(writer, "p1")
    reader.arrived(Arrival("good", ticket, 32))
    reader.arrived(Arrival("bad", {**ticket, "remote_block_ids": [[3, 4]]}, 32))
    assert reader.external_tokens("good", 0) == (32, True)
    assert reader.external_tokens("bad", 0) == (0, False)
    assert "ticket-seal" in caplog.text
    assert "a" * 16 not in caplog.text
    stats = reader.take_stats()
    assert stats is not None
    assert "ticket-seal" in str(stats["ticket_refusal_codes"])


def test_secrets_rotate_under_a_running_engine(tmp_path: Path) -> None:
    now = [0.0]
    old, new = "a" * 16, "b" * 16
    writer = sealing_side(write_secret(tmp_path / "p", old), lambda: now[0])
    reader = sealing_side(write_secret(tmp_path / "d", old), lambda: now[0])
    steps = [("d", (old, new)), ("p", (old, new)), ("p", (new, old)), ("d", (new, old)), ("p", (new,)), ("d", (new,))]
    for number, (name, secrets) in enumerate(steps):
        write_secret(tmp_path / name, *secrets)
        now[0] += 2.0
        reader.arrived(Arrival(f"d{number}", finished_ticket(writer, f"p{number}"), 32))
        assert reader.external_tokens(f"d{number}", 0) == (32, True), f"refused after {name} had {secrets}"
        writer.update_output(sent=[f"p{number}"], received=[], failed=[])


def test_an_unsealed_peer_is_accepted_from_where_it_may_be_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    side = sealing_side(write_secret(tmp_path / "d", "a" * 16), unsealed_networks=("10.0.0.0/24",))
    plain = finished_ticket(sealing_side(None), "p1")
    for number in range(3):
        side.arrived(Arrival(f"d{number}", plain, 32))
        assert side.external_tokens(f"d{number}", 0)[0] == 32 or number
    assert caplog.text.count("hands over without seals") == 1
    side.arrived(Arrival("far", {**plain, "remote_host": "10.0.1.1"}, 32))
    assert side.external_tokens("far", 0) == (0, False)


def test_reports_of_other_connectors_are_left_to_them(caplog: pytest.LogCaptureFixture) -> None:
    """Beside other connectors each gets the ids of all: a load of another one was an error with a traceback."""
    engine = Engine()
    text = "x" * 2 * BLOCK
    assert engine.prefill("leased", text) is not None
    engine.side.arrived(Arrival("busy", PREFILL, len(text), Prompt(text)))
    engine.allocate("busy", [4, 5])
    engine.step()
    for ids in (("unheard of",), ("busy",), ("leased",)):
        engine.side.update_output(sent=(), received=ids, failed=ids)
    for ids in (("unheard of",), ("busy",)):
        engine.side.update_output(sent=ids, received=(), failed=())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert engine.state.live_count == 2
    engine.side.update_output(sent=("leased", "unheard of"), received=(), failed=())
    assert engine.state.live_count == 1


def test_ranks_whose_metadata_another_connector_kept_back_are_asked_for_it() -> None:
    """vLLM's MultiConnector passes on the metadata of its first child that has any, to all children."""
    engine = Engine()
    ranks = [(0, 0), (0, 1)]
    engine.side.serve({}, ranks)
    orders = engine.side.build_step((), ())
    assert orders.question
    assert engine.prefill("early", "x" * 20) is None, "nobody could read from this engine yet"
    for rank in ranks:
        answer = RankRegistration(engine.facts.generation, b"envelope of %d" % rank[1], orders.question)
        engine.side.update_output(sent=(), received=(), failed=(), registrations={rank: answer})
    assert engine.parts.listener.served[-1] == {(0, 0): b"envelope of 0", (0, 1): b"envelope of 1"}
    assert engine.side.build_step((), ()).question == 0
    assert engine.prefill("later", "x" * 20) is not None
