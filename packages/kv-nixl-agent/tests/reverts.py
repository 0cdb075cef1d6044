"""Fixes taken back, one at a time: the code as it was, so that the random driver can be seen to find each fault."""

import contextlib

from kv_nixl_agent._errors import AgentError
from kv_nixl_agent._fences import FenceArray
from kv_nixl_agent._handles import Handles
from kv_nixl_agent._loop import Loop
from kv_nixl_agent._mailbox import Arrivals
from kv_nixl_agent._peers import PeerTable
from kv_nixl_agent._schedule import Deadlines, Schedule
from kv_nixl_agent._timers import Timers
from kv_nixl_agent._transfer import Transfer
from kv_nixl_agent._transfer_table import TransferTable
from kv_nixl_agent._word_reads import WordReader

__all__ = ["REVERTS"]

REVERTS = {}


def revert(function):
    REVERTS[function.__name__] = function
    return function


@revert
def agents_are_unloaded_with_their_peer(patch):
    retire = PeerTable.retire

    def old(self, peer):
        was_retiring = peer in self._retiring
        retire(self, peer)
        if was_retiring and peer not in self._retiring and peer.agent_name not in self._by_name:
            self._unload(peer.agent_name)

    patch.setattr(PeerTable, "retire", old)


@revert
def orders_that_wait_are_dropped_when_the_thread_dies(patch):
    fail = Loop.fail

    def old(self, failure):
        fail(self, failure)
        self.mailbox._items.clear()

    patch.setattr(Loop, "fail", old)


@revert
def notifications_overtake_calls(patch):
    add = Arrivals.add
    patch.setattr(Arrivals, "add", lambda self, arrived, _: add(self, arrived, 0))


@revert
def timers_overtake_calls(patch):
    take_due = Timers.take_due
    patch.setattr(Timers, "take_due", lambda self, now_s, **_: take_due(self, now_s, given_count=0, taken_count=0))


@revert
def timers_that_fall_due_later_join_a_round_that_waits(patch):
    take_due = Timers.take_due

    def old(self, now_s, *, given_count, taken_count):
        if self._round is not None:
            self._round = (self._round[0], now_s)
        return take_due(self, now_s, given_count=given_count, taken_count=taken_count)

    patch.setattr(Timers, "take_due", old)


@revert
def scratch_words_are_lost_after_an_error(patch):
    give_back = WordReader._give_back

    def old(self, read, *, is_suspect):
        if not is_suspect:
            give_back(self, read, is_suspect=False)

    patch.setattr(WordReader, "_give_back", old)


@revert
def fence_words_can_be_revived(patch):
    void_all = FenceArray.void_all

    def old(self):
        void_all(self)
        self._is_void = False

    patch.setattr(FenceArray, "void_all", old)


@revert
def orders_without_descriptors_skip_their_fence(patch):
    def old(self):
        self._go("skip-data")
        self._go("trust")
        self._confirm()

    patch.setattr(Transfer, "skip_data", old)


@revert
def replacing_a_peer_resets_the_bound_on_quarantine(patch):
    def old(self, key):
        return sum(transfer.peer.key == key and not transfer.peer.is_removed for transfer, _ in self._held.values())

    def hold(self, transfer, now_s):
        self._held[transfer.order.transfer_id] = (transfer, now_s)

    def let_go(self, transfer):
        del self._held[transfer.order.transfer_id]
        self._on_quiet(transfer)

    patch.setattr(Handles, "held_for", old)
    patch.setattr(Handles, "hold", hold)
    patch.setattr(Handles, "_let_go", let_go)


@revert
def killed_and_replaced_peers_are_lost(patch):
    patch.setattr(Handles, "last_look", lambda *_: None)

    def old(self, peer):
        for transfer in self.of_peer(peer):
            transfer.end("failed", "peer-removed", "")

    patch.setattr(TransferTable, "end_peer", old)


@revert
def ended_transfers_stay_in_the_deadline_heap(patch):
    patch.setattr(Deadlines, "forget", lambda _: None)


@revert
def cancelled_orders_count_as_queued(patch):
    forget = Schedule.forget

    def old(self, transfer):
        before = self.count
        forget(self, transfer)
        self.count = before

    patch.setattr(Schedule, "forget", old)


@revert
def an_error_of_a_warm_up_leaks_it(patch):
    def release_lists(self, lists):
        for prepared in lists:
            self._port.release_prepared(prepared)

    def end_watched(self, one, failure):
        with contextlib.suppress(AgentError):
            one.on_end(failure)
            self.release(one.peer, one.handle)

    patch.setattr(WordReader, "_release_lists", release_lists)
    patch.setattr(Handles, "_end_watched", end_watched)


@revert
def lists_that_were_evicted_are_missed_by_the_fence_read(patch):
    make = WordReader.make_fence_read

    class Unprepared:
        def __init__(self, peers):
            self._peers = peers

        def prepare(self, peer):
            return peer.lists or type("Lists", (), {"fence": None})

    def old(self, peer, slot, generation, *, is_early=False):
        peers, self._peers = self._peers, Unprepared(self._peers)
        try:
            return make(self, peer, slot, generation, is_early=is_early)
        finally:
            self._peers = peers

    patch.setattr(WordReader, "make_fence_read", old)
