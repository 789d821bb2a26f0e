"""Runs TensorFlow's own tests of TPU embeddings against the classes of this package.

    make test-tensorflow TF_TESTS=folder

`folder` is the root of a checkout of TensorFlow, or any folder that has its files
`tensorflow/python/tpu/tests/*.py` and `tensorflow/python/tpu/tpu_embedding_*_test.py`.
The files run unmodified: only the names that they import from TensorFlow's modules are
replaced. Nothing is downloaded. The last lines say how many tests pass on each engine.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from typing import Any

TPU = pathlib.Path("tensorflow/python/tpu")
SPMD = "tests/tpu_embedding_v2_mp_strategy_test.py"
# The engine and number of devices, and the files that run there.
RUNS = {
    "v4:2": ("tests/*_test.py",),
    # Several cores of a chip for one replica: a chip of v4 is one device.
    "v3:2": (SPMD,),
    "v5p:1": ("tpu_embedding_v3_*test.py",),
    "host": ("tpu_embedding_for_serving_test.py", "tpu_embedding_v2_utils_test.py"),
}
# Modules of TensorFlow whose names are replaced by those of this package.
REPLACED = (
    *("tpu_embedding_v1", "tpu_embedding_v2", "tpu_embedding_v2_utils"),
    *("tpu_embedding_v3", "tpu_embedding_for_serving"),
)
# Files that others import.
BASES = ("tpu_embedding_base_test.py", "tpu_embedding_v2_correctness_base_test.py")
TIMEOUT = 3600


def main() -> int:
    """Runs the files of each engine in a process of its own."""
    parser = argparse.ArgumentParser(description="Runs the tests of TensorFlow.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--on", choices=RUNS, help="only this engine")
    parser.add_argument("--match", default="", help="only files whose name has this")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.folder / TPU).is_dir():
        parser.error(f"there is no {TPU} in {arguments.folder}")
    if arguments.in_process:
        return run(arguments.folder, arguments.on, arguments.match)
    codes = []
    for on in [arguments.on] if arguments.on else RUNS:
        command = [sys.executable, __file__, str(arguments.folder), "--in-process"]
        command += ["--on", on, "--match", arguments.match]
        with tempfile.TemporaryDirectory() as scratch:
            # Where the tests write checkpoints.
            environment = {**os.environ, "TEST_TMPDIR": scratch}
            ended = subprocess.run(
                command, env=environment, timeout=TIMEOUT, check=False
            )
        codes.append(ended.returncode)
        if codes[-1] not in (0, 1):
            print(f"{on}: the process ended with {codes[-1]}, and the rest did not run")
    return int(any(codes))


def run(folder: pathlib.Path, on: str, match: str) -> int:
    """Runs the files of one engine, and prints what failed and the counts."""
    import tensorflow as tf
    from absl import flags

    tf.compat.v1.enable_v2_behavior()
    replace(on)
    tpu = importlib.import_module("tensorflow.python.tpu")
    tpu.__path__.append(str(folder / TPU))
    paths = sorted(p for pattern in RUNS[on] for p in (folder / TPU).glob(pattern))
    suite = unittest.TestSuite()
    unread: list[str] = []
    for path in paths:
        if path.name in BASES or match not in path.name:
            continue
        if path.match(SPMD) and SPMD not in RUNS[on]:
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        try:
            module = importlib.import_module(".".join(parts))
        except Exception as error:
            unread.append(f"{path.name}: {type(error).__name__}: {error}")
            continue
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    flags.FLAGS(sys.argv[:1])
    results = unittest.TextTestRunner(verbosity=2).run(suite)
    failed = [*results.failures, *results.errors]
    reasons = collections.Counter(text.strip().splitlines()[-1] for _, text in failed)
    for reason, count in reasons.most_common():
        print(f"{on}: {count} x {reason[:300]}")
    for reason in unread:
        print(f"{on}: not read: {reason}")
    skipped = len(results.skipped)
    passed = results.testsRun - skipped - len({test.id() for test, _ in failed})
    print(
        f"{on}: {passed} of {results.testsRun - skipped} tests pass, {skipped} are "
        f"skipped by TensorFlow, {len(unread)} files could not be read",
        flush=True,
    )
    return int(bool(failed or unread))


def replace(on: str) -> None:
    """Puts the names of this package into TensorFlow's modules."""
    import tensorflow as tf

    import tpu_embedding as ours

    for name in REPLACED:
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(f"tensorflow.python.tpu.{name}")
            for key, value in _public(ours):
                if hasattr(module, key):
                    setattr(module, key, value)
            # The class of TensorFlow's v2 module that its API exports under this name.
            if name == "tpu_embedding_v1":
                module.TPUEmbeddingV0 = ours.TPUEmbeddingV0
            if name == "tpu_embedding_v3":
                module.TPUEmbeddingShardedVariable = _Stack
    _lend_private_names(ours)
    ours.install("host" if on == "host" else on)
    from tpu_embedding.compat import drop_in

    kind, _, devices = on.partition(":")
    if kind != "host":
        from tpu_embedding.testing.strategy import create_devices

        create_devices(int(devices), f"--on {on}")  # Before a test starts TensorFlow.

    def strategy(resolver: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Makes a new system for each test, as initializing the TPU does."""
        if kind == "host":
            return drop_in.TPUStrategy(resolver, *args, **kwargs)
        from tpu_embedding.testing import SoftwareTPUStrategy

        kwargs.pop("experimental_spmd_xla_partitioning", None)
        made = SoftwareTPUStrategy(kind, int(devices), *args, **kwargs)
        drop_in._process.strategy = made  # The one that initializing restarts.
        return made

    python = "tensorflow.python"

    def function(*args: Any, jit_compile: Any = None, **kwargs: Any) -> Any:
        """Drops jit_compile: a TPU compiles anyway, and XLA for CPUs has no TPU ops."""
        del jit_compile
        return tf.function(*args, **kwargs)

    resolver = f"{python}.distribute.cluster_resolver.tpu_cluster_resolver"
    system = tf.tpu.experimental
    for module_name, values in {
        f"{python}.distribute.tpu_strategy": {
            "TPUStrategy": strategy,
            "TPUStrategyV2": strategy,
        },
        resolver: {
            "TPUClusterResolver": drop_in.TPUClusterResolver,
            "initialize_tpu_system": system.initialize_tpu_system,
            "shutdown_tpu_system": system.shutdown_tpu_system,
        },
        f"{python}.eager.def_function": {"function": function},
        f"{python}.eager.remote": {"connect_to_cluster": _nothing},
        f"{python}.tpu.tpu_strategy_util": {
            "initialize_tpu_system": system.initialize_tpu_system
        },
    }.items():
        module = importlib.import_module(module_name)
        for name, value in values.items():
            setattr(module, name, value)


class _Array:
    """A table or slot as TensorFlow's tests read it."""

    def __init__(self, rows: Any) -> None:
        self._rows, self.shape, self.variables = rows, rows.shape, [self]

    def numpy(self) -> Any:
        return self._rows.numpy()

    def __getitem__(self, rows: Any) -> Any:
        return self.numpy()[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        del dtype, copy
        return self.numpy()


class _Stack:
    """The parameters of a stack as TensorFlow's tests read them."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def read_from_device(self, device: str) -> Any:
        return next(v.read_value() for v in self.values if v.device == device)


def _lend_private_names(package: Any) -> None:
    """Adds the private names by which the tests read tables and configurations.

    TensorFlow's class moves tables between the host and the TPU when told to; ours
    reads them from where they are. What `enqueue` returns needs no copy here.
    """

    def variables(embedding: Any) -> dict[str, dict[str, _Array]]:
        return {
            table: {name: _Array(rows) for name, rows in arrays.items()}
            for table, arrays in embedding.core.checkpoint_rows().items()
        }

    def features(embedding: Any) -> Any:
        configs = [spec.config for spec in embedding.core.plan.features]
        return embedding.core.structure.pack(configs)

    def configuration(embedding: Any) -> Any:
        from tpu_embedding.engines.tpu_v2_v4.configuration import make_configuration

        tpu, shapes = embedding.core.topology.tpu, embedding.core.output_shapes.full()
        return make_configuration(embedding.core.plan, tpu, shapes, pipelined=False)

    def stacks(embedding: Any) -> dict[str, dict[str, _Stack]]:
        stacked = embedding.stacked_tables.items()
        return {name: {"parameters": _Stack(values)} for name, values in stacked}

    def sparse_cores(embedding: Any) -> int:
        return embedding.core.topology.tpu.generation.sparse_cores_per_device

    for name in ("TPUEmbedding", "TPUEmbeddingForServing"):
        embedding_class = getattr(package, name)
        embedding_class._variables = property(variables)
        embedding_class._feature_config = property(features)
    queue = package.TPUEmbedding
    queue._load_variables = queue._retrieve_variables = _nothing
    queue._create_config_proto = configuration
    queue._output_shapes = _DeclaredShapes()
    v2 = package.TPUEmbeddingV2
    v2._copy_tensors_to_device = staticmethod(_tables)
    v2._variables, v2._num_sc_per_chip = property(stacks), property(sparse_cores)
    v2._batch_initialize_tables = _FirstValues()
    combiner = package.CustomCombiner
    combiner._slot_names = lambda c: [c.CUSTOM_COMBINER_SLOT_NAME][: c.num_weights]
    combiner._slot_initializers = lambda c: [c.initializer][: c.num_weights]


class _DeclaredShapes:
    """The shapes of features, which TensorFlow's tests compare and set as lists."""

    def __get__(self, embedding: Any, owner: Any = None) -> Any:
        return _Comparable(embedding.core.output_shapes)

    def __set__(self, embedding: Any, value: Any) -> None:
        from tpu_embedding.layout import output_shapes

        shapes = [None if s.rank is None else tuple(s.as_list()) for s in value]
        embedding.core.output_shapes._declared = [
            None if s is None else output_shapes.Declared(s, "a test") for s in shapes
        ]


class _FirstValues:
    """The function for the initial values of all tables, which a test replaces."""

    def __get__(self, embedding: Any, owner: Any = None) -> Any:
        return _FirstValues

    def __set__(self, embedding: Any, value: Any) -> None:
        for spec in embedding.core.plan.tables:
            object.__setattr__(spec.config, "initializer", value)


class _Comparable:
    """Shapes that are equal to lists of shapes."""

    def __init__(self, shapes: Any) -> None:
        self._shapes = shapes

    def __eq__(self, other: Any) -> bool:
        return [tuple(s) for s in other] == self._shapes.activations(None)

    __hash__ = None  # type: ignore[assignment]


def _tables(partitioned_tensors: Any) -> Any:
    return partitioned_tensors.tables


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def _public(package: Any) -> Iterator[tuple[str, Any]]:
    for name in package.__all__:
        yield name, getattr(package, name)


if __name__ == "__main__":
    sys.exit(main())
