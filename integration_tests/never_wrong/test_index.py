"""Index of the named cases: every way in which bytes once landed wrong, an order got lost or an engine stalled, and its tests.

`INDEX` names a subject, its mark (`pytest.mark.never_wrong`) and the tests that fail without its fix. The tests of this module
check that each of them exists, and that no mark is used which has no subject here.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEVER_WRONG = "integration_tests/never_wrong"
STATE = "packages/kv-scheduler-state/tests"
ADAPTER = "packages/vllm-adapter/tests"
TOPOLOGY = "packages/kv-topology/tests"
AGENT = "packages/kv-nixl-agent/tests"
HANDSHAKE = "packages/kv-handshake/tests"
SIMULATION = "integration_tests/sim"
REAL = "integration_tests/real_io"
INSIDE = "integration_tests/host/inside"
INSIDE = "integration_tests/host/inside"
ENGINES = "integration_tests/host/engines"

INDEX: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "a ticket is bound to its prompt": ("A1", (
        (NEVER_WRONG, "test_a_ticket_of_another_prompt_is_refused_and_the_honest_ones_are_read"),
        (STATE, "test_a_ticket_serves_the_prompt_that_it_was_written_for"),
        (STATE, "test_the_digest_covers_every_part_and_confuses_no_two"),
        (ADAPTER, "test_a_prompt_that_an_engine_cannot_identify_is_refused_by_its_own_code"),
        (INSIDE, "test_a_ticket_with_another_prompt_is_computed_here_and_poisons_nothing"),
        (INSIDE, "test_pictures_without_content_ids_identify_no_prompt"),
        (ENGINES, "test_a_ticket_of_another_prompt_is_refused_and_leaves_nothing_wrong_behind"),
        (ENGINES, "test_two_prompts_of_one_body_do_not_share_a_ticket"),
    )),
    "a ticket without a fence is refused by an engine that has fences": ("A1", (
        (NEVER_WRONG, "test_a_ticket_without_the_fence_that_its_engine_has_is_refused"),
        (ADAPTER, "test_a_ticket_without_a_fence_is_refused_by_an_engine_that_has_fences"),
        (ADAPTER, "test_a_peer_of_vllms_own_kind_needs_neither_and_the_log_says_what_is_lost"),
    )),
    "a ticket that was changed on its way is refused": ("A7", (
        (STATE, "test_every_field_that_is_acted_upon_is_sealed"),
        (STATE, "test_no_forged_ticket_is_admitted"),
        (ADAPTER, "test_a_changed_ticket_is_computed_here_counted_and_logged_by_code"),
    )),
    "context parallelism takes turns as the host decided": ("A2", (
        (NEVER_WRONG, "test_context_parallel_ranks_take_turns_block_by_block"),
        (ADAPTER, "test_context_parallel_tokens_land_where_the_host_keeps_them"),
        (ADAPTER, "test_a_group_that_context_parallelism_leaves_whole_is_told"),
    )),
    "the last token of a prompt sees what it should": ("A8", (
        (INSIDE, "test_every_token_that_the_first_one_sees_was_handed_over"),
        (STATE, "test_a_producer_stops_early_where_its_engine_gives_up_what_the_last_token_sees"),
        (STATE, "test_a_prompt_whose_peer_gives_up_a_block_at_its_end_is_not_read_meanwhile"),
    )),
    "an engine that only produces reads nothing": ("A9", (
        (STATE, "test_an_engine_that_only_produces_reads_nothing"),
    )),
    "a read fills what no hit covers": ("A10", (
        (INSIDE, "test_a_read_fills_every_block_that_no_hit_covers"),
        (ADAPTER, "test_only_states_may_lag_behind_the_hit_of_full_attention"),
    )),
    "block lists are aligned by their first token": ("A3", (
        (NEVER_WRONG, "test_a_spare_local_block_shifts_nothing"),
        (NEVER_WRONG, "test_a_producer_that_decoded_on_shifts_nothing"),
        (TOPOLOGY, "test_lists_begin_where_they_say"),
        (TOPOLOGY, "test_a_spare_block_does_not_shift_the_others"),
        (TOPOLOGY, "test_windows_with_spare_and_missing_blocks_are_not_shifted"),
        (TOPOLOGY, "test_a_peer_list_that_ends_early_is_refused"),
        (STATE, "test_a_list_says_with_which_token_it_begins_on_both_sides"),
        (STATE, "test_a_regenerated_turn_is_only_read_back_if_the_window_reaches_back"),
        (STATE, "test_a_window_list_is_placed_where_its_writer_put_it_or_refused_here_or_by_the_worker"),
        (STATE, "test_null_blocks_of_a_chunked_list_begin_with_the_prompt_or_are_refused"),
    )),
    "states move whole, and from a real block": ("A3", (
        (TOPOLOGY, "test_all_pages_of_a_state_are_moved"),
        (TOPOLOGY, "test_states_pair_from_the_end"),
    )),
    "null blocks of a chunked first group are no prefix hit": ("A3", (
        (NEVER_WRONG, "test_null_blocks_of_a_chunked_first_group_are_no_prefix_hit"),
        (STATE, "test_null_blocks_of_a_whole_group_are_no_prefix_hit"),
    )),
    "indexer pages are opaque": ("A4", (
        (ADAPTER, "test_indexer_pages_move_whole_between_equal_pages"),
        (ADAPTER, "test_indexer_pages_of_another_size_are_refused"),
    )),
    "tokens in flight are not promised to a next turn": ("A5", (
        (ADAPTER, "test_tokens_in_flight_are_not_promised"),
        (ADAPTER, "test_a_state_that_has_seen_tokens_in_flight_is_not_handed_back"),
        (ADAPTER, "test_tokens_behind_the_end_of_an_answer_are_not_promised"),
        (ADAPTER, "test_a_state_that_has_seen_tokens_behind_the_end_of_an_answer_is_not_handed_over"),
        (INSIDE, "test_accepted_drafts_behind_the_end_of_an_answer_are_not_promised"),
        (INSIDE, "test_readback_is_refused_without_the_role_of_both"),
    )),
    "geometries that contradict themselves": ("A6", (
        (TOPOLOGY, "test_a_context_rank_that_contradicts_the_rule_is_refused"),
        (TOPOLOGY, "test_a_layer_on_two_producer_stages_is_read_from_the_first"),
        (TOPOLOGY, "test_two_fields_of_one_name_in_a_layout_are_refused"),
        (TOPOLOGY, "test_canonical_bytes_of_a_field_in_several_regions_are_all_there"),
    )),
    "ranks that are only notified": ("B1", (
        (NEVER_WRONG, "test_latent_caches_between_any_sizes"),
        (ADAPTER, "test_ranks_that_only_wait_for_a_notification_are_wired_without_rows"),
        (TOPOLOGY, "test_a_rank_that_is_only_notified_has_no_rows"),
        (ADAPTER, "test_bytes_land_where_they_belong_and_every_producer_rank_is_released"),
        (ENGINES, "test_what_arrives_is_the_producers_byte_for_byte"),
    )),
    "states with fewer groups than ranks": ("B1", (
        (NEVER_WRONG, "test_states_with_fewer_groups_than_ranks"),
        (ADAPTER, "test_mamba2_groups_are_copies_where_there_are_fewer_than_ranks"),
    )),
    "every order can only fail itself": ("B2", (
        (NEVER_WRONG, "test_an_id_that_cannot_be_notified_costs_nobody_else_a_thing"),
        (ADAPTER, "test_an_id_that_cannot_be_notified_does_not_stop_the_orders_behind_it"),
        (ADAPTER, "test_whatever_ids_and_nonces_tickets_have_each_order_ends_and_an_honest_one_is_read"),
        (ADAPTER, "test_orders_behind_one_handshake_do_not_share_its_fate"),
        (STATE, "test_an_id_that_cannot_be_notified_is_refused_at_arrival"),
        (ENGINES, "test_beside_tickets_of_a_grammar_every_honest_request_gets_its_text"),
    )),
    "ticket numbers survive doubles": ("B3", (
        (NEVER_WRONG, "test_a_float64_reader_leaves_a_ticket_usable"),
        (NEVER_WRONG, "test_node_leaves_a_ticket_usable"),
        (NEVER_WRONG, "test_go_leaves_a_ticket_usable"),
        (NEVER_WRONG, "test_no_number_in_a_ticket_needs_more_than_a_double"),
        (STATE, "test_every_number_of_a_ticket_survives_a_reader_of_doubles"),
        (INSIDE, "test_a_generation_survives_a_router_that_keeps_numbers_as_doubles"),
    )),
    "a refused connection is an answer": ("B4", (
        (HANDSHAKE, "test_a_refused_connection_is_an_answer"),
        (HANDSHAKE, "test_a_failed_peer_is_asked_again_in_the_background"),
        (SIMULATION, "test_a_closed_port_fails_each_of_many_requests_at_once_and_names_the_cause"),
        (ENGINES, "test_a_dead_producer_that_nobody_met_is_answered_at_once"),
    )),
    "a lost connection is tried once more": ("B5", (
        (SIMULATION, "test_one_disconnect_is_mended_by_a_second_attempt"),
        (ENGINES, "test_a_lost_connection_costs_another_read_and_not_the_request"),
    )),
    "all nodes of an engine have one generation": ("B6", (
        (INSIDE, "test_ranks_of_a_second_node_take_the_generation_of_the_first"),
    )),
    "several children of one prompt": ("B7", (
        (NEVER_WRONG, "test_the_children_of_one_prompt_share_one_read"),
        (ADAPTER, "test_siblings_wait_for_the_first_read_and_then_read_nothing"),
        (ADAPTER, "test_an_aborted_sibling_passes_its_read_on"),
        (STATE, "test_a_ticket_without_a_fence_is_not_read_after_its_peer_was_told"),
        (STATE, "test_an_engine_does_not_read_from_itself"),
        (ENGINES, "test_several_choices_of_one_prompt_take_one_hand_over"),
    )),
    "pairs that were refused and can be read": ("B8", (
        (NEVER_WRONG, "test_a_window_peer_with_exactly_the_needed_tokens"),
        (NEVER_WRONG, "test_null_blocks_of_groups_that_share_memory"),
        (TOPOLOGY, "test_exactly_the_tokens_in_the_window_suffice"),
        (TOPOLOGY, "test_null_blocks_of_groups_that_share_memory_are_written_by_nobody"),
        (TOPOLOGY, "test_readers_agree_where_groups_of_other_stages_are_dealt_out_otherwise"),
        (TOPOLOGY, "test_a_field_that_only_the_producer_has_is_not_read"),
        (TOPOLOGY, "test_target_ranks_name_every_rank_that_the_plan_reads_or_notifies"),
        (TOPOLOGY, "test_the_peers_interleave_is_not_assumed_to_be_ours"),
    )),
    "documents have a budget": ("B9", (
        (TOPOLOGY, "test_a_document_is_answered_within_a_second_and_100_megabytes"),
        (TOPOLOGY, "test_absurd_sizes_of_a_ticket_are_refused_in_time"),
    )),
    "a full cache takes no lease from its reader": ("B10", (
        (ADAPTER, "test_bytes_in_flight_have_a_cap_unless_it_is_taken_away"),
        (INSIDE, "test_a_full_cache_makes_requests_wait_and_takes_no_lease"),
        (ENGINES, "test_a_full_prefill_cache_and_a_busy_decode_engine_cost_no_request"),
    )),
    "engines that wait for each other's blocks": ("B13", (
        (STATE, "test_the_newest_read_that_waits_for_blocks_gives_way_to_a_peer"),
        (ADAPTER, "test_an_engine_whose_blocks_are_leased_gives_up_its_newest_read"),
        (INSIDE, "test_two_engines_that_wait_for_each_others_blocks_go_on_without_an_error"),
    )),
    "the previous release": ("B11", (
        (NEVER_WRONG, "test_a_hand_over_between_releases"),
        (HANDSHAKE, "test_release_0_1_reads_an_envelope_with_capabilities"),
        (STATE, "test_larger_generations_of_version_0_1_are_still_read"),
        (TOPOLOGY, "test_documents_of_version_0_1_are_still_read"),
    )),
    "an operator sees what goes wrong": ("B12", (
        (ADAPTER, "test_an_exception_on_the_transfer_thread_is_logged_once_with_its_traceback_and_counted"),
        (ADAPTER, "test_a_stuck_or_dead_transfer_thread_is_an_error_and_a_gauge"),
        (ADAPTER, "test_quarantine_and_expiry_warn_once_per_request"),
        (ADAPTER, "test_two_silent_probes_let_an_idle_engine_go_within_seconds"),
        (SIMULATION, "test_an_idle_engine_whose_process_is_gone_is_let_go_within_seconds"),
    )),
    "no slot, no hand-over; computed blocks only": ("C1", (
        (ADAPTER, "test_without_a_free_slot_nothing_is_handed_over"),
        (ADAPTER, "test_a_ticket_covers_the_blocks_of_its_tokens_and_no_spare_one"),
        (STATE, "test_a_ticket_covers_computed_blocks_only"),
        (STATE, "test_a_state_that_ran_on_beyond_the_prompt_is_not_handed_over"),
    )),
    "peers that come and go leak nothing": ("C2", (
        (AGENT, "test_a_peer_that_is_dead_is_unloaded_and_a_living_one_is_kept_for_its_return"),
    )),
    "every accepted order has one result": ("C3", (
        (AGENT, "test_every_accepted_order_has_one_result_though_the_thread_dies"),
        (AGENT, "test_calls_that_wait_when_the_thread_dies_still_order_and_are_told_so"),
    )),
    "calls, notifications and timers keep their order": ("C4", (
        (AGENT, "test_a_notification_is_delivered_after_the_calls_that_were_handed_over_before_it"),
        (AGENT, "test_a_renewal_that_waits_counts_before_timers_run"),
        (AGENT, "test_a_renewal_that_came_during_a_pause_counts_before_timers_however_few_the_turns"),
        (STATE, "test_a_renewed_lease_survives_a_process_that_stood_still_for_a_minute"),
        (REAL, "test_a_renewal_that_came_while_the_process_was_stopped_counts_before_its_timers"),
    )),
    "the agent's scratch words, fences, quarantine and queues": ("C5", (
        (AGENT, "test_scratch_words_return_after_any_error_of_their_read"),
        (AGENT, "test_no_word_becomes_valid_while_or_after_the_agent_closes"),
        (AGENT, "test_an_order_without_descriptors_still_checks_its_fence"),
        (AGENT, "test_replacing_a_peer_keeps_the_bound_on_its_quarantine"),
        (AGENT, "test_a_stalled_transfer_keeps_no_later_ones_in_memory"),
        (AGENT, "test_cancelled_orders_do_not_count_as_queued"),
        (AGENT, "test_an_error_at_the_end_of_a_warm_up_leaks_neither_handle_nor_peer"),
        (REAL, "test_a_producer_killed_and_replaced_between_two_polls_is_found_disconnected"),
    )),
    "a nonce per grant": ("C6", (
        (STATE, "test_a_late_notification_does_not_touch_the_next_lease_of_its_id"),
        (STATE, "test_ranks_of_two_consumers_never_add_up"),
        (ADAPTER, "test_only_readers_that_echo_the_nonce_end_and_renew_a_lease"),
        (ADAPTER, "test_two_consumers_of_one_ticket_never_add_up"),
        (HANDSHAKE, "test_read_with_nonce_and_consumer_survives_the_way"),
    )),
    "a restart has a new generation": ("C7", (
        (STATE, "test_a_restart_has_a_new_generation"),
        (ADAPTER, "test_a_restart_has_a_new_generation_also_when_it_is_told_late"),
    )),
    "proofs randomise the configuration": ("C8", (
        (AGENT, "test_the_driver_finds_each_fault_that_was_fixed"),
        (STATE, "test_no_order_of_events_breaks_a_promise"),
        (STATE, "test_a_planted_bug_in_any_transition_is_caught"),
        (NEVER_WRONG, "test_no_byte_is_wrong_in_random_pairs"),
        (NEVER_WRONG, "test_a_planted_fault_is_found"),
    )),
}  # fmt: skip

MARKS = [*(f"A{n}" for n in range(1, 11)), *(f"B{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 9))]


@cache
def _tests_of(folder: str) -> frozenset[str]:
    """Return the names of all tests in the modules of a folder."""
    return frozenset(
        name
        for file in (ROOT / folder).glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize("subject", INDEX)
def test_every_named_case_exists(subject: str) -> None:
    missing = [f"{folder}: {name}" for folder, name in INDEX[subject][1] if name not in _tests_of(folder)]
    assert not missing, f"{subject}: {missing}"


def test_every_mark_has_a_subject() -> None:
    assert {mark for mark, _ in INDEX.values()} == set(MARKS)
    files = [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("integration_tests/**/*.py")]
    used = {
        mark
        for file in files
        for given in re.findall(r"mark\.never_wrong\(([^)]*)\)", file.read_text())
        for mark in re.findall(r'"(\w+)"', given)
    }
    assert used <= set(MARKS), f"marks without a subject: {sorted(used - set(MARKS))}"
