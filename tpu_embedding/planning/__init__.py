"""Plans where tables fit: memory, limits, traffic and balance, before any run."""

from tpu_embedding.planning.placements import plan
from tpu_embedding.planning.report import (
    ArrayBytes,
    PlannedPlacement,
    PlanReport,
    StackLimits,
    TableStatistics,
)

__all__ = [
    "ArrayBytes",
    "PlanReport",
    "PlannedPlacement",
    "StackLimits",
    "TableStatistics",
    "plan",
]


def __dir__() -> list[str]:
    return sorted(__all__)
