"""Private: the engines, and the one place that chooses among them."""

from __future__ import annotations

from tpu_embedding.distribution import Topology
from tpu_embedding.engines.base import Engine
from tpu_embedding.engines.calls import (
    Call,
    EmbeddingOptions,
    EngineOptions,
    Prepared,
    StepQueue,
)
from tpu_embedding.engines.host.engine import HostEngine
from tpu_embedding.engines.host.processes import ShardedEngine
from tpu_embedding.engines.host.servers import ParameterServerEngine
from tpu_embedding.engines.portable.engine import PortableEngine
from tpu_embedding.engines.sparse_core.engine import SparseCoreEngine
from tpu_embedding.engines.tpu_v2_v4.engine import TPUV2V4Engine
from tpu_embedding.layout.plan import Plan, refuse_growing, require_dtypes

__all__ = [
    "Call",
    "EmbeddingOptions",
    "Engine",
    "EngineOptions",
    "Prepared",
    "StepQueue",
    "choose",
]

_ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (
        HostEngine,
        PortableEngine,
        ParameterServerEngine,
        ShardedEngine,
        SparseCoreEngine,
        TPUV2V4Engine,
    )
}


def choose(topology: Topology, plan: Plan) -> type[Engine]:
    """Returns the engine for a plan: the topology's engine, or its stand-in.

    Raises:
      NotImplementedError: If the TPUs have no hardware for embeddings, or if the engine
        cannot store the dtype of a table.
    """
    engine = _ENGINES.get(topology.engine)
    if engine is None:
        assert topology.tpu is not None
        raise NotImplementedError(
            f"{topology.tpu.generation.name} has no hardware for embeddings. Use "
            "TPUEmbeddingV0, whose tables are ordinary variables of each replica; or "
            "create the embedding outside of the strategy's scope, where it runs on "
            "this machine's CPU."
        )
    # Our kernels cannot call user functions.
    if engine.stand_in and any(table.function for table in plan.tables):
        engine = _ENGINES[engine.stand_in]
    if not engine.grows:
        reason = f"the {engine.name} engine does not support"
        refuse_growing(plan.tables, reason)
    functions = {table.function for table in plan.tables if engine.name == "portable"}
    runs = " and ".join(sorted(filter(None, functions)))
    what = f"the {engine.name} engine" + (f", which runs a {runs}," if runs else "")
    require_dtypes(plan, engine.table_dtypes, what)
    return engine
