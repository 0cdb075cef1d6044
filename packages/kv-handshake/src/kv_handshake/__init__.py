"""The side-channel protocol that lets two inference engines agree to move a KV cache."""

__version__ = "0.1.0"
