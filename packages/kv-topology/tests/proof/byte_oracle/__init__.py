"""Proofs of transfer plans: every byte of every consumer rank is compared with what it must be."""

from byte_oracle.oracle import (
    MemoryOfRank,
    OracleFailure,
    Proof,
    Request,
    check_readers,
    execute,
    expand_rows,
    permute,
    prove,
)

__all__ = [
    "MemoryOfRank",
    "OracleFailure",
    "Proof",
    "Request",
    "check_readers",
    "execute",
    "expand_rows",
    "permute",
    "prove",
]
