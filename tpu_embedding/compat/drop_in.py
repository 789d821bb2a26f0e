"""Runs programs written for TPUs with the classes of this package, unchanged.

`install` replaces names of TensorFlow and of TFRS in this process, and
`python -m tpu_embedding run SCRIPT` runs a script after that. With `--keras` it runs a
script for Keras, whose embeddings then work by rows. Nothing is replaced unless one of
these is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tpu_embedding import tpu_generations

_TFRS_LAYER = "tensorflow_recommenders.layers.embedding.tpu_embedding_layer"
_TFRS_UNIFIED = "tensorflow_recommenders.layers.feature_multiplexing.unified_embedding"
_LOADERS = ("keras.src.saving.saving_lib", "tf_keras.src.saving.saving_lib")
_PLACES = re.compile(r"host|(mirrored|v[234]|v5e|v5p|v6e|7x):([1-9]\d*)")
# The roots of TensorFlow's API: `tensorflow`, and its copies for compatibility.
_ROOTS = ("", "compat.v1.", "compat.v2.")
_ESTIMATOR = {
    "": ("EstimatorSpec", "ModeKeys", "WarmStartSettings"),
    "export": (
        *("ClassificationOutput", "PredictOutput", "RegressionOutput"),
        *("ServingInputReceiver", "build_parsing_serving_input_receiver_fn"),
        "build_raw_serving_input_receiver_fn",
    ),
    "tpu": (
        *("InputPipelineConfig", "RunConfig", "TPUConfig", "TPUEstimator"),
        "TPUEstimatorSpec",
    ),
    "tpu.experimental": (
        *("EmbeddingConfigSpec", "AdagradParameters", "AdamParameters"),
        *("FtrlParameters", "StochasticGradientDescentParameters"),
    ),
}
_COLUMNS = ("embedding_column", "shared_embedding_columns")
# TensorFlow still has these of `tf.estimator`, in `tf.compat.v1.train`.
_HOOKS = (
    *("CheckpointSaverHook", "CheckpointSaverListener", "FeedFnHook", "FinalOpsHook"),
    *("GlobalStepWaiterHook", "LoggingTensorHook", "NanLossDuringTrainingError"),
    *("NanTensorHook", "ProfilerHook", "SecondOrStepTimer", "SessionRunArgs"),
    *("SessionRunContext", "SessionRunHook", "SessionRunValues", "StepCounterHook"),
    *("StopAtStepHook", "SummarySaverHook"),
)


@dataclasses.dataclass
class _Process:
    """The state of `install` in this process.

    Attributes:
      on: The argument of `install`, or "".
      strategy: The strategy that `TPUStrategy` gives, or None before the first call.
      cores: The devices of each replica, if a program assigned them.
      undo: The calls by which `uninstall` restores the names.
    """

    on: str = ""
    strategy: Any = None
    cores: list[list[int]] | None = None
    undo: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)


_process = _Process()


def install(on: str = "host") -> None:
    """Replaces TensorFlow's TPU embedding classes by those of this package.

    Call it before the program imports the names that it uses. It affects this process,
    prints once to stderr what it replaces, and `uninstall` reverses it:

    - `tf.tpu.experimental.embedding` gets each name that this package has.
    - `tf.distribute.TPUStrategy` gives the strategy of `on`;
      `tf.distribute.cluster_resolver.TPUClusterResolver`,
      `tf.tpu.experimental.initialize_tpu_system` and
      `tf.config.experimental_connect_to_cluster` accept any address, and connect to
      nothing. `tf.distribute.InputOptions` takes `experimental_prefetch_to_device`.
    - `tf.estimator` and `tf.compat.v1.estimator` get TPUEstimator if TensorFlow has
      none, and `tf.tpu.experimental` the columns and `*Parameters`.
    - `tensorflow_recommenders.layers.embedding.TPUEmbedding` becomes this package's.
    - `load_model` of Keras converts what it loads, as `te.keras.load_model` does.

    For programs that use TFRS or tf_keras, first set the environment variable
    TF_USE_LEGACY_KERAS to "1"; `python -m tpu_embedding run` does so.

    >>> import tpu_embedding as te
    >>> te.install("tpu")
    Traceback (most recent call last):
    ...
    ValueError: `on` must be "host", "mirrored:N" or "GENERATION:N" ...

    Args:
      on: What `TPUStrategy` stands for: "host", one replica on the CPU; "mirrored:2",
        MirroredStrategy on as many logical CPU devices; "v4:2", "v6e:2" and other
        generations: the software TPU with as many devices.

    Raises:
      ValueError: If `on` is none of these.
      RuntimeError: If names were already installed for another `on`, or TFRS was
        imported before.
    """
    if not isinstance(on, str) or _PLACES.fullmatch(on) is None:
        raise ValueError(
            '`on` must be "host", "mirrored:N" or "GENERATION:N" for a generation of '
            "v2, v3, v4, v5e, v5p, v6e and 7x, with N replicas or devices. Received: "
            f"{on!r}."
        )
    if _process.on == on:
        return
    if _process.on:
        raise RuntimeError(
            f"tpu_embedding.install({on!r}): names are already installed for "
            f"{_process.on!r} in this process. Call uninstall() first."
        )
    if _TFRS_LAYER in sys.modules:
        raise RuntimeError(
            "tensorflow_recommenders was imported before tpu_embedding.install(), so "
            "its layer may be in use. Call install() first."
        )
    _process.on = on
    replaced = [*_replace_embedding(), *_replace_tpu_system()]
    replaced += [*_replace_estimator(), *_replace_tfrs(), *_replace_loading()]
    print(
        f"tpu_embedding: on {on}, these names are those of tpu_embedding in this "
        f"process: {', '.join(replaced)}.",
        file=sys.stderr,
    )


def install_with_devices(on: str) -> None:
    """Calls `install`, and creates the devices before the program runs anything."""
    install(on)
    if _devices() > 1:
        from tpu_embedding.testing.strategy import create_devices

        create_devices(_devices(), f"--on {on}")


def uninstall() -> None:
    """Gives the names that `install` replaced back to TensorFlow and to TFRS.

    Names that the program has imported and objects that it has made keep the classes
    of this package. If `install` was not called, it does nothing.

    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> te.install("host")
    >>> tf.tpu.experimental.embedding.TPUEmbedding is te.TPUEmbedding
    True
    >>> te.uninstall()
    >>> tf.tpu.experimental.embedding.TPUEmbedding is te.TPUEmbedding
    False

    Raises:
      RuntimeError: If TFRS was imported after `install`, and so uses this package.
    """
    if _process.on and _TFRS_LAYER in sys.modules:
        raise RuntimeError(
            "tensorflow_recommenders was imported after tpu_embedding.install(), so "
            "its names cannot be restored. Use another process."
        )
    _process.undo.close()
    _process.on, _process.strategy, _process.cores = "", None, None


def _replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute, until `uninstall`."""
    if hasattr(owner, name):
        _process.undo.callback(setattr, owner, name, getattr(owner, name))
    else:
        _process.undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _replace_embedding() -> Iterator[str]:
    import tpu_embedding as ours

    for module in _modules("tpu.experimental.embedding"):
        for name in [n for n in dir(module) if n in ours.__all__]:
            _replace(module, name, getattr(ours, name))
    yield "tf.tpu.experimental.embedding.*"


class TPUClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """A cluster resolver of no TPUs, which accepts any address."""

    def __init__(self, tpu: Any = None, **kwargs: Any) -> None:
        del tpu, kwargs  # Addresses, zones and credentials of the cluster.
        self.task_type, self.task_id = None, None

    @staticmethod
    def connect(tpu: Any = None, **kwargs: Any) -> TPUClusterResolver:
        """Returns a resolver; connects to nothing."""
        return TPUClusterResolver(tpu, **kwargs)

    def master(self, *args: Any, **kwargs: Any) -> str:
        """Returns the address for sessions, "" for this process."""
        del args, kwargs
        return ""

    get_master = master

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Returns a cluster of one worker, at whose address no process listens."""
        return tf.train.ClusterSpec({"worker": ["localhost:8470"]})

    def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """Returns the number of replicas or devices, as TPU cores."""
        del args, kwargs
        return {"TPU": _devices()}

    def get_tpu_system_metadata(self) -> Any:
        """Returns the metadata of one host with the devices of `install`."""
        return tf.tpu.experimental.TPUSystemMetadata(
            _devices(), 1, _devices(), None, []
        )


class _Instances(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return value is not None and value is _process.strategy


class InputOptions(tf.distribute.InputOptions):
    """TensorFlow's class, which also takes the name that an option had before 2.4."""

    def __new__(
        cls,
        *args: Any,
        experimental_prefetch_to_device: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the options.

        Raises:
          ValueError: If the option is given by both names.
        """
        if experimental_prefetch_to_device is not None:
            if args or kwargs.get("experimental_fetch_to_device") is not None:
                raise ValueError(
                    "InputOptions(experimental_prefetch_to_device=...) is an older "
                    "name of `experimental_fetch_to_device`. Pass one of them."
                )
            kwargs["experimental_fetch_to_device"] = experimental_prefetch_to_device
        return super().__new__(cls, *args, **kwargs)


class TPUStrategy(metaclass=_Instances):
    """Returns the strategy of `install`, one for the process, not an instance."""

    def __new__(
        cls,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
        steps_per_run: int | None = None,
        device_assignment: Any = None,
    ) -> Any:
        """Returns the strategy.

        Raises:
          NotImplementedError: For an option that only TPUs have.
        """
        del tpu_cluster_resolver
        if steps_per_run not in (None, 1):
            raise NotImplementedError(
                f"TPUStrategy(steps_per_run={steps_per_run!r}) is not supported on "
                f"{_process.on}. Leave it out."
            )
        assignment = experimental_device_assignment or device_assignment
        cores = None if assignment is None else _cores_of(assignment)
        if not _is_software_tpu():
            whole = [[device] for device in range(_devices())]
            if experimental_spmd_xla_partitioning or cores not in (None, whole):
                raise NotImplementedError(
                    "TPUStrategy(experimental_device_assignment=..., "
                    "experimental_spmd_xla_partitioning=...) is supported on "
                    f"{_process.on} only if each replica is one device and each device "
                    'a replica. Use a software TPU, for example "v3:2".'
                )
            assignment = cores = None
        if _process.strategy is None:
            _process.strategy = _create_strategy(assignment)
            _process.cores = cores
        elif cores not in (None, _process.cores):
            raise RuntimeError(
                "TPUStrategy was created in this process with another "
                "`experimental_device_assignment` or without one, but the whole "
                "program shares one strategy. Pass the same assignment each time."
            )
        return _process.strategy


def _cores_of(assignment: Any) -> list[list[int]]:
    """Returns the numbers of the devices of each replica."""
    cores = range(assignment.num_cores_per_replica)
    return [
        [assignment.tpu_ordinal(replica, core) for core in cores]
        for replica in range(assignment.num_replicas)
    ]


def _kind() -> str:
    return _process.on.partition(":")[0]


def _is_software_tpu() -> bool:
    return _kind() not in ("host", "mirrored")


def _topology() -> Any:
    """Returns the devices of `install` as `initialize_tpu_system` describes a TPU's."""
    from tpu_embedding.testing.strategy import create_topology

    devices_per_chip = 1
    if _is_software_tpu():
        devices_per_chip = tpu_generations.generation(_kind()).devices_per_chip
    return create_topology(_devices(), devices_per_chip)


def _devices() -> int:
    return int(_process.on.partition(":")[2] or 1)


def _create_strategy(assignment: Any) -> Any:
    kind = _kind()
    if kind == "host":
        return tf.distribute.OneDeviceStrategy("/cpu:0")
    from tpu_embedding.testing import strategy

    if kind != "mirrored":
        return strategy.SoftwareTPUStrategy(
            kind, _devices(), experimental_device_assignment=assignment
        )
    strategy.create_devices(_devices(), "--on mirrored")
    devices = [f"/cpu:{i}" for i in range(_devices())]
    reduction = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


def _replace_tpu_system() -> Iterator[str]:
    def initialize_tpu_system(cluster_resolver: Any = None) -> Any:
        del cluster_resolver
        if _process.strategy is not None and _is_software_tpu():
            kind = _kind()
            if tpu_generations.generation(kind).embedding == "v1":
                _process.strategy.initialize_tpu_system()  # This drops its tables.
        return _topology()

    def shutdown_tpu_system(cluster_resolver: Any = None) -> None:
        del cluster_resolver

    connect = tf.config.experimental_connect_to_cluster

    def experimental_connect_to_cluster(
        cluster: Any, *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(cluster, TPUClusterResolver):
            connect(cluster, *args, **kwargs)

    for path, value in (
        ("distribute.TPUStrategy", TPUStrategy),
        ("distribute.experimental.TPUStrategy", TPUStrategy),
        ("distribute.cluster_resolver.TPUClusterResolver", TPUClusterResolver),
        ("distribute.InputOptions", InputOptions),
        ("tpu.experimental.initialize_tpu_system", initialize_tpu_system),
        ("tpu.experimental.shutdown_tpu_system", shutdown_tpu_system),
        ("config.experimental_connect_to_cluster", experimental_connect_to_cluster),
    ):
        parent, _, name = path.rpartition(".")
        for module in _modules(parent):
            if hasattr(module, name):
                _replace(module, name, value)
        yield f"tf.{path}"


class _Estimator(types.ModuleType):
    """A part of `tf.estimator` that loads private modules of TensorFlow when needed."""

    def __getattr__(self, name: str) -> Any:
        part = self.__name__.partition("estimator")[2].lstrip(".")
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _HOOKS and not part:
            return getattr(tf.compat.v1.train, name)
        if name not in _ESTIMATOR[part]:
            raise AttributeError(
                f"{self.__name__}.{name}: TensorFlow has removed Estimators. "
                f"tpu_embedding provides only {', '.join(_ESTIMATOR[part])} here, and "
                "the hooks of tf.compat.v1.train in tf.estimator."
            )
        package = "interop" if part == "tpu.experimental" else "estimator"
        value = getattr(importlib.import_module(f"tpu_embedding.{package}"), name)
        if name == "RunConfig":
            value = _without_cluster(value)
        setattr(self, name, value)
        return value


def _without_cluster(run_config: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, cluster: Any = None, **kwargs: Any) -> Any:
        if cluster is not None and not isinstance(cluster, TPUClusterResolver):
            raise NotImplementedError(
                "RunConfig(cluster=...) of a cluster without TPUs is not supported: "
                "tpu_embedding runs a TPUEstimator in one process."
            )
        return run_config(*args, **kwargs)

    return make


def _replace_estimator() -> Iterator[str]:
    from tpu_embedding import interop

    for module in _modules("tpu.experimental"):
        for name in interop.__all__:
            # TensorFlow 1 had both here; TensorFlow 2 has columns in compat.v1 alone.
            column = name in _COLUMNS and not hasattr(module, name)
            if name.endswith("Parameters") or column:
                _replace(module, name, getattr(interop, name))
    yield "tf.tpu.experimental.*Parameters"
    yield from (f"tf.tpu.experimental.{name}" for name in _COLUMNS)
    for root in ("tensorflow.", "tensorflow.compat.v1."):
        parent = importlib.import_module(root.rstrip("."))
        if hasattr(parent, "estimator"):
            continue
        for part in _ESTIMATOR:
            name = ".".join(filter(None, (f"{root}estimator", part)))
            module = _Estimator(name)
            module.__path__ = []
            sys.modules[name] = module
            _process.undo.callback(sys.modules.pop, name)
            owner, _, leaf = name.rpartition(".")
            _replace(sys.modules[owner], leaf, module)
        yield f"{root.replace('tensorflow', 'tf')}estimator.*"


class _TfrsLayer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the layer of this package as the module of TFRS's layer."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        del target
        if fullname == _TFRS_UNIFIED:
            return _mended(importlib.machinery.PathFinder.find_spec(fullname, path))
        if fullname != _TFRS_LAYER:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: types.ModuleType) -> None:
        from tpu_embedding import keras
        from tpu_embedding.compat import tfrs_layer
        from tpu_embedding.keras.keras_api import keras_api

        if not issubclass(keras.TPUEmbedding, tf.keras.layers.Layer):
            raise ImportError("The layer must be loaded for the Keras of tf.keras.")
        for name in keras.__all__:
            setattr(module, name, getattr(keras, name))
        # Models that this process loads have it, too.
        of_tfrs: Any = module
        of_tfrs.TPUEmbedding = keras_api.register(tfrs_layer.TPUEmbedding)


def _mended(spec: Any) -> Any:
    """Corrects a module's UnifiedEmbedding.from_config, which reads a wrong key."""
    load = spec.loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        load(module)
        of_tfrs: Any = module

        def from_config(cls: Any, config: dict[str, Any]) -> Any:
            arguments = dict(config)
            unified = of_tfrs.UnifiedEmbeddingConfig(0, 0, 0, "")
            unified.hashing_config.update(arguments.pop("hash_config"))
            embedding = tf.keras.saving.deserialize_keras_object(
                arguments.pop("embed_layer")
            )
            layer = cls(config=unified, optimizer=None, **arguments)
            layer._embedding_layer = embedding
            return layer

        of_tfrs.UnifiedEmbedding.from_config = classmethod(from_config)

    spec.loader.exec_module = exec_module
    return spec


def _replace_tfrs() -> Iterator[str]:
    if importlib.util.find_spec("tensorflow_recommenders") is None:
        return
    finder = _TfrsLayer()
    sys.meta_path.insert(0, finder)
    _process.undo.callback(sys.meta_path.remove, finder)
    yield "tensorflow_recommenders.layers.embedding.TPUEmbedding"


class _Loader(importlib.abc.MetaPathFinder):
    """Replaces the `load_model` of each Keras as soon as that Keras is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        del target
        if fullname not in _LOADERS:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _convert_loaded(module)

        spec.loader.exec_module = exec_module
        return spec


def _replace_loading() -> Iterator[str]:
    finder = _Loader()
    sys.meta_path.insert(0, finder)
    _process.undo.callback(sys.meta_path.remove, finder)
    for name in _LOADERS:
        if name in sys.modules:
            _convert_loaded(sys.modules[name])
    yield "load_model of Keras"


def _convert_loaded(module: Any) -> None:
    load = module.load_model

    @functools.wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        from tpu_embedding.keras.keras_api import keras_api
        from tpu_embedding.keras.rows.converting import convert

        model = load(*args, **kwargs)
        if isinstance(model, keras_api.Model):  # Not of the other Keras.
            try:
                convert(model)
            except (NotImplementedError, ValueError) as error:
                logging.warning("load_model: the model stays Keras's: %s", error)
        return model

    _replace(module, "load_model", load_model)


def _modules(path: str) -> Iterator[Any]:
    """Yields the modules of a part of TensorFlow's API.

    `import tensorflow.tpu.experimental` would load a module other than `tf.tpu`, and
    replace `tf.tpu` by it. After this call the import finds the module of `tf.tpu`.
    """
    for root in _ROOTS:
        module: Any = tf
        imported: Any = tf
        path_of_import = "tensorflow"
        for name in (root + path).split("."):
            module = getattr(module, name)
            path_of_import += f".{name}"
            imported = sys.modules.setdefault(path_of_import, module)
        yield module
        if imported is not module:  # Was imported before.
            yield imported
