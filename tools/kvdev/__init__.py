"""The verbs of `tools/dev.py`, one module each; standard library only up to the re-entry in `bootstrap.py`."""
