"""Proofs of transfer plans: every byte of every consumer rank is compared with what it must be."""
