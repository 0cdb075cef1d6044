"""Plugs the KV-transfer packages into an unmodified vLLM."""

__version__ = "0.1.0"
