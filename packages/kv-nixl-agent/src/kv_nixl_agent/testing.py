"""Test doubles: a fake NIXL that moves bytes and fails on demand, and a port that counts handles."""

from ._fake import FakeFabric, FakeNixl
from ._recording import RecordingPort, recording_factory

__all__ = ["FakeFabric", "FakeNixl", "RecordingPort", "recording_factory"]
