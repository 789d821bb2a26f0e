"""`python -m tpu_embedding run`: TPU programs run unchanged, with these figures."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import types
from typing import Any

import forked
import keras
import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.__main__ import main
from tpu_embedding.commands import programs
from tpu_embedding.compat import drop_in
from tpu_embedding.keras.keras_api import keras_api

PROGRAMS = pathlib.Path(__file__).parents[1] / "examples" / "drop_in"
second_tier = pytest.mark.second_tier
FIGURES = [
    pytest.param(
        "queue_loop.py", "v4:2", "loss 0.665679 served 4.375109", marks=second_tier
    ),
    pytest.param("sparse_core.py", "v6e:2", "loss 56.500000 to 5.33907"),
    pytest.param("estimator.py", "host", "loss 0.70", marks=second_tier),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(arguments)


@pytest.mark.parametrize(("program", "on", "figure"), FIGURES)
def test_programs_reach_their_figures(program: str, on: str, figure: str):
    done = run("-m", "tpu_embedding", "run", "--on", on, str(PROGRAMS / program))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith(figure)
    assert done.stderr.count("these names are those of tpu_embedding") == 1
    assert f"on {on}, " in done.stderr


IMPORTED = """
import tensorflow.tpu.experimental.embedding as before
import tpu_embedding as te
te.install("v5p:2")
import tensorflow as tf
import tensorflow.compat.v1.tpu.experimental.embedding as of_v1
import tensorflow.tpu.experimental.embedding as after
from tensorflow.config import experimental_connect_to_cluster
from tensorflow.tpu import experimental
from tensorflow.tpu.experimental import initialize_tpu_system
from tensorflow.tpu.experimental.embedding import TPUEmbedding
for module in (before, after, of_v1, experimental.embedding):
    assert module.TPUEmbedding is te.TPUEmbedding, module
assert TPUEmbedding is tf.tpu.experimental.embedding.TPUEmbedding is te.TPUEmbedding
assert initialize_tpu_system is tf.tpu.experimental.initialize_tpu_system
assert initialize_tpu_system().mesh_shape.tolist() == [2, 1, 1, 1]
resolver = tf.distribute.cluster_resolver.TPUClusterResolver()
print("Running on", resolver.cluster_spec().as_dict()["worker"])
experimental_connect_to_cluster(resolver)
"""


@second_tier
@pytest.mark.parametrize("early", [False, True])
def test_each_way_to_import_a_name(early: bool, tmp_path: pathlib.Path):
    first, rest = IMPORTED.lstrip().split("\n", 1)
    text = f"{first}\n{rest}" if early else rest.replace("before, ", "")
    (tmp_path / "program.py").write_text(text)
    done = run(str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "Running on ['localhost:8470']\n"


def test_nothing_is_replaced_unless_asked():
    assert tf.tpu.experimental.embedding.TPUEmbedding is not te.TPUEmbedding
    assert tf.distribute.TPUStrategy is not drop_in.TPUStrategy
    assert not hasattr(tf, "estimator")


def test_the_module_of_tfrs_has_a_layer_that_keeps_axes():
    module: Any = types.ModuleType(drop_in._TFRS_LAYER)
    plain = te.keras.TPUEmbedding
    try:
        drop_in._TfrsLayer().exec_module(module)
        layer = module.TPUEmbedding(te.FeatureConfig(te.TableConfig(4, 2)), "sgd")
        assert layer(tf.constant([[1, 2]])).shape == (1, 2, 2)
        saved: Any = keras.saving.serialize_keras_object(layer)
        loaded = keras.saving.deserialize_keras_object(saved)
        assert type(loaded) is module.TPUEmbedding is not plain
    finally:
        keras_api.register(plain)
    # In another process, the layer by its own name has what was saved.
    assert saved["module"] == "tpu_embedding.keras.layer"
    assert type(keras.saving.deserialize_keras_object(saved)) is plain


def test_uninstall_gives_the_names_back(monkeypatch: pytest.MonkeyPatch):
    def names() -> list[object]:
        found = [vars(tf.tpu.experimental.embedding), vars(tf.tpu.experimental)]
        found += [vars(tf.distribute), vars(tf.config), sys.meta_path]
        modules = [name for name in sys.modules if "estimator" in name]
        return [*map(str, found), modules, hasattr(tf, "estimator")]

    before = names()
    for on in ("v4:2", "host"):
        te.install(on)
        assert tf.tpu.experimental.embedding.TPUEmbedding is te.TPUEmbedding
        assert names() != before
        te.uninstall()
        assert names() == before
    te.uninstall()
    te.install("host")
    monkeypatch.setitem(sys.modules, drop_in._TFRS_LAYER, te)
    with pytest.raises(RuntimeError, match="Use another process"):
        te.uninstall()
    monkeypatch.undo()
    te.uninstall()
    assert names() == before


def test_load_model_of_keras_converts(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    def loaded(optimizer: str) -> tuple[type, type]:
        table = keras.layers.Embedding(5, 2)
        model = keras.Sequential([keras.Input([2]), table])
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        model.save(path := str(tmp_path / "model.keras"))
        found: Any = keras.models.load_model(path)
        return type(found.layers[0]), type(found.optimizer)

    plain = (keras.layers.Embedding, keras.optimizers.Adam)
    te.install("host")
    try:
        assert loaded("adam")[0] is te.keras.Embedding
        assert loaded("adam")[1].__name__ == "RowSparseAdam"
        assert loaded("adamax") == (plain[0], keras.optimizers.Adamax)
        assert "the model stays Keras's: RowSparseOptimizer does not" in caplog.text
    finally:
        te.uninstall()
    assert loaded("adam") == plain


def test_names_of_tensorflow_1_and_2_3():
    te.install("host")
    try:
        options = tf.distribute.InputOptions(experimental_prefetch_to_device=False)
        assert options == tf.distribute.InputOptions(experimental_fetch_to_device=False)
        assert isinstance(options, drop_in.InputOptions.__base__)
        assert tf.distribute.InputOptions().experimental_fetch_to_device
        with pytest.raises(ValueError, match="an older name of `experimental_fetch_"):
            tf.distribute.InputOptions(False, experimental_prefetch_to_device=False)
        for root in (tf, tf.compat.v1, tf.compat.v2):
            names: Any = root.tpu.experimental
            assert names.AdagradParameters is te.interop.AdagradParameters
            assert names.embedding_column is te.interop.embedding_column
            assert names.shared_embedding_columns is te.interop.shared_embedding_columns
        removed: Any = tf
        parameters = removed.estimator.tpu.experimental.AdagradParameters
        assert parameters is te.interop.AdagradParameters
        with pytest.raises(AttributeError, match="AdagradParameters, AdamParameters"):
            removed.estimator.tpu.experimental.NoParameters  # noqa: B018
    finally:
        te.uninstall()
    assert not hasattr(tf.tpu.experimental, "embedding_column")


PROGRAM = """
import sys
import tensorflow as tf
import tpu_embedding as te
te.install("mirrored:2")
te.install("mirrored:2")
assert tf.compat.v2.tpu.experimental.embedding.TPUEmbedding is te.TPUEmbedding
strategy = tf.distribute.TPUStrategy()
assert strategy.num_replicas_in_sync == 2
assert isinstance(strategy, tf.distribute.TPUStrategy)
assert strategy is tf.distribute.experimental.TPUStrategy(None)
resolver = tf.distribute.cluster_resolver.TPUClusterResolver("grpc://10.0.0.1")
assert resolver.num_accelerators() == {"TPU": 2}
topology = tf.tpu.experimental.initialize_tpu_system(resolver)
def assigned(replicas):
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        topology, num_replicas=replicas
    )
    return tf.distribute.TPUStrategy(
        resolver, experimental_device_assignment=assignment
    )
assert assigned(2) is strategy
assert tf.estimator.SessionRunHook is tf.compat.v1.train.SessionRunHook
for refused in (
    lambda: tf.distribute.TPUStrategy(experimental_spmd_xla_partitioning=True),
    lambda: assigned(1),
    lambda: tf.distribute.TPUStrategy(resolver, steps_per_run=3),
    lambda: tf.estimator.Estimator,
    lambda: te.install("v4:2"),
):
    try:
        refused()
    except (NotImplementedError, AttributeError, RuntimeError) as error:
        print(error)
"""


def test_a_program_may_begin_with_its_data(tmp_path: pathlib.Path):
    (tmp_path / "program.py").write_text(
        "import tensorflow as tf\n"
        "data = tf.data.Dataset.range(4)\n"
        "print(tf.distribute.TPUStrategy().num_replicas_in_sync)\n"
    )
    program = str(tmp_path / "program.py")
    done = run("-m", "tpu_embedding", "run", "--on", "v4:2", program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "2\n"


@second_tier
def test_what_is_not_carried_is_refused_by_name(tmp_path: pathlib.Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    for line in lines[:2]:
        assert "only if each replica is one device and each device a" in line
    assert "TPUStrategy(steps_per_run=3) is not supported on mirrored:2" in lines[2]
    assert "tensorflow.estimator.Estimator: TensorFlow has removed" in lines[3]
    assert "names are already installed for 'mirrored:2'" in lines[4]


# Two cores of a chip for a replica, whose program they share on a TPU.
ASSIGNED = """
import tensorflow as tf
import tpu_embedding as te
te.install("v3:4")
embeddings = tf.tpu.experimental.embedding
resolver = tf.distribute.cluster_resolver.TPUClusterResolver("")
topology = tf.tpu.experimental.initialize_tpu_system(resolver)
assert topology.mesh_shape.tolist() == [2, 1, 1, 2]
assignment = tf.tpu.experimental.DeviceAssignment.build(
    topology, computation_shape=[1, 1, 1, 2], num_replicas=2
)
strategy = tf.distribute.TPUStrategy(
    resolver, assignment, experimental_spmd_xla_partitioning=True
)
assert strategy.num_replicas_in_sync == 2
feature = strategy.extended.tpu_hardware_feature.embedding_feature
assert feature == tf.tpu.experimental.HardwareFeature.EmbeddingFeature.V1
with strategy.scope():
    table = embeddings.TableConfig(8, 4, tf.zeros_initializer(), combiner="sum")
    embedding = embeddings.TPUEmbedding(
        embeddings.FeatureConfig(table), embeddings.SGD(0.5)
    )
def replica_step():
    rows = embedding.dequeue()
    embedding.apply_gradients(tf.ones_like(rows))
    return rows
@tf.function
def step():
    embedding.enqueue(tf.constant([1, 1, 2, 3]))
    return strategy.run(replica_step)
step()
print(strategy.experimental_local_results(step())[0][:, 0].numpy().tolist())
tf.tpu.experimental.initialize_tpu_system(resolver)
try:
    embedding.enqueue(tf.constant([1, 1, 2, 3]))
except tf.errors.FailedPreconditionError as error:
    print(str(error).replace("\\n", " "))
try:
    tf.distribute.TPUStrategy(
        resolver, tf.tpu.experimental.DeviceAssignment.build(topology, num_replicas=4)
    )
except RuntimeError as error:
    print(error)
"""


@second_tier
def test_a_device_assignment_and_spmd(tmp_path: pathlib.Path):
    (tmp_path / "program.py").write_text(ASSIGNED)
    done = run(str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    rows, ended, refused = done.stdout.splitlines()
    assert "the TPU was initialized again" in ended
    # Both replicas look up the same ids, so each row has twice its gradients.
    assert rows == "[-2.0, -2.0, -1.0, -1.0]"
    assert "with another `experimental_device_assignment` or without" in refused


@pytest.mark.parametrize("on", ["", "tpu", "v4", "mirrored:0", "v9:2", "host:2", None])
def test_places_that_do_not_exist(on: Any):
    with pytest.raises(ValueError, match='`on` must be "host", '):
        te.install(on)


@second_tier
def test_scripts_have_their_own_arguments_and_errors(tmp_path: pathlib.Path):
    (tmp_path / "beside.py").write_text("NUMBER = 3")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\nprint(__name__, beside.NUMBER, sys.argv[1:])\n"
        "raise ValueError('mine')"
    )
    done = run("-m", "tpu_embedding", "run", str(script), "--on", "x", "-v")
    assert done.stdout.splitlines() == ["__main__ 3 ['--on', 'x', '-v']"]
    assert done.returncode == 1
    # As Python prints it: no line of this package.
    lines = done.stderr.splitlines()
    assert lines[lines.index("Traceback (most recent call last):") + 1 :] == [
        f'  File "{script}", line 3, in <module>',
        "    raise ValueError('mine')",
        "ValueError: mine",
    ]
    script.write_text("import sys\nif __name__ == '__main__': sys.exit(7)")
    assert run("-m", "tpu_embedding", "run", str(script)).returncode == 7


@second_tier
def test_modules(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os; first = os.environ.get('TF_USE_LEGACY_KERAS')"
    )
    (package / "model.py").write_text("NUMBER = 3\ndef later():\n    import tf_keras")
    (package / "train.py").write_text(
        "import sys\nfrom . import first\nfrom package.model import NUMBER\n"
        "print(__name__, __package__, NUMBER, first, sys.argv[1:])"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    done = run("-m", "tpu_embedding", "run", "-m", "package.train", "-m", "x")
    assert done.stdout.splitlines() == ["__main__ package 3 1 ['-m', 'x']"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.py"], "error: There is no script 'nothing.py'. For a module use"),
        (["."], "error: '.' is a folder without a __main__.py."),
        (["x.ipynb"], "error: 'x.ipynb' is a notebook. Convert it with `jupyter"),
        (["-m", "nothing.x"], "error: There is no module 'nothing.x' in the current"),
        (["-m", "tensorflow"], "error: There is no module 'tensorflow' in the current"),
        (["--on", "v9:2", "-m", "json.tool"], 'error: `on` must be "host", '),
    ],
    ids=range(6),
)
def test_programs_that_are_missing(
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "x.ipynb").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import tensorflow as tf", False),
        ("import tf_keras", True),
        ("from tensorflow_recommenders.layers import embedding", True),
        ("from package import model", True),
        ("import package.model", True),
        ("import package", False),
        ("import package.train", True),
        ("from package import nothing, train", True),
        ("import package.wrong\nimport package.model", True),
        ("import package.wrong", False),
        ("import tensorflow as tf\ntf.keras.layers.DenseFeatures([])", True),
        ("import tensorflow as tf\ntf.keras.layers.Dense(1)", False),
        ("import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'", True),
        ("import os\nos.environ['TF_USE_LEGACY_KERAS'] = '0'", False),
    ],
)
def test_scripts_that_need_tf_keras(text: str, expected: bool, tmp_path: pathlib.Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "model.py").write_text("import tensorflow_recommenders")
    (tmp_path / "package" / "part").mkdir()
    (tmp_path / "package" / "part" / "deep.py").write_text("from .. import model")
    (tmp_path / "package" / "train.py").write_text("from .part.deep import model")
    (tmp_path / "package" / "wrong.py").write_text("print 1")
    script = tmp_path / "script.py"
    script.write_text(text)
    assert programs.needs_tf_keras(script) is expected
