"""`te.plan` and `python -m tpu_embedding plan`."""

from __future__ import annotations

import cProfile
import json
import pathlib
import tracemalloc
import xml.etree.ElementTree
from typing import Any

import numpy as np
import optimizer_cases
import planned_jobs
import pytest
import tensorflow as tf
from software_tpu.calls import strategy_of

import tpu_embedding as te
from tpu_embedding.__main__ import main
from tpu_embedding.tpu_generations import GENERATIONS, GIB


def table(rows: int, dim: int, name: str = "films", **options: Any) -> te.TableConfig:
    return te.TableConfig(rows, dim, name=name, **options)


SGD = te.SGD(0.1)


def plan(features: Any, *topologies: str, optimizer: Any = SGD, **options: Any) -> Any:
    """Plans one machine, these TPUs, and no processes unless they are options."""
    options = {"processes": [], **options}
    return te.plan(features, optimizer, topologies=topologies, **options)


def placement(report: Any, name: str) -> Any:
    (found,) = [p for p in report.placements if p.name == name]
    return found


def on_tpus(topology: str, features: Any, **options: Any) -> Any:
    """Plans these TPUs; returns their placement."""
    return placement(plan(features, topology, **options), topology)


def test_bytes_by_hand() -> None:
    films = table(1001, 6, "films", optimizer=te.Adam(0.1))
    users = table(64, 8, "users", dtype="bfloat16", optimizer=te.RowwiseAdagrad(0.1))
    report = te.plan(
        {"a": te.FeatureConfig(films), "b": te.FeatureConfig(users)},
        batch_size=64,
        processes=[3],
        topologies=["v6e:2x2", "v4:2x2x1", "v5e:1x1"],
        machine_bytes=GIB,
    )
    sizes = {(a.table, a.array): (a.shape, a.bytes) for a in report.arrays}
    assert sizes == {
        ("films", "parameters"): ((1001, 6), 24024),
        ("films", "momenta"): ((1001, 6), 24024),
        ("films", "velocities"): ((1001, 6), 24024),
        ("users", "parameters"): ((64, 8), 1024),
        ("users", "accumulators"): ((64, 1), 256),
    }
    assert report.total_bytes == 3 * 24024 + 1280
    host = placement(report, "one machine")
    assert host.by_table == {"films": 72072, "users": 1280}
    assert host.device_bytes[0] == 73352 + host.buffer_bytes
    # Each is more than the third part of all work.
    rows = placement(report, "3 processes, synchronous")
    assert rows.by_table == {"films": 334 * 72, "users": 22 * 20}
    servers = placement(report, "3 parameter servers")
    assert servers.location == {"films": 0, "users": 1}
    assert servers.wire_bytes == 64 * (4 + 2 * 24) + 64 * (4 + 2 * 32)
    for name, text in (
        ("v6e:2x2", "no op for RowwiseAdagrad"),
        ("v4:2x2x1", "do not support RowwiseAdagrad"),
        ("v5e:1x1", "bfloat16"),
    ):
        assert text in placement(report, name).unsupported


def test_the_steps_that_rows_wait_for_take_memory() -> None:
    films = table(1001, 6, "films", optimizer=te.Adam(0.1, lazy_adam=False))
    report = te.plan(
        te.FeatureConfig(films), batch_size=64, processes=[3], machine_bytes=GIB
    )
    history = 512 * (2 + 4) * 8
    for name, rows, waits in (
        ("one machine", 1001, 4 * 1001 + history),
        ("3 processes, synchronous", 334, 4 * 334 + history),
        ("3 parameter servers", 1001, 4 * 1001 + history),
    ):
        assert placement(report, name).by_table == {"films": rows * 72 + waits}


def test_stacks_of_sparse_cores_by_hand() -> None:
    features = {
        name: te.FeatureConfig(table(rows, 6, name), output_shape=[16], name=name)
        for name, rows in (("a", 100), ("b", 65))
    }
    place = on_tpus("v6e:2x2", features, optimizer=te.Adagrad(0.1))
    # 8 shards of a multiple of 8 rows: 16 and 16, 8 columns; a table and a slot.
    rows = 2 * 16 * 8 * 4
    assert place.by_table == {"a": 2 * rows, "b": 2 * rows}
    pointers = 2 * 64 * 8
    batch, activations = 4 * (32 * 64 * 3 + pointers), 4 * 32 * 8
    assert place.buffer_bytes == batch
    # Outside of SparseCores a row of 8 columns is stored as 128.
    assert place.program_bytes == 2**20 + activations + 2 * (4 * 32 * 128)
    assert place.padding_bytes == 2 * (4 * 32 * 128)
    used = 4 * rows + place.buffer_bytes + place.program_bytes
    assert place.device_bytes == (used,) * 4
    # The pending update is another batch and its gradients; the program copies it.
    pipelined = {"pipeline_execution_with_tensor_core": True}
    found = on_tpus("v6e:2x2", features, optimizer=te.Adagrad(0.1), **pipelined)
    assert found.buffer_bytes == 2 * batch + activations
    assert found.program_bytes == place.program_bytes + batch + activations


@pytest.mark.parametrize(
    ("dim", "floats"),
    [(1, 256), (8, 136), (12, 256), (64, 320), (128, 384), (136, 648), (256, 512)],
)
def test_activations_are_planned_as_libtpu_stores_them(dim: int, floats: int) -> None:
    """So many floats of a sample programs for v6e:1x1 need beside their arguments."""
    samples = 2**18
    feature = te.FeatureConfig(table(1000, dim), output_shape=[samples])
    planned = on_tpus("v6e:1x1", feature).program_bytes / (4 * samples)
    assert floats <= planned < floats + 20


def test_what_a_custom_combiner_gets_is_planned() -> None:
    def planned(combiner: Any) -> int:
        films = table(1000, 16, combiner=combiner)
        feature = te.FeatureConfig(films, output_shape=[64])
        return on_tpus("v6e:2x2", feature).program_bytes

    combiner = te.CustomCombiner(lambda _, vectors: vectors[0], max_valency=9)
    # libtpu compiles multiples of 8 rows for each sample.
    assert planned(combiner) == planned("sum") + 4 * (64 * 16 * 16 * 4)


@pytest.mark.parametrize("topology", ["v6e:1x1", "v5p:1x1x1", "7x:1x1x1"])
def test_batches_of_a_custom_combiner_that_end_the_compiler(topology: str) -> None:
    combiner = te.CustomCombiner(lambda _, vectors: vectors[0], max_valency=4)
    cores = 4 if topology.startswith("v5p") else 2

    def planned(samples: int) -> Any:
        films = table(1000, 8, combiner=combiner)
        return on_tpus(topology, te.FeatureConfig(films, output_shape=[samples]))

    assert planned(16 * cores).fits
    refused = planned(24 * cores)
    assert not refused.fits
    assert "has 24 samples on each SparseCore" in refused.problem
    assert f"a multiple of {16 * cores} samples on each device" in refused.problem


@pytest.mark.parametrize(
    ("topology", "devices"), [("v5p:4x4x12", 192), ("v6e:2x3", 6), ("7x:2x2x3", 24)]
)
def test_numbers_of_devices_that_the_compiler_has_no_programs_for(
    topology: str, devices: int
) -> None:
    place = on_tpus(topology, te.FeatureConfig(table(1000, 8), output_shape=[96]))
    assert not place.fits
    assert f"has {devices} devices, which is not a power of two" in place.problem


def ragged(rng: np.random.Generator, rows: int, samples: int) -> tf.RaggedTensor:
    lengths = rng.integers(0, 9, samples)
    ids = rng.zipf(1.3, lengths.sum()) % rows
    return tf.RaggedTensor.from_row_lengths(ids.astype(np.int64), lengths)


@pytest.mark.parametrize(("topology", "devices"), [("v5p:1x1x1", 1), ("v5p:2x2x1", 4)])
def test_limits_are_those_of_the_preprocessor(
    topology: str, devices: int, rng: np.random.Generator
) -> None:
    """`compute_sparse_core_requirements` partitions the batch of one replica."""
    features = {
        name: te.FeatureConfig(table(rows, 8, name), output_shape=[64], name=name)
        for name, rows in (("a", 1000), ("b", 50))
    }
    batches = [
        {"a": ragged(rng, 1000, 64 * devices), "b": ragged(rng, 50, 64 * devices)}
        for _ in range(3)
    ]
    report = plan(features, topology, "v5p:2x2x2", sample=batches, processes=[2])
    (own,) = placement(report, topology).limits
    needs = [
        te.TPUEmbeddingV2.compute_sparse_core_requirements(
            {name: ids[64 * i : 64 * (i + 1)] for name, ids in batch.items()},
            features,
            devices,
            4,
            te.SGD(0.1),
        )
        for batch in batches
        for i in range(devices)
    ]
    # Its 8 devices have larger batches.
    other = placement(report, "v5p:2x2x2")
    assert not other.limits
    assert f"batches of feature a have {64 * devices} samples" in other.not_counted
    assert own.stack == "a_b"
    for name in ("max_ids", "max_unique_ids", "required_ids"):
        assert getattr(own, name) == max(int(getattr(n, name)["a_b"]) for n in needs)
    assert own.suggested_max_ids >= 1.2 * own.max_ids
    assert own.beyond_suggested == 0.0
    assert own.dropped == 0.0
    first, _ = report.statistics
    ids = [batch["a"].values.numpy() for batch in batches]
    assert first.ids_per_step == np.mean([len(i) for i in ids])
    assert first.distinct_ids_per_step == np.mean([len(np.unique(i)) for i in ids])
    assert first.distinct_ids == len(np.unique(np.concatenate(ids)))


def test_suggested_limits_can_be_set(rng: np.random.Generator) -> None:
    """A CustomOptimizer compiles with at most 4 ids for a sample of a SparseCore."""
    custom = te.CustomOptimizer(lambda gradient, row, *_: row - gradient, 0.1)
    feature = te.FeatureConfig(table(1000, 8), output_shape=[16], name="f")
    sample = [rng.integers(0, 1000, (16, 30))]
    (own,) = on_tpus("v6e:1x1", feature, optimizer=custom, sample=sample).limits
    assert own.max_unique_ids > 32
    assert (own.suggested_max_ids, own.suggested_max_unique_ids) == (32, 32)
    assert own.beyond_suggested == own.beyond_default > 0


def test_limits_of_many_sparse_cores_take_little_memory() -> None:
    """16,384 SparseCores have 268 million partitions, nearly all of them empty."""
    sample = [np.arange(2**16), np.zeros([2**16, 0], np.int64)]
    feature = te.FeatureConfig(table(10**9, 8))
    tracemalloc.start()
    (own,) = on_tpus("v5p:16x16x16", feature, sample=sample).limits
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (own.max_ids, own.max_unique_ids) == (1, 1)
    assert peak < 2**26


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"max_sequence_length": 5}, "ragged"),
        ({"max_sequence_length": 5}, "sparse"),
        ({"max_sequence_length": 5}, "dense"),
        ({"output_shape": [64, 5]}, "ragged"),
        ({"output_shape": [320]}, "dense"),
    ],
    ids=["ragged", "sparse", "dense", "axes", "rows"],
)
def test_each_position_of_a_sequence_is_a_sample(
    options: Any, kind: str, rng: np.random.Generator
) -> None:
    ids = ragged(rng, 40, 320 if options == {"output_shape": [320]} else 64)
    values: Any = {
        "ragged": ids,
        "sparse": ids.to_sparse(),
        "dense": ids.to_tensor(),  # Pads by id 0.
    }[kind]
    feature = te.FeatureConfig(table(40, 8, "a"), name="a", **options)
    (own,) = on_tpus("v5p:1x1x1", feature, batch_size=64, sample=[values]).limits
    if "max_sequence_length" in options:
        options = {"output_shape": [64, 5]}
        values = tf.RaggedTensor.from_tensor(values) if kind == "dense" else ids
    feature = te.FeatureConfig(feature.table, name="a", **options)
    needs = te.TPUEmbeddingV2.compute_sparse_core_requirements(
        values, feature, 1, 4, te.SGD(0.1)
    )
    for name in ("max_ids", "max_unique_ids", "required_ids"):
        assert getattr(own, name) == int(getattr(needs, name)["a"])


def test_ids_beyond_limits_and_out_of_range(rng: np.random.Generator) -> None:
    feature = te.FeatureConfig(table(10_000, 8, invalid_ids="drop"), name="f")
    ids = rng.integers(0, 1250, (4096, 8)) + 1250 * np.arange(8)  # None twice.
    ids[0] = -1
    report = plan(feature, "v6e:1x1", sample=[ids], batch_size=4096)
    assert report.statistics[0].out_of_range_ids == 8
    (own,) = placement(report, "v6e:1x1").limits
    counts = np.zeros((2, 2))
    np.add.at(counts, (np.arange(4096)[1:, None] // 2048, ids[1:] % 2), 1)
    assert own.max_ids == counts.max()
    assert own.beyond_default > 0.9
    sparse = plan(feature, "v6e:1x1", sample=[tf.sparse.from_dense(ids[1:] // 2 + 1)])
    assert sparse.statistics[0].ids_per_sample == 8.0


def test_traffic_of_rows_is_that_of_numpy(rng: np.random.Generator) -> None:
    """Ids spread evenly over two processes: the formula's one assumption."""
    feature = te.FeatureConfig(table(100_000, 16), name="f")
    ids = rng.integers(0, 100_000, (2048, 5))
    two: Any = {"sample": [ids], "processes": [2]}
    report = plan(feature, **two)
    own = ids[:1024]
    away = own % 2 != 0
    exact = len(np.unique(own[away])) * (4 + 64)  # Distinct rows and their numbers.
    # Entries, and the lengths and the weights of their mean of samples.
    exact += 4 * (away.sum() + 2 * away.any(1).sum())
    exact += away.any(1).sum() * 64  # Gradients of the samples.
    found = placement(report, "2 processes, synchronous").wire_bytes
    assert abs(found - exact) < 0.02 * exact
    # Ids and gradients to the owner of the table, activations from it, each half.
    for wire, size in (("float32", 4), ("bfloat16", 2)):
        shared = te.DistributedOptions("whole", wire)
        whole = plan(feature, distributed_options=shared, **two)
        found = placement(whole, "2 processes, synchronous").wire_bytes
        assert found == (4 * own.size + (4 + 2 * 16 * size) * 1024) // 2
        # All of it travels to or from servers.
        served = placement(whole, "2 parameter servers")
        assert served.wire_bytes == 4 * found
        assert served.unsupported is None


PLACES = {
    "host": "one machine",
    "sharded": "2 processes, synchronous",
    "parameter_server": "2 parameter servers",
}


def refused_by(optimizer: Any, text: str) -> set[str]:
    """The engines of `PLACES` whose place is refused with this text."""
    features = te.FeatureConfig(table(8, 4, "films"))
    report = plan(features, optimizer=optimizer, batch_size=8, processes=[2])
    reasons = {e: placement(report, name).unsupported for e, name in PLACES.items()}
    return {engine for engine, reason in reasons.items() if text in (reason or "")}


@pytest.mark.parametrize(
    "option",
    ["clipnorm", "slot_variable_creation_fn", "low_dimensional_packing_status"],
)
def test_places_refuse_the_options_that_jobs_refuse(option: str) -> None:
    value = optimizer_cases.OPTION_VALUES[option]
    optimizer: Any = te.Adagrad(0.1, **{option: value})
    (own,) = (own for own in optimizer.options if own.name == option)
    lacking = PLACES.keys() & set(own.lacking)
    assert refused_by(optimizer, f"`{option}={value!r}`") == lacking


def test_only_one_process_calls_functions_of_the_user() -> None:
    custom = te.CustomOptimizer(lambda gradient, table, *_: table - gradient, 0.1)
    assert refused_by(custom, "'films'") == {"sharded", "parameter_server"}


def test_growing_tables_are_planned_with_all_their_rows() -> None:
    films = te.GrowingVocabulary(1001, min_count=2, max_candidates=30, eviction="lru")
    users = te.GrowingVocabulary(9, unknown="shared_row")
    features = {
        "a": te.FeatureConfig(table(films, 6, "films", placement="rows")),
        "b": te.FeatureConfig(table(users, 8, "users")),
    }
    sample = [{"a": np.array([-(2**63), 2**63 - 1, 7]), "b": np.array([1, 1, 1])}]
    report = te.plan(
        features, te.Adam(0.1), processes=[3], topologies=["v6e:1x1"], sample=sample
    )
    assert report.total_bytes == 1001 * 72 + 9 * 96
    assert [own.out_of_range_ids for own in report.statistics] == [0, 0]
    # By row an id, hits and the last update; maps of at most 5 / 8; candidates.
    host = placement(report, "one machine")
    users_bytes = 9 * (96 + 8) + 16 * 64
    ids = 1001 * 16 + 16 * 2048 + 30 * 16 + 16 * 64
    assert host.by_table == {"films": 1001 * 72 + ids, "users": users_bytes}
    part = 334 * (72 + 16) + 16 * (1024 + 512) + 10 * 16 + 16 * 64
    for name in ("3 processes, synchronous", "3 parameter servers"):
        found = placement(report, name)
        assert found.location == {"films": "all", "users": 0}
        assert found.by_table == {"films": part, "users": users_bytes}
    # An id has 8 bytes, of which one of the two owners is another machine.
    servers = placement(report, "3 parameter servers")
    assert servers.wire_bytes == 3 * (8 + 4 + 24 + 24) + 3 * (8 + 32 + 32)
    assert "v6e does not take a Growing" in placement(report, "v6e:1x1").unsupported


def test_a_growing_table_of_int8_allocates_the_bytes_of_its_plan() -> None:
    films = table(te.GrowingVocabulary(50), 20, dtype="int8")
    feature, optimizer = {"film": te.FeatureConfig(films)}, te.RowwiseAdagrad(0.1)
    report = plan(feature, optimizer=optimizer, batch_size=50)
    assert report.total_bytes == 50 * (20 + 4 + 4)
    embedding = te.TPUEmbedding(feature, optimizer)
    embedding.enqueue({"film": tf.range(50)})
    embedding.apply_gradients({"film": tf.ones_like(embedding.dequeue()["film"])})
    stored = embedding.core.growing()["films"].read()
    names = ("parameters", "scale_offset", "accumulators")
    assert sum(stored[name].nbytes for name in names) == report.total_bytes
    planned = placement(report, "one machine").by_table["films"]
    assert planned == report.total_bytes + stored["ids"].nbytes + 16 * 128  # Its map.


def test_rows_that_cannot_be_made_by_id_are_refused() -> None:
    films = table(te.GrowingVocabulary(10), 16, initializer=te.RowIdInitializer())
    report = plan(te.FeatureConfig(films), batch_size=4, processes=[2])
    assert report.best is None
    found = placement(report, "one machine").unsupported
    assert "from a seed and an id" in found


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_a_plan_is_what_jobs_allocate(seed: int) -> None:
    """`python -m planned_jobs 400` compares more of them."""
    _, error = planned_jobs.compare(seed)
    assert error <= planned_jobs.LIMIT


def test_initializers_that_make_whole_tables_are_counted() -> None:
    """Beside the table, as many arrays as tf.random.normal has."""

    def normal(shape: Any, dtype: Any) -> Any:
        return tf.random.normal(shape, dtype=dtype)

    size = 8_000_000 * 64 * 4

    def planned(initializer: Any, placement: str) -> dict[str, tuple[float, ...]]:
        report = plan(
            te.FeatureConfig(table(8_000_000, 64, initializer=initializer)),
            batch_size=4,
            processes=[2],
            distributed_options=te.DistributedOptions(placement),
        )
        engine = 40 * 2**20
        return {
            place.kind: tuple(
                round((used - engine) / size, 1) for used in place.device_bytes
            )
            for place in report.placements
        }

    by_rows = {"host": (1.0,), "synchronous": (0.5, 0.5)}
    assert planned(None, "rows") == {**by_rows, "parameter_servers": (0.5, 0.5)}
    # Every process draws all numbers; of servers the owner, or the first one.
    drawn = {"host": (3.0,), "synchronous": (3.0, 3.0)}
    assert planned(normal, "whole") == {**drawn, "parameter_servers": (3.0, 0.0)}
    # The rows that a process keeps go into memory of their own.
    drawn["synchronous"] = (3.5, 3.5)
    assert planned(normal, "rows") == {**drawn, "parameter_servers": (3.5, 0.5)}
    # The whole table, and the rows that a process keeps of it.
    copied = {
        "host": (1.0,),
        "synchronous": (1.5, 1.5),
        "parameter_servers": (1.5, 0.5),
    }
    for zeros in (tf.zeros_initializer(), tf.zeros, "zeros", "Zeros"):
        assert planned(zeros, "rows") == copied
    assert planned("uniform", "rows") == planned(normal, "rows")


@pytest.mark.parametrize(
    ("mib", "slots", "expected"),
    [  # TensorFlow 2.21 needed 400, 528, 496, 1046, 656 and 1216 MiB.
        ([128], 0, 384),
        ([128], 1, 512),
        ([128, 32], 0, 480),
        ([24, 48, 96, 192], 0, 1080),
        ([192, 96, 48, 24], 0, 576),
        ([192] * 4, 0, 1152),
    ],
)
def test_memory_that_initializers_free(
    mib: list[int], slots: int, expected: int
) -> None:
    features = [
        te.FeatureConfig(
            table(own * 2**12, 64, f"t{i}", initializer="normal"), name=f"t{i}"
        )
        for i, own in enumerate(mib)
    ]
    optimizer = te.Adagrad(0.1) if slots else te.SGD(0.1)
    report = plan(features, optimizer=optimizer, batch_size=1)
    place = placement(report, "one machine")
    assert round((place.peak_bytes - place.buffer_bytes) / 2**20) == expected


def test_placements_of_tables_are_those_of_jobs() -> None:
    features = [
        te.FeatureConfig(table(1000, 8, name, placement=choice), name=name)
        for name, choice in (("a", "whole"), ("b", "rows"), ("c", None))
    ]
    for own in ("rows", "whole"):
        options = te.DistributedOptions(own)
        report = plan(
            features, batch_size=4, processes=[2], distributed_options=options
        )
        assert {
            place.kind: place.location
            for place in report.placements
            if place.num_devices > 1
        } == {
            kind: {"a": 0, "b": "all", "c": "all" if own == "rows" else 1}
            for kind in ("synchronous", "parameter_servers")
        }


@pytest.mark.parametrize("topology", ["v5e:2x2", "v4:2x2x1", "v6e:2x2"])
def test_batches_of_tpus_are_counted(topology: str) -> None:
    """Rows of 8 columns are stored as 128."""

    def planned(samples: int) -> Any:
        feature = te.FeatureConfig(table(1000, 8))
        return on_tpus(topology, feature, batch_size=samples)

    assert planned(2**16).fits
    assert planned(2**22).device_bytes[0] >= 2**20 * 128 * 4
    assert not planned(2**30).fits
    if topology != "v6e:2x2":
        assert "how the " in planned(2**16).not_counted


def test_where_the_padding_of_activations_decides_a_plan_is_close() -> None:
    """Programs that store them without padding fit, others do not."""
    feature = te.FeatureConfig(table(1000, 8), name="f")

    def planned(batch_size: int) -> tuple[Any, Any]:
        sizes = {"batch_size": batch_size, "machine_bytes": 1}
        report = plan(feature, "v6e:1x1", "v6e:2x1", **sizes)
        return report, placement(report, "v6e:1x1")

    assert planned(2**24)[1].fits
    report, place = planned(2**25)
    assert (place.fits, place.close) == (False, True)
    assert place.peak_bytes > place.capacity > place.peak_bytes - place.padding_bytes
    assert place.problem.startswith("Close to the limit: ")
    assert "Compile the step to know" in place.problem
    assert [p.name for p in report.placements] == ["v6e:2x1", "v6e:1x1", "one machine"]
    assert report.best.name == "v6e:2x1"
    (line,) = [line for line in str(report).splitlines() if line.startswith("v6e:1x1 ")]
    assert line.split()[1] == "close"
    assert " GiB - close</text>" in report.to_svg()
    facts = json.loads(report.to_json())["placements"]
    assert [own["close"] for own in facts] == [False, True, False]
    # Nothing is refused before a compiler has seen it.
    with strategy_of("v6e", 1).scope():
        te.TPUEmbeddingV2(
            te.FeatureConfig(feature.table, output_shape=[2**25], name="f"), te.SGD(0.1)
        )
    assert not planned(2**26)[1].close


@pytest.mark.parametrize("optimizer", [None, te.SGD(0.1)], ids=["lookups", "SGD"])
def test_this_machine_comes_before_a_tpu(optimizer: Any) -> None:
    features = te.FeatureConfig(table(100_000, 64))
    report = te.plan(features, optimizer, batch_size=64)
    assert report.best is not None
    assert report.best.name == "one machine"
    assert report.placements[1].kind == "tpu"


def test_forty_configurations_around_the_limits(rng: np.random.Generator) -> None:
    """A plan fits just where an embedding can be created."""
    outcomes = set()
    for _ in range(40):
        generation = str(rng.choice(["v5p", "v6e", "7x"]))
        known = GENERATIONS[generation]
        devices = 2 * known.devices_per_chip
        rows = int(rng.uniform(0.1, 1.5) * 16 * GIB / (4 * 128)) * devices
        tables = int(rng.integers(1, 1 + 2 * known.hbm_bytes // (16 * GIB)))
        cores = devices * known.sparse_cores_per_device
        unique = int(known.max_unique_ids(cores, 256) * rng.uniform(0.5, 1.2))
        if rows >= 2**31:
            continue
        features = [
            te.FeatureConfig(table(rows, 128, f"t{i}"), output_shape=[64], name=f"f{i}")
            for i in range(tables)
        ]
        config = te.SparseCoreEmbeddingConfig(max_unique_ids_per_table={"t0": unique})
        topology = f"{generation}:{'2x1' if generation == 'v6e' else '2x1x1'}"
        place = on_tpus(topology, features, sparse_core_embedding_config=config)
        assert place.num_devices == devices
        try:
            with strategy_of(generation, devices).scope():
                te.TPUEmbeddingV2(
                    features, te.SGD(0.1), sparse_core_embedding_config=config
                )
            created = ""
        except ValueError as error:
            created = str(error)
        assert (place.fits or place.close) == (not created)
        first = place.excesses[0].kind if place.excesses else ""
        # The plan counts activations with the padding that they may have.
        about = "The tables, their slots and a step need"
        assert created.startswith(about if first == "device bytes" else place.problem)
        outcomes.add(first)
    assert outcomes == {"", "tensor bytes", "unique ids", "device bytes"}


def test_a_reason_of_several_placements_is_printed_once() -> None:
    feature = te.FeatureConfig(table(1000, 8), name="f")
    tpus = ("v3:2x2", "v4:2x2x1", "v6e:1x1", "v5p:2x2x1")
    report = plan(feature, *tpus, optimizer=None, batch_size=64)
    lines = str(report).splitlines()
    told = [line.partition(": Table ")[0] for line in lines if "no optimizer" in line]
    assert told == ["v6e:1x1, v5p:2x2x1", "v4:2x2x1, v3:2x2"]


def test_the_calls_of_a_plan_grow_with_its_tables() -> None:
    """A thousand tables took 0.4 s; twice as many must not take four times as long."""
    calls = []
    for number in (200, 400):
        features = [
            te.FeatureConfig(table(1000 * (i + 1), 16 * (1 + i % 4), f"t{i}"))
            for i in range(number)
        ]
        profile = cProfile.Profile()
        report = profile.runcall(te.plan, features, te.Adagrad(0.1), batch_size=8192)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
        assert {p.name.split(":")[0] for p in report.placements} > set(GENERATIONS)
    assert calls[1] < 2.2 * calls[0]


def test_the_picture_has_whole_names_and_a_legend() -> None:
    features = [
        te.FeatureConfig(table(10**9, 64, f"{'long_name_' * 9}{i}"), name=f"f{i}")
        for i in range(10)
    ]
    report = te.plan(features, te.Adagrad(0.1), batch_size=64, machine_bytes=GIB)
    root = xml.etree.ElementTree.fromstring(report.to_svg())
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    texts = [e for e in root if e.tag.endswith("text")]
    bars = [e for e in root if e.tag.endswith("rect")]
    for text in texts:  # Sans-serif letters of 11 pixels are narrower than 7.
        assert float(text.attrib["x"]) + 7 * len(text.text or "") <= width
        assert float(text.attrib["y"]) <= height
    names = [text.text for text in texts]
    assert {f"{'long_name_' * 9}0", "a step, and other tables"} <= {*names}
    assert [n for n in names if str(n).endswith("GiB - no")]
    # The last bars are those of the legend: each colour once.
    colours = [bar.attrib["fill"] for bar in bars]
    assert len({*colours[-9:]}) == 9
    assert {*colours} == {*colours[-9:]}


def test_what_does_not_fit_says_by_how_much() -> None:
    feature = te.FeatureConfig(table(2**31 - 1, 64), name="f")
    report = te.plan(
        feature, te.SGD(0.1), batch_size=1024, machine_bytes=64 * GIB, processes=[2, 16]
    )
    host = placement(report, "one machine")
    assert not host.fits
    assert "films: 512.00 GiB" in host.problem
    assert "448.04 GiB too much" in host.problem
    assert report.placements[0].fits
    assert not report.placements[-1].fits
    text = str(report)
    assert "NO" in text
    assert report.best is not None
    assert report.best.kind in {"tpu", "synchronous"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "Feature feature has no full `output_shape`. Pass `batch_size`"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 8, "processes": [0]}, "processes"),
        ({"batch_size": 8, "topologies": ["v6e"]}, "for example 'v5p:2x2x1'"),
        ({"sample": []}, "no batches"),
        ({"sample": [3]}, "a scalar"),
        ({"sample": [np.array([0.5])]}, "not whole"),
        ({"sample": [tf.ragged.constant([[[1], [2, 3]]])]}, "several ragged axes"),
        ({"batch_size": 8, "sample": [np.zeros(4)]}, "sample have 4 samples, but `bat"),
        (
            {"batch_size": 8, "sample": [np.zeros(8), np.zeros(4), np.zeros(9)]},
            "sample have 9 samples, but `batch_size` is 8",
        ),
    ],
    ids=range(10),
)
def test_arguments(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        te.plan(te.FeatureConfig(table(10, 8)), te.SGD(0.1), **arguments)


FILMS = {"name": "films", "vocabulary_size": 1000, "dim": 16, "optimizer": "Adam"}
CONFIG = {
    "tables": [FILMS, {"name": "users", "vocabulary_size": 500, "dim": 8}],
    "features": [{"name": "liked", "table": "films"}, {"table": "users"}],
    "optimizer": {"name": "Adagrad", "learning_rate": 0.05},
    "batch_size": 256,
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def check_refused(
    capsys: pytest.CaptureFixture[str], text: str, *arguments: str
) -> str:
    code, out, error = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert text in error
    return error


@pytest.fixture
def config_file(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.mark.parametrize("minibatching", [False, True])
def test_a_plan_without_a_sample_compares_its_assumption_with_the_limits(
    minibatching: bool,
) -> None:
    videos = te.TableConfig(500_000, 16, name="video")
    features = {name: te.FeatureConfig(videos) for name in ("watched", "query")}

    def note(batch_size: int, **limits: Any) -> str:
        report = plan(
            features,
            "v6e:2x2",
            optimizer=te.Adagrad(0.1),
            batch_size=batch_size,
            sparse_core_embedding_config=te.SparseCoreEmbeddingConfig(**limits),
        )
        place = placement(report, "v6e:2x2")
        assert place.fits
        assert not place.note or f"v6e:2x2: {place.note}" in str(report)
        return place.note

    # 2 x 2,048 samples of a SparseCore, over 8 of them.
    told = note(16384, minibatching=minibatching)
    if minibatching:
        assert told == ""
        return
    # The mean is 512, and three standard deviations are 68.
    assert (
        "a SparseCore may ask another for 580 ids (578 distinct) of stack vid" in told
    )
    assert "the limits are 256 and 256: set max_ids_per_table['video'] to 728" in told
    assert "may ask another for 304 ids" in note(8192)
    assert note(6144) == ""
    raised = {"video": 728}
    assert note(16384, max_ids_per_table=raised, max_unique_ids_per_table=raised) == ""


def test_the_command(
    tmp_path: pathlib.Path, config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "plan.svg"
    code, out, _ = run(capsys, config_file, "--svg", str(svg), "--topology", "v6e:2x2")
    assert code == 0
    assert "2 tables, 3 slots: 218.75 KiB" in out
    assert "v6e:2x2: the largest tables of the fullest device" in out
    for other in ("one machine", "processes, synchronous", "v5p"):
        assert other not in out  # Only what was asked for.
    root = xml.etree.ElementTree.fromstring(svg.read_text())
    assert root.tag.endswith("svg")
    code, out, _ = run(capsys, config_file, "--json")
    assert code == 0
    assert json.loads(out)["total_bytes"] == 224000
    module = tmp_path / "model_to_plan.py"
    module.write_text(
        "import tpu_embedding as te\n"
        "def features():\n"
        "    table = te.TableConfig(1000, 16, name='films')\n"
        "    return te.FeatureConfig(table), te.SGD(0.1)\n"
    )
    code, out, _ = run(capsys, f"{module}:features", "--batch-size", "64")
    assert "62.50 KiB" in out
    code, out, _ = run(
        capsys, f"{module}:features", "--batch-size=64", "--machine-gib=1e-6",
        "--processes=2", "--topology=v6e:1x1",
    )  # fmt: skip
    assert code == 0
    assert "one machine, 2 parameter servers: The tables, their slots" in out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tables": []}, "object with a list `tables`"),
        ({"tables": [{"dim": 3}]}, "has no `name`"),
        ({"features": [{"table": "x"}]}, "must name one of the tables films, users"),
        ({"optimizer": "Adamant"}, "'Adamant' is not known. Its `name` must be one of"),
        ({"tables": [{"name": "a", "rows": 3}]}, "'a' has the unknown key 'rows'. Use"),
        ({"tables": [{"name": "a", "dim": 3}]}, "'a' lacks `vocabulary_size`."),
        ({"tables": "films"}, "object with a list `tables`"),
        ({"tables": [FILMS, FILMS]}, "two tables 'films'"),
        ({"features": [{"table": "films"}] * 2}, "two features 'films'"),
        ({"features": [{"table": ["films"]}]}, "must name one of the tables films"),
        ({"optimiser": "Adam"}, "unknown key 'optimiser'. Use one of tables, features"),
        ({"optimizer": "CustomOptimizer"}, "'CustomOptimizer' is not known"),
        ({"batch_size": "64"}, "must be an int >= 1. Received: '64'"),
    ],
    ids=range(13),
)
def test_files_that_are_wrong(
    change: Any, text: str, config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pathlib.Path(config_file).write_text(json.dumps({**CONFIG, **change}))
    check_refused(capsys, text, config_file)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "as in `my_model:features`"),
        ("no_such_module:x", "Cannot import 'no_such_module'"),
        ("json:x", "json has no attribute 'x'"),
        ("json:lods", "no attribute 'lods'. Did you mean 'loads'?"),
        ("missing.json", "No such file"),
        ("missing.py:x", "Cannot import 'missing.py': FileNotFoundError: there is no"),
    ],
)
def test_configurations_that_are_missing(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(capsys, text, name)


MODEL = """
import sys
import numpy as np
import tpu_embedding as te
features = te.FeatureConfig(te.TableConfig(100, 8, name="films"))
def printing():
    print("from the model")
    return features
def raising():
    raise KeyError("nope")
def exiting():
    sys.exit(0)
def sample():
    yield np.zeros([64])
    raise OSError("the disk is gone")
nothing, number, text = None, 5, [np.array(["a"])]
"""


@pytest.mark.parametrize(
    ("config", "sample", "expected"),
    [
        ("raising", None, "model.py:raising failed: KeyError: 'nope' ("),
        ("exiting", None, "model.py:exiting failed: sys.exit(0) was called ("),
        ("feature", None, "Did you mean 'features'?"),
        ("features", "nothing", "model.py:nothing is a NoneType, but a sample must"),
        ("features", "number", "model.py:number is a int, but a sample must"),
        ("features", "text", "the sample has values of <U1, but ids must be integers"),
        ("features", "sample", "model.py:sample failed: OSError: the disk is gone ("),
        ("features.table", None, "must be a FeatureConfig"),
    ],
)
def test_code_that_fails_is_named_with_its_line(
    config: str,
    sample: str | None,
    expected: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    arguments = [f"{model}:{config}", "--batch-size=64"]
    arguments += [] if sample is None else ["--sample", f"{model}:{sample}"]
    error = check_refused(capsys, expected, *arguments)
    assert " (" not in expected[-2:] or f"{model}, line " in error


def test_what_code_prints_is_not_a_part_of_the_answer(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A module of that name is loaded: the file is.
    model = tmp_path / "json.py"
    model.write_text(MODEL)
    code, out, error = run(capsys, f"{model}:printing", "--batch-size=64", "--json")
    assert code == 0
    assert json.loads(out)["total_bytes"] == 3200
    assert error == "from the model\n"


def test_files_that_python_replaces(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The errors have Python files that work."""
    np.savez(tmp_path / "ids.npz", liked=np.arange(640))
    (tmp_path / "tables.yaml").touch()
    written = []
    for arguments, asked in (
        (["tables.yaml"], "pass FILE.py:features"),
        (["json:decoder", "--sample=ids.npz"], "pass FILE.py:sample"),
    ):
        error = check_refused(capsys, asked, *arguments)
        written += [line[4:] for line in error.splitlines() if line.startswith("    ")]
    text = "\n".join(written).replace("ids.npz", str(tmp_path / "ids.npz"))
    model = tmp_path / "plan_of_tables.py"
    model.write_text(text)
    sample = ["--sample", f"{model}:sample", "--json"]
    code, out, _ = run(capsys, f"{model}:features", "--batch-size=64", *sample)
    assert code == 0
    assert [t["ids_per_sample"] for t in json.loads(out)["statistics"]] == [1.0]


def test_files_that_cannot_be_parsed(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, expected in (
        (b'{"tables": [', "config.json is not JSON: Expecting value: line 1"),
        (b"\xff\xfe", "config.json is not a text file in UTF-8"),
        (b"[" * 200_000, "config.json is not JSON: maximum recursion depth"),
        (b"9" * 5000, "config.json is not JSON: Exceeds the limit"),
    ):
        pathlib.Path(config_file).write_bytes(content)
        check_refused(capsys, expected, config_file)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--machine-gib=1e300", "--machine-gib must be a positive number"),
        ("--processes=1000000000", "`processes` must be at most 65,536. Received: 1"),
        ("--svg=a\0b", r"cannot hold a NUL character. Received: 'a\x00b'"),
        ("--sample=a\0b.npz", r"cannot hold a NUL character. Received: 'a\x00b.npz'"),
        ("--svg=a\ud800b", r"A path must be UTF-8. Received: 'a\ud800b'"),
    ],
    ids=["memory", "processes", "svg", "sample", "surrogate"],
)
def test_options_that_are_refused(
    option: str, expected: str, config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(capsys, expected, config_file, option)
