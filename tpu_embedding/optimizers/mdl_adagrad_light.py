"""Adagrad with a minimum description length, as TPUs v2 to v4 have it.

A variant of Shamir, 2015, https://proceedings.mlr.press/v44/shamir15.html, that is not
published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tpu_embedding.optimizers import base, checks, errors


@dataclasses.dataclass(frozen=True)
class MDLAdagradLight(base.KeywordOptimizer):
    """The parameters of a rule that only TPUs v2 to v4 know.

    `base.Optimizer` describes the other attributes. The others are the fields of
    MdlAdagradLightParameters in TensorFlow's optimization_parameters.proto, which
    is all that is published of them; the defaults are the proto's.

    Attributes:
      initial_accumulator_value: What `accumulators` start at, positive, as in
        `Adagrad`. The slots `weights` and `benefits` start at 0. Nothing is published
        of either; `slot_variable_creation_fn` can set others.
    """

    rule: ClassVar[str] = "mdl_adagrad_light"
    tpu: ClassVar[base.TpuRule | None] = base.TpuRule(
        ops="MDLAdagradLight",
        message="mdl_adagrad_light",
        fields={
            name: name
            for name in (
                "l2",
                "lr_power",
                "min_servable_mdl_benefit",
                "mdl_mix_in_margin",
                "mdl_benefit_rampup_coeff",
                "mdl_min_weight",
                "benefit_revisit_scale",
                "max_event_benefit",
                "max_total_benefit",
                "mdl_hard_limit",
                "hard_limit_min_benefit",
                "mdl_regularize",
            )
        },
    )
    host_values: ClassVar[dict[str, Any] | None] = None

    learning_rate: base.Rate = 0.001
    initial_accumulator_value: float = 0.1
    l2: float = 0.0
    lr_power: float = 0.0
    min_servable_mdl_benefit: float = 0.0
    mdl_mix_in_margin: float = 0.0
    mdl_benefit_rampup_coeff: float = 0.0
    mdl_min_weight: float = 0.0
    benefit_revisit_scale: float = 0.0
    max_event_benefit: float = 0.0
    max_total_benefit: float = 0.0
    mdl_hard_limit: float = 0.0
    hard_limit_min_benefit: bool = False
    mdl_regularize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_positive(
            "initial_accumulator_value", self.initial_accumulator_value
        )
        for argument in self.tpu.fields if self.tpu else {}:
            check = checks.check_number
            if argument in ("hard_limit_min_benefit", "mdl_regularize"):
                check = checks.check_flag
            check(argument, getattr(self, argument))

    @property
    def slots(self) -> tuple[base.Slot, ...]:
        return (
            base.Slot("accumulators", self.initial_accumulator_value),
            base.Slot("weights", 0.0),
            base.Slot("benefits", 0.0),
        )

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        return ()

    def update(
        self,
        ops: base.ArrayOps,
        gradient: Any,
        row: Any,
        slots: Sequence[Any],
        rate: Any,
    ) -> tuple[Any, ...]:
        raise errors.unpublished_rule(type(self).__name__)
