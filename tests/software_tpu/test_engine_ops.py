"""The embedding engine's ops: batches and arguments that are refused, ragged forms.

Numbers, orders and waits are in `tpu_v2_v4`.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf
from replica_values import this_replica
from software_tpu import engine_calls as calls

INVALID = tf.errors.InvalidArgumentError
ORDER = tf.errors.FailedPreconditionError
HOST = {"num_shards": 1, "shard_id": 0}


def test_a_step_inside_of_run_and_in_a_loop():
    program = calls.Program(calls.config_of(2), 2)

    def steps():
        total = tf.zeros([calls.SAMPLES, calls.WIDTH])
        for _ in tf.range(2):
            # -1 stands for the replica's own core.
            calls.enqueue([this_replica(), 2, 2])
            (activations,) = program.train()
            total += activations
        return [total]

    # The rows start as 0, 1, 2 and lose 0.5, 0.5 and 4 * 0.5 in each step.
    assert calls.first_column(program.run(tf.function(steps))) == [
        [-0.5, 2, 2],
        [1.5, 2, 2],
    ]
    assert calls.rows().tolist() == [-1, 0, -2, 3, 4, 5]


def test_a_bad_batch_in_a_run_is_queued_on_no_replica():
    program = calls.Program(calls.config_of(2), 2, calls.PATIENCE)

    def step(ids):
        calls.enqueue([0, 1, ids])
        return program.receive()

    with pytest.raises(INVALID, match=r"watched, table films: sample 2 has id 6"):
        program.run(lambda: step(5 + this_replica()))
    assert calls.first_column(program.run(lambda: step(5 - this_replica()))) == [
        [0, 1, 5],
        [0, 1, 4],
    ]


def test_a_bad_batch_takes_its_step_with_it():
    program = calls.Program(calls.config_of(2), 2)
    calls.enqueue([1, 1, 1], 0)
    with pytest.raises(INVALID, match="id -1, but ids must be in"):
        calls.enqueue([2, 2, -1], 1)
    calls.enqueue([3, 3, 3], 0)
    calls.enqueue([4, 4, 4], 1)
    assert calls.first_column(program.run(program.receive)) == [[3, 3, 3], [4, 4, 4]]


def test_a_failed_run_takes_its_step_with_it():
    program = calls.Program(calls.config_of(1), 1, calls.PATIENCE)

    def fail_after(call: Any):
        calls.enqueue([1, 1, 1])
        with tf.control_dependencies(call()):
            tf.debugging.Assert(tf.zeros(()) > 1.0, ["on purpose"])
        return [tf.zeros(())]

    # With a batch that is queued, and with one that owes gradients.
    for call in (list, program.receive):
        with pytest.raises(INVALID, match="on purpose"):
            program.run(lambda call=call: fail_after(call))
    calls.enqueue([2, 3, 4], 0, mode_override="unspecified")
    assert calls.first_column(program.run(program.train)) == [[2, 3, 4]]


def test_another_thread_may_bring_what_is_missing():
    program = calls.Program(calls.config_of(1))
    thread = threading.Timer(0.3, calls.enqueue, ([1, 2, 3], 0))
    thread.start()
    assert calls.first_column(program.run(program.receive)) == [[1, 2, 3]]
    thread.join()


def test_initializing_the_tpu_ends_waits():
    program = calls.Program(calls.config_of(1))
    thread = threading.Timer(0.3, program.strategy.initialize_tpu_system)
    thread.start()
    with pytest.raises(ORDER, match="initialized again, which ended its embedding"):
        program.run(program.receive)
    thread.join()
    for call in (lambda: calls.enqueue([0, 0, 0], 0), calls.rows):
        with pytest.raises(ORDER, match="The TPU has no embedding engine"):
            call()


def test_rates_come_by_tag_and_are_those_of_all_replicas():
    config = calls.config_of(2)
    calls.add_table(config, "users").learning_rate.dynamic.tag = 0
    parameters = config.table_descriptor[0].optimization_parameters
    parameters.learning_rate.dynamic.tag = 1
    config.feature_descriptor.add(name="home", table_id=1, input_shape=[1])
    program = calls.Program(config, 2)

    def step(rates):
        for_home = tf.zeros([0], tf.int32)
        calls.enqueue(
            *([2, 2, 2], this_replica()),
            sample_indices_or_row_splits=[for_home] * 2,
            embedding_indices=[tf.constant([2, 2, 3]), tf.constant([4])],
            aggregation_weights=[tf.zeros([0])] * 2,
            combiners=["sum", "mean"],
        )
        values = program.receive()
        program.send([tf.ones_like(value) for value in values], rates)
        return values

    program.run(lambda: step([0.25, 0.125]))
    assert calls.rows().tolist() == [0, 1, 1.5, 2.75, 4, 5]
    with pytest.raises(INVALID, match="`learning_rates` differ between replicas"):
        program.run(lambda: step([0.25, float(this_replica())]))
    for rates in ([0.25], [0.25] * 3):
        text = rf"There are {len(rates)} `learning_rates`, .* has 2 tags"
        with pytest.raises(INVALID, match=text):
            program.run(lambda own=rates: step(own))


def ragged(ids: list[list[int]], dynamic: bool, **attributes: Any) -> None:
    rows = tf.ragged.constant(ids, dtype=tf.int64)
    name = "EnqueueTPUEmbeddingRaggedTensorBatch"
    changes = {"device_ordinal": tf.constant(0)} if dynamic else {"device_ordinal": 0}
    calls_op = getattr(tf.raw_ops, ("Dynamic" if dynamic else "") + name)
    calls_op(
        sample_splits=[rows.row_splits],
        embedding_indices=[rows.values],
        aggregation_weights=[tf.zeros([0], tf.float64)],
        mode_override="inference",
        table_ids=[0],
        combiners=["mean"],
        **changes,
        **attributes,
    )


def test_ragged_batches_for_features():
    program = calls.Program(calls.config_of(1))
    ragged([[1, 2], [], [4]], dynamic=False)
    assert calls.first_column(program.run(program.receive)) == [[1.5, 0, 4]]
    # One row of three positions.
    ragged([[1, 2, 3, 4]], dynamic=True, max_sequence_lengths=[3])
    assert calls.first_column(program.run(program.receive)) == [[1, 2, 3]]
    with pytest.raises(INVALID, match="2 rows do not fill the 3 samples"):
        ragged([[1], [2]], dynamic=True)


def test_sparse_batches_in_any_order():
    program = calls.Program(calls.config_of(1))
    # One place twice; then nothing at all.
    for ids, places in [([5, 2, 4], [[1, 0], [0, 0], [1, 0]]), ([], [])]:
        indices = tf.reshape(tf.constant(places, tf.int32), [-1, 2])
        calls.enqueue(ids, 0, sample_indices_or_row_splits=[indices])
    for expected in ([2, 9, 0], [0, 0, 0]):
        assert calls.first_column(program.run(program.receive)) == [expected]
        program.run(lambda: program.send([tf.zeros([3, 2])]) or [tf.zeros(())])


def test_configurations_without_features():
    """Samples of all features of a table alternate."""
    config = calls.config_of(1)
    del config.feature_descriptor[:]
    config.batch_size_per_tensor_core = 2
    config.table_descriptor[0].num_features = 2
    program = calls.Program(config)
    ragged([[1], [3], [2], [4, 5]], dynamic=False, num_features=[2])
    assert calls.first_column(program.run(program.receive)) == [[1, 3, 2, 4.5]]
    ragged([[1, 2, 3], [4]], dynamic=True, max_sequence_lengths=[2])
    assert calls.first_column(program.run(program.receive)) == [[1, 2, 4, 0]]
    with pytest.raises(INVALID, match=r"no `feature_descriptor`.* `table_ids`"):
        calls.enqueue([1, 2, 3], 0)


WRONG = {
    "combiner": ({"combiners": ["max"]}, '`combiners` has "max"'),
    "combiners": ({"combiners": ["sum", "sum"]}, "There are 2 `combiners`, but 1"),
    "mode": ({"mode_override": "eval"}, '`mode_override` is "eval"'),
    "ordinal": ({"core": 1}, r"`device_ordinal` is 1, but must be in \[0, 1\)"),
    "no ordinal": ({"core": -1}, r"-1 stands for .* inside of SoftwareTPUStrategy"),
    "ids": ({"embedding_indices": [[[1, 2, 3]]]}, r"indices`\[0\] has the shape \[1,3"),
    "weights": ({"aggregation_weights": [[1.0]]}, "has 3 ids and 1 weights"),
    "shape of weights": (
        {"aggregation_weights": [[[1.0]]]},
        r"weights`\[0\] has the shape \[1,1\]",
    ),
    "structure": (
        {"sample_indices_or_row_splits": [[[[1]]]]},
        r"row_splits`\[0\] has the shape \[1,1,1\], but must have rank 1 or 2",
    ),
    "too few": ({"embedding_indices": [[1, 2]]}, "one id for each of 3 samples"),
    "row splits": (
        {"sample_indices_or_row_splits": [[0, 1, 1, 2]]},
        "end at the number of ids",
    ),
    "rank of indices": (
        {"sample_indices_or_row_splits": [[[0], [1], [2]]]},
        r"needs \[ids, 2\]",
    ),
    "inputs": (
        {
            "sample_indices_or_row_splits": [[0, 1, 2, 3]] * 2,
            "embedding_indices": [[1, 2, 3]] * 2,
            "aggregation_weights": [[1.0] * 3] * 2,
        },
        "The op has 2 inputs, but the configuration",
    ),
    "place": (
        {"sample_indices_or_row_splits": [[[0, 0], [3, 0], [2, 0]]]},
        "index 3 on axis 0",
    ),
}


@pytest.mark.parametrize(("changes", "text"), WRONG.values(), ids=WRONG)
def test_wrong_enqueues_are_refused_and_change_nothing(changes: dict, text: str):
    program = calls.Program(calls.config_of(1))
    with pytest.raises(INVALID, match=text):
        calls.enqueue([5, 5, 5], **{"core": 0, **changes})
    calls.enqueue([1, 2, 3], 0)
    assert calls.first_column(program.run(program.receive)) == [[1, 2, 3]]


def test_wrong_attributes_of_the_other_ops():
    program = calls.Program(calls.config_of(1))
    load = tf.raw_ops.LoadTPUEmbeddingStochasticGradientDescentParameters
    table = calls.named_rows()
    for error, changes in {
        "`num_shards` is 2, but the configuration has `num_hosts` 1": {"num_shards": 2},
        r"`shard_id` is 1, but must be in \[0, 1\)": {"shard_id": 1},
        "has no table users": {"table_name": "users"},
        "Give one of `table_id` and `table_name`": {"table_id": 0},
        r"films: `parameters` has the shape \[5,2\], but shard 0 of 1 has \[6,2\]": {
            "parameters": table[:5]
        },
        "`config` is not what the TPU's embedding engine was": {"config": b"other"},
    }.items():
        with pytest.raises(INVALID, match=error):
            load(**{"parameters": table, "table_name": "films", **HOST, **changes})
    with pytest.raises(INVALID, match="FTRLParameters is for ftrl, but the optimizer"):
        tf.raw_ops.RetrieveTPUEmbeddingFTRLParameters(table_name="films", **HOST)
    with pytest.raises(INVALID, match=r"runs on 2 replicas, .* `num_tensor_cores` 1"):
        calls.Program.run(_on_two(program), program.receive)
    calls.enqueue([1, 2, 3], 0)

    def send():
        program.receive()
        program.send([tf.ones((calls.SAMPLES, 1))])
        return [tf.zeros(())]

    with pytest.raises(INVALID, match=r"`inputs`\[0\] has the shape \[3,1\].* watched"):
        program.run(send)


def _on_two(program: calls.Program) -> calls.Program:
    """The same program on another TPU; not of "v4", which would end the engine."""
    other = object.__new__(calls.Program)
    other.__dict__.update(program.__dict__)
    other.strategy = calls.SoftwareTPUStrategy("v5p", 2)
    return other
