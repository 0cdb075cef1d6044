"""The connector in the scheduler's process: plain values in and out, loadable without vLLM."""

__all__: list[str] = []
