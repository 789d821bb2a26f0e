"""What tests call in the processes of a job; all with the strategy first."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import sys
import time
from typing import Any
from unittest import mock

import fingerprints
import numpy as np
import optimizer_cases
import tensorflow as tf
from linux import status
from multi_process import training
from multi_process.training import Case
from steps import train_on

import tpu_embedding as te
from tpu_embedding.checkpoint import saving
from tpu_embedding.planning import machines


def rank(strategy: Any) -> int:
    return strategy.extended._id_in_cluster


def train(strategy: Any, case: Case) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Trains; returns the activations of this process, and whole tables and slots."""
    embedding = training.create(strategy, case)
    activations = training.train(
        strategy, case, embedding, 0, own_batches(strategy, case)
    )
    return activations, training.tables_of(embedding)


def failure(function: Any) -> tuple[str, str]:
    """Returns the type and the text of what a call raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, getattr(error, "message", None) or str(error)
    return "", ""


def refuse_batches(strategy: Any, case: Case, bad: str) -> Any:
    """Trains with a bad batch in the last process before each step.

    Returns what each bad call raised, and whole tables and slots.
    """
    embedding = training.create(strategy, case)
    embedding.build()
    is_bad = rank(strategy) == strategy.num_replicas_in_sync - 1

    def give_bad() -> None:
        features, _ = training.batch(case, 0, rank(strategy))
        if is_bad and bad == "id":
            features["dense"] = tf.constant([7, 37], tf.int64)
        if is_bad and bad == "structure":
            features["more"] = features["dense"]
        if is_bad and bad == "type":
            features["dense"] = tf.constant(["7"])
        training.step(case, embedding, features, None)

    def give_bad_gradient() -> None:
        embedding.enqueue(training.batch(case, 0, rank(strategy))[0])
        activations = embedding.dequeue()
        sums = {name: tf.sin(3 * value) for name, value in activations.items()}
        given = {
            **sums,
            "dense": tf.zeros([99, case.dims[1]]) if is_bad else sums["dense"],
        }
        raised.append(failure(lambda: embedding.apply_gradients(given)))
        embedding.reset()

    raised: list[Any] = []
    for number in range(case.steps):
        if bad == "gradient":
            give_bad_gradient()
        else:
            raised.append(failure(give_bad))
        given = training.batch(case, number, rank(strategy))
        training.step(case, embedding, *given)
    embedding.flush()
    return raised, training.tables_of(embedding)


# By what differs: where the argument belongs, a value, and another one.
DIFFERENCES: dict[str, tuple[str, Any, Any]] = {
    "vocabulary_size": ("table", 8, 9),
    "dim": ("table", 2, 4),
    "combiner": ("table", "sum", "mean"),
    "dtype": ("table", "float32", "bfloat16"),
    "initializer": ("table", fingerprints.closure(0.0), fingerprints.closure(1.0)),
    "the class": ("class", te.TPUEmbedding, te.TPUEmbeddingV2),
    "batch_size": ("size", 6, 12),
    "invalid_ids": ("table", "error", "drop"),
    "quantization_config": ("table", None, te.QuantizationConfig(4, 0.0, 1.0)),
    "placement": ("table", "rows", "whole"),
    "names of the tables": ("name", "films", "other"),
    "optimizer": ("optimizer", te.Adagrad(0.1), te.SGD(0.1)),
    "learning_rate": ("optimizer", te.Adagrad(0.1), te.Adagrad(0.2)),
    **{
        option: ("optimizer", te.Adagrad(0.1), te.Adagrad(0.1, **{option: value}))
        for option, value in optimizer_cases.ALL_OPTIONS.items()
    },
    "rounding_seed": ("seed", 1, 2),
    "max_sequence_length": ("feature", 0, 3),
    "output_shape": ("shape", None, [4]),
    "paths": ("path", "film", "movie"),
    "pipeline_execution_with_tensor_core": ("pipelined", False, True),
    "check_numerics": ("numerics", False, True),
    "wire_dtype": ("distributed", "float32", "bfloat16"),
    "timeout_seconds": ("distributed", 60, 61),
}


def differ(strategy: Any) -> dict[str, tuple[str, str]]:
    """Returns what a constructor raises if an argument of the last process differs."""
    last = rank(strategy) == strategy.num_replicas_in_sync - 1

    def construct(name: str) -> None:
        kind, value, other = DIFFERENCES[name]
        chosen = {kind: other if last else value}
        table_name = chosen.get("name", "films")
        arguments = {"vocabulary_size": 8, "dim": 2, "name": table_name}
        if kind == "seed":  # Only bfloat16 is rounded.
            arguments |= {"dtype": "bfloat16"}
        if kind in ("table", "seed"):
            arguments |= {name: chosen[kind]}
        table = te.TableConfig(**arguments)
        length, shape = chosen.get("feature", 0), chosen.get("shape")
        feature = te.FeatureConfig(table, length, output_shape=shape)
        options = {name: chosen[kind]} if kind == "distributed" else {}
        with strategy.scope():
            chosen.get("class", te.TPUEmbedding)(
                {chosen.get("path", "film"): feature},
                chosen.get("optimizer", te.Adagrad(0.1)),
                chosen.get("pipelined", False),
                check_numerics=chosen.get("numerics", False),
                **({"batch_size": chosen["size"]} if kind == "size" else {}),
                distributed_options=te.DistributedOptions(**options),
            )

    return {name: failure(functools.partial(construct, name)) for name in DIFFERENCES}


def unsupported(strategy: Any) -> list[tuple[str, str]]:
    """Returns what constructors raise for what several processes cannot have."""

    def construct(optimizer: Any, combiner: Any = "sum") -> None:
        table = te.TableConfig(8, 2, combiner=combiner, name="films")
        with strategy.scope():
            te.TPUEmbeddingV2({"film": te.FeatureConfig(table)}, optimizer)

    def rule(gradient: Any, table: Any, *others: Any) -> Any:
        return table - gradient

    slots = te.Adagrad(slot_variable_creation_fn=lambda *arguments: {})
    combiner = te.CustomCombiner(lambda valency, vectors: vectors[0], 1)
    return [
        failure(lambda: construct(te.CustomOptimizer(rule))),
        failure(lambda: construct(te.SGD(), combiner)),
        failure(lambda: construct(slots)),
    ]


def telemetry(strategy: Any, case: Case) -> dict[str, dict[str, te.Figure]]:
    """Trains; returns what te.Telemetry has counted of the rows of this process."""
    embedding = training.create(strategy, case)
    counting = te.Telemetry(embedding, every=1, hottest=1000)
    training.train(strategy, case, embedding, 0, own_batches(strategy, case))
    return counting.read()


def save(strategy: Any, case: Case, path: str) -> dict[str, np.ndarray]:
    """Trains and saves; returns whole tables and slots."""
    embedding = training.create(strategy, case)
    training.train(strategy, case, embedding, 0, own_batches(strategy, case))
    te.checkpoint.save(embedding, path)
    tf.train.Checkpoint(embedding=embedding).write(f"{path}-{rank(strategy)}")
    return training.tables_of(embedding)


def _films(strategy: Any, kind: Any, pipelined: bool) -> tuple[Any, te.TableConfig]:
    table = te.TableConfig(te.GrowingVocabulary(5), 2, "ones", name="films")
    with strategy.scope():
        return kind({"film": te.FeatureConfig(table)}, te.SGD(0.5), pipelined), table


def fill_a_table(strategy: Any, version: int, pipelined: bool) -> Any:
    """Trains two steps of two new ids in each process, for which a table has five rows.

    Returns what the second raised, and rows, ids and counts after the first.
    """
    kind = te.TPUEmbedding if version == 1 else te.TPUEmbeddingV2
    embedding, table = _films(strategy, kind, pipelined)

    def step(ids: list[int]) -> None:
        features, preserved = {"film": tf.constant(ids)}, []
        if version == 1:
            embedding.enqueue(features)
            activations = embedding.dequeue()
        else:
            prepared = embedding.preprocess_features(features)
            activations, *preserved = embedding.embedding_lookup(prepared)
        gradients = {"film": tf.ones_like(activations["film"])}
        embedding.apply_gradients(gradients, *preserved)

    own = rank(strategy)
    step([own, 10 + own])
    raised = failure(lambda: step([20 + own, 30 + own]))
    embedding.reset()
    embedding.flush()
    found = embedding.vocabularies[table]
    rows = embedding.embedding_tables[table].numpy().tolist()
    step([own, own])
    embedding.flush()
    assert embedding.vocabularies[table].ids.tolist() == found.ids.tolist()
    return raised, rows, found.ids.tolist(), found[4:]


def keep_rows(strategy: Any, keeps: bool, refused: bool = False) -> list[int]:
    """Looks id 1 up in the last process, trains others; returns the ids with rows.

    The preserved outputs of id 1 exist and are applied later if `keeps`; if `refused`,
    they exist, but the last process has refused their update.
    """
    vocabulary = te.GrowingVocabulary(3, eviction="lru", min_rows=1)
    table = te.TableConfig(vocabulary, 2, "ones", name="films")
    with strategy.scope():
        embedding = te.TPUEmbeddingV2(
            {"film": te.FeatureConfig(table)}, te.SGD(0.5), check_numerics=True
        )
    processes = strategy.extended._num_workers

    def look_up(ids: list[int]) -> Any:
        own = ids if rank(strategy) == processes - 1 else []
        return embedding({"film": tf.constant(own, tf.int64)})

    def apply(activations: Any, preserved: Any, gradient: float = 1.0) -> None:
        gradients = {"film": gradient * tf.ones_like(activations["film"])}
        embedding.apply_gradients(gradients, preserved)

    apply(*look_up([1, 2]))
    kept: Any = look_up([1])
    if refused:
        assert (
            failure(lambda: apply(*kept, gradient=np.nan))[0] == "InvalidArgumentError"
        )
    elif not keeps:
        kept = None
    apply(*look_up([3, 4]))
    found = embedding.vocabularies[table].ids.tolist()
    if keeps:
        apply(*kept)
        rows = embedding.embedding_tables[table].numpy()[:, 0].tolist()
        assert sorted(rows) == [0, 0.5, 0.5]  # The first has been updated twice.
    return found


def save_a_growing_table(strategy: Any, folder: str) -> Any:
    """Saves, restores and exports the only table of a job; returns its ids and rows."""
    embedding, _ = _films(strategy, te.TPUEmbedding, False)
    train_on(embedding, {"film": tf.constant([rank(strategy), 7])})
    te.checkpoint.save(embedding, f"{folder}/saved")
    other, table = _films(strategy, te.TPUEmbedding, False)
    te.checkpoint.restore(other, f"{folder}/saved")
    te.serving.export(other, f"{folder}/model", signatures=["dense"])
    tf.saved_model.load(f"{folder}/model")  # Each process may publish it.
    rows = other.embedding_tables[table].numpy().tolist()
    return other.vocabularies[table].ids.tolist(), rows


def restore(strategy: Any, case: Case, path: str, tracked: bool) -> Any:
    """Restores; returns whole tables and slots, and the number of updates."""
    embedding = training.create(strategy, case)
    embedding.build()
    if tracked:
        status = tf.train.Checkpoint(embedding=embedding).restore(path)
        status.assert_nontrivial_match()
    else:
        te.checkpoint.restore(embedding, path)
    updates = embedding.core.checkpoint_updates()
    return training.tables_of(embedding), None if updates is None else int(updates)


def fail_to_restore(strategy: Any, case: Case, path: str) -> tuple[str, str]:
    """Returns what restoring raises if the last process finds no checkpoint."""
    embedding = training.create(strategy, case)
    is_bad = rank(strategy) == strategy.num_replicas_in_sync - 1
    missing = tf.errors.NotFoundError(None, None, f"{path} is missing")
    hidden = mock.patch.object(saving, "read", side_effect=missing)
    with hidden if is_bad else contextlib.nullcontext():
        return failure(lambda: te.checkpoint.restore(embedding, path))


def own_batches(strategy: Any, case: Case) -> Any:
    return lambda number: training.batch(case, number, rank(strategy))


def statistics(
    strategy: Any,
    rows: int,
    sizes: tuple[int, int, int],
    wire: str = "float32",
    combiner: str = "sum",
) -> Any:
    """Returns the bytes that a step sent, and those by docs/distributed.md."""
    samples, length, dim = sizes
    row_bytes = tf.as_dtype(wire).size * dim
    weighted = combiner != "sum" and length > 1
    number, own = strategy.num_replicas_in_sync, rank(strategy)
    placements = ("rows", "whole", "whole")
    with strategy.scope():
        tables = [
            te.TableConfig(rows, dim, combiner=combiner, name=str(t), placement=place)
            for t, place in enumerate(placements)
        ]
        features = [te.FeatureConfig(table) for table in tables]
        options = te.DistributedOptions(wire_dtype=wire)
        embedding = te.TPUEmbedding(features, te.SGD(0.1), distributed_options=options)
    random = np.random.default_rng(own)
    ids = [random.integers(0, rows, (samples, length)) for _ in tables]
    train_on(embedding, [tf.constant(i, tf.int32) for i in ids], tf.identity)
    engine = embedding.core.create_engine()
    owners = engine._placement.owners
    expected = {"enqueue": 0.0, "lookup": 0.0, "update": 0.0}
    for other in set(range(number)) - {own}:
        theirs = np.random.default_rng(other)
        asked = [theirs.integers(0, rows, (samples, length)) for _ in tables]
        for table, owner in enumerate(owners):
            if owner < 0:
                there = ids[table] % number == other
                served = asked[table][asked[table] % number == own]
                with_entry = int(there.any(axis=1).sum())
                found = machines.divided_table_bytes(
                    rows=len(np.unique(ids[table][there])),
                    rows_served=len(np.unique(served)),
                    entries=int(there.sum()),
                    samples=with_entry,
                    lengths=with_entry if length > 1 else 0,
                    gains=with_entry if weighted else 0,
                    row_bytes=row_bytes,
                    gradient_bytes=row_bytes,
                )
            else:
                found = machines.whole_table_bytes(
                    entries=samples * length * (owner == other),
                    samples=samples * (owner == other),
                    samples_served=samples * (owner == own),
                    lengths=0,
                    gains=samples * (owner == other) if weighted else 0,
                    activation_bytes=row_bytes,
                )
            expected = {phase: expected[phase] + found[phase] for phase in expected}
    sent = engine.channel.traffic().bytes_sent
    return {phase: (sent[phase], number) for phase, number in expected.items()}


@dataclasses.dataclass(frozen=True)
class Fault:
    """Happens to the process `culprit` before a call in a step.

    The call, `place`, is "enqueue", "dequeue", "update" or "save". The `kind` is
    "exception", "exit", "stuck", "kill", "stop", or "none", which never happens.
    """

    culprit: int
    kind: str
    place: str
    step: int = 2

    def happen(self) -> None:
        if self.kind == "exception":
            raise UncaughtError
        if self.kind == "exit":
            sys.exit(0)
        if self.kind == "stuck":
            time.sleep(3600)
        os.kill(
            os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind]
        )


FUNCTION_STEPS = 3  # Of a tf.function that trains until a fault.


class UncaughtError(BaseException):
    """Ends a process; `failure` does not catch it."""


def train_with_fault(
    strategy: Any, case: Case, fault: Fault, folder: str = ""
) -> tuple[str, str, float]:
    """Trains until an error, and saves after each step if there is a folder.

    The culprit writes the time of its fault into a file "fault" of the folder. With
    `case.graph` each tf.function trains FUNCTION_STEPS steps, and is followed by
    saving. Returns the type, the text and the time of the error.
    """
    own = rank(strategy)
    embedding = training.create(strategy, case)
    embedding.build()
    number = 0

    def at(place: str, step: int) -> None:
        if (own, place, step) == (fault.culprit, fault.place, fault.step):
            if folder:
                pathlib.Path(folder, "fault").write_text(str(time.monotonic()))
            fault.happen()

    def batches() -> Any:
        for step in range(number, number + FUNCTION_STEPS):
            yield step, training.batch(case, step, own)[0]

    def at_in_graph(place: str, step: tf.Tensor) -> Any:
        """Calls `at` before the next op; TensorFlow orders only ops of one resource."""

        def act(step: Any) -> Any:
            at(place, int(step))
            return step

        before = tf.compat.v1.get_default_graph().get_operations()[-1:]
        with tf.control_dependencies(before):
            acted = tf.numpy_function(act, [step], tf.int64)
        return tf.control_dependencies([acted])

    @tf.function
    def train_steps(data: Any) -> None:
        # A loop over a dataset would begin the iteration after a failed one.
        for _ in tf.range(FUNCTION_STEPS):
            step, features = next(data)
            with at_in_graph("enqueue", step):
                embedding.enqueue(features)
            with at_in_graph("dequeue", step):
                activations = embedding.dequeue()
            with at_in_graph("update", step):
                embedding.apply_gradients(training.gradients(activations))

    def train_step() -> None:
        at("enqueue", number)
        features, weights = training.batch(case, number, own)
        embedding.enqueue(features, weights if case.weights else None)
        at("dequeue", number)
        activations = embedding.dequeue()
        at("update", number)
        embedding.apply_gradients(training.gradients(activations))

    def train() -> None:
        nonlocal number
        signature = tf.nest.map_structure(_of_any_size, next(batches())[1])
        spec = (tf.TensorSpec([], tf.int64), signature)
        while True:
            if case.graph:
                data = tf.data.Dataset.from_generator(batches, output_signature=spec)
                train_steps(iter(data))
                number += FUNCTION_STEPS - 1
            else:
                train_step()
            at("save", number)
            if folder:
                te.checkpoint.save(embedding, f"{folder}/{number}")
            number += 1

    raised = failure(train)
    if case.graph and own == fault.culprit and fault.kind == "exception":
        raise UncaughtError  # Functions turn it into an error that programs may catch.
    return *raised, time.monotonic()


def _of_any_size(value: Any) -> tf.TypeSpec:
    """Returns the type of a feature's batches, which have any number of samples."""
    shape = [None, *value.shape[1:]]
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, value.dtype, row_splits_dtype=tf.int64)
    kind = tf.SparseTensorSpec if isinstance(value, tf.SparseTensor) else tf.TensorSpec
    return kind(shape, value.dtype)


def resume(strategy: Any, case: Case, path: str, first: int) -> dict[str, np.ndarray]:
    """Restores and trains `case.steps` steps; returns whole tables and slots."""
    embedding = training.create(strategy, case)
    te.checkpoint.restore(embedding, path)
    batches = own_batches(strategy, case)
    training.train(strategy, case, embedding, first, batches)
    return training.tables_of(embedding)


def save_again(strategy: Any, case: Case, source: str, path: str) -> Any:
    """Restores and saves; returns whole tables, slots, and the number of updates."""
    embedding = training.create(strategy, case)
    te.checkpoint.restore(embedding, source)
    te.checkpoint.save(embedding, path)
    updates = embedding.core.checkpoint_updates()
    return training.tables_of(embedding), None if updates is None else int(updates)


def train_long(strategy: Any, case: Case, samples: int) -> list[tuple[int, int, float]]:
    """Trains many steps; returns some (step, threads, MiB) of this process."""
    embedding = training.create(strategy, case)
    batches = [training.batch(case, n, rank(strategy)) for n in range(20)]
    one = training.runner(
        strategy, case, lambda f, w: training.step(case, embedding, f, w)
    )
    found = []
    for number in range(case.steps + 1):
        if number % (case.steps // samples) == 0:
            found.append((number, status("Threads"), status("VmRSS") / 2**20))
        one(*batches[number % len(batches)])
    return found
