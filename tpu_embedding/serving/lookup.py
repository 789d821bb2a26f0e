"""Lookups for serving, made of TensorFlow's ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.layout.plan import FeatureSpec, Plan, TableSpec, make_plan
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.nest_utils import flatten_with_paths
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.tf_configs import ConvertedFeatures, convert_features

# AutoGraph has nothing to convert in these functions.
_do_not_convert = tf.autograph.experimental.do_not_convert


@_do_not_convert
def serving_embedding_lookup(
    inputs: Any,
    weights: Any,
    tables: Mapping[Any, Any],
    feature_config: Any,
    *,
    invalid_ids: str | None = None,
) -> Any:
    """Looks up features with TensorFlow's ops, for serving.

    A drop-in replacement for tf.tpu.experimental.embedding.serving_embedding_lookup,
    with the numbers of docs/semantics.md:

    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> films = te.TableConfig(4, 2, combiner="sum")
    >>> table = tf.constant([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    >>> seen = tf.ragged.constant([[1, 3], []])
    >>> te.serving_embedding_lookup(
    ...     {"seen": seen}, None, {films: table}, {"seen": te.FeatureConfig(films)}
    ... )["seen"].numpy().tolist()
    [[4.0, 4.0], [0.0, 0.0]]

    Args:
      inputs: Some or all features of `feature_config`, in its structure: tf.Tensor,
        tf.SparseTensor or tf.RaggedTensor, in any mix, int32 or int64 (or whole numbers
        of a floating point dtype).
      weights: None, or the structure of `inputs` with floating point weights of each
        feature's own layout, or None for features without.
      tables: Variables or tensors [vocabulary_size, dim] by TableConfig, as
        `embedding_tables` has them.
      feature_config: A FeatureConfig or a nested structure of them.
      invalid_ids: The policy for tables of tf.tpu.experimental.embedding: "error"
        (also if None), "drop" or "mod". A TableConfig of this package has its own.

    Returns:
      Activations in the structure of `inputs`, float32 [output shape..., dim].

    Raises:
      TypeError: If a container or dtype is of the wrong type.
      ValueError: If `inputs` has a feature that `feature_config` lacks, `tables`
        lacks a table, or a structure, rank or static shape does not fit.
      tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
    """
    converted = convert_features(feature_config, invalid_ids)
    plan = plan_of(converted)
    paths = [path for path, _ in flatten_with_paths(inputs)]
    specs = features_at(plan, paths)
    used = {spec.table: spec.path for spec in specs}
    readers = {
        index: VariableReader(find_table(plan.tables[index], tables, path))
        for index, path in used.items()
    }
    lookup = FeatureLookup(plan, readers, any_batch_size=True)
    return look_up_structure(lookup, specs, inputs, weights)


def plan_of(
    converted: ConvertedFeatures, optimizer: Any = None, *, growing: bool = False
) -> Plan:
    """Makes the plan of a converted configuration."""
    return make_plan(*converted, optimizer, custom=True, growing=growing)


def features_at(plan: Plan, paths: Sequence[str]) -> list[FeatureSpec]:
    """Returns the features of a plan by path.

    Raises:
      ValueError: If a path has no feature.
    """
    known: dict[str, list[FeatureSpec]] = {}
    for spec in plan.features:
        known.setdefault(spec.path, []).append(spec)
    unknown = [path for path in paths if path not in known]
    if unknown:
        raise ValueError(
            f"`inputs` has the features {', '.join(unknown)}, which `feature_config` "
            f"lacks. It has {', '.join(known)}."
        )
    return [spec for path in paths for spec in known[path]]


def find_table(
    spec: TableSpec, tables: Mapping[Any, Any], path: str, *, arrays: bool = False
) -> Any:
    """Returns the variable or tensor of a table.

    Args:
      spec: The table.
      tables: The tables by the TableConfig that the user passed.
      path: The path of a feature that needs the table, for messages.
      arrays: Whether the table may be a NumPy array.

    Raises:
      ValueError: If the table is missing, or of another shape or kind.
    """
    if spec.key not in tables:
        raise ValueError(
            f"`tables` lacks table {spec.name} of feature {path}. Its keys must be the "
            "TableConfig objects of `feature_config` themselves."
        )
    table = tables[spec.key]
    shape = (spec.config.vocabulary_size, spec.config.dim)
    kinds = (tf.Variable, tf.Tensor, *([np.ndarray] if arrays else []))
    fits = isinstance(table, kinds) and tuple(table.shape) == shape
    if fits and table.dtype != object and tf.as_dtype(table.dtype).is_floating:
        return table
    received = (
        f"{table.dtype.name} of shape {tuple(table.shape)}"
        if hasattr(table, "shape") and hasattr(table, "dtype")
        else repr(table)
    )
    raise ValueError(
        f"Table {spec.name} must be a floating point variable"
        f"{', tensor or NumPy array' if arrays else ' or tensor'} of shape {shape}. "
        f"Received: {received}."
    )


def look_up_structure(
    lookup: FeatureLookup, specs: Sequence[FeatureSpec], inputs: Any, weights: Any
) -> Any:
    """Looks up the leaves of `inputs`; activations in the same structure."""
    structure = FeatureStructure(inputs, specs)
    values = structure.for_plan(structure.flatten("inputs", inputs))
    flat_weights = structure.for_plan(structure.flatten_weights(weights))
    return structure.pack_joined(lookup(specs, values, flat_weights))
