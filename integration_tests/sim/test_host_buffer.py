"""Host-buffer mode: peers only ever see the mirror, which has what they need exactly when they may look."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from engines import EVERYWHERE, TOKENS, Engine

from kv_scheduler_state import UNBOUND
from vllm_adapter.config import Settings
from vllm_adapter.scheduler.followed import Arrival, Ending

Make = Callable[..., Engine]
QUICK = Settings(read_timeout_s=2.0)


@EVERYWHERE
def test_slow_copies_are_there_before_the_ticket_is(make: Make) -> None:
    producer, consumer = make("P", has_mirror=True), make("D")
    producer.mirrors[0].delay_s = 0.05
    for chunk_tokens in (None, TOKENS):
        consumer.take_over(producer, 4 * TOKENS, chunk_tokens=chunk_tokens)
    producer.wait_idle()


def test_a_prompt_that_could_not_be_copied_is_void_for_its_reader(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make("P", has_mirror=True), make("D", settings=QUICK)
    consumer.take_over(producer, TOKENS)
    producer.mirrors[0].save_refusal = MemoryError("no room")
    _, ticket = producer.prefill(2 * TOKENS)
    producer.mirrors[0].save_refusal = None
    assert consumer.wait_received(consumer.start_decode(ticket, 2 * TOKENS)) is False
    assert "will find its fence void" in caplog.text
    assert "fence-mismatch" in caplog.text
    observed = producer.workers[0].take_stats()
    assert observed is not None
    assert len(observed["num_failed_mirror_copies"]) == 1
    assert observed["mirror_save_duration"]
    consumer.take_over(producer, 2 * TOKENS)
    producer.wait_idle()


def test_a_failed_copy_to_the_device_is_that_requests_failure(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make("P"), make("D", has_mirror=True)
    _, ticket = producer.prefill(TOKENS)
    consumer.mirrors[0].restore_refusal = MemoryError("no room")
    assert consumer.wait_received(consumer.start_decode(ticket, TOKENS)) is False
    assert "mirror-copy-failed" in caplog.text
    consumer.mirrors[0].restore_refusal = None
    consumer.take_over(producer, TOKENS)
    producer.wait_idle()


@EVERYWHERE
def test_a_late_copy_of_an_aborted_prompt_never_lands_on_a_read(make: Make) -> None:
    """An engine of both roles: the aborted prompt's only blocks are those that the next request reads into."""
    producer, both = make("P"), make("B", has_mirror=True, blocks=3)
    source, ticket = producer.prefill(2 * TOKENS)
    both.mirrors[0].delay_s = 0.3
    both.side.arrived(Arrival("gone", {"do_remote_decode": True}, 3 * TOKENS, identity=UNBOUND))
    blocks = both.take_blocks("gone", 2 * TOKENS)
    both.side.allocated("gone", [blocks], [blocks], external_tokens=0, preemptions=0)
    both._prefill_chunk("gone", blocks, 0, 2 * TOKENS, 3 * TOKENS)
    both.side.finished(Ending("gone", "abort", 0, identity=UNBOUND), [blocks])
    both._free += both.held.pop("gone")
    request = both.start_decode(ticket, 2 * TOKENS)
    assert both.held[request] == blocks
    time.sleep(0.6)  # the read is done, a late copy would have landed on it, and nothing was copied to the device yet
    assert both.wait_received(request)
    both.assert_has(request, source, 2 * TOKENS)
    producer.wait_idle()
