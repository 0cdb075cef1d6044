"""The owner thread on the fake fabric."""

import threading

import numpy as np
import pytest
from helpers import Pages, wait_for

from kv_nixl_agent import AgentError, AgentOptions, TransferThread
from kv_nixl_agent.testing import FakeFabric


class Rank:
    """A transfer thread with everything it reports."""

    def __init__(self, fabric, name, pages, **arguments):
        self.results, self.notifications, self.quiet = {}, [], []
        self.pages = pages
        self.thread = TransferThread(
            name,
            [pages.region],
            on_result=lambda result: self.results.setdefault(result.transfer_id, []).append(result),
            on_notification=lambda sender, payload: self.notifications.append((sender, payload)),
            on_quiet=self.quiet.append,
            port_factory=fabric.port,
            **arguments,
        )

    def do(self, function):
        """Run on the owner thread and return what it returned or raise what it raised."""
        done, box = threading.Event(), []

        def call():
            try:
                box.append((function(), None))
            except BaseException as error:
                box.append((None, error))
            done.set()

        self.thread.call_soon(call)
        assert done.wait(10)
        value, error = box[0]
        if error is not None:
            raise error
        return value


@pytest.fixture
def ranks():
    fabric = FakeFabric()
    producer = Rank(fabric, "producer", Pages(16, 32, seed=1))
    consumer = Rank(fabric, "consumer", Pages(16, 32))
    for rank in (producer, consumer):
        rank.thread.start()
    consumer.do(
        lambda: consumer.thread.add_peer(
            "p",
            producer.thread.agent_metadata(),
            local_rows=consumer.pages.rows,
            peer_rows=producer.pages.rows,
            memory_kind="DRAM",
            fence=producer.thread.fence,
        )
    )
    yield fabric, producer, consumer
    for rank in (consumer, producer):
        rank.thread.close()


def test_read_through_two_threads(ranks):
    _, producer, consumer = ranks
    producer.do(lambda: producer.thread.write_fence(1, 5))
    ids = np.arange(4, dtype=np.int32)
    consumer.do(lambda: consumer.thread.post_read("r", "p", ids, ids + 2, notification=b"r:1", fence=(1, 5)))
    wait_for(lambda: "r" in consumer.results and producer.notifications)
    assert consumer.results["r"][0].outcome == "done"
    assert np.array_equal(consumer.pages.page(0), producer.pages.page(2))
    assert producer.notifications == [("consumer", b"r:1")]


def test_owner_methods_refuse_other_threads(ranks):
    _, _, consumer = ranks
    with pytest.raises(AgentError) as error:
        consumer.thread.has_peer("p")
    assert error.value.code == "wrong-thread"


def test_raising_callbacks_do_not_kill_the_thread(ranks):
    _, _, consumer = ranks
    consumer.thread.call_soon(lambda: 1 // 0)
    assert consumer.do(lambda: consumer.thread.has_peer("p"))
    assert consumer.thread.health().callback_errors == 1
    assert "ZeroDivisionError" in consumer.thread.health().last_error
    assert consumer.thread.is_alive


def test_refused_orders_end_as_results(ranks):
    _, _, consumer = ranks
    one = np.zeros(1, dtype=np.int32)
    consumer.do(lambda: consumer.thread.post_read("x", "nobody", one, one))
    consumer.do(lambda: consumer.thread.post_read("y", "p", one + 99, one))
    wait_for(lambda: {"x", "y"} <= set(consumer.results))
    assert consumer.results["x"][0].code == "unknown-peer"
    assert consumer.results["y"][0].code == "bad-indices"


def test_timers_run_on_the_owner_thread(ranks):
    _, _, consumer = ranks
    seen = []
    consumer.thread.call_every(0.005, lambda: seen.append(threading.current_thread().name))
    wait_for(lambda: len(seen) >= 3)
    assert set(seen) == {"kv-nixl-consumer"}


def test_start_reports_what_registration_raised():
    fabric = FakeFabric()
    fabric.fail_next("register", "nixl-backend")
    rank = Rank(fabric, "broken", Pages(1, 8), options=AgentOptions(fence_words=1))
    with pytest.raises(AgentError) as error:
        rank.thread.start()
    assert error.value.code == "registration-failed"
    assert not rank.thread.is_alive
    with pytest.raises(AgentError):
        rank.thread.call_soon(lambda: None)
    rank.thread.close()
