"""What the slots of each optimizer are called in checkpoints of TensorFlow 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from tpu_embedding.interop import parameters as v1


@dataclasses.dataclass(frozen=True)
class SlotSource:
    """One slot.

    Attributes:
      name: As this library and the TPU call it.
      spellings: What stands below the table's name in a checkpoint, that of TPU runs
        first, and that of CPU runs where it is another.
    """

    name: str
    spellings: tuple[str, ...]


_SLOTS: dict[type, tuple[SlotSource, ...]] = {
    v1.StochasticGradientDescentParameters: (),
    v1.AdagradParameters: (SlotSource("accumulators", ("Adagrad",)),),
    v1.AdagradMomentumParameters: (
        SlotSource("accumulators", ("AdagradMomentum/Accumulator",)),
        SlotSource("momenta", ("AdagradMomentum/Momentum",)),
    ),
    v1.AdamParameters: (
        SlotSource("momenta", ("Adam/m", "Adam")),
        SlotSource("velocities", ("Adam/v", "Adam_1")),
    ),
    v1.FtrlParameters: (
        SlotSource("accumulators", ("Ftrl",)),
        SlotSource("linears", ("Ftrl_1",)),
    ),
    v1.MomentumParameters: (SlotSource("momenta", ("Momentum",)),),
    v1.RMSPropParameters: (
        SlotSource("ms", ("RMSProp/ms", "RMSProp")),
        SlotSource("mom", ("RMSProp/mom", "RMSProp_1")),
    ),
    v1.ProximalAdagradParameters: (SlotSource("accumulators", ("ProximalAdagrad",)),),
    v1.ProximalYogiParameters: (
        SlotSource("v", ("ProximalYogi",)),
        SlotSource("m", ("ProximalYogi_1",)),
    ),
    v1.FrequencyEstimatorParameters: (
        SlotSource("last_hit_step", ("FrequencyEstimator",)),
    ),
}


def slot_sources(parameters: Any) -> tuple[SlotSource, ...]:
    """The slots of one of the *Parameters; none for None.

    Raises:
      ValueError: If it is neither.
    """
    if parameters is None:
        return ()
    v1.check_parameters(parameters)
    return _SLOTS[type(parameters)]
