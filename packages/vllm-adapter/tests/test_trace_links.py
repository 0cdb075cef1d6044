"""Traces of requests, from arrival to the order to read and to the end of the lease."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from vllm_adapter.observe.spans import TraceLinks

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def plan(*ids: str, is_reported: bool = True) -> Any:
    reads = [SimpleNamespace(request_id=i, is_reported=is_reported) for i in ids]
    return cast("Any", SimpleNamespace(reads=reads, streams=SimpleNamespace(watches=[])))


def test_only_traced_and_reported_reads_are_linked() -> None:
    links = TraceLinks(print)
    links.arrived("traced", HEADERS)
    links.arrived("plain", None)
    assert links.of_reads(plan("traced", is_reported=False)) == {}
    linked = links.of_reads(plan("plain", "traced"))
    assert list(linked) == ["traced"]
    assert linked["traced"].headers == HEADERS
    links.finished("traced", keeps_blocks=False)
    assert links.of_reads(plan("traced")) == {}


def test_a_lease_is_told_once_and_only_of_traced_requests_that_keep_blocks() -> None:
    told: list[str] = []
    links = TraceLinks(lambda _link, request_id, _granted_ns: told.append(request_id))
    for request_id, headers, keeps in (("a", HEADERS, True), ("b", HEADERS, False), ("c", None, True)):
        links.arrived(request_id, headers)
        links.finished(request_id, keeps_blocks=keeps)
    links.sent(["a", "b", "c"])
    links.sent(["a"])
    assert told == ["a"]
