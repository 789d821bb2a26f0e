"""`python -m tpu_embedding plan`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from tpu_embedding import optimizers, user_code
from tpu_embedding.config import DistributedOptions, FeatureConfig, TableConfig
from tpu_embedding.errors import check_path, type_name
from tpu_embedding.planning.placements import plan

# The keys of a file.
_LISTS, _REST = ("tables", "features"), ("optimizer", "batch_size")
# What errors suggest to write instead of files that `plan` does not read.
_CONFIGURATION = """
    import tpu_embedding as te
    films = te.TableConfig(1_000_000, 64, name="films", optimizer=te.Adam(0.01))
    features = {"liked": te.FeatureConfig(films)}
"""
_SAMPLE = """
    import numpy as np
    import tensorflow as tf
    arrays = dict(np.load({!r}))
    sample = tf.data.Dataset.from_tensor_slices(arrays).batch(64, drop_remainder=True)
"""


class Configuration(NamedTuple):
    """The configuration that a file or an attribute contains.

    Attributes:
      features: The feature configuration.
      optimizer: The optimizer of tables without their own, or None.
      batch_size: Samples of a step, or None.
    """

    features: Any
    optimizer: Any = None
    batch_size: int | None = None


def run(arguments: argparse.Namespace) -> int:
    """Runs `plan`."""
    for path in (arguments.config, arguments.sample, arguments.svg):
        check_path(path or "")
    config = load_configuration(arguments.config)
    batch_size = arguments.batch_size
    if batch_size is None:
        batch_size = config.batch_size
    sample = None if arguments.sample is None else load_sample(arguments.sample)
    memory = arguments.machine_gib
    if memory is not None and not 0 < memory * 2**30 < float("inf"):
        raise ValueError(
            f"--machine-gib must be a positive number. Received: {memory}."
        )
    report = plan(
        config.features,
        config.optimizer,
        batch_size=batch_size,
        topologies=arguments.topology,
        processes=arguments.processes or (() if arguments.topology else (2, 4, 8)),
        distributed_options=DistributedOptions(placement=arguments.placement),
        machine_bytes=None if memory is None else int(memory * 2**30),
        pipeline_execution_with_tensor_core=arguments.pipelined,
        sample=sample,
        sample_batches=arguments.sample_batches,
    )
    if arguments.topology and memory is None:  # No machine was asked for.
        asked = [p for p in report.placements if p.kind != "host"]
        report = dataclasses.replace(report, placements=tuple(asked))
    print(report.to_json() if arguments.json else report)
    if arguments.svg:
        pathlib.Path(arguments.svg).write_text(report.to_svg(), encoding="utf-8")
    return 0 if report.best is not None else 1


def load_configuration(name: str) -> Configuration:
    """Loads the configuration of a file or an attribute."""
    path = pathlib.Path(name)
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(
            f"`plan` does not read YAML files such as {name}. Write a Python file, for "
            f"example\n{_CONFIGURATION}\nand pass FILE.py:features, or the same "
            "keys as JSON."
        )
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not a text file in UTF-8: {error}.") from error
        except (ValueError, RecursionError) as error:  # Numbers may be too long.
            raise ValueError(f"{name} is not JSON: {error}.") from error
        return _of_dict(content)
    found = _attribute(name)
    is_pair = isinstance(found, tuple) and len(found) == 2
    if is_pair and (found[1] is None or hasattr(found[1], "learning_rate")):
        return Configuration(*found)
    return Configuration(found)


def load_sample(name: str) -> Any:
    """Loads the batches of the data set MODULE:ATTRIBUTE."""
    if pathlib.Path(name).suffix == ".npz":
        raise ValueError(
            f"`plan` does not read a sample from .npz files such as {name}. Write a "
            "Python file, for example, for batches of 64 samples and an array of ids "
            f"for each feature,\n{_SAMPLE.format(name)}\nand pass FILE.py:sample. "
            "For ragged ids use a tf.RaggedTensor instead of an array."
        )
    found = _attribute(name)
    if isinstance(found, str) or not hasattr(found, "__iter__"):
        raise ValueError(
            f"{name} is a {type_name(found)}, but a sample must be an iterable of "
            "batches, for example a batched tf.data.Dataset."
        )
    return user_code.iterate(name, found)


def _attribute(name: str) -> Any:
    """Returns MODULE:ATTRIBUTE; a function without arguments is called."""
    found = user_code.find(name)
    is_model = hasattr(found, "_flatten_layers")  # Keras models are callable.
    return user_code.call(name, found) if callable(found) and not is_model else found


def _of_dict(given: Any) -> Configuration:
    """Converts the content of a JSON file."""
    lists = [given.get(key, []) for key in _LISTS] if isinstance(given, dict) else []
    if not lists or not lists[0] or not all(isinstance(own, list) for own in lists):
        raise ValueError(
            "A configuration file must be a JSON object with a list `tables`. A list "
            "`features`, an `optimizer` and a `batch_size` are optional."
        )
    _check_keys("A configuration file", given, (*_LISTS, *_REST))
    tables: dict[str, TableConfig] = {}
    for entry in lists[0]:
        own = _entry("tables", entry)
        if not own.get("name"):
            raise ValueError(f"`tables`: {entry!r} has no `name`.")
        own["optimizer"] = _optimizer(own.get("optimizer"))
        table = _make(f"`tables`: {own['name']!r}", TableConfig, own)
        if table.name in tables:
            raise ValueError(f"`tables` has two tables {table.name!r}: rename one.")
        tables[own["name"]] = table
    features = lists[1] or [{"name": name, "table": name} for name in tables]
    configs: dict[str, FeatureConfig] = {}
    for entry in features:
        own = _entry("features", entry)
        if str(own.get("table")) not in tables:
            raise ValueError(
                f"`features`: {entry!r} must name one of the tables "
                f"{', '.join(tables)}."
            )
        own["table"] = tables[str(own["table"])]
        name = own.setdefault("name", own["table"].name)
        feature = _make(f"`features`: {name!r}", FeatureConfig, own)
        if name in configs:
            raise ValueError(
                f"`features` has two features {name!r}. Give each its own `name`."
            )
        configs[name] = feature
    return Configuration(
        configs, _optimizer(given.get("optimizer")), given.get("batch_size")
    )


def _entry(where: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"`{where}` needs JSON objects. Received: {entry!r}.")
    return dict(entry)


def _optimizer(given: Any) -> optimizers.Optimizer | None:
    """Makes an optimizer from its name, or from an object of `name` and arguments."""
    if given is None:
        return None
    own = {"name": given} if isinstance(given, str) else _entry("optimizer", given)
    known = {
        name: value
        for name in optimizers.__all__
        if isinstance(value := getattr(optimizers, name), type)
        and issubclass(value, optimizers.Optimizer)
        and value is not optimizers.CustomOptimizer  # Its rule is a function.
    }
    make = known.get(str(own.pop("name", "")))
    if make is None:
        raise ValueError(
            f"`optimizer`: {given!r} is not known. Its `name` must be one of "
            f"{', '.join(known)}."
        )
    return _make("`optimizer`", make, own)


def _make(what: str, make: Any, arguments: dict[str, Any]) -> Any:
    """Calls the class of a table, feature or optimizer."""
    parameters = inspect.signature(make).parameters
    _check_keys(what, arguments, parameters)
    missing = [
        f"`{name}`"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in arguments
    ]
    if missing:
        raise ValueError(f"{what} lacks {' and '.join(missing)}.")
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error


def _check_keys(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a key that would be ignored."""
    unknown = sorted({*map(str, given)} - {*known})
    if unknown:
        raise ValueError(
            f"{what} has the unknown key {unknown[0]!r}. Use one of {', '.join(known)}."
        )
