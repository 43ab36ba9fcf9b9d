"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Linear algebra of small fits is slower in several threads, and tests run beside each other already. Read as
# NumPy is loaded, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A busy machine takes its time: no test fails for that.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
