"""Finds the custom-op library, checks it, and loads it once.

A library belongs to one minor version of TensorFlow, because the binary interface
changes with each. A wheel has libraries for several versions, and the running version
decides which is loaded. The check reads the file: loading a wrong one may crash.

A *record* holds named fields, which cross to the kernels as one string attribute;
cc/kernels/plan.h reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import pathlib
import platform
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tpu_embedding.optimizers.idle import Idle

# Ops take this in place of an optional number; converting a list would take 25 us.
NO_NUMBER = np.zeros(0, np.int64)
# cc/kernels/version.cc writes this text into the library.
_MARKER = re.compile(rb"tpu_embedding built for TensorFlow ([^\0]+)\0")
# The systems for which wheels have libraries (tools/build_wheel.py).
SYSTEMS = ("Linux on x86_64", "Linux on aarch64")
# The ops with a gradient, which read variables of Keras (keras/rows/waiting.py).
_WITH_GRADIENT = ("TpuEmbeddingCaughtUpRows",)
_FIX = (
    "To fix it, build the library for this TensorFlow: in the source tree of "
    f"tpu_embedding, run `{sys.executable} -m pip install --no-build-isolation "
    "--force-reinstall --no-deps .`"
)
# The module makes its classes when it is imported; type checkers cannot know them.
_AttrValue: Any = vars(attr_value_pb2)["AttrValue"]
_NameAttrList: Any = vars(attr_value_pb2)["NameAttrList"]

# For each class of values the field of an AttrValue and its content; bool before int.
_FIELDS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (bool, "b", bool),
    (int, "i", int),
    (float, "f", float),
    (str, "s", lambda value: value.encode()),
    (tf.TensorShape, "shape", lambda value: value.as_proto()),
    (_NameAttrList, "func", lambda value: value),
    (np.ndarray, "tensor", tf.make_tensor_proto),
)


def choose(path: pathlib.Path, tensorflow_version: str) -> pathlib.Path:
    """Returns the path of the library for a version of TensorFlow.

    Args:
      path: where a build from source writes it, such as `folder/ops.so`.
      tensorflow_version: the version of the TensorFlow that would load it.

    Returns:
      `folder/ops.tf2.20.so` for TensorFlow 2.20 if there is one, as in a wheel, and
      `path` otherwise.
    """
    fitting = path.with_suffix(f".tf{_minor(tensorflow_version)}.so")
    return fitting if fitting.is_file() else path


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


PATH = choose(pathlib.Path(__file__).with_name("_tpu_embedding_ops.so"), tf.__version__)


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """The result of loading the library, of which one field is not None."""

    module: types.ModuleType | None = None
    reason: str | None = None


def load() -> types.ModuleType:
    """Returns the module of op functions that TensorFlow made from the library.

    Raises:
      RuntimeError: if `unavailable_reason()` is not None, with that text.
    """
    attempt = _attempt()
    if attempt.module is None:
        raise RuntimeError(attempt.reason)
    return attempt.module


def unavailable_reason() -> str | None:
    """Returns why the library cannot be used and how to fix it, or None if it can.

    The first call loads the library. A caller that goes on without it must say so.
    """
    return _attempt().reason


def built_for(path: pathlib.Path) -> str | None:
    """Returns the TensorFlow version that the library at `path` was compiled for.

    It reads the file and loads nothing. It returns None if the file does not say.
    """
    if path.stat().st_size == 0:
        return None  # An empty file cannot be mapped.
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        match = _MARKER.search(content)
        return match.group(1).decode() if match else None


def problem_with(path: pathlib.Path, tensorflow_version: str) -> str | None:
    """Returns why the library at `path` must not be loaded, or None if it may be.

    Only the major and minor numbers of TensorFlow count, as its binary interface
    changes with these.
    """
    if not path.is_file():
        others = sorted(path.parent.glob(f"{path.stem}.tf*.so"))
        if others:
            minors = ", ".join(other.stem.partition(".tf")[2] for other in others)
            return (
                f"The installed wheel has custom-op libraries for TensorFlow {minors}, "
                f"but this is TensorFlow {tensorflow_version}. {_FIX}, or install one "
                "of these versions of TensorFlow."
            )
        tree = path.parents[2]
        if (tree / "setup.py").is_file():
            return (
                "Python has imported tpu_embedding from its source tree, where the "
                f"custom-op library is not built: there is no {path}. To fix it, run "
                f"`make ops` in {tree}; or, if tpu_embedding is installed, start "
                "Python in another folder."
            )
        system = f"{platform.system()} on {platform.machine()}"
        if system not in SYSTEMS:
            return (
                f"There is no custom-op library for {system}, only for "
                f"{' and '.join(SYSTEMS)}. The portable engine needs no library. It is "
                "slower, and docs/limitations.md lists what it lacks."
            )
        return f"The custom-op library is not installed: there is no {path}. {_FIX}"
    version = built_for(path)
    if version is None:
        return (
            f"{path} does not contain the TensorFlow version it was built for, so it "
            f"is not a library of this package. {_FIX}"
        )
    if _minor(version) != _minor(tensorflow_version):
        return (
            f"The custom-op library was built for TensorFlow {version}, but this is "
            f"TensorFlow {tensorflow_version}. {_FIX}"
        )
    return None


@functools.cache
def _attempt() -> _Attempt:
    try:
        problem = problem_with(PATH, tf.__version__)
        if problem is not None:
            return _Attempt(reason=problem)
        module = tf.load_op_library(str(PATH))
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        return _Attempt(reason=f"TensorFlow could not load {PATH}: {error} {_FIX}")
    for name in dir(module):
        if name.startswith("TpuEmbedding") and name not in _WITH_GRADIENT:
            _declare_without_gradient(name)
    return _Attempt(module=module)


@functools.cache  # TensorFlow accepts each name once.
def _declare_without_gradient(op: str) -> None:
    """Stops gradients at an op, because apply_gradients trains the tables.

    A tape outside of a tf.function that looks rows up watches the tables that it reads,
    and would ask the op for a gradient.
    """
    tf.no_gradient(op)


def record(**fields: Any) -> Any:
    """Encodes named fields: bool, int, float, str, TensorShape, record, array or list.

    >>> record(rows=8, names=["films"]).attr["rows"].i
    8
    """
    return _NameAttrList(attr={name: _encode(value) for name, value in fields.items()})


def serialize(**fields: Any) -> bytes:
    """Serializes a record for the kernels; equal fields give equal bytes."""
    return record(**fields).SerializeToString(deterministic=True)


def _encode(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        field, content = _field(value)
        return _AttrValue(**{field: content(value)})
    if not value:
        return _AttrValue(list=_AttrValue.ListValue())
    field, content = _field(value[0])
    return _AttrValue(
        list=_AttrValue.ListValue(**{field: [content(item) for item in value]})
    )


def _field(value: Any) -> tuple[str, Callable[[Any], Any]]:
    return next((f, content) for kind, f, content in _FIELDS if isinstance(value, kind))


def idle_record(
    idle: Idle, *, name: str, decays: bool, owner: int = 0, with_weights: bool = True
) -> Any:
    """Returns the record that cc/kernels/waiting.cc reads.

    Args:
      idle: What a step with a gradient of zeros does to a row.
      name: The name of the table.
      decays: Whether a step also shrinks rows.
      owner: The number of an optimizer of Keras.
      with_weights: Whether to add the weights of nodes, for ops that count steps.
    """
    quadrature = idle.quadrature
    weights = quadrature.weights if quadrature and with_weights else np.zeros(0)
    options = (idle.epsilon_beta, idle.root_fade, idle.epsilon, *idle.follow)
    return record(
        name=name,
        owner=owner,
        move=idle.move,
        moment=idle.moment,
        square=idle.square,
        epsilon_inside=idle.epsilon_inside,
        decays=decays,
        options=np.array(options, np.float64),
        fades=np.array(idle.fades, np.float64),
        nodes=quadrature.nodes if quadrature else np.ones(1),
        powers=quadrature is not None and quadrature.powers,
        node_weights=weights,
    )
