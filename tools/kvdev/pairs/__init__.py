"""Benchmark of connectors inside real engines: pairs of a prefill and a decode engine that take turns on one machine."""
