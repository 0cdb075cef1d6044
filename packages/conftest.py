"""Property tests have no deadline: on a busy machine a case takes as long as it takes, and so does its drawing."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("no deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no deadline")
