"""Tests of `SoftwareTPUStrategy` as a strategy: devices, variables, values."""

from __future__ import annotations

import gc
import weakref

import forked
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from replica_values import this_replica

from tpu_embedding.testing import SoftwareTPUStrategy


@pytest.fixture(scope="module")
def strategy() -> SoftwareTPUStrategy:
    return SoftwareTPUStrategy("v5p", 2)


def context() -> tf.distribute.ReplicaContext:
    return tf.distribute.get_replica_context()


def values(strategy: SoftwareTPUStrategy, distributed) -> list:
    local = strategy.experimental_local_results(distributed)
    return [np.asarray(value).tolist() for value in local]


def test_it_says_which_hardware_it_is():
    v6e = SoftwareTPUStrategy("v6e", 4)
    assert v6e.extended.tpu_hardware.sparse_cores_per_device == 2
    assert v6e.num_replicas_in_sync == 4
    assert v6e.extended.num_hosts == 1
    assert [device[-5:] for device in v6e.extended.worker_devices] == [
        f"CPU:{i}" for i in range(4)
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"generation": "v9"}, "v9"),
        ({"num_devices": 0}, "`num_devices` must be an int >= 1. Received: 0"),
        ({"num_devices": "2"}, "`num_devices` must be an int >= 1. Received: '2'"),
        ({"meeting_timeout": 0}, "`meeting_timeout` must be .* > 0. Received: 0"),
        (
            {"generation": "v4", "num_devices": 4, "cores_per_replica": 3},
            "`cores_per_replica` .* divides `num_devices`, 4. Received: 3",
        ),
        ({"generation": "v3", "cores_per_replica": 0}, "Received: 0"),
        ({"cores_per_replica": 2}, "only for v2, v3 and v4.* generation='v5p'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, expected: str):
    with pytest.raises(ValueError, match=expected):
        SoftwareTPUStrategy(**arguments)


def test_too_few_devices_are_an_error_with_the_line_to_put_first():
    with pytest.raises(RuntimeError) as caught:
        SoftwareTPUStrategy("v5p", 5)
    assert "needs 5 logical CPU devices" in str(caught.value)
    assert "TensorFlow has started with 4" in str(caught.value)
    assert str(caught.value).endswith(
        "\n    tf.config.set_logical_device_configuration("
        'tf.config.list_physical_devices("CPU")[0], '
        "[tf.config.LogicalDeviceConfiguration()] * 5)"
    )


NEW_PROCESS = """
import tensorflow as tf
from tpu_embedding.testing import SoftwareTPUStrategy
print(SoftwareTPUStrategy("v6e", 3).num_replicas_in_sync)
print(len(tf.config.list_logical_devices("CPU")))
"""


def test_devices_are_made_before_tensorflow_starts():
    assert forked.run(["-c", NEW_PROCESS]).stdout.split() == ["3", "3"]


def test_each_replica_gets_its_own_part_and_gives_its_own_result(strategy):
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([1.0, 2.0]) * (context.replica_id_in_sync_group + 1)
    )

    def step(own, *, same):
        return {"own": own * same, "id": context().replica_id_in_sync_group}, None

    results, nothing = strategy.run(step, (given,), {"same": tf.constant(10.0)})
    assert values(strategy, results["own"]) == [[10.0, 20.0], [20.0, 40.0]]
    assert values(strategy, results["id"]) == [0, 1]
    assert nothing is None
    assert strategy.reduce("SUM", results["own"], axis=None).numpy().tolist() == [
        30.0,
        60.0,
    ]
    assert strategy.reduce("MEAN", results["own"], axis=0).numpy() == 22.5
    assert strategy.gather(results["own"], axis=0).shape == (4,)


def test_replicas_run_on_their_devices(strategy):
    with strategy.scope():
        table = tf.Variable([1.0])
    assert [variable.device[-5:] for variable in table.values] == ["CPU:0", "CPU:1"]

    def step():
        return tf.strings.join([table.handle.device, tf.zeros(1).device])

    assert [device[-5:] for device in strategy.extended.worker_devices] == [
        value.numpy().decode()[-5:]
        for value in strategy.experimental_local_results(strategy.run(step))
    ]


def test_variables_are_assigned_in_their_replica(strategy):
    with strategy.scope():
        own = tf.Variable(0.0)
        summed = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    def step():
        number = this_replica() + 1.0
        own.assign_add(number)
        summed.assign_add(tf.constant(number))
        mean.assign(tf.constant(number))
        return own.read_value()

    results = strategy.run(step)
    assert values(strategy, results) == [1.0, 2.0]
    assert values(strategy, own) == [1.0, 2.0]
    assert values(strategy, summed) == [3.0, 3.0]
    assert values(strategy, mean) == [1.5, 1.5]


def test_a_variable_can_be_made_at_the_first_call(strategy):
    class Model(tf.Module):
        kept = None

        def __call__(self, x):
            if self.kept is None:
                self.kept = tf.Variable(3.0)
            return self.kept * x

    model = Model()
    with strategy.scope():
        model(1.0)
    assert values(strategy, strategy.run(model, (tf.constant(2.0),))) == [6.0, 6.0]


def test_all_reduce_takes_structures_and_has_a_gradient(strategy):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            parts = context().all_reduce("MEAN", {"a": x, "b": [2.0 * x]})
            loss = parts["a"] * parts["b"][0]
        return loss, tape.gradient(loss, x), context().all_reduce("SUM", 1)

    loss, gradient, count = strategy.run(step, (tf.constant(3.0),))
    assert values(strategy, loss) == [18.0, 18.0]
    # Each replica's x gets the mean of what the replicas say of the mean.
    assert values(strategy, gradient) == [12.0, 12.0]
    assert values(strategy, count) == [2, 2]


def number() -> float:
    """1 for the first replica, 2 for the second."""
    return this_replica() + 1.0


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_merge_call(strategy, wrap):
    """As TPUStrategy: each replica passes its own values and gets its own results."""
    kinds = []

    def merge(given, value, *, factor):
        kinds.append((given is strategy, context() is None))
        return {
            "own": given.experimental_local_results(value)[0] * factor,
            "sum": given.extended.reduce_to(
                tf.distribute.ReduceOp.SUM, value, destinations=value
            ),
            "mean": given.reduce("MEAN", value, axis=None),
            "first": given.extended.broadcast_to(value, destinations=value),
            "several": given.extended.batch_reduce_to(
                tf.distribute.ReduceOp.SUM, [(value, value), (2 * value, value)]
            )[1],
            "again": given.extended.call_for_each_replica(
                lambda own: context().all_reduce("SUM", own) + number(), (value,)
            ),
            "none": None,
        }

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            merged = context().merge_call(merge, (x * number(),), {"factor": 10.0})
            loss = 3.0 * merged["own"]
        return merged, tape.gradient(loss, x)

    merged, gradient = wrap(lambda x: strategy.run(step, (x,)))(tf.constant(1.0))
    assert merged.pop("none") is None
    assert {name: values(strategy, value) for name, value in merged.items()} == {
        "own": [10.0, 20.0],
        "sum": [3.0, 3.0],
        "mean": [1.5, 1.5],
        "first": [1.0, 1.0],
        "several": [6.0, 6.0],
        "again": [4.0, 5.0],
    }
    assert values(strategy, gradient) == [30.0, 60.0]
    assert kinds == [(True, True)] * 2


def test_summaries_are_written_after_a_call_for_each_replica(strategy, tmp_path):
    def merge(given):
        return given.extended.call_for_each_replica(lambda: tf.constant(number()))

    strategy.run(lambda: context().merge_call(merge))
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        assert tf.summary.write("number", 1.0, step=0)


def test_merge_call_updates_each_copy_of_a_variable_once(strategy):
    with strategy.scope():
        updated, assigned = tf.Variable(1.0), tf.Variable(1.0)
        first = tf.Variable(1.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def merge(given, value):
        total = given.reduce("SUM", value, axis=None)
        given.extended.update(updated, lambda own, x: own.assign_add(x), (total,))
        assigned.assign_add(2.0 * total)
        return updated + assigned

    def step():
        first.assign_add(tf.constant(number()))
        return context().merge_call(merge, (tf.constant(number()),))

    assert values(strategy, strategy.run(step)) == [11.0, 11.0]
    assert values(strategy, updated) == [4.0, 4.0]
    assert values(strategy, assigned) == [7.0, 7.0]
    assert values(strategy, first) == [2.0, 2.0]


@pytest.mark.parametrize("name", ["AdamOptimizer", "MomentumOptimizer"])
def test_optimizers_of_tensorflow_1_train_as_under_mirrored_strategy(strategy, name):
    def trained(strategy):
        with strategy.scope():
            weight = tf.Variable([1.0, 2.0])
            arguments = (0.1, 0.9) if name == "MomentumOptimizer" else (0.1,)
            optimizer = getattr(tf.compat.v1.train, name)(*arguments)

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((weight * number()) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

        for _ in range(3):
            strategy.run(step)
        return values(strategy, weight)

    expected = trained(models.mirrored(2))
    assert expected[0] == expected[1] != [1.0, 2.0]
    np.testing.assert_allclose(trained(strategy), expected, rtol=1e-6)


def test_what_a_merge_call_cannot_do(strategy):
    def nested():
        own = context()
        own.merge_call(lambda _: own.merge_call(lambda _: None))

    with pytest.raises(RuntimeError, match="inside `call_for_each_replica"):
        strategy.run(nested)
    with pytest.raises(NotImplementedError, match=r"does not support all_gather"):
        strategy.run(lambda: context().all_gather(tf.ones(2), axis=0))
    # The strategy is as before.
    assert values(strategy, strategy.run(lambda: context().all_reduce("SUM", 1))) == [
        2,
        2,
    ]


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_an_error_in_the_merge_call_of_one_replica_ends_all(wrap):
    strategy = SoftwareTPUStrategy("v5p", 2, meeting_timeout=20)

    def merge(given, value):
        checked = tf.debugging.assert_less(value, 2.0, "the second is wrong")
        with tf.control_dependencies([checked]):
            return given.reduce("SUM", tf.identity(value), axis=None)

    def step(x):
        return context().merge_call(merge, (x * number(),))

    def raising(x):
        def merge(given, value):
            raise ValueError("while tracing")

        return context().merge_call(merge, (x,))

    def once(x):
        if number() == 1.0:
            return context().merge_call(
                lambda given, x: given.reduce("SUM", x, axis=None), (x,)
            )
        return x

    for program, error, text in (
        (step, tf.errors.InvalidArgumentError, "the second is wrong"),
        (raising, ValueError, "while tracing"),
        (once, tf.errors.OpError, "Missing: Replica 1"),
    ):
        run = wrap(lambda x, program=program: strategy.run(program, (x,)))
        with pytest.raises(error, match=text):
            run(tf.constant(1.5))
    run = wrap(lambda x: strategy.run(step, (x,)))
    assert values(strategy, run(tf.constant(0.5))) == [1.5, 1.5]


def test_a_function_is_traced_once_per_replica_and_signature(strategy):
    traced = []

    def step(x):
        traced.append(x.shape)
        return tf.reduce_sum(x)

    for size in (2, 2, 3):
        strategy.run(step, (tf.ones(size),))
    assert traced == [(2,), (2,), (3,), (3,)]


def test_methods_are_traced_once_too(strategy):
    class Model:
        traced = 0

        def step(self, x):
            self.traced += 1
            return x

    model = Model()
    for _ in range(3):
        strategy.run(model.step, (tf.constant(1.0),))
    assert model.traced == 2


def test_a_program_does_not_outlive_its_function(strategy):
    def step(x):
        return x + 1.0

    reference = weakref.ref(step)
    strategy.run(step, (tf.constant(1.0),))
    del step
    gc.collect()
    assert reference() is None


def test_autograph_and_functions(strategy):
    def branch(x):
        if x > 0.0:
            return x
        else:
            return -x

    for fn in (branch, tf.function(branch)):
        assert values(strategy, strategy.run(fn, (tf.constant(-2.0),))) == [2.0, 2.0]


def test_a_dataset_is_split_over_replicas(strategy):
    dataset = tf.data.Dataset.range(8).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)

    total = 0
    for batch in distributed:
        sums = strategy.run(tf.reduce_sum, (batch,))
        total += strategy.reduce("SUM", sums, axis=None).numpy()
    assert total == 28
    first = next(iter(distributed))
    assert values(strategy, first) == [[0, 1], [2, 3]]


def test_methods_that_autograph_leaves_alone(strategy: SoftwareTPUStrategy):
    """TensorFlow wraps them not at all, others in a function."""

    class Counter:
        @tf.autograph.experimental.do_not_convert
        def do_not_convert(self) -> tf.Tensor:
            return tf.constant(1)

        def converted(self) -> tf.Tensor:
            return tf.constant(2)

    counter = Counter()
    for method, expected in ((counter.do_not_convert, 1), (counter.converted, 2)):
        assert values(strategy, strategy.run(method)) == [expected] * 2


def test_variables_cast_themselves_in_programs():
    strategy = SoftwareTPUStrategy("v5p", 2)
    with strategy.scope():
        weight = tf.Variable(10)
        counter = tf.Variable(
            2, synchronization=tf.VariableSynchronization.ON_READ, trainable=False
        )

    @tf.function
    def step():
        return tf.constant([0.5]) * weight * counter, weight + 1

    floats, ints = strategy.run(step)
    assert [value.numpy().tolist() for value in floats.values] == [[10.0]] * 2
    assert [value.numpy() for value in ints.values] == [11, 11]
    with pytest.raises(tf.errors.InvalidArgumentError):
        _ = tf.constant([0.5]) * weight


def test_cores_of_a_device_assignment():
    coordinates = [[x, y, 0, core] for x in (0, 1) for y in (0, 1) for core in (0, 1)]
    topology = tf.tpu.experimental.Topology(
        mesh_shape=[2, 2, 1, 2], device_coordinates=np.array([coordinates])
    )

    def assigned(replicas: list[list[int]]) -> SoftwareTPUStrategy:
        assignment = tf.tpu.experimental.DeviceAssignment(
            topology, np.array([[coordinates[c] for c in own] for own in replicas])
        )
        return SoftwareTPUStrategy(
            "v4", sum(map(len, replicas)), experimental_device_assignment=assignment
        )

    strategy = assigned([[3, 1], [0, 2]])
    assert strategy.num_replicas_in_sync == 2
    names = strategy.extended.replica_devices
    assert [[name[-5:] for name in own] for own in names] == [
        ["CPU:3", "CPU:1"],
        ["CPU:0", "CPU:2"],
    ]
    assert [name[-5:] for name in strategy.extended.worker_devices] == [
        "CPU:3",
        "CPU:0",
    ]
    with pytest.raises(ValueError, match=r"from 0 to 1\. Received: \[\[3, 1\]\]"):
        assigned([[3, 1]])
    with pytest.raises(ValueError, match="not both"):
        SoftwareTPUStrategy(
            "v4", 2, cores_per_replica=2, experimental_device_assignment=1
        )
