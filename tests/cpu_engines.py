"""The engines for CPUs, as parameters of tests outside of the conformance suite."""

from __future__ import annotations

import pytest

# Conformance holds both engines to the same numbers in each run. What else the portable
# engine does is of the second tier.
EACH_ENGINE = ("host", pytest.param("portable", marks=pytest.mark.second_tier))
