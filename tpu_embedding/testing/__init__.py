"""A TPU in software, a TPU's compiler and parameter servers, on one machine."""

from __future__ import annotations

from tpu_embedding.testing.compilation import CompileReport, StackReport, compile_step
from tpu_embedding.testing.local_servers import LocalServers
from tpu_embedding.testing.strategy import SoftwareTPUStrategy

__all__ = [
    "CompileReport",
    "LocalServers",
    "SoftwareTPUStrategy",
    "StackReport",
    "compile_step",
]


def __dir__() -> list[str]:
    return sorted(__all__)
