"""What tests call in the processes of a job: promises that meet each other."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import time
from typing import Any

import tensorflow as tf
from multi_process import training
from multi_process.calls import failure, rank
from multi_process.training import Case
from steps import train_on

import tpu_embedding as te

REFUSED = ("id", "weight", "gradient")  # What is wrong before each step, in turn.


def _is_last(strategy: Any) -> bool:
    return rank(strategy) == strategy.num_replicas_in_sync - 1


def _two_calls(strategy: Any, case: Case, embedding: Any) -> tuple[Any, Any]:
    """Returns the two halves of a step, each in strategy.run.

    The first takes features and weights; the second what the first returned and a
    factor of the gradients, and returns the activations.
    """

    def look_up(features: Any, weights: Any) -> Any:
        if case.version == 1:
            embedding.enqueue(features, weights)
            return embedding.dequeue(), ()
        if case.version == 2:
            return embedding(features, weights)
        return (features, weights), ()  # Keras looks up under a tape.

    def apply(found: Any, preserved: Any, factor: tf.Tensor) -> Any:
        def scaled(activations: Any) -> Any:
            return {
                name: None if gradient is None else factor * gradient
                for name, gradient in training.gradients(activations).items()
            }

        if case.version == 1:
            embedding.apply_gradients(scaled(found))
            return found
        if case.version == 2:
            embedding.apply_gradients(scaled(found), preserved)
            return found
        with tf.GradientTape() as tape:
            activations = embedding(*found)
        training.backward(tape, embedding, activations, scaled(activations))
        return activations

    def runner(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            return strategy.run(function, args=arguments)

        return tf.function(run, reduce_retracing=True) if case.graph else run

    return runner(look_up), runner(apply)


def _restarted(strategy: Any, case: Case, embedding: Any, path: str) -> Any:
    """Makes a new embedding from a checkpoint of this one."""
    restarted = training.create(strategy, case)
    if case.version < 3:
        te.checkpoint.save(embedding, path)
        te.checkpoint.restore(restarted, path)
        return restarted
    path = tf.train.Checkpoint(layer=embedding).write(f"{path}-{rank(strategy)}")
    restarted.build()
    status = tf.train.Checkpoint(layer=restarted).read(path)
    status.assert_existing_objects_matched()
    return restarted


def _in_turn(look_up: Any, apply: Any, batch: Any, factor: tf.Tensor) -> None:
    apply(*look_up(*batch), factor)


def train_around_refusals(strategy: Any, case: Case, path: str) -> Any:
    """Trains; a step is refused before each step; half way a checkpoint is restored.

    Returns the errors, the activations of the other steps, whole tables and slots.
    """
    embedding = training.create(strategy, case)
    look_up, apply = _two_calls(strategy, case, embedding)
    bad = _is_last(strategy)
    raised, activations = [], []
    for number in range(case.steps):
        if number == case.steps // 2:
            embedding = _restarted(strategy, case, embedding, path)
            look_up, apply = _two_calls(strategy, case, embedding)
        features, weights = training.batch(case, number, rank(strategy))
        wrong = REFUSED[number % len(REFUSED)]
        factor = tf.constant(1.0)
        others = (dict(features), dict(weights))
        if bad and wrong == "id":
            others[0]["dense"] = tf.zeros_like(features["dense"]) + case.rows[1]
        if bad and wrong == "weight":
            others[1]["many"] = weights["many"] * float("nan")
        if wrong == "gradient":
            found = look_up(features, weights)
            worse = tf.constant(float("nan")) if bad else factor
            raised.append(failure(functools.partial(apply, *found, worse)))
        else:
            step = functools.partial(_in_turn, look_up, apply, others, factor)
            raised.append(failure(step))
            found = look_up(features, weights)
        values = apply(*found, factor)
        activations.append({name: [v.numpy()] for name, v in values.items()})
    embedding.core.flush()
    return raised, activations, training.tables_of(embedding)


def _embedding(
    strategy: Any, version: int = 1, *, build: bool = True, **arguments: Any
) -> Any:
    """Makes an embedding of one table, whose values are its row numbers."""
    table = te.TableConfig(
        8, 2, te.RowIdInitializer(), combiner="sum", name="films", placement="rows"
    )
    kind: Any = te.TPUEmbedding if version == 1 else te.TPUEmbeddingV2
    options = te.DistributedOptions(timeout_seconds=5)
    with strategy.scope():
        embedding = kind(
            {"film": te.FeatureConfig(table)},
            te.SGD(0.5),
            distributed_options=options,
            **arguments,
        )
    if build:
        embedding.build()
    return embedding


def _step(embedding: Any) -> list[float]:
    """Trains a good step of any class; returns the first column of the table."""
    train_on(embedding, {"film": tf.constant([1, 2])})
    (table,) = embedding.embedding_tables.values()
    return table.numpy()[:, 0].tolist()


def step_late(strategy: Any, seconds: float) -> list[float]:
    """Trains a step that the last process begins later than the others."""
    embedding = _embedding(strategy)
    if _is_last(strategy):
        time.sleep(seconds)
    return _step(embedding)


def train_until_preempted(
    strategy: Any, folder: str, steps: int, preempted_at: int
) -> tuple[int, list[float]]:
    """Trains under TensorFlow's handler; the last process gets SIGTERM before a step.

    Returns the step of the checkpoint it began with, and the first column at the end.
    """
    embedding = _embedding(strategy)
    handler = tf.distribute.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, tf.train.Checkpoint(embedding=embedding), folder
    )
    begun = handler.total_run_calls
    for number in range(steps):
        if _is_last(strategy) and number == preempted_at:
            os.kill(os.getpid(), signal.SIGTERM)
        table = handler.run(_step, embedding)
    return begun, table


def refuse_inputs(strategy: Any) -> list[tuple[str, str, float]]:
    """Enters each bad input in the last process; returns the errors, and when."""
    from reliability.bad_inputs import BY_TYPE, BY_VALUE, DIM, ROWS, Bad

    films = te.TableConfig(ROWS, DIM, te.RowIdInitializer(), name="films")
    config = {"bad": te.FeatureConfig(films), "good": te.FeatureConfig(films)}
    options = te.DistributedOptions("rows", timeout_seconds=5)
    arguments: Any = {"check_numerics": True, "distributed_options": options}
    with strategy.scope():
        first = te.TPUEmbedding(config, te.SGD(0.5), **arguments)
        second = te.TPUEmbeddingV2(config, te.SGD(0.5), **arguments)
    first.build()
    second.build()
    entries: list[Any] = [
        first.enqueue,
        second,
        lambda features, weights: second.dequeue(second.enqueue(features, weights)),
    ]
    good = tf.constant([1, 2])
    more = [
        Bad("half", tf.constant([1.5, 2.0]), ()),
        Bad("not_a_number", tf.constant([float("nan"), 2.0]), ()),
        Bad("nothing", None, ()),
        Bad("weights_of_strings", good, (), tf.constant(["a", "b"])),
    ]
    found = []
    for bad in [*BY_TYPE, *BY_VALUE, *more]:
        for call in entries:
            given = (good, None if bad.weights is None else tf.ones([2]))
            if _is_last(strategy):
                given = (bad.value, bad.weights)
            features = {"bad": given[0], "good": good}
            weights = None if given[1] is None else {"bad": given[1], "good": None}
            begin = time.monotonic()
            raised = failure(lambda c=call, f=features, w=weights: c(f, w))
            found.append((*raised, time.monotonic() - begin))
    return found


def refuse_calls(strategy: Any, folder: str) -> dict[str, tuple[Any, Any]]:
    """Makes calls that are wrong in the last process.

    Returns by what is wrong the error, and the tables after a step that follows.
    """
    bad = _is_last(strategy)
    first, second = _embedding(strategy), _embedding(strategy, 2)
    ids = tf.constant([1, 2])

    def weights(embedding: Any, function: Any) -> Any:
        return lambda: function(
            {"film": ids}, {"worse" if bad else "film": tf.ones([2])}
        )

    def traced(embedding: Any) -> Any:
        @tf.function
        def step() -> None:
            """Fails while it is traced, when the others run it."""
            gradients = {"film": tf.ones([2, 3 if bad else 2])}
            if embedding is first:
                train_on(first, {"film": ids}, gradients)
            else:
                second.apply_gradients(gradients, second({"film": ids})[1])

        return step

    def nested() -> None:
        inner = traced(first)
        tf.function(inner)()

    def evaluated() -> None:
        first.enqueue({"film": ids}, training=not bad)

    def taken_apart() -> None:
        """Looks up in the last process where the others update."""
        activations, preserved = second({"film": ids})
        if bad:
            second({"film": ids})
        else:
            second.apply_gradients({"film": activations["film"]}, preserved)

    def read() -> None:
        """Reads other rows in the last process."""
        rows = first.core.tables()["films"].rows["parameters"]
        rows.read(0, 4 if bad else 8)

    calls = {
        "features": lambda: first.enqueue({"worse" if bad else "film": ids}),
        "weights": weights(first, first.enqueue),
        "weights of V2": weights(second, second),
        "traced": traced(first),
        "traced, in a function": nested,
        "traced, of V2": traced(second),
        "training": evaluated,
        "apply_gradients": taken_apart,
        "rows": read,
        "save": lambda: te.checkpoint.save(first, f"{folder}/save{bad}"),
        "restore": lambda: te.checkpoint.restore(first, f"{folder}/restore{bad}"),
        "slots": lambda: te.checkpoint.save(first, f"{folder}/slots", slots=bad),
        "export": lambda: te.serving.export(
            first, f"{folder}/exported", storage="int8" if bad else "float32"
        ),
    }
    found = {}
    for name, call in calls.items():
        raised = failure(call)
        found[name] = (raised, [_step(first), _step(second)])
    return found


def call_alone(strategy: Any) -> dict[str, tuple[Any, list[float]]]:
    """Makes a call in the last process while others look up; an update is pending.

    Returns by the call what it raised, and the table after one more step.
    """
    found = {}
    features = {"film": tf.constant([1, 2])}
    for name in ("flush", "reset", "embedding_tables", "apply_gradients"):
        embedding = _embedding(strategy, 2, pipeline_execution_with_tensor_core=True)
        activations, preserved = embedding(features)
        gradients = {"film": tf.ones_like(activations["film"])}
        embedding.apply_gradients(gradients, preserved)
        alone: dict[str, Any] = {
            "embedding_tables": lambda e=embedding: e.embedding_tables,
            "apply_gradients": functools.partial(
                embedding.apply_gradients, gradients, preserved
            ),
        }
        call = alone.get(name) or getattr(embedding, name)
        look_up = functools.partial(embedding, features)
        raised = failure(call if _is_last(strategy) else look_up)
        found[name] = raised, _step(embedding)
    return found


def forget_a_gradient(strategy: Any) -> list[tuple[Any, list[float]]]:
    """Catches an error of its own in each process in turn, then begins the next step.

    Outside of `strategy.run`, where a step is not known to be another one, the next
    call of this process raises.
    """
    features = {"film": tf.constant([1, 2])}
    found = []
    for number in range(2 * strategy.num_replicas_in_sync):
        replicated, turn = divmod(number, strategy.num_replicas_in_sync)
        embedding = _embedding(strategy)
        run = strategy.run if replicated else lambda function: function()

        def step(embedding: Any = embedding, forgets: bool = False) -> None:
            embedding.enqueue(features)
            with tf.GradientTape():
                activations = embedding.dequeue()
            if not forgets:
                embedding.apply_gradients({"film": tf.ones_like(activations["film"])})

        forgets = rank(strategy) == turn
        first = functools.partial(run, functools.partial(step, forgets=forgets))
        raised = failure(first)
        if replicated:
            run(step)
        else:
            raised = (
                failure(lambda run=run, step=step: run(step)) if forgets else raised
            )
            embedding.reset()
            run(step)
        (table,) = embedding.embedding_tables.values()
        found.append((raised, table.numpy()[:, 0].tolist()))
    return found


def refuse_a_structure(strategy: Any) -> tuple[Any, list[float]]:
    """Calls a Keras layer with another structure in the last process.

    Returns what the call raised, and the activations of the next one.
    """
    table = te.TableConfig(8, 2, te.RowIdInitializer(), combiner="sum", name="films")
    with strategy.scope():
        layer = te.keras.TPUEmbedding({"film": te.FeatureConfig(table)}, te.SGD(0.5))
        layer.build()
    good = {"film": tf.constant([1, 2])}
    bad = {"films": tf.constant([1, 2])}
    given = bad if _is_last(strategy) else good
    raised = failure(lambda: strategy.run(layer, [given]))
    return raised, strategy.run(layer, [good])["film"].numpy()[:, 0].tolist()


def meet_unbuilt(strategy: Any, path: str) -> tuple[int, Any, list[float]]:
    """Flushes and resets before there are tables in all processes but the last.

    Returns how many resets were refused, what a flush met by a restore raised, and the
    table after a step.
    """
    alone = _is_last(strategy)
    embedding = _embedding(
        strategy, build=alone, pipeline_execution_with_tensor_core=True
    )
    embedding.flush()
    embedding = _embedding(strategy, build=alone)
    embedding.reset()
    embedding = _embedding(strategy, pipeline_execution_with_tensor_core=True)
    restore = functools.partial(te.checkpoint.restore, embedding, path)
    raised = failure(restore if alone else embedding.flush)
    embedding.enqueue({"film": tf.constant([1, 2])})
    activations = embedding.dequeue()
    refused = 0
    try:
        if alone:
            raise tf.errors.FailedPreconditionError(None, None, "of its own")
        embedding.apply_gradients({"film": tf.ones_like(activations["film"])})
    except tf.errors.FailedPreconditionError:
        refused = 0 if alone else 1
        while "" not in failure(embedding.reset):
            refused += 1
    return refused, raised, _step(embedding)


def evict_alone(strategy: Any) -> list[tuple[int, Any, list[int]]]:
    """Evicts in each process in turn while the others dequeue, also with pipelining.

    Returns the turn, what that raised, and the ids after it.
    """
    vocabulary = te.GrowingVocabulary(9, eviction="lru", min_rows=1)
    table = te.TableConfig(vocabulary, 2, name="films")
    features = {"film": tf.constant([1, 2])}
    found = []
    for number in range(2 * strategy.num_replicas_in_sync):
        pipelined, turn = divmod(number, strategy.num_replicas_in_sync)
        with strategy.scope():
            embedding = te.TPUEmbedding(
                {"film": te.FeatureConfig(table)},
                te.SGD(0.5),
                pipeline_execution_with_tensor_core=bool(pipelined),
            )
        train_on(embedding, features)
        embedding.enqueue({"film": tf.constant([2])})
        evict = functools.partial(embedding.evict, table)
        raised = failure(evict if rank(strategy) == turn else embedding.dequeue)
        found.append((turn, raised, embedding.vocabularies[table].ids.tolist()))
    return found


def refuse_prepared(strategy: Any) -> list[tuple[Any, list[float]]]:
    """Prepares batches with a bad ID in the last process, then steps with them.

    Returns what each step raised, and the table after a good one.
    """
    embedding = _embedding(strategy, 2)
    bad = {"film": tf.constant([1, 8 if _is_last(strategy) else 2])}

    def step(batch: Any) -> None:
        activations, preserved = embedding.dequeue(batch)
        embedding.apply_gradients({"film": activations["film"]}, preserved)

    @tf.function
    def enqueued(features: Any) -> None:
        step(embedding.enqueue(features))

    @tf.function
    def preprocessed(features: Any) -> None:
        step(embedding.preprocess_features(features))

    def from_dataset(features: Any) -> None:
        data = tf.data.Dataset.from_tensors(features)
        (batch,) = data.map(embedding.preprocess_features)
        strategy.run(tf.function(step), args=(batch,))

    def eagerly(features: Any) -> None:
        step(embedding.preprocess_features(features))

    found = []
    for function in (enqueued, preprocessed, from_dataset, eagerly):
        raised = failure(functools.partial(function, bad))
        found.append((raised, _step(embedding)))
    return found


def fail_in_a_function(strategy: Any) -> tuple[str, str]:
    """Fails in the last process while it waits for the others."""
    embedding = _embedding(strategy)

    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        def wait(value: tf.Tensor) -> Any:
            time.sleep(0.5)
            return value

        # Not stateful: TensorFlow orders stateful ops.
        waited = tf.numpy_function(wait, [value], tf.int32, stateful=False)
        embedding.enqueue({"film": tf.constant([1, 2])})
        return tf.gather([1.0, 2.0], waited)

    if not _is_last(strategy):
        time.sleep(2)
    value = tf.constant(3 if _is_last(strategy) else 0)
    return failure(lambda: step(value))


def train_keras(strategy: Any, case: Case) -> Any:
    """Runs `keras_loop` on the batches of this process."""
    return keras_loop(
        strategy, case, lambda number: training.batch(case, number, rank(strategy))
    )


def keras_loop(strategy: Any, case: Case, value: Any) -> Any:
    """Trains a Keras layer and a dense one by a loop of one's own.

    Returns an evaluation of each replica, dense weights, and whole tables and slots.
    """
    from tpu_embedding.keras.keras_api import keras_api

    keras = importlib.import_module(keras_api.Model.__module__.split(".")[0])
    layer = training.create(strategy, case)
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        optimizer = keras.optimizers.SGD(0.1)
        layer.build()
        dense.build((None, 2 * case.dims[0]))
        optimizer.build([*layer.trainable_variables, *dense.trainable_variables])

    def results(features: Any) -> tf.Tensor:
        activations = layer(features)
        return dense(tf.concat([activations["ragged"], activations["many"]], -1))

    @tf.function(reduce_retracing=True)
    def step(features: Any) -> None:
        def of_replica(features: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(results(features)))
                loss /= strategy.num_replicas_in_sync
            variables = [*layer.trainable_variables, *dense.trainable_variables]
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        strategy.run(of_replica, args=(features,))

    @tf.function
    def evaluate(features: Any) -> Any:
        return strategy.run(results, args=(features,))

    for number in range(case.steps):
        step(value(number)[0])
    evaluated = strategy.experimental_local_results(evaluate(value(0)[0]))
    return (
        [one.numpy() for one in evaluated],
        [weight.numpy() for weight in dense.weights],
        training.tables_of(layer),
    )


def fit(strategy: Any) -> tuple[str, str]:
    """Returns what `fit` of a model with a Keras layer raises."""
    import keras

    layer = training.create(strategy, Case(version=3, features=("dense",)))
    with strategy.scope():
        inputs = {"dense": keras.Input((), dtype="int64", name="dense")}
        head = keras.layers.Dense(1, name="head")
        model = keras.Model(inputs, head(layer(inputs)["dense"]))
        model.compile("sgd", "mse")
    batch = ({"dense": tf.range(8)}, tf.ones([8, 1]))
    data = tf.data.Dataset.from_tensors(batch)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    return failure(lambda: model.fit(data.with_options(options), verbose=0))


def export(strategy: Any, case: Case, folder: str) -> Any:
    """Trains and exports, once well and once into a folder that is not empty.

    Returns the reports, what the second raised, and whole tables and slots.
    """
    embedding = training.create(strategy, case)
    training.train(
        strategy,
        case,
        embedding,
        0,
        lambda number: training.batch(case, number, rank(strategy)),
    )
    with strategy.scope():
        scale = tf.Variable(2.0)  # Of all processes.

    def model(activations: Any) -> Any:
        return {name: scale * value for name, value in activations.items()}

    reports = [
        te.serving.export(
            embedding,
            f"{folder}/{storage}",
            model,
            storage=storage,
            signatures=("dense",),
        )
        for storage in ("float32", "int8")
    ]
    raised = failure(lambda: te.serving.export(embedding, f"{folder}/int8"))
    return reports, raised, training.tables_of(embedding)


def enqueue_on_own_device(strategy: Any) -> list[float]:
    """Trains on the batch of this process's device; returns a column of the table."""
    with strategy.scope():
        table = te.TableConfig(4, 1, tf.zeros_initializer(), name="table")
        embedding = te.TPUEmbedding(te.FeatureConfig(table), te.SGD(1.0))
    (device,) = strategy.extended.worker_devices
    embedding.enqueue(tf.constant([1 + rank(strategy)]), device=device)

    def train() -> None:
        embedding.apply_gradients(tf.ones_like(embedding.dequeue()))

    strategy.run(train)
    return embedding.embedding_tables[table].numpy()[:, 0].tolist()


def _stepping(
    strategy: Any, table: Any, optimizer: Any, graph: bool, **more: Any
) -> Any:
    """Makes an embedding of one table, and a step in strategy.run that returns rows."""
    with strategy.scope():
        embedding = te.TPUEmbedding(
            te.FeatureConfig(table),
            optimizer,
            distributed_options=te.DistributedOptions(timeout_seconds=20),
            **more,
        )
    embedding.build()

    def step(ids: tf.Tensor) -> tf.Tensor:
        return train_on(embedding, ids, tf.zeros_like)

    function = tf.function(step) if graph else step

    def run(*ids: int) -> list[float]:
        rows = strategy.run(function, args=(tf.constant(ids, tf.int64),))
        return rows.numpy().ravel().tolist()

    return embedding, run


def leave_refused_lookups(strategy: Any) -> list[tuple[Any, list[list[float]]]]:
    """Fills a growing table by a pending update, so that the next lookup is refused.

    Returns the errors, eagerly and in a tf.function, and the rows of three more steps,
    of which the first and the last have the same ids.
    """
    found = []
    first = 100 * rank(strategy)
    for graph in (False, True):
        vocabulary = te.GrowingVocabulary(
            6, eviction="lru", min_rows=0, unknown="initializer"
        )
        start = tf.keras.initializers.RandomUniform(-1, 1)
        table = te.TableConfig(vocabulary, 1, start, name="films")
        embedding, run = _stepping(
            strategy,
            table,
            te.SGD(0.0),
            graph,
            pipeline_execution_with_tensor_core=True,
        )
        run(11, 12, 13)
        run(11, 12, 13)
        run(first + 21, first + 22, first + 23)
        raised = failure(lambda run=run: run(11, 12, 13))
        embedding.flush()
        rows = [run(31, 32, 33), run(41, 42, 43), run(31, 32, 33)]
        found.append((raised, rows))
    return found


def leave_refused_rates(strategy: Any) -> list[tuple[Any, list[float]]]:
    """Trains with a learning-rate function that raises in one process, or in all.

    It raises eagerly, while a function is traced or when it runs. Returns for each the
    error, and the row that the next step looked up.
    """
    found = []
    state = {"fails": False, "place": ""}

    def rate() -> Any:
        if state["fails"] and state["place"] != "run":
            raise ArithmeticError("no rate")
        broken = tf.numpy_function(lambda: state["fails"], [], tf.bool)
        check = tf.debugging.Assert(~broken, ["no rate"])
        with tf.control_dependencies([] if check is None else [check]):
            return tf.constant(0.0)

    for place in ("eager", "traced", "run"):
        for culprits in ((0,), (1,), (0, 1)):
            table = te.TableConfig(100, 1, te.RowIdInitializer(), name="films")
            _, run = _stepping(strategy, table, te.SGD(rate), place != "eager")
            if place != "traced":
                run(10 + rank(strategy))
            state = {"fails": rank(strategy) in culprits, "place": place}
            raised = failure(lambda run=run: run(20 + rank(strategy)))
            state = {"fails": False, "place": place}
            found.append((raised, run(30 + rank(strategy))))
    return found


def call_alone_in_a_function(strategy: Any) -> list[tuple[str, Any, list[float]]]:
    """Makes a call in the last process where the others begin a tf.function of a step.

    Returns the call, what it raised, and the table after one more step.
    """
    found = []
    calls: dict[str, Any] = {
        "reset": lambda embedding: embedding.reset(),
        "flush": lambda embedding: embedding.flush(),
        "embedding_tables": lambda embedding: embedding.embedding_tables,
    }
    for name, call in calls.items():
        for form in ("plain", "loop", "nested"):
            embedding = _embedding(strategy, pipeline_execution_with_tensor_core=True)

            def step(embedding: Any = embedding) -> None:
                embedding.enqueue({"film": tf.constant([1, 2])})
                activations = embedding.dequeue()
                gradients = {"film": tf.ones_like(activations["film"])}
                embedding.apply_gradients(gradients)

            def loop(step: Any = step) -> None:
                for _ in tf.range(1):
                    step()

            body = {"plain": step, "loop": loop, "nested": tf.function(step)}[form]
            run = functools.partial(strategy.run, tf.function(body))
            alone = functools.partial(call, embedding)
            raised = failure(alone if _is_last(strategy) else run)
            run()
            (table,) = embedding.embedding_tables.values()
            found.append((name, raised, table.numpy()[:4, 0].tolist()))
    return found


def step_in_another_order(strategy: Any) -> tuple[str, str]:
    """Steps the second embedding in the last process, and the first in the others."""
    embeddings = [_embedding(strategy), _embedding(strategy)]
    return failure(lambda: _step(embeddings[_is_last(strategy)]))


def wait_elsewhere(strategy: Any) -> tuple[str, str]:
    """Resets in the last process where the others enqueue ahead."""
    embedding = _embedding(strategy)
    enqueue = functools.partial(embedding.enqueue, {"film": tf.constant([1, 2])})
    return failure(embedding.reset if _is_last(strategy) else enqueue)


def construct_late(strategy: Any, seconds: float) -> None:
    """Makes the first embedding in the last process later than in the others."""
    if _is_last(strategy):
        time.sleep(seconds)
    _embedding(strategy)
