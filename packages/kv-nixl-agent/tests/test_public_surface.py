"""The public names, pinned: a new one is added here on purpose."""

import importlib
from typing import Any

import numpy as np
import pytest
from helpers import Pages, Rank, connected

from kv_nixl_agent import (
    AgentError,
    AgentOptions,
    BackendOptions,
    PeerSpec,
    ThreadOptions,
    TransferAgent,
    TransferOrder,
    TransferThread,
)
from kv_nixl_agent.testing import FakeFabric

SURFACE = {
    "kv_nixl_agent": (
        "AgentError AgentOptions BackendOptions NixlPort PeerSpec PortFactory QuarantineEntry StallEntry ThreadHealth "
        "ThreadOptions TransferAgent TransferOrder TransferResult TransferThread open_nixl try_backends"
    ),
    "kv_nixl_agent.testing": ("FakeFabric FakeNixl FakeTransfer PeerProcess page_pattern stop_process"),
}


@pytest.mark.parametrize("module", SURFACE)
def test_names(module):
    loaded = importlib.import_module(module)
    assert " ".join(sorted(loaded.__all__)) == SURFACE[module]
    assert all(hasattr(loaded, name) for name in loaded.__all__)


PAGES, FABRIC = Pages(4, 64), FakeFabric()
PAIR = connected()
NAMES = iter(range(1000000))
NONE = np.empty((0, 5), dtype=np.uint64)
ROWS = {"local_rows": NONE, "peer_rows": NONE, "memory_kind": "DRAM"}
INDICES = {"local_indices": [0], "peer_indices": [1]}
ORDER = {"peer": "p", **INDICES, "notification": b"", "deadline_s": 1.0, "fence": (0, 0)}


def ignore(*_):
    pass


def add_peer(**given):
    given = {"key": f"k{next(NAMES)}", **given}
    PAIR.consumer.add_peer(PeerSpec(agent_metadata=PAIR.producer.agent_metadata(), **given))


def start(**given):
    with TransferThread(port_factory=FABRIC.port, **given):
        pass


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "TransferAgent": (
        lambda **given: TransferAgent(port_factory=FABRIC.port, **given).close(),
        {"name": "a", "regions": [PAGES.region], "options": AgentOptions()},
    ),
    "TransferThread": (
        start,
        {
            "name": "t",
            "regions": [PAGES.region],
            "options": None,
            "thread_options": ThreadOptions(),
            **dict.fromkeys(("on_result", "on_notification"), ignore),
        },
    ),
    "call_every": (Rank(FABRIC).thread.call_every, {"period_s": 1.0, "function": ignore}),
    "write_fence": (PAIR.producer.write_fence, {"slot": 0, "generation": 0}),
    "add_peer": (add_peer, {"key": "x", "fence": PAIR.producer.fence, "agent_prefix": "", **ROWS}),
    "has_peer": (PAIR.consumer.has_peer, {"peer": "p"}),
    "remove_peer": (lambda peer: PAIR.consumer.remove_peer(peer) or PAIR.connect(), {"peer": "p"}),
    "send_notification": (PAIR.consumer.send_notification, {"peer": "p", "payload": b""}),
    "post": (lambda **given: PAIR.consumer.post(TransferOrder(f"o{next(NAMES)}", **given)), ORDER),
    "probe": (lambda **given: PAIR.consumer.probe(f"o{next(NAMES)}", **given), {"peer": "p", "deadline_s": 1.0}),
    "cancel": (PAIR.consumer.cancel, {"transfer_id": "x"}),
    "BackendOptions": (BackendOptions, vars(BackendOptions())),
    "AgentOptions": (AgentOptions, vars(AgentOptions())),
    "ThreadOptions": (ThreadOptions, {n: v for n, v in vars(ThreadOptions()).items() if n != "on_thread_start"}),
}
ODD = (object(), 1.5, True, [[]], {"a": [1]}, [[1], [1, 2]])


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_a_wrong_type_is_a_coded_error(name):
    call, good = CALLS[name]
    call(**good)
    accepted = []
    for key in good:
        for odd in ODD:
            try:
                call(**{**good, key: odd})
                accepted.append((key, odd))
            except AgentError as error:
                assert str(error).endswith(f"({error.code})")
    # A number of seconds may be a fraction.
    assert [key for key, odd in accepted if type(odd) is not type(good[key])] == []
