"""Prefix hits that are there before a step, and those that the step is about to compute."""

from __future__ import annotations

from vllm_adapter.scheduler.chunks import PrefixHits

Tables = dict[str, tuple[int, list[list[int]]]]
"""Tokens that are computed already, and the whole block table, by request."""


def hits(tables: Tables, *spans: int, unknown: str = "") -> PrefixHits:
    return PrefixHits(
        spans,
        lambda: ((name, computed) for name, (computed, _) in tables.items()),
        lambda name: None if name == unknown else tables[name][1],
    )


def test_a_hit_on_blocks_of_earlier_steps_is_there() -> None:
    tables: Tables = {"r": (32, [[1, 2, 3]]), "other": (16, [[4, 5, 6]])}
    assert hits(tables, 16).held([[1, 2, 3]], 32) == 32


def test_a_hit_on_blocks_that_another_request_of_the_step_computes_is_not() -> None:
    """Two requests of one prefix in the same step: the second finds blocks that the first one is about to fill."""
    tables: Tables = {"first": (0, [[1, 2, 3]]), "second": (32, [[1, 2, 4]])}
    step = hits(tables, 16)
    assert step.held([[1, 2, 4]], 32) == 0
    assert step.held([[1, 2, 3]], 0) == 0, "no hit at all"


def test_a_block_that_another_request_goes_on_with_is_not_there() -> None:
    tables: Tables = {"r": (32, [[1, 2, 3]]), "other": (24, [[1, 2, 5]])}
    assert hits(tables, 16).held([[1, 2, 3]], 32) == 0
    assert hits({**tables, "other": (32, [[1, 2, 5]])}, 16).held([[1, 2, 3]], 32) == 32


def test_null_blocks_are_nobodys_and_states_do_not_count() -> None:
    tables: Tables = {"r": (64, [[1, 2, 3], [0, 7, 8], [9]]), "other": (0, [[4, 5], [0, 6], [9]])}
    assert hits(tables, 32, 32, 0).held([[1, 2, 3], [0, 7, 8], [9]], 64) == 64


def test_a_hit_counts_in_whole_blocks_of_all_groups() -> None:
    blocks = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    assert hits({"r": (80, blocks)}, 16, 32).held(blocks, 80) == 64, "block 9 is written from its middle on"
    assert hits({"r": (80, blocks)}, 16, 96).held(blocks, 80) == 0


def test_a_host_that_does_not_tell_its_tables_leaves_it_open() -> None:
    tables: Tables = {"r": (32, [[1, 2, 3]]), "other": (0, [[4]])}
    assert hits(tables, 16, unknown="other").held([[1, 2, 3]], 32) == 0


def test_tables_are_looked_up_once_a_step_and_only_for_a_hit() -> None:
    looks: list[str] = []

    def blocks_of(request_id: str) -> list[list[int]]:
        looks.append(request_id)
        return [[1, 2]]

    step = PrefixHits((16,), lambda: [("r", 16)], blocks_of)
    step.held([[1, 2]], 0)
    assert looks == []
    step.held([[1, 2]], 16)
    step.held([[1, 3]], 16)
    assert looks == ["r"]
