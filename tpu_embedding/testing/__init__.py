"""A TPU in software, and a TPU's compiler, to test TPU programs on a CPU."""

from __future__ import annotations

from tpu_embedding.testing.compilation import CompileReport, StackReport, compile_step
from tpu_embedding.testing.strategy import SoftwareTPUStrategy

__all__ = ["CompileReport", "SoftwareTPUStrategy", "StackReport", "compile_step"]


def __dir__() -> list[str]:
    return sorted(__all__)
