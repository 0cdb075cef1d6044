"""Memory registration and transfers through NIXL, off the engine's thread and safe against dying peers."""

__version__ = "0.1.0"
