"""Hand-overs between caches on the device, through the adapter's own transfer threads, handshake and fences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines import TOKENS
from torch_engine import TorchEngine

from vllm_adapter.config import Settings

Make = Callable[..., TorchEngine]
LENGTHS = (1, 16, 48, 53, 144, 150)


@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (1, 2), (2, 1)])
def test_pages_arrive_byte_for_byte(make: Make, producers: int, consumers: int) -> None:
    producer, consumer = make("P", tp=producers), make("D", tp=consumers)
    for tokens in LENGTHS:
        consumer.take_over(producer, tokens)
    producer.wait_idle()
    expected = len(LENGTHS) * max(1, producers // consumers)  # a fence per producer rank that is read from
    assert consumer.fence_checks(expected) == [expected] * consumers
    assert consumer.fences_rejected() == 0


@pytest.mark.parametrize(
    ("there", "here", "producer_tokens", "consumer_tokens"),
    [("NHD", "HND", 16, 16), ("HND", "NHD", 16, 48), ("NHD", "HND", 48, 16)],
)
def test_pages_of_another_order_or_size_are_converted_on_the_device(
    make: Make, monkeypatch: pytest.MonkeyPatch, there: str, here: str, producer_tokens: int, consumer_tokens: int
) -> None:
    producer = make("P", order=there, tokens=producer_tokens)
    consumer = make("D", order=here, tokens=consumer_tokens, settings=Settings(receive_conversion="always"))
    converter, converted = consumer.converters[0], list[int]()
    convert = converter.convert

    def counted(steps: list[object]) -> None:
        converted.append(len(steps))
        convert(steps)

    monkeypatch.setattr(converter, "convert", counted)
    for tokens in LENGTHS:
        consumer.take_over(producer, tokens)
    assert sum(converted) > 0
    producer.wait_idle()


@pytest.mark.parametrize(("there", "here"), [(True, True), (True, False), (False, True)])
def test_prompts_cross_through_a_host_buffer(make: Make, there: bool, here: bool) -> None:
    producer, consumer = make("P", has_mirror=there), make("D", has_mirror=here)
    for tokens in (1, TOKENS, 3 * TOKENS + 5):
        consumer.take_over(producer, tokens, chunk_tokens=24)
    producer.wait_idle()


def test_the_transfer_thread_works_on_the_caches_device(
    make: Make, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    engine = make("P")
    (thread,) = engine.transfer_threads()
    seen: list[object] = []
    thread.call_soon(lambda: seen.append(_current_device(device)))
    engine.wait_idle()
    while not seen:
        engine.step()
    assert seen == [device]
    record_property("device of the transfer thread", seen[0])


def _current_device(device: torch.device) -> torch.device:
    """Return the calling thread's device of the same kind."""
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device(device.type, torch.get_device_module(device).current_device())
