"""TPUs in software and parameter servers on one machine, for tests and examples."""

from __future__ import annotations

from tpu_embedding.testing.local_servers import LocalServers
from tpu_embedding.testing.strategy import SoftwareTPUStrategy

__all__ = ["LocalServers", "SoftwareTPUStrategy"]


def __dir__() -> list[str]:
    return sorted(__all__)
