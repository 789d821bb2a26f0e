"""The engines, and the one place that chooses among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.distribution import Topology
from tpu_embedding.engines import errors
from tpu_embedding.engines.base import Engine, EngineOptions, Queue, Stacks
from tpu_embedding.engines.host import HostEngine
from tpu_embedding.engines.portable import PortableEngine
from tpu_embedding.engines.sparse_core import SparseCoreEngine
from tpu_embedding.engines.table_dtypes import require_dtypes
from tpu_embedding.engines.tpu_v2_v4.engine import TPUV2V4Engine
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout, TableLayout

__all__ = [
    "Engine",
    "EngineOptions",
    "as_queue",
    "as_stacks",
    "check_inputs",
    "create_engine",
    "lay_out",
    "needs_shapes",
    "require_queue",
    "require_stacks",
    "stacks_tables",
    "stored_layouts",
    "takes_profiles",
]

_ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (HostEngine, PortableEngine, SparseCoreEngine, TPUV2V4Engine)
}


def create_engine(options: EngineOptions) -> Engine:
    """Makes the engine that the topology names, or the one that stands in for it."""
    return _engine_for_plan(options.topology, options.plan)(options)


def lay_out(
    plan: Plan, topology: Topology, config: SparseCoreEmbeddingConfig
) -> Layout:
    """Stacks the tables for the engine that the topology names; see `Engine`.

    Raises:
      NotImplementedError: If the engine cannot store the dtype of a table.
    """
    engine = _engine_for_plan(topology, plan)
    require_dtypes(plan, engine.table_dtypes, f"the {engine.name} engine")
    return engine.lay_out(plan, topology, config)


def stored_layouts(topology: Topology, layout: Layout) -> tuple[TableLayout, ...]:
    """Where each table is, if checkpoints hold stacks; else nothing."""
    return layout.tables if _engine_of(topology).stores_stacks else ()


def require_queue(topology: Topology, what: str) -> None:
    """Refuses a class that queues batches, where the engine cannot.

    Raises:
      NotImplementedError: It names `what` and the way out.
    """
    engine = _engine_of(topology)
    if not issubclass(engine, Queue):
        raise errors.no_queue(what, engine.name)


def require_stacks(topology: Topology, what: str) -> None:
    """Refuses a class that hands its batches out, where the engine cannot.

    Raises:
      NotImplementedError: It names `what` and the way out.
    """
    engine = _engine_of(topology)
    if not issubclass(engine, Stacks):
        raise errors.no_batches(what, engine.name)


def stacks_tables(topology: Topology) -> bool:
    """Whether that engine needs names and whole output shapes, to lay tables out."""
    return _engine_of(topology).stores_stacks


def as_queue(engine: Engine, what: str) -> Queue:
    """An engine as one that queues batches; the errors of `require_queue`."""
    if not isinstance(engine, Queue):
        raise errors.no_queue(what, engine.name)
    return engine


def as_stacks(engine: Engine, what: str) -> Stacks:
    """An engine as one that hands batches out; the errors of `require_stacks`."""
    if not isinstance(engine, Stacks):
        raise errors.no_batches(what, engine.name)
    return engine


def check_inputs(
    topology: Topology, paths: Sequence[str], values: Sequence[Any]
) -> None:
    """Checks where features come from, for that engine; see `Engine`."""
    _engine_of(topology).check_inputs(topology, paths, values)


def takes_profiles(topology: Topology) -> bool:
    """Whether that engine has a use for `EngineOptions.profile_data_directory`."""
    return _engine_of(topology).takes_profiles


def needs_shapes(topology: Topology) -> bool:
    """Whether that engine can be made only when all output shapes are known."""
    return _engine_of(topology).needs_shapes


def _engine_for_plan(topology: Topology, plan: Plan) -> type[Engine]:
    """The engine for a plan: kernels of ours cannot call functions of the user's."""
    engine = _engine_of(topology)
    custom = any(
        (table.optimizer is not None and table.optimizer.is_custom)
        or table.config.custom_combiner is not None
        for table in plan.tables
    )
    return _ENGINES[engine.for_custom] if custom and engine.for_custom else engine


def _engine_of(topology: Topology) -> type[Engine]:
    found = _ENGINES.get(topology.engine)
    if found is None:
        assert topology.tpu is not None
        raise errors.no_engine(topology.tpu.generation.name)
    return found
