"""Checkpoints of the removed TPUEstimator: read, looked up, trained on."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from estimator import oracle
from hypothesis import strategies as st
from interop.spec_cases import dict_spec, embedding, shared, spec
from steps import train_on

import tpu_embedding as te
from tpu_embedding import checkpoint, interop
from tpu_embedding.compat.interop.checkpoint_import import rows_by_id
from tpu_embedding.testing import SoftwareTPUStrategy

read = interop.import_estimator_checkpoint
VARIABLES = {
    "tbl_x": "dense_features/x_embedding/embedding_weights",
    "tbl_w_weighted_by_wt": "dense_features/w_weighted_by_wt_embedding/"
    "embedding_weights",
    "tbl_y_z_shared_embedding": "y_z_shared_embedding",
}


@pytest.mark.parametrize("folder", oracle.RUNS, ids=oracle.RUN_IDS)
def test_reference_checkpoint_is_read(folder: pathlib.Path):
    run = oracle.load(folder)
    imported = read(run.checkpoint, run.spec())
    assert imported.global_step == run.meta["steps"]
    found = {name: 0 for name in run.variables if not name.startswith("head")}
    del found["global_step"]
    for table, parts in imported.items():
        slots = {
            "accumulators": "/" + run.meta["optimizer"].title(),
            "linears": "/Ftrl_1",
        }
        for part, value in parts.items():
            name = VARIABLES[table] + {"parameters": "", **slots}[part]
            np.testing.assert_array_equal(value, run.variables[name])
            found[name] += 1
    assert set(found.values()) == {1}  # Everything was taken, and once.


@pytest.mark.parametrize("folder", oracle.RUNS, ids=oracle.RUN_IDS)
def test_reference_checkpoint_predicts_and_trains_on(folder: pathlib.Path):
    run = oracle.load(folder)
    made = run.spec()
    embedding, adapted = made.to_tpu_embedding(), made.adapt()
    read(run.checkpoint, made).assign(embedding)
    head = tf.Variable(run.variables["head"])

    def forward(features: Any, *, training: bool) -> Any:
        ids = {key: features[key] for key in adapted.features}
        embedding.enqueue(ids, adapted.weights(features), training=training)
        return embedding.dequeue()

    features, labels = run.batch(0)
    predictions = oracle.predict(forward(features, training=False), head)[:, 0]
    np.testing.assert_allclose(
        predictions, run.arrays["predictions"], rtol=0, atol=oracle.TOLERANCE
    )
    loss = float(tf.reduce_mean((predictions[:, tf.newaxis] - labels) ** 2))
    assert abs(loss - run.meta["eval"]["loss"]) < oracle.TOLERANCE
    before = {t.name: v.numpy() for t, v in embedding.embedding_tables.items()}
    activations = forward(features, training=True)
    with tf.GradientTape() as tape:
        tape.watch(activations)
        error = (oracle.predict(activations, head) - labels) ** 2
        loss = tf.reduce_mean(error)
    embedding.apply_gradients(tape.gradient(loss, activations))
    # Other runs may have a first batch without entries of a table.
    named = {
        config.table.name
        for key, config in adapted.feature_config.items()
        if features[key].values.shape[0]
    }
    assert named
    for table, variable in embedding.embedding_tables.items():
        changed = (variable.numpy() != before[table.name]).any(axis=1)
        assert changed.any() or table.name not in named, table.name


def save(folder: pathlib.Path, variables: dict[str, Any], step: int = 7) -> str:
    """A checkpoint of TensorFlow 1 with these variables; its prefix."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        for name, value in variables.items():
            v1.get_variable(name, initializer=np.float32(value))
        set_step = v1.assign(v1.train.get_or_create_global_step(), step)
        session.run(v1.global_variables_initializer())
        session.run(set_step)
        return v1.train.Saver().save(session, str(folder / "model.ckpt"), step)


A = np.arange(16, dtype=np.float32).reshape(8, 2)
ADAM = interop.AdamParameters(0.1)
TABLE_A = "input_layer/a_embedding/embedding_weights"


def test_adam_of_tpu_and_cpu_runs(tmp_path: pathlib.Path):
    tpu = save(
        tmp_path, {TABLE_A: A, TABLE_A + "/Adam/m": A + 1, TABLE_A + "/Adam/v": A}
    )
    parts = read(tpu, spec(parameters=ADAM))["tbl_a"]
    np.testing.assert_array_equal(parts["momenta"], A + 1)
    (tmp_path / "cpu").mkdir()
    cpu = save(
        tmp_path / "cpu", {TABLE_A: A, TABLE_A + "/Adam": A + 1, TABLE_A + "/Adam_1": A}
    )
    parts = read(cpu, spec(parameters=ADAM))["tbl_a"]
    np.testing.assert_array_equal(parts["momenta"], A + 1)
    np.testing.assert_array_equal(parts["velocities"], A)


# By table its parameters, and its slots as (their names there, their names here).
RULES: dict[str, tuple[Any, dict[str, str]]] = {
    "mom": (interop.MomentumParameters(0.1, 0.9), {"Momentum": "momenta"}),
    "rms": (
        interop.RMSPropParameters(0.1, 0.9, 0.9, 1e-8),
        {"RMSProp/ms": "ms", "RMSProp/mom": "mom"},
    ),
    "rms_of_a_cpu": (
        interop.RMSPropParameters(0.1, 0.9, 0.9, 1e-8),
        {"RMSProp": "ms", "RMSProp_1": "mom"},
    ),
    "ada": (
        interop.ProximalAdagradParameters(0.1),
        {"ProximalAdagrad": "accumulators"},
    ),
    "yogi": (
        interop.ProximalYogiParameters(),
        {"ProximalYogi": "v", "ProximalYogi_1": "m"},
    ),
    "often": (
        interop.FrequencyEstimatorParameters(0.1, 9, 3, 0),
        {"FrequencyEstimator": "last_hit_step"},
    ),
}


def test_tables_by_key_and_slots_of_every_rule(tmp_path: pathlib.Path):
    column, written, expected = A[:, :1], {}, {}
    for table, (_, slots) in RULES.items():
        written[table] = column
        expected[table] = {"parameters": column}
        for number, (theirs, ours) in enumerate(slots.items(), 1):
            written[f"{table}/{theirs}"] = column + number
            expected[table][ours] = column + number
    made = dict_spec(
        features={table: interop.FeatureConfig(table) for table in RULES},
        tables={
            table: interop.TableConfig(8, 1, optimization_parameters=parameters)
            for table, (parameters, _) in RULES.items()
        },
        optimization_parameters=None,
    )
    trained = made.to_tpu_embedding()
    read(save(tmp_path, written), made).assign(trained)
    for table, parts in trained.variables.items():
        assert set(parts) == set(expected[str(table.name)])
        for part, values in expected[str(table.name)].items():
            np.testing.assert_array_equal(parts[part], values)


def test_missing_slots_keep_their_initial_values(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    path = save(tmp_path, {TABLE_A: A})
    made = spec(parameters=interop.AdagradParameters(0.1, 0.25))
    imported = read(tmp_path, made)  # A folder stands for its latest checkpoint.
    assert list(read(path, made)["tbl_a"]) == list(imported["tbl_a"]) == ["parameters"]
    trained = made.to_tpu_embedding()
    imported.assign(trained)
    (parts,) = trained.variables.values()
    np.testing.assert_array_equal(parts["parameters"], A)
    assert set(parts["accumulators"].numpy().flat) == {0.25}


def test_the_step_goes_on_for_rate_functions(tmp_path: pathlib.Path):
    path = save(tmp_path, {TABLE_A: A}, step=7)
    made = spec(embedding("a", learning_rate_fn=lambda step: tf.cast(step, tf.float32)))
    trained = made.to_tpu_embedding()
    read(path, made).assign(trained)
    train_on(trained, {"a": tf.constant([1])}, {"a": tf.ones([1, 2])})
    (table,) = trained.embedding_tables.values()
    assert table.numpy()[1].tolist() == [2.0 - 7, 3.0 - 7]


@pytest.mark.parametrize("version", ["v4", "v6e"])
def test_tables_go_into_the_engines_of_tpus(tmp_path: pathlib.Path, version: str):
    """Their values are no variables that one could assign."""
    values = {"t": np.arange(800.0).reshape(100, 8), "t/Adagrad": np.full((100, 8), 2)}
    tables = {"t": interop.TableConfig(100, 8)}
    made = dict_spec(
        tables=tables, optimization_parameters=interop.AdagradParameters(1)
    )
    imported = read(save(tmp_path, values), made)
    with SoftwareTPUStrategy(version, num_devices=2).scope():
        if version == "v4":
            trained = made.to_tpu_embedding()
            trained.build({"f": tf.TensorShape([4, 1])})
        else:
            table = te.TableConfig(100, 8, name="t")
            feature = te.FeatureConfig(table, output_shape=[4], name="f")
            trained = te.TPUEmbeddingV2({"f": feature}, te.Adagrad(1.0))
    imported.assign(trained)
    written = checkpoint.read(checkpoint.save(trained, tmp_path / "again"))["t"]
    np.testing.assert_array_equal(written.parameters.numpy(), values["t"])
    np.testing.assert_array_equal(written.slots["accumulators"].numpy(), 2)
    with pytest.raises(TypeError, match="take a TPUEmbedding or a"):
        imported.assign({})  # type: ignore[arg-type]


def test_a_spec_is_needed(tmp_path: pathlib.Path):
    with pytest.raises(TypeError, match="`spec` must be an EmbeddingConfigSpec"):
        read(save(tmp_path, {"t": A}), {"t": A})


def test_names_that_the_rules_do_not_find(tmp_path: pathlib.Path):
    path = save(tmp_path, {"one": A, "two": A + 1, TABLE_A: A, "b/" + TABLE_A: A})
    made = spec(parameters=interop.AdagradParameters(0.1))
    names = {"tbl_a": "one", "tbl_a/accumulators": "two"}
    parts = read(path, made, name_map=names)["tbl_a"]
    np.testing.assert_array_equal(parts["accumulators"], parts["parameters"] + 1)


@hypothesis.given(st.integers(1, 40), st.integers(1, 7))
def test_rows_by_id_undoes_mod(rows: int, hosts: int):
    """Row j of host h is id j * hosts + h, written host after host."""
    written = [i for h in range(hosts) for i in range(rows) if i % hosts == h]
    values = np.array(written)[:, np.newaxis] * [1, 10]
    np.testing.assert_array_equal(rows_by_id(values, hosts)[:, 0], np.arange(rows))


@pytest.mark.parametrize("strategy", ["mod", "div"])
def test_files_of_three_hosts(tmp_path: pathlib.Path, strategy: str):
    order = [0, 3, 6, 1, 4, 7, 2, 5] if strategy == "mod" else list(range(8))
    path = save(tmp_path, {"t": A[order], "t/Adagrad": A[order] + 1})
    made = dict_spec(
        optimization_parameters=interop.AdagradParameters(0.1),
        partition_strategy=strategy,
    )
    parts = read(path, made, num_hosts=3)["t"]
    np.testing.assert_array_equal(parts["parameters"], A)
    np.testing.assert_array_equal(parts["accumulators"], A + 1)
    other = read(path, made, num_hosts=3, partition_strategy="div")["t"]
    np.testing.assert_array_equal(other["parameters"], A[order])


def test_small_tables_are_padded_to_the_hosts(tmp_path: pathlib.Path):
    path = save(tmp_path, {"t": A})
    tables = {"t": interop.TableConfig(3, 2)}
    parts = read(path, dict_spec(tables=tables), num_hosts=8)["t"]
    np.testing.assert_array_equal(parts["parameters"], A[:3])


BAD: dict[str, tuple[Any, str]] = {
    "no file": (
        lambda path: read("nowhere/model.ckpt", spec()),
        "There is no checkpoint at 'nowhere/model.ckpt'.",
    ),
    "hosts": (
        lambda path: read(path, spec(), num_hosts=0),
        "Argument `num_hosts` must be an int >= 1. Received: 0.",
    ),
    "strategy": (
        lambda path: read(path, spec(), partition_strategy="row"),
        "`partition_strategy` must be",
    ),
    "none": (
        lambda path: read(path, spec(embedding("q"))),
        "must belong to 'tbl_q', but none does. The checkpoint has 'c_embedding/",
    ),
    "two": (
        lambda path: read(path, spec(embedding("c"))),
        "2 match: 'c_embedding/embedding_weights', 'top/c_embedding/embedding_weights'",
    ),
    "shared": (
        lambda path: read(path, spec(*shared("b", "c"))),
        "must belong to 'tbl_b_c_shared_embedding', but none does",
    ),
    "strategy of no letters": (
        lambda path: read(path, spec(), partition_strategy=""),
        "`partition_strategy` must be",
    ),
    "parameters of another class": (
        lambda path: read(path, dict_spec(optimization_parameters="sgd")),
        "Argument `optimization_parameters` must be one of AdagradParameters,",
    ),
    "key of the map": (
        lambda path: read(path, spec(), name_map={"a": "t"}),
        "`name_map` has the key 'a', but the spec has 'tbl_a'.",
    ),
    "value of the map": (
        lambda path: read(path, spec(), name_map={"tbl_a": "nothing"}),
        "must belong to 'tbl_a', but none does",
    ),
    "shape": (
        lambda path: read(path, dict_spec(tables={"t": interop.TableConfig(9, 2)})),
        "Table 't', parameters: the checkpoint's variable 't' has shape (8, 2), but "
        "the spec requires (9, 2).",
    ),
    "other tables": (
        lambda path: read(path, dict_spec()).assign(spec().to_tpu_embedding()),
        "The imported tables are 't', but the embedding has the tables 'tbl_a'.",
    ),
    "other slots": (
        lambda path: read(
            path, dict_spec(optimization_parameters=interop.AdagradParameters(0.1))
        ).assign(dict_spec(optimization_parameters=ADAM).to_tpu_embedding()),
        "Table 't': the imported slot 'accumulators' has no counterpart among",
    ),
    "other size": (
        lambda path: read(path, dict_spec()).assign(
            dict_spec(tables={"t": interop.TableConfig(9, 2)}).to_tpu_embedding()
        ),
        "Table 't', parameters: the imported array has shape (8, 2), but the "
        "embedding's variable has shape (9, 2).",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls(case: str, tmp_path: pathlib.Path):
    table = "c_embedding/embedding_weights"
    path = save(tmp_path, {"t": A, "t/Adagrad": A, table: A, f"top/{table}": A})
    call, text = BAD[case]
    with pytest.raises(ValueError, match=re.escape(text)):
        call(path)


@pytest.mark.parametrize("suffix", ["index", "data-00000-of-00001"])
@pytest.mark.parametrize("size", [0, 20])
def test_damaged_files_are_named(tmp_path: pathlib.Path, suffix: str, size: int):
    path = save(tmp_path, {"t": A})
    file = pathlib.Path(f"{path}.{suffix}")
    file.write_bytes(file.read_bytes()[:size])
    words = f"The checkpoint {path!r} cannot be read: "
    with pytest.raises(ValueError, match=re.escape(words)):
        read(path, dict_spec())


def test_a_lost_part_is_named(tmp_path: pathlib.Path):
    path = save(tmp_path, {"t": A})
    pathlib.Path(path + ".data-00000-of-00001").unlink()
    with pytest.raises(ValueError, match="cannot be read: "):
        read(path, dict_spec())


def test_tables_of_the_tensor_core_are_refused(tmp_path: pathlib.Path):
    column = embedding(
        "a", embedding_lookup_device="tpu_tensor_core", tensor_core_shape=[None, 3]
    )
    with pytest.raises(NotImplementedError, match="import_estimator_checkpoint"):
        read(save(tmp_path, {TABLE_A: A}), spec(column))
