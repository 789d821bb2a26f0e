"""Beginning with the values of another model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.interop.estimator_tables import DUMMY_PREFIX

_v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Which variables begin with which values of a checkpoint.

    Attributes:
      ckpt_to_initialize_from: The checkpoint, or a folder.
      vars_to_warm_start: A regular expression over the names of trainable variables
        and embedding tables; or a list of them, over all variables.
      var_name_to_vocab_info: As in tf.compat.v1.train.warm_start; not for tables.
      var_name_to_prev_var_name: Names in the checkpoint that differ.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: Any = ".*"
    var_name_to_vocab_info: Mapping[str, Any] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None

    @classmethod
    def of(cls, value: Any) -> WarmStartSettings | None:
        """The settings of `warm_start_from`, which may be a path."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise errors.argument_type(
                "warm_start_from", value, "a path or WarmStartSettings"
            )
        return cls(value)

    def names(self, name: str) -> bool:
        """Whether a variable is to be warm-started."""
        wanted = self.vars_to_warm_start
        patterns = [wanted] if isinstance(wanted, str) else wanted or []
        return any(re.match(pattern, name) for pattern in patterns)


def warm_start(settings: WarmStartSettings, tables: Mapping[str, tf.Variable]) -> None:
    """Changes the initial values of variables of the default graph.

    Args:
      settings: Which.
      tables: Embedding tables and slots by their names in checkpoints.
    """
    previous = dict(settings.var_name_to_prev_var_name or {})
    listed = not isinstance(settings.vars_to_warm_start, str)
    known = {id(variable) for variable in tables.values()}
    candidates = _v1.global_variables() if listed else _v1.trainable_variables()
    others = [
        variable
        for variable in candidates
        if id(variable) not in known
        and DUMMY_PREFIX not in variable.op.name
        and settings.names(variable.op.name)
    ]
    chosen = {
        previous.pop(name, name): variable
        for name, variable in tables.items()
        if settings.names(name) and (listed or not _is_slot(name, tables))
    }
    if chosen:
        _v1.train.init_from_checkpoint(settings.ckpt_to_initialize_from, chosen)
    _v1.train.warm_start(
        settings.ckpt_to_initialize_from,
        others,
        dict(settings.var_name_to_vocab_info or {}),
        previous,
    )


def _is_slot(name: str, tables: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{table}/") for table in tables)
