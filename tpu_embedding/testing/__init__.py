"""A TPU in software, to run and test TPU programs on a CPU."""

from __future__ import annotations
