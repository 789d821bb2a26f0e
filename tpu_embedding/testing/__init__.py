"""A TPU in software, to run and test TPU programs on a CPU."""

from __future__ import annotations

from tpu_embedding.testing.strategy import SoftwareTPUStrategy

__all__ = ["SoftwareTPUStrategy"]


def __dir__() -> list[str]:
    return sorted(__all__)
