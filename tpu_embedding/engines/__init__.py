"""The engines, and the one place that chooses among them."""

from __future__ import annotations

from tpu_embedding.engines.base import Engine, EngineOptions
from tpu_embedding.engines.host import HostEngine
from tpu_embedding.engines.portable import PortableEngine

__all__ = ["Engine", "EngineOptions", "create_engine"]

_ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (HostEngine, PortableEngine)
}


def create_engine(options: EngineOptions) -> Engine:
    """Makes the engine that the topology names."""
    return _ENGINES[options.topology.engine](options)
