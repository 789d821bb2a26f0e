"""Hashed tables: against static tables whose rows an oracle chooses."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from new_process import printed_by
from reference import hashing as oracle
from serving.exported import ops_of
from steps import evaluate_on, train_on

import tpu_embedding as te
from tpu_embedding import hashing
from tpu_embedding.__main__ import main
from tpu_embedding.vocabulary import RowHash

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / "golden" / "hashing.json").read_text()
)
# Extremes, ids whose low bits are alike, and ids that share rows of small tables.
POOL = np.array(
    [0, -1, 5, 2**63 - 1, -(2**63), 1 << 32, 3 << 32, 7 << 48, 12, -77, 3], np.int64
)
ROWS, DIM = 7, 6


def golden_rows() -> np.ndarray:
    """Of each id, salt and hash."""
    return np.array(list(GOLDEN["ids"].values()))


def test_rows_are_those_of_the_golden_table():
    ids = tf.constant([int(i) for i in GOLDEN["ids"]], tf.int64)
    for s, salt in enumerate(GOLDEN["salts"]):
        table = te.Hashing(GOLDEN["num_rows"], hashes=16, salt=salt)
        for number, k in enumerate(GOLDEN["hashes"]):
            expected = golden_rows()[:, s, number]
            for call in (hashing.rows_of, tf.function(hashing.rows_of)):
                assert (call(ids, RowHash(table, k)).numpy() == expected).all()
    small = tf.constant([0, -1, 2**31 - 1, -(2**31)], tf.int32)
    wide = hashing.rows_of(tf.cast(small, tf.int64), RowHash(table, 3))
    assert (hashing.rows_of(small, RowHash(table, 3)) == wide).numpy().all()


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("length", [0, 1])
def test_engines_read_the_rows_of_the_golden_table(
    engine: str, dtype: tf.DType, length: int
):
    own = te.Hashing(GOLDEN["num_rows"], hashes=1, salt=GOLDEN["salts"][1])
    table = te.TableConfig(own, 1, te.RowIdInitializer())
    embedding = te.TPUEmbedding(te.FeatureConfig(table, length), te.SGD(0.1))
    pairs = zip(map(int, GOLDEN["ids"]), golden_rows()[:, 1, 0], strict=True)
    known = [(i, row) for i, row in pairs if dtype.min <= i <= dtype.max]
    ids = tf.RaggedTensor.from_tensor(tf.constant([[i] for i, _ in known], dtype))
    embedding.enqueue(ids, training=False)
    rows = tf.reshape(embedding.dequeue(), [-1]).numpy()
    assert rows.tolist() == [row for _, row in known]


def test_the_oracle_makes_the_golden_table():
    rows = [
        [
            [oracle.row(int(i), GOLDEN["num_rows"], salt, k) for k in GOLDEN["hashes"]]
            for salt in GOLDEN["salts"]
        ]
        for i in GOLDEN["ids"]
    ]
    assert rows == golden_rows().tolist()


def test_the_largest_table_has_rows_of_int32():
    rows = hashing.rows_of(tf.constant(POOL), RowHash(te.Hashing(2**31 - 1), 0)).numpy()
    assert rows.min() >= 0
    assert [int(r) for r in rows] == [oracle.row(int(i), 2**31 - 1, 0, 0) for i in POOL]


def configs(table: te.TableConfig, other: te.TableConfig, count: int = 1) -> Any:
    """A feature of each kind of input, on two tables; each of them `count` times."""
    found = {}
    for number, case in enumerate(cases.INPUTS):
        own = other if number % 3 == 2 else table
        length, shape = case.max_sequence_length, case.output_shape
        found[case.name] = [
            te.FeatureConfig(own, length, output_shape=shape) for _ in range(count)
        ]
    return found


def alone(nested: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: own[0] for name, own in nested.items()}


def batch(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ids that are indices of POOL, and weights of every second feature."""
    ids = {case.name: case.draw(rng, len(POOL)) for case in cases.INPUTS}
    weights = {
        case.name: cases.signed_weights(rng, ids[case.name])[0] if number % 2 else None
        for number, case in enumerate(cases.INPUTS)
    }
    return ids, weights


def by_hand(ids: Any, own: te.Hashing) -> list[Any]:
    """For each hash the rows that the oracle chooses."""
    indices = cases.values_of(ids)
    return [
        cases.with_values(
            ids,
            np.array([oracle.row(int(i), own.num_rows, own.salt, k) for i in POOL])[
                indices
            ],
        )
        for k in range(own.hashes)
    ]


def joined(parts: list[tf.Tensor], own: te.Hashing) -> tf.Tensor:
    if own.combine == "concat":
        return tf.concat(parts, -1)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize(
    ("combine", "combiner"), [("concat", "mean"), ("sum", "sqrtn")]
)
@pytest.mark.parametrize("cls", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_a_feature_is_a_feature_for_each_hash(
    engine: str, cls: Any, combine: str, combiner: str, rng: np.random.Generator
):
    own = te.Hashing(ROWS, hashes=3, combine=combine, salt=77)
    tables = [
        te.TableConfig(own, DIM, te.RowIdInitializer(), combiner=combiner, name=name)
        for name in "ab"
    ]
    static = [
        dataclasses.replace(t, vocabulary_size=ROWS, dim=own.width(DIM)) for t in tables
    ]
    salts = {case.name: (None, 5, 9)[n % 3] for n, case in enumerate(cases.INPUTS)}
    salted = {
        name: dataclasses.replace(config, salt=salts[name])
        for name, config in alone(configs(*tables)).items()
    }
    hashed = cls(salted, te.Adagrad(0.1))
    plain = cls(configs(static[0], static[1], own.hashes), te.Adagrad(0.1))
    for _ in range(2):
        ids, weights = batch(rng)
        found, gradients = [], []
        rows = {
            name: by_hand(value, salted[name].hashing) for name, value in ids.items()
        }
        repeated = {name: [w] * own.hashes for name, w in weights.items()}
        real = {
            n: cases.with_values(v, POOL[cases.values_of(v)]) for n, v in ids.items()
        }
        for embedding, given in ((hashed, (real, weights)), (plain, (rows, repeated))):
            if cls is te.TPUEmbedding:
                embedding.enqueue(*given)
                found.append((embedding.dequeue(), ()))
            else:
                activations, preserved = embedding(*given)
                found.append((activations, (preserved,)))
        for name, value in found[0][0].items():
            expected = joined(found[1][0][name], own)
            assert value.numpy().tobytes() == expected.numpy().tobytes(), name
            gradients.append(rng.normal(size=value.shape).astype(np.float32))
        upstream = dict(zip(found[0][0], map(tf.constant, gradients), strict=True))
        parts = {
            name: tf.split(g, own.hashes, -1) if combine == "concat" else [g] * 3
            for name, g in upstream.items()
        }
        hashed.apply_gradients(upstream, *found[0][1])
        plain.apply_gradients(parts, *found[1][1])
    for mine, theirs in zip(tables, static, strict=True):
        for array, variable in hashed.variables[mine].items():
            other = plain.variables[theirs][array]
            assert variable.numpy().tobytes() == other.numpy().tobytes()


def test_a_feature_has_a_salt_of_its_own_in_copies_files_and_exports(
    tmp_path: pathlib.Path,
):
    """Two features of one table give an id other rows, as TFRS's UnifiedEmbedding."""
    table = te.TableConfig(te.Hashing(1000, hashes=2), 8, name="all")
    config = {n: te.FeatureConfig(table, salt=s) for n, s in (("a", 3), ("b", None))}
    layer = te.keras.TPUEmbedding(config, te.SGD(0.1))
    ids = dict.fromkeys("ab", tf.constant(POOL))
    expected = layer(ids)
    assert (expected["a"].numpy() != expected["b"].numpy()).any(-1).all()
    copy = te.keras.TPUEmbedding.from_config(layer.get_config())
    copy(ids)
    copy.set_weights(layer.get_weights())
    te.serving.export(layer, tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served"))
    for answer in (copy(ids), served.signatures["serving_default"](**ids)):
        for name, value in expected.items():
            assert (answer[name].numpy() == value.numpy()).all()


@pytest.mark.parametrize("salt", [-1, 2**63, 0.5, "a"])
def test_a_salt_of_a_feature_is_checked(salt: Any):
    table = te.TableConfig(te.Hashing(10, hashes=1), 8)
    with pytest.raises(ValueError, match="salt"):
        te.FeatureConfig(table, salt=salt)
    with pytest.raises(ValueError, match="its table is not hashed"):
        te.FeatureConfig(te.TableConfig(10, 8), salt=salt)


def feature(own: Any = None, **table: Any) -> Any:
    options: dict[str, Any] = {"name": "films", "combiner": "sum", **table}
    config = te.TableConfig(own or te.Hashing(50, salt=3), 8, **options)
    return {"film": te.FeatureConfig(config)}


def made(cls: Any = te.TPUEmbedding, own: Any = None, **table: Any) -> Any:
    return cls(feature(own, **table), te.Adagrad(0.1))


def looked_up(embedding: Any, ids: Any = POOL) -> np.ndarray:
    given = {"film": tf.convert_to_tensor(ids)}
    if isinstance(embedding, te.TPUEmbedding):
        return evaluate_on(embedding, given)["film"].numpy()
    found = embedding(given)
    return (found[0] if isinstance(found, tuple) else found)["film"].numpy()


def trained(embedding: Any) -> Any:
    train_on(embedding, {"film": tf.constant(POOL)}, {"film": tf.ones([len(POOL), 8])})
    return embedding


CLASSES = [
    te.TPUEmbedding,
    te.TPUEmbeddingV2,
    te.TPUEmbeddingV0,
    te.TPUEmbeddingForServing,
    te.keras.TPUEmbedding,
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_restores_and_gives_the_same_bits(cls: Any, tmp_path: pathlib.Path):
    embedding = trained(made())
    expected = looked_up(embedding)
    path = tf.train.Checkpoint(embedding=embedding).write(f"{tmp_path}/a")
    other = made(cls)
    other.build()
    status = tf.train.Checkpoint(embedding=other).read(path)
    status.assert_existing_objects_matched()
    assert looked_up(other).tobytes() == expected.tobytes()
    for table in (
        te.Hashing(50, salt=4),
        te.Hashing(50, salt=3, hashes=2),
        te.Hashing(50, salt=3, combine="sum"),
        50,
    ):
        wrong = made(cls, table)
        wrong.build()
        with pytest.raises(ValueError, match=r"Hashing\(num_rows=50, hashes=4"):
            tf.train.Checkpoint(embedding=wrong).read(path)


def test_files_hold_the_hashing(tmp_path: pathlib.Path):
    embedding = trained(made())
    expected = looked_up(embedding)
    path = te.checkpoint.save(embedding, f"{tmp_path}/a")
    stock = tf.train.Checkpoint(embedding=embedding).write(f"{tmp_path}/b")
    assert tf.train.list_variables(path) == tf.train.list_variables(stock)
    folder = f"{tmp_path}/numpy"
    command = ["checkpoint", "convert", path, folder, "--to", "numpy"]
    assert main(command) == 0
    for source in (path, folder):
        assert te.checkpoint.read(source)["films"].hashing == te.Hashing(50, salt=3)
        other = made()
        te.checkpoint.restore(other, source)
        assert looked_up(other).tobytes() == expected.tobytes()
    wrong = made(own=te.Hashing(50, salt=4))
    before = looked_up(wrong)
    with pytest.raises(ValueError, match=r"salt=4\), but in .* it has .*salt=3\)"):
        te.checkpoint.restore(wrong, path)
    with pytest.raises(ValueError, match="it has"):
        te.checkpoint.restore(made(own=50), path, slots=False)
    with pytest.raises(NotImplementedError, match=r"`resize=True` .*'films'"):
        te.checkpoint.restore(made(own=te.Hashing(60, salt=3)), path, resize=True)
    with pytest.raises(NotImplementedError, match="`ids` names table 'films'"):
        te.checkpoint.restore(wrong, path, ids={"films": [1]})
    static = te.checkpoint.save(made(own=50), f"{tmp_path}/static")
    with pytest.raises(ValueError, match="it is not hashed"):
        te.checkpoint.restore(wrong, static)
    assert looked_up(wrong).tobytes() == before.tobytes()


@pytest.mark.parametrize(("storage", "mapped"), [("float32", False), ("int8", True)])
def test_an_export_gives_the_same_bits(
    storage: str, mapped: bool, tmp_path: pathlib.Path
):
    embedding = trained(made(string_ids=True))
    path = str(tmp_path / "model")
    report = te.serving.export(
        embedding, path, signatures=["dense"], storage=storage, mapped=mapped
    )
    served = tf.saved_model.load(path).signatures["dense"]
    words = np.array(["", "a", "film", "films"])
    found = served(film=tf.constant(words))["film"].numpy()
    error = 4 * (report.tables[0].max_error or 0.0)  # 0 for float32.
    exact = looked_up(embedding, words)
    np.testing.assert_allclose(found, exact, rtol=0, atol=error)
    if storage == "float32":
        assert found.tobytes() == exact.tobytes()
    assert ops_of(tmp_path / "model")


@pytest.mark.second_tier
def test_an_export_loads_without_the_package(tmp_path: pathlib.Path):
    embedding = trained(made())
    te.serving.export(embedding, tmp_path / "model")
    program = (
        "import sys\n"
        "sys.modules['tpu_embedding'] = None\n"
        "import numpy as np, tensorflow as tf\n"
        "model = tf.saved_model.load(sys.argv[1]).signatures['dense']\n"
        "ids = tf.constant(np.load(sys.argv[2]))\n"
        "np.save(sys.argv[3], model(film=ids)['film'])\n"
    )
    ids, rows = tmp_path / "ids.npy", tmp_path / "rows.npy"
    np.save(ids, POOL)
    printed_by("-c", program, tmp_path / "model", ids, rows, timeout=120)
    assert np.load(rows).tobytes() == looked_up(embedding).tobytes()


@pytest.mark.second_tier
def test_deltas_have_the_rows_of_ids(tmp_path: pathlib.Path):
    embedding, path = made(), str(tmp_path / "model")
    te.serving.export(embedding, path, signatures=["dense"], deltas=True)
    model = tf.saved_model.load(path)
    writer = te.serving.DeltaWriter(embedding, path, "replicas")
    trained(embedding)
    writer.export_delta(tmp_path / "delta")
    te.serving.apply_delta(model, tmp_path / "delta")
    found = model.signatures["dense"](film=tf.constant(POOL))["film"].numpy()
    assert found.tobytes() == looked_up(embedding).tobytes()
    with pytest.raises(ValueError, match=r"salt=3.*but the embedding has .*salt=4"):
        te.serving.DeltaWriter(made(own=te.Hashing(50, salt=4)), path, "replicas")


def test_strings_are_ids_where_they_are_allowed():
    words = tf.constant(["", "a", "film"])
    ids = tf.strings.to_hash_bucket_fast(words, 2**63 - 1)
    own = made(string_ids=True)
    assert looked_up(own, words).tobytes() == looked_up(own, ids).tobytes()
    with pytest.raises(TypeError, match=r"TableConfig\(string_ids=True\)"):
        looked_up(made(), words)
    with pytest.raises(TypeError, match=r"te\.pack does not take strings"):
        te.pack({"film": words})
    with pytest.raises(ValueError, match="Argument `string_ids` must be False"):
        te.TableConfig(5, 2, string_ids=True)


def test_strings_are_ids_of_growing_tables():
    words = tf.constant([["", "a"], ["film", "a"]])
    ids = tf.strings.to_hash_bucket_fast(words, 2**63 - 1).numpy()
    table = te.TableConfig(te.GrowingVocabulary(9), 2, combiner="sum", string_ids=True)
    grown = te.TPUEmbeddingV2(te.FeatureConfig(table), te.SGD(0.1))
    weights = tf.ones([2, 2])
    with tf.GradientTape() as tape:
        tape.watch(weights)
        activations, preserved = grown(words, weights)
    found = tape.gradient(activations, weights).numpy()
    np.testing.assert_allclose(found.sum(1), activations.numpy().sum(1), atol=1e-6)
    grown.apply_gradients(tf.zeros_like(activations), preserved)
    assert grown.vocabularies[table].ids.tolist() == np.unique(ids).tolist()
    assert grown.freeze_vocabulary(table).config.string_ids is False


def test_first_values_have_the_deviation_of_the_value_of_an_id():
    for combine in ("concat", "sum"):
        own = te.Hashing(20_000, hashes=4, combine=combine)
        table = te.TPUEmbedding(
            te.FeatureConfig(te.TableConfig(own, 16)), None
        ).embedding_tables
        (values,) = (variable.numpy() for variable in table.values())
        expected = 16**-0.5 if combine == "concat" else (16 * 4) ** -0.5
        assert values.shape == (20_000, own.width(16))
        assert abs(values.std() / expected / 0.8796 - 1) < 0.01  # It is truncated.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_rows": 0}, "`num_rows` must be an int from 1 to 2147483647"),
        ({"num_rows": 2**31}, "`num_rows` must be an int from 1"),
        ({"num_rows": 2.0}, "`num_rows` must be an int >= 1"),
        ({"hashes": 0}, "`hashes` must be an int from 1 to 16"),
        ({"hashes": 17}, "`hashes` must be an int from 1 to 16"),
        ({"salt": -1}, "`salt` must be an int from 0"),
        ({"salt": 2**63}, "`salt` must be an int from 0"),
        ({"combine": "mean"}, "`combine` must be one of"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        te.Hashing(**{"num_rows": 5, **options})


def test_wrong_tables_are_named():
    with pytest.raises(ValueError, match="dim 6 is not a multiple of 4, the num"):
        te.TableConfig(te.Hashing(5), 6)
    for policy in ("drop", "mod"):
        with pytest.raises(ValueError, match='`invalid_ids` must be "error"'):
            te.TableConfig(te.Hashing(5), 8, invalid_ids=policy)
    combiner = te.CustomCombiner(lambda v, w: v, 1)
    with pytest.raises(NotImplementedError, match="Hashing does not support a Custom"):
        te.TableConfig(te.Hashing(5), 8, combiner=combiner)
    embedding = made()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has id 2\.5"):
        looked_up(embedding, [2.5])
    trained(embedding).enqueue({"film": tf.constant([1])})
    embedding.dequeue()
    with pytest.raises(ValueError, match="whose last axis is 8"):
        embedding.apply_gradients({"film": tf.ones([1, 6])})
