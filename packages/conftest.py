"""Property tests have no deadline: on a busy machine a case takes as long as it takes."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
