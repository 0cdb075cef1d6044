"""The part of vLLM's interface that vllm-adapter stands on, as it sees it. Checked against the host by a test."""

from vllm import envs as envs

__version__: str
