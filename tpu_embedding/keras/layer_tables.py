"""The tables of the layer: trained in the backward pass, or by Keras as weights."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tpu_embedding import engines
from tpu_embedding.checkpoint.stored import VariableTables
from tpu_embedding.config import DistributedOptions
from tpu_embedding.core import Core
from tpu_embedding.distribution import ProcessTopology, Topology
from tpu_embedding.embedding_base import per_replica
from tpu_embedding.engines import EmbeddingOptions, Prepared
from tpu_embedding.keras import gradient_hook
from tpu_embedding.keras.conversion import Features
from tpu_embedding.keras.gradient_hook import check_scale_is_known, unscaled
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.symbols import PLACEHOLDER
from tpu_embedding.layout.output_shapes import Shape, from_input
from tpu_embedding.layout.plan import Plan, require_dtypes
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.lookup.graph_checks import refuse
from tpu_embedding.serving.growing_tables import RestoredGrowingTable
from tpu_embedding.tables.initial import table_values
from tpu_embedding.tables.readers import TableReader, VariableReader
from tpu_embedding.tables.rows import PARAMETERS
from tpu_embedding.tables.variables import create_counter, create_state
from tpu_embedding.tables.vocabularies import Vocabulary
from tpu_embedding.tables.waiting import is_recording
from tpu_embedding.tf_configs import convert_sparse_core

# Graphs in which TensorFlow computes the gradients of tf.cond and of loops.
_CONTROL_FLOW = (".cond_v2", ".while_v2")
_CALLS_REMEMBERED = 1024  # Calls that may come between a call and its gradient.

_NO_TAPE = (
    "tpu_embedding.keras.TPUEmbedding was traced without a recording tf.GradientTape, "
    "as for evaluation and export, so no gradient can reach its tables. Open the tape "
    "before the tf.function is first called, or inside of it, or use a second "
    "tf.function for training. A subclassed model loaded from a SavedModel has only "
    "functions traced without a tape: create the model in code, and load its weights."
)
_FOR_SERVING = (
    "tpu_embedding.keras.TPUEmbedding was called with `serving_config`, which is for "
    "serving: such a call consists of TensorFlow ops, and no gradient can reach the "
    "tables through it. Train a model that calls the layer without it, or set "
    "`layer.trainable = False` to train the other layers of this model."
)


class LayerTables(Protocol):
    """The tables of a layer: `EngineTrainedTables` or `KerasTrainedTables`."""

    @property
    def core(self) -> Any:
        """What saves, serves and reads the tables; None if `build` is to create it."""

    def can_build(self) -> bool:
        """Returns whether `build` needs no shapes of inputs."""
        ...

    def build(self, layer: Any, input_shapes: Any) -> None:
        """Creates the tables.

        Args:
          layer: The layer that receives variables.
          input_shapes: The shapes of a replica's inputs, in the structure of the
            features, or None.

        Raises:
          ValueError: If the engine needs the shapes and an axis is unknown.
        """

    def variables(self) -> dict[str, Any]:
        """Returns all that is saved except growing tables, by name in checkpoints."""
        ...

    def parameters(self) -> dict[str, Any]:
        """Returns the variable with the rows of each table, by the table's name."""
        ...

    def stored(self) -> list[Any]:
        """Returns what stores the up-to-date tables, for exported graphs.

        These are tf.Variables, and a tf.Module for each growing table.

        Raises:
          NotImplementedError: If a table grows and the caller is not `model.export`.
        """
        ...

    def refusing(self, *, trainable: bool) -> contextlib.AbstractContextManager[None]:
        """Tells other processes of an error before a look-up that is collective."""
        ...

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        """Looks up the features of the layer.

        Args:
          values: The ids of each feature.
          weights: The weights of each feature, or None for one without.
          trainable: Whether a gradient may update the tables.

        Returns:
          The activations of each feature, float32.
        """
        ...

    def serve(
        self,
        plan: Plan,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        """Looks up the features of any plan over the tables with TensorFlow's ops.

        Args:
          plan: A plan whose tables are those of the layer.
          values: As for `look_up`.
          weights: As for `look_up`.
          trainable: As for `look_up`; a gradient raises LookupError.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One lookup of which a gradient may be computed.

    Attributes:
      values: The ids of each feature.
      weights: The weights of each feature, or None.
      activation: One of the activations.
      looked_up: What the update takes from the lookup; not a tensor in some engines.
      number: int64 scalar of a call in a graph, else None; see `_CallNumbers`.
    """

    values: Sequence[Any]
    weights: Sequence[Any]
    activation: tf.Tensor
    looked_up: Prepared
    number: tf.Tensor | None

    def is_visible_in(self, graph: Any) -> bool:
        """Returns whether `graph` can use `looked_up`, made in it or an outer graph."""
        if hasattr(self.activation, "numpy"):
            return True  # Created eagerly.
        while graph is not None and graph is not self.activation.graph:
            graph = getattr(graph, "outer_graph", None)
        return graph is not None


class Mode(enum.Enum):
    """What a call of the layer does."""

    SERVE = enum.auto()  # A lookup by TensorFlow's ops, from tables as they are.
    LOOK = enum.auto()  # A lookup by the engine, which no update follows.
    TRAIN = enum.auto()  # A lookup by the engine; its gradient updates the tables.


def mode(
    *,
    recording: bool,
    trainable: bool,
    in_program: bool,
    in_replica: bool,
    exportable: bool,
) -> Mode:
    """Chooses what a call does.

    Args:
      recording: Whether a tape records.
      trainable: Whether the layer is to be trained.
      in_program: Whether the call is in a TPU program, which cannot be exported.
      in_replica: Whether the call is in strategy.run, or there is only one replica.
      exportable: Whether the graph may be exported, so must use TensorFlow's ops only.
    """
    if recording and trainable:
        return Mode.TRAIN
    if recording or in_program or (in_replica and not exportable):
        return Mode.LOOK
    return Mode.SERVE


class EngineTrainedTables:
    """Tables of an engine, which updates them in the backward pass.

    See `LayerTables` of `layer.py`.

    Attributes:
      core: The tables; None until `build` if that needs the shapes of inputs.
    """

    def __init__(
        self,
        features: Features,
        topology: Topology,
        *,
        pipelined: bool,
        batch_size: int | None,
        sparse_core: Any,
        loss_scale: Any,
        check_numerics: bool,
        distributed: DistributedOptions | None,
    ) -> None:
        """Checks the arguments of the layer; `build` creates the tables."""
        self._features = features
        self._topology = topology
        self._loss_scale = loss_scale
        self._check_numerics = check_numerics
        self._batch_size = per_replica(batch_size, topology)
        self._options = EmbeddingOptions(
            pipelined=pipelined,
            check_numerics=check_numerics,
            sparse_core=convert_sparse_core(sparse_core),
            distributed=DistributedOptions() if distributed is None else distributed,
            batch_size=batch_size,
        )
        self._engine_class = engine = engines.choose(topology, features.plan)
        self.core: Any = None
        shapes = self._output_shapes(None)
        if None not in shapes or not (engine.stores_stacks or engine.needs_shapes):
            self.core = self._create_core(shapes if engine.stores_stacks else None)
        for table in features.plan.tables_with_clock:
            raise NotImplementedError(
                f"Table {table!r} has clock=True, but a training step of Keras cannot "
                "pass a clock. Use te.TPUEmbedding, or count `max_age` in updates with "
                "clock=False."
            )
        self._variables: dict[str, Any] = {}
        self._growing: dict[str, Vocabulary] = {}
        self._exported: dict[str, RestoredGrowingTable] = {}
        self._placeholder: Any = None
        self._numbers: Any = None

    def can_build(self) -> bool:
        return self.core is not None

    def build(self, layer: Any, input_shapes: Any) -> None:
        """See `LayerTables.build`; it also creates the layer's placeholder variable."""
        if self.core is None:
            shapes = self._output_shapes(input_shapes)
            for spec, shape in zip(self._features.plan.features, shapes, strict=True):
                if shape is None or None in shape:
                    raise ValueError(
                        f"Feature {spec.path}: a TPU needs the shape of each input "
                        "before the first step. Pass the layer `batch_size`, build the "
                        "model with keras.Input(batch_size=...) or with tensors of "
                        "static shape, both with the batch size of a replica, or set "
                        "FeatureConfig(output_shape)."
                    )
            self.core = self._create_core(shapes)
        self._placeholder = keras_api.add_weight(layer, PLACEHOLDER, (), "zeros")
        self._variables = self.core.logical_variables()
        with tf.init_scope():
            self._numbers = _CallNumbers()
        self._growing = self.core.growing()
        keras_api.set_state(layer, self._variables)

    def variables(self) -> dict[str, Any]:
        return dict(self._variables)

    def parameters(self) -> dict[str, Any]:
        return self.core.parameters()

    def stored(self) -> list[Any]:
        if self._growing and not gradient_hook.is_export():
            raise NotImplementedError(
                f"The tables {', '.join(self._growing)} grow: only `model.export` and "
                "tpu_embedding.serving.export(layer, ...) can save them as a "
                "SavedModel."
            )
        self.core.retrieve()
        tables = self.core.tables()
        static = [tables[spec.name] for spec in self._features.plan.static]
        variables = [v for table in static for v in table.reader.variables]
        return [*variables, *(table.served for table in self._exported.values())]

    def _readers(self) -> dict[int, TableReader]:
        """Returns readers for TensorFlow's ops by table index; copies growing tables.

        Raises:
          NotImplementedError: If a table grows and the caller is not `model.export`.
        """
        tables = self.core.tables()
        specs = self._features.plan.tables
        readers = {spec.index: tables[spec.name].reader for spec in specs}
        if self._growing and not gradient_hook.is_export():
            raise NotImplementedError(
                f"The tables {', '.join(self._growing)} grow, and `serving_config` "
                "does not support growing tables. Call the layer without it."
            )
        with tf.init_scope():
            for spec in self._features.plan.growing:
                if spec.name not in self._exported:
                    self._exported[spec.name] = RestoredGrowingTable.alone(spec)
                table = self._exported[spec.name]
                table.write(self._growing[spec.name].read())
                readers[spec.index] = table.served
        return readers

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        chosen = self._mode(trainable)
        may_serve = not self._growing or gradient_hook.is_export()
        if chosen is Mode.SERVE and may_serve:
            plan = self._features.plan
            return self.serve(plan, values, weights, trainable=trainable)
        watched = self.core.require_weight_gradients(weights)
        activations, looked_up = self.core.look_up(
            values, weights, training=chosen is Mode.TRAIN
        )
        if chosen is Mode.TRAIN:
            activations = self._hooked(values, weights, activations, looked_up)
        elif watched:
            # The ops pass the batch on as a variant, which has no gradient.
            activations = [tf.stop_gradient(activation) for activation in activations]
        if chosen is not Mode.TRAIN and trainable:
            # tf.recompute_grad, and so keras.RematScope, computes gradients only of
            # variables that were read while nothing was recorded.
            tf.convert_to_tensor(self._placeholder)
        if chosen is Mode.SERVE and trainable and not tf.executing_eagerly():
            activations = gradient_hook.refuse_gradient(
                self._placeholder, activations, _NO_TAPE
            )
        return self.core.with_weight_gradients(activations, watched, values, weights)

    def refusing(self, *, trainable: bool) -> contextlib.AbstractContextManager[None]:
        synchronizes = self.core.engine_class.synchronizes
        if not synchronizes or self._mode(trainable) is Mode.SERVE:
            return contextlib.nullcontext()
        return self.core.refusing("lookup")

    def _mode(self, trainable: bool) -> Mode:
        return mode(
            recording=is_recording(),
            trainable=trainable,
            in_program=self._topology.program() is not None,
            in_replica=self._topology.replica() is not None,
            exportable=self._may_be_exported(),
        )

    def _may_be_exported(self) -> bool:
        """Returns whether the graph may be saved, so must use TensorFlow's ops only."""
        if tf.executing_eagerly() or gradient_hook.is_evaluation():
            return False
        # In a job no process has whole tables, and exported functions have no replicas.
        is_part = isinstance(self._topology, ProcessTopology)
        return not is_part or self._topology.run_context() is None

    def _hooked(
        self,
        values: Sequence[Any],
        weights: Sequence[Any],
        activations: list[tf.Tensor],
        looked_up: Prepared,
    ) -> list[tf.Tensor]:
        """Returns the activations, whose gradient updates the tables."""
        check_scale_is_known(self._loss_scale)
        # A TPU program is traced as a whole, so `looked_up` tells calls apart.
        in_program = self._topology.program() is not None
        numbered = not (tf.executing_eagerly() or in_program)
        number = self._numbers.take_next() if numbered else None
        call = _Call(values, weights, activations[0], looked_up, number)
        return gradient_hook.call_on_gradient(
            self._placeholder,
            activations,
            lambda gradients: self._backward(call, gradients),
        )

    def serve(
        self,
        plan: Plan,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        if self._topology.program() is not None:
            raise NotImplementedError(
                "`serving_config` is for serving: under a TPU strategy pass it only "
                "outside of strategy.run. Inside, call the layer without it."
            )
        self.core.retrieve()
        readers = self._readers()
        own = plan is self._features.plan
        # Outside of replicas, Keras also traces models with a replica's batch size.
        checked = own and self._topology.replica() is not None
        lookup = FeatureLookup(
            plan,
            readers,
            check_numerics=self._check_numerics,
            batch_size=self._batch_size if checked else None,
            any_batch_size=not own,
            inputs=self.core.inputs if own else None,
        )
        activations = lookup(plan.features, values, weights)
        if not trainable or tf.executing_eagerly():
            return activations
        reason = _NO_TAPE if own else _FOR_SERVING
        return gradient_hook.refuse_gradient(self._placeholder, activations, reason)

    def _backward(self, call: _Call, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Applies the gradients of a call; returns tensors that wait for the update."""
        self.core.require_optimizers("The layer", "set `layer.trainable = False`")
        # The gradient of tf.gather is IndexedSlices.
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        dense = unscaled(dense, self._loss_scale, check_numerics=self._check_numerics)
        graph = tf.compat.v1.get_default_graph()
        if call.is_visible_in(graph):
            self.core.update(call.looked_up, dense)
            return []
        if type(graph).__module__.endswith(_CONTROL_FLOW):
            raise NotImplementedError(
                "The layer was called inside tf.cond, tf.map_fn or a TensorFlow loop, "
                "under a tape that was opened outside of it. Call the layer before the "
                "loop or condition, with all ids at once, or open the tape inside."
            )
        return [self._look_up_again_and_update(call, dense)]

    def _look_up_again_and_update(
        self, call: _Call, gradients: list[tf.Tensor]
    ) -> tf.Tensor:
        """Updates in the gradient of a function, which cannot use `looked_up`.

        Whatever a function passes to its gradient needs a gradient itself, and
        `looked_up` has none. An inner tf.function adds the control dependencies that
        order stateful ops and keep them from being pruned; a gradient's graph has none.

        Returns:
          A tensor that waits for the update.
        """

        @tf.function(autograph=False)
        def update() -> tf.Tensor:
            self._numbers.use(call.number)
            _, looked_up = self.core.look_up(call.values, call.weights)
            self.core.update(looked_up, gradients)
            return tf.constant(True)

        return update()

    def _output_shapes(self, input_shapes: Any) -> list[Shape | None]:
        """Returns the output shape of each feature, as far as it is known."""
        features, structure = self._features.plan.features, self._features.structure
        inputs = [None] * len(features)
        if input_shapes is not None:
            inputs = structure.for_plan(
                structure.flatten_shapes("input_shape", input_shapes)
            )
        shapes = []
        for spec, shape in zip(features, inputs, strict=True):
            config, size = spec.config, self._batch_size
            found = config.output_shape
            if found is None and size is not None:
                length = config.max_sequence_length
                found = (size, length) if length else (size,)
            if found is None and shape is not None and len(shape):
                found = from_input(spec.path, config, tuple(shape))
            shapes.append(found)
        return shapes

    def _create_core(self, shapes: Sequence[Any] | None) -> Core:
        """Creates the tables; `shapes` are the features' output shapes, or None."""
        plan, size = self._features.plan, self._batch_size
        if shapes is not None:
            features = []
            for spec, shape in zip(plan.features, shapes, strict=True):
                config, source = spec.config, spec.shape_source
                if config.max_sequence_length:
                    size = shape[0]
                elif config.output_shape is None:
                    config = dataclasses.replace(config, output_shape=shape)
                    source = "the layer's batch_size"
                    if self._batch_size is None:
                        source = (
                            "the inputs of the model (their batch size is that of one "
                            "replica, also in keras.Input)"
                        )
                features.append(
                    dataclasses.replace(spec, config=config, shape_source=source)
                )
            plan = dataclasses.replace(plan, features=tuple(features))
        structure = self._features.structure
        core = Core(
            plan,
            structure,
            self._options,
            topology=self._topology,
            engine_class=self._engine_class,
            made_by="keras.TPUEmbedding",
        )
        core.set_batch_size(size)
        return core


class _CallNumbers:
    """Numbers calls in graphs, to refuse a second gradient of one call.

    The engine refuses it too, but what it needs for that cannot pass from the graph of
    a function to the graph of its gradient, while a number can. Each cell keeps the
    last used number of those that map to it; numbers only grow.
    """

    def __init__(self) -> None:
        """Creates the state, one for all replicas."""
        self._count = create_counter("calls", "/device:CPU:0")
        with tf.device("/device:CPU:0"):
            self._used = create_state("used", tf.zeros([_CALLS_REMEMBERED], tf.int64))

    def take_next(self) -> tf.Tensor:
        """Returns the number of a new call, an int64 scalar."""
        return tf.identity(self._count.assign_add(1))  # Read now, not when used.

    def use(self, number: tf.Tensor) -> None:
        """Marks a number as used; call it in a tf.function.

        Raises:
          tf.errors.FailedPreconditionError: If the number was used before, or more
            than `_CALLS_REMEMBERED` calls came in between.
        """
        cell = number % _CALLS_REMEMBERED
        used = tf.gather(self._used, cell) >= number
        text = (
            "The gradients of this lookup were applied already; each lookup takes them "
            "once. Call the layer again, or take all gradients with one tape.gradient "
            f"call, at most {_CALLS_REMEMBERED} calls later."
        )
        with tf.control_dependencies(refuse(tf.cast(used, tf.int32), ["", text])):
            self._used.scatter_nd_update([[cell]], [number])


class KerasTrainedTables(VariableTables):
    """Tables that are trainable weights of the layer, and their core.

    See `LayerTables` of `layer.py`.
    """

    def __init__(
        self, features: Features, topology: Topology, *, check_numerics: bool
    ) -> None:
        """Checks the plan; `build` creates the tables."""
        if topology.tpu is not None:
            raise NotImplementedError(
                "`trainable_tables=True` looks up with TensorFlow ops that TPU "
                "programs do not support. Leave it at False under a TPU strategy, "
                "where each table has its own optimizer, or use "
                "keras.layers.Embedding."
            )
        plan = features.plan
        require_dtypes(plan, ("float32",), "trainable_tables=True")
        for spec in plan.tables:
            if spec.optimizer is not None:
                raise ValueError(
                    "With `trainable_tables=True` the optimizer of the model trains "
                    f"the tables, so table {spec.name} cannot have its own optimizer. "
                    "Pass `optimizer=None` to the layer and leave "
                    "TableConfig.optimizer at None."
                )
        super().__init__(
            plan, features.structure, self._arrays, check_numerics=check_numerics
        )
        self._weights: dict[str, Any] = {}

    @property
    def core(self) -> KerasTrainedTables:
        return self

    def can_build(self) -> bool:
        return True

    def build(self, layer: Any, input_shapes: Any) -> None:
        del input_shapes
        for spec in self.plan.tables:
            values = table_values(spec)
            self._weights[spec.name] = keras_api.add_weight(
                layer, values.name, values.shape, values.initializer
            )

    def variables(self) -> dict[str, Any]:
        return dict(self._weights)

    def parameters(self) -> dict[str, Any]:
        return self.variables()

    def _arrays(self) -> dict[str, dict[str, Any]]:
        return {name: {PARAMETERS: w.value} for name, w in self._weights.items()}

    def start_counting(self, every: int) -> None:
        """Refuses telemetry."""
        del every
        raise NotImplementedError(
            "Telemetry counts the updates of the tables' own optimizers. With "
            "`trainable_tables=True` the optimizer of the model trains the tables: "
            "leave `trainable_tables` at False."
        )

    def stored(self) -> list[Any]:
        return [keras_api.value_of(weight) for weight in self._weights.values()]

    def refusing(self, *, trainable: bool) -> contextlib.AbstractContextManager[None]:
        """See `LayerTables.refusing`: a look-up here is not collective."""
        del trainable
        return contextlib.nullcontext()

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        return self.serve(self.plan, values, weights, trainable=trainable)

    def serve(
        self,
        plan: Plan,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        del trainable  # Keras leaves frozen weights out of trainable_variables.
        lookup = FeatureLookup(
            plan,
            {
                spec.index: VariableReader(keras_api.value_of(self._weights[spec.name]))
                for spec in plan.tables
            },
            check_numerics=self.check_numerics,
            any_batch_size=plan is not self.plan,
            inputs=self.inputs if plan is self.plan else None,
        )
        return lookup(plan.features, values, weights)
