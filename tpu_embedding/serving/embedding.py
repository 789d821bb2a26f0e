"""Lookups in tables and checkpoints by TensorFlow's ops, on the CPU, for serving."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding import distribution, errors
from tpu_embedding.checkpoint.stored import VariableTables
from tpu_embedding.checkpoint.trackable import RestoresLayouts
from tpu_embedding.layout.plan import (
    FeatureSpec,
    Plan,
    TableSpec,
    make_plan,
    require_dtypes,
)
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.nest_utils import flatten_with_paths
from tpu_embedding.serving.growing_tables import RestoredGrowingTable
from tpu_embedding.serving.mapping import open_tables
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.tables.table import stored_table
from tpu_embedding.tables.trackable import RowsVariable
from tpu_embedding.tables.variables import TableVariables, create_variables
from tpu_embedding.tf_configs import (
    convert_features,
    convert_optimizer,
    freeze_configs,
)

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

    A drop-in replacement for tf.tpu.experimental.embedding.serving_embedding_lookup
    that computes as docs/semantics.md says:

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
    plan = make_plan(*convert_features(feature_config, invalid_ids), None, custom=True)
    specs = _features_of(inputs, plan)
    used = {spec.table: spec.path for spec in specs}
    readers = {
        index: VariableReader(find_table(plan.tables[index], tables, path))
        for index, path in used.items()
    }
    lookup = FeatureLookup(plan, readers, any_batch_size=True)
    return _look_up(lookup, specs, inputs, weights)


def _features_of(inputs: Any, plan: Plan) -> list[FeatureSpec]:
    """Returns the features of a plan that `inputs` has.

    Raises:
      ValueError: If the plan lacks one.
    """
    paths = [path for path, _ in flatten_with_paths(inputs)]
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


def _look_up(
    lookup: FeatureLookup, specs: Sequence[FeatureSpec], inputs: Any, weights: Any
) -> Any:
    """Looks up the leaves of `inputs`; returns activations in the same structure."""
    structure = FeatureStructure(inputs, specs)
    values = structure.for_plan(structure.flatten("inputs", inputs))
    flat_weights = structure.for_plan(structure.flatten_weights(weights))
    return structure.pack_joined(lookup(specs, values, flat_weights))


@dataclasses.dataclass(frozen=True)
class _Tables:
    """Holds the variables in an object, because checkpoints track lists and dicts."""

    variables: list[TableVariables]
    lookup: FeatureLookup
    growing: dict[str, RestoredGrowingTable]


class TPUEmbeddingForServing(RestoresLayouts, tf.__internal__.tracking.AutoTrackable):
    """Looks embedding tables up by TensorFlow's ops, without training them.

    A drop-in replacement for tf.tpu.experimental.embedding.TPUEmbeddingForServing that
    computes as docs/semantics.md says. It restores the checkpoints of every class:

    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer())
    >>> serving = te.TPUEmbeddingForServing({"film": te.FeatureConfig(films)}, None)
    >>> serving({"film": tf.constant([3, 5])})["film"].numpy().tolist()
    [[3.0, 3.0], [5.0, 5.0]]

    The object is trackable: make it an attribute of the module that you save as a
    SavedModel, or let tpu_embedding.serving.export do all of it.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        experimental_sparsecore_restore_info: Any = None,
        *,
        invalid_ids: str | None = None,
        mapped: str | os.PathLike[str] | None = None,
        verify: bool = True,
    ) -> None:
        """Reads the configuration; tables are made by build or the first lookup.

        Args:
          feature_config: A FeatureConfig or a nested structure of them, of this
            package or of tf.tpu.experimental.embedding.
          optimizer: The optimizer of tables without their own, whose slots are created
            and restored too. None means no slots for those tables.
          experimental_sparsecore_restore_info: Must be None.
          invalid_ids: The policy for tables of tf.tpu.experimental.embedding: "error"
            (also if None), "drop" or "mod". A TableConfig of this package has its own.
          mapped: The folder of an export with `mapped`, whose files lookups then read.
            There are no variables in that case, and checkpoints are not restored.
          verify: Whether to compare the files of `mapped` with their checksums, which
            reads them.

        Raises:
          RuntimeError: If created under a TPU strategy, or if `mapped` is given and the
            custom-op library cannot be loaded.
          ValueError: If the configuration is wrong, the export in `mapped` lacks a
            table, or `verify` is False without `mapped`.
          NotImplementedError: If an option is not supported here, or a mapped table
            grows.
          tf.errors.DataLossError: If a file of a mapped table is missing, damaged or
            has another size.
        """
        if distribution.is_tpu():
            raise RuntimeError(
                "TPUEmbeddingForServing cannot be created under a TPU strategy: it "
                "serves on the CPU. Create it outside of `strategy.scope()` and "
                "restore the checkpoint there."
            )
        if experimental_sparsecore_restore_info is not None:
            raise NotImplementedError(
                "TPUEmbeddingForServing does not support "
                "`experimental_sparsecore_restore_info="
                f"{experimental_sparsecore_restore_info!r}`: it restores whole tables. "
                "Leave it at None; checkpoints of SparseCores are restored without it."
            )
        errors.check_flag("verify", verify)
        if mapped is None and not verify:
            raise ValueError(
                "`verify=False` skips the check of the files of `mapped`, so it has no "
                "effect without `mapped`. Pass `mapped`, or leave `verify` out."
            )
        converted = convert_features(feature_config, invalid_ids)
        self._plan = make_plan(
            *converted, convert_optimizer(optimizer), custom=True, growing=True
        )
        self._structure = FeatureStructure(feature_config, self._plan.features)
        self.core = VariableTables(
            self._plan, self._structure, self._arrays, lambda: self._built().growing
        )
        self._tables: _Tables | None = None
        self._mapped = None if mapped is None else os.fspath(mapped)
        if self._mapped is None:
            kept = ("float32", "bfloat16")
            require_dtypes(self._plan, kept, "TPUEmbeddingForServing")
        else:
            specs = self._plan.tables
            readers = open_tables(self._mapped, specs, verify=verify)
            lookup = FeatureLookup(self._plan, readers, any_batch_size=True)
            self._tables = _Tables([], lookup, {})
        freeze_configs(feature_config)

    @_do_not_convert
    def build(self) -> None:
        """Creates the tables and slots; the first lookup calls it if needed."""
        if self._tables is not None:
            return
        with tf.init_scope():
            variables = create_variables(self._plan, "/device:CPU:0")
            readers = {}
            growing = {
                spec.name: RestoredGrowingTable(spec, variables[spec.index])
                for spec in self._plan.growing
            }
            for spec, arrays in zip(self._plan.tables, variables, strict=True):
                stored = growing.get(spec.name)
                parts = [] if stored is None else [stored]
                table = stored_table(spec, [arrays], vocabulary=parts)
                for name, child in table.ids.objects(RowsVariable).items():
                    self._track_trackable(child, name)
                readers[spec.index] = table.reader if stored is None else stored.served
            lookup = FeatureLookup(self._plan, readers, any_batch_size=True)
            self._tables = _Tables(variables, lookup, growing)

    def __call__(self, features: Any, weights: Any = None) -> Any:
        """See `embedding_lookup`."""
        return self.embedding_lookup(features, weights)

    @_do_not_convert
    def embedding_lookup(self, features: Any, weights: Any = None) -> Any:
        """Looks features up.

        Args:
          features: Some or all features of the configuration, in its structure; see
            `serving_embedding_lookup`.
          weights: None, or the structure of `features` with weights or None.

        Returns:
          Activations in the structure of `features`, float32 [output shape..., dim].

        Raises:
          ValueError: If features or weights are refused; `serving_embedding_lookup`
            lists all errors.
        """
        lookup = self._built().lookup
        specs = _features_of(features, self._plan)
        return _look_up(lookup, specs, features, weights)

    @property
    def embedding_tables(self) -> dict[Any, tf.Variable]:
        """The table variables [vocabulary_size, dim], by the TableConfig passed.

        A growing table with n ids has a variable [n + 1, dim]: the rows in the order of
        the ids, and then the row that ids without one look up.
        """
        return {key: table["parameters"] for key, table in self.variables.items()}

    @property
    def variables(self) -> dict[Any, dict[str, tf.Variable]]:
        """A dict of its "parameters" and slots by name, for each TableConfig."""
        arrays = self._arrays()
        return {spec.key: arrays[spec.name] for spec in self._plan.tables}

    def _arrays(self) -> dict[str, dict[str, tf.Variable]]:
        self._require_variables()
        tables = zip(self._plan.tables, self._built().variables, strict=True)
        return {spec.name: table.arrays for spec, table in tables}

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            return children
        self._require_variables()
        # A SavedModel holds growing tables in the form that its graphs read.
        growing = self._built().growing
        return {
            name: growing[name].served if name in growing else child
            for name, child in children.items()
        }

    def _require_variables(self) -> None:
        if self._mapped is not None:
            raise RuntimeError(
                "This TPUEmbeddingForServing has no variables and cannot be saved: it "
                f"reads the tables of {self._mapped}. Serve that export, or create a "
                "TPUEmbeddingForServing without `mapped`."
            )

    def _built(self) -> _Tables:
        self.build()
        assert self._tables is not None
        return self._tables
