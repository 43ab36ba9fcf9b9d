"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine takes its time: no test fails for that.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
