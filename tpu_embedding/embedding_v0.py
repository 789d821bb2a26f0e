"""TPUEmbeddingV0: tables as ordinary weights, looked up by plain ops."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_context

from tpu_embedding import distribution, errors
from tpu_embedding.checkpoint import errors as checkpoint_errors
from tpu_embedding.checkpoint.stored import VariableTables
from tpu_embedding.checkpoint.trackable import RestoresLayouts
from tpu_embedding.core import do_not_convert
from tpu_embedding.engines.cpu_base import refuse_layouts
from tpu_embedding.layout.plan import Plan, TableSpec, make_plan, require_dtypes
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.packing import flatten_batch
from tpu_embedding.tables.initial import slot_values, table_values
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.tables.rows import PARAMETERS, by_checkpoint_name
from tpu_embedding.tf_configs import convert_features, convert_optimizer, freeze_configs


class TPUEmbeddingV0(RestoresLayouts):
    """Looks up embedding tables that your own optimizer trains, under any strategy.

    A drop-in for tf.tpu.experimental.embedding.TPUEmbeddingV0 that runs under every
    strategy (but ParameterServerStrategy must have no partitioner: it divides tables).
    Each replica has a copy of each table, a trainable variable: take its
    gradient with a tape and train it with any optimizer, e.g. one of Keras. Inside
    strategy.run of TPUs the host checks and pads the batch and the TPU looks it up;
    distribute data sets with `experimental_fetch_to_device=False`, as TensorFlow's
    class requires. The gradient then names row 0, with zeros, for each sample without
    entries, which matters to optimizers that change every row they are given. The
    numbers of a lookup are those of docs/semantics.md:

    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer(), combiner="sum")
    >>> embedding = te.TPUEmbeddingV0({"seen": te.FeatureConfig(films)}, None)
    >>> table = embedding.embedding_tables[films]
    >>> with tf.GradientTape() as tape:
    ...     activations = embedding({"seen": tf.constant([[3, 5], [1, 1]])})
    >>> activations["seen"].numpy().tolist()
    [[8.0, 8.0], [2.0, 2.0]]
    >>> gradient = tf.convert_to_tensor(tape.gradient(activations, table))
    >>> gradient[:, 0].numpy().tolist()
    [0.0, 2.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]

    Tables and slots have the names of TPUEmbedding in checkpoints, so that each can
    restore what the other saved.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any = None,
        *,
        invalid_ids: str | None = None,
        check_numerics: bool = False,
    ) -> None:
        """Reads the configuration; tables are made by build or the first lookup.

        Args:
          feature_config: A FeatureConfig or a nested dict, list, tuple or namedtuple
            of them, of this package or of tf.tpu.experimental.embedding.
          optimizer: Gives its slots to tables without an optimizer of their own, by
            its `slot_variable_creation_fn` if it has one. It is not applied, so its
            other options have no effect. With None such tables have no slots.
          invalid_ids: The policy for tables of tf.tpu.experimental.embedding: "error"
            (also if None), "drop" or "mod". A TableConfig of this package has its own.
          check_numerics: Refuse weights that are not finite.

        Raises:
          ValueError: If the configuration is wrong.
          TypeError: If an argument is of the wrong type.
          NotImplementedError: If an option is not supported.
        """
        errors.check_flag("check_numerics", check_numerics)
        converted = convert_features(feature_config, invalid_ids)
        self._plan: Plan = make_plan(*converted, convert_optimizer(optimizer))
        self._structure = FeatureStructure(feature_config, self._plan.features)
        refuse_layouts("plain", self._plan)
        require_dtypes(self._plan, ("float32",), "TPUEmbeddingV0")
        self.core = VariableTables(
            self._plan, self._structure, self._built, check_numerics=check_numerics
        )
        self._topology = distribution.without_engine()
        self._variables: dict[str, dict[str, Any]] = {}
        freeze_configs(feature_config)

    @do_not_convert
    def build(self) -> None:
        """Creates the tables and slots; the first lookup calls it if needed."""
        if self._variables:
            return
        strategy = self._topology.strategy
        inside = self._topology.replica() is not None and tf.distribute.has_strategy()
        # A replica is in the scope already, and must not open it again.
        scope = contextlib.nullcontext() if inside else strategy.scope()
        with tf.init_scope(), scope:
            made = {spec.name: _create_table(spec) for spec in self._plan.tables}
        for name, variable in by_checkpoint_name(made).items():
            # Each replica of a MirroredStrategy gets here, with the same variables.
            self._track_trackable(variable, name, overwrite=True)
        self._variables = made

    @property
    def check_numerics(self) -> bool:
        """Whether weights must be finite."""
        return self.core.check_numerics

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """The tables, as trainable float32 variables [vocabulary_size, dim].

        The keys are the TableConfigs that the user passed.
        """
        return {key: arrays[PARAMETERS] for key, arrays in self.variables.items()}

    @property
    def variables(self) -> dict[Any, dict[str, Any]]:
        """A dict of "parameters" and slots by name, for each TableConfig."""
        made = self._built()
        return {spec.key: made[spec.name] for spec in self._plan.tables}

    @do_not_convert
    def __call__(self, features: Any, weights: Any = None) -> Any:
        """See `embedding_lookup`."""
        return self.embedding_lookup(features, weights)

    @do_not_convert
    def embedding_lookup(self, features: Any, weights: Any = None) -> Any:
        """Looks up the features of the replica that calls it.

        Args:
          features: In the structure of `feature_config`, int32 or int64 (or whole
            numbers of a floating point dtype): tf.Tensor [B] or [..., k],
            tf.SparseTensor [..., k] or tf.RaggedTensor [B, None],
            in any mix; or what `te.pack` gave.
          weights: None, or the same structure with floating point weights in the layout
            of each feature, or None for a feature without weights.

        Returns:
          The activations in the structure of `feature_config`, float32
          [output shape..., dim] each.

        Raises:
          TypeError: If a container or dtype is of the wrong type.
          ValueError: If a structure, rank or static shape does not fit.
          tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
        """
        self.build()
        specs = self._plan.features
        values, flat = flatten_batch(self._structure, features, weights)
        readers = {
            spec.index: VariableReader(self._variables[spec.name][PARAMETERS])
            for spec in self._plan.tables
        }
        lookup = FeatureLookup(
            self._plan,
            readers,
            check_numerics=self.check_numerics,
            inputs=self.core.inputs,
        )
        if self._topology.program() is None:
            return self._structure.pack_joined(lookup(specs, values, flat))
        on_host = self._topology.on_host
        found = lookup.in_program(specs, values, flat, on_host)
        return self._structure.pack_joined(found)

    def _built(self) -> dict[str, dict[str, Any]]:
        self.build()
        return self._variables

    def __deepcopy__(self, memo: Any) -> Any:
        """Raises TypeError: the strategy that holds the tables cannot be copied."""
        raise checkpoint_errors.deep_copy(type(self).__name__)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        # This is the last chance to make tables that are to be saved or restored, as
        # in `TrackableTables`: otherwise they would be left out silently.
        if tf.executing_eagerly() and not checkpoint_context.in_async_metrics_context():
            self.build()
        return super()._trackable_children(save_type, **kwargs)


def _create_table(spec: TableSpec) -> dict[str, Any]:
    """Creates a table and its slots with the creators of the strategy in scope."""
    parameters = tf.Variable(table_values(spec).whole, trainable=True, name=spec.name)
    if not isinstance(parameters, tf.Variable):
        raise NotImplementedError(
            f"Table {spec.name} would be split by the strategy's "
            "`variable_partitioner`, so each lookup would read the whole table. Create "
            "ParameterServerStrategy without a partitioner, or with one that leaves "
            "this table whole."
        )
    return {PARAMETERS: parameters, **_create_slots(spec, parameters)}


def _create_slots(spec: TableSpec, parameters: Any) -> dict[str, Any]:
    if spec.optimizer is None:
        return {}
    slots = spec.optimizer.slots
    create = spec.optimizer.slot_variable_creation_fn
    if create is not None:
        initializers = [tf.constant_initializer(slot.initial_value) for slot in slots]
        return dict(create(parameters, [slot.name for slot in slots], initializers))
    values = {slot.name: slot_values(spec, slot) for slot in slots}
    return {
        name: tf.Variable(start.whole(), trainable=False, name=start.name)
        for name, start in values.items()
    }
