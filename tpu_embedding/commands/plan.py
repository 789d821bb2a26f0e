"""`python -m tpu_embedding plan`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tpu_embedding import optimizers, user_code
from tpu_embedding.config import DistributedOptions, FeatureConfig, TableConfig
from tpu_embedding.errors import check_path, type_name
from tpu_embedding.nest_utils import flatten_with_paths
from tpu_embedding.planning.placements import plan

# The keys of a file.
_LISTS, _REST = ("tables", "features"), ("optimizer", "batch_size")


class Configuration(NamedTuple):
    """What a file or an attribute says.

    Attributes:
      features: The feature configuration.
      optimizer: For tables without one, or None.
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
    sample = None
    if arguments.sample is not None:
        sample = load_sample(arguments.sample, config.features, batch_size)
    memory = arguments.machine_gib
    if memory is not None and not 0 < memory * 2**30 < float("inf"):
        raise ValueError(f"--machine-gib must be a positive number, not {memory}.")
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
    """The configuration of a file or an attribute."""
    path = pathlib.Path(name)
    if path.suffix in (".json", ".yaml", ".yml"):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not a text file in UTF-8: {error}.") from error
        return _of_dict(
            _json(name, text) if path.suffix == ".json" else _yaml(name, text)
        )
    found = _attribute(name)
    if isinstance(found, tuple) and len(found) == 2 and _is_optimizer(found[1]):
        return Configuration(*found)
    return Configuration(found)


def load_sample(name: str, features: Any, batch_size: int | None) -> Any:
    """The batches of a data set, MODULE:ATTRIBUTE, or of a .npz file."""
    if pathlib.Path(name).suffix != ".npz":
        found = _attribute(name)
        if isinstance(found, str) or not hasattr(found, "__iter__"):
            raise ValueError(
                f"{name} is a {type_name(found)}, and a sample is an iterable of "
                "batches, for example a batched tf.data.Dataset."
            )
        return user_code.iterate(name, found)
    if batch_size is None:
        raise ValueError(f"{name} has no batches: pass --batch-size.")
    paths = [path for path, _ in flatten_with_paths(features)]
    values = _arrays_of(name)
    for path in paths:
        if path not in values and not {f"{path}.values", f"{path}.row_splits"} <= {
            *values
        }:
            raise ValueError(
                f"{name} has no array {path!r}, nor both {path + '.values'!r} and "
                f"{path + '.row_splits'!r}. It has {', '.join(sorted(values))}."
            )
    return _batches(name, paths, values, features, batch_size)


def _arrays_of(name: str) -> dict[str, np.ndarray]:
    try:
        with np.load(name, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except OSError:
        raise
    except Exception as error:  # NumPy has no one type for a file that is damaged.
        raise ValueError(
            f"{name} is no .npz file of arrays of numbers, as numpy.savez writes them."
        ) from error


def _batches(
    name: str,
    paths: list[str],
    values: Mapping[str, np.ndarray],
    features: Any,
    size: int,
) -> Iterator[Any]:
    """Cuts the arrays of a file; the last batch is left out if it is short."""
    counts = {}
    for path in paths:
        for part in (path, f"{path}.values", f"{path}.row_splits"):
            if part in values and values[part].ndim == 0:
                raise ValueError(f"{name}: {part!r} is a scalar. Batch it.")
        counts[path] = len(values.get(path, ()))
        if path not in values:
            splits = values[f"{path}.row_splits"]
            counts[path] = len(splits) - 1
            entries = values[f"{path}.values"].shape
            integers = splits.ndim == len(entries) == 1 and splits.dtype.kind in "iu"
            if not integers or not _are_splits(splits, entries[0]):
                raise ValueError(
                    f"{name}: {path + '.row_splits'!r} must be integers >= 0 that do "
                    f"not decrease, and must end with the {entries[0]} entries of "
                    f"{path + '.values'!r}. Both are vectors."
                )
    if len({*counts.values()}) > 1 or min(counts.values()) < size:
        listed = ", ".join(f"{path}: {count}" for path, count in counts.items())
        raise ValueError(
            f"{name} needs the same number of samples for each feature, and at least "
            f"one batch of {size}. It has {listed}."
        )
    for start in range(0, counts[paths[0]] - size + 1, size):
        batch = []
        for path in paths:
            if path in values:
                batch.append(values[path][start : start + size])
                continue
            splits = values[f"{path}.row_splits"][start : start + size + 1]
            ids = values[f"{path}.values"][splits[0] : splits[-1]]
            ragged: Any = tf.RaggedTensor
            batch.append(ragged.from_row_splits(ids, splits - splits[0]))
        yield tf.nest.pack_sequence_as(features, batch)


def _are_splits(splits: np.ndarray, entries: int) -> bool:
    ends = len(splits) and splits[0] >= 0 and splits[-1] == entries
    return bool(ends) and not (splits[1:] < splits[:-1]).any()


def _attribute(name: str) -> Any:
    """Returns MODULE:ATTRIBUTE; a function without arguments is called."""
    found = user_code.find(name)
    return user_code.call(name, found) if callable(found) else found


def _is_optimizer(value: Any) -> bool:
    return value is None or hasattr(value, "learning_rate")


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # Also of numbers that are too long.
        raise ValueError(f"{name} is not JSON: {error}.") from error


def _yaml(name: str, text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError(
            "Reading YAML requires PyYAML: `pip install pyyaml`, or write JSON."
        ) from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not YAML: {error}.") from error


def _of_dict(given: Any) -> Configuration:
    """Converts the content of a JSON or YAML file."""
    lists = [given.get(key, []) for key in _LISTS] if isinstance(given, dict) else []
    if not lists or not lists[0] or not all(isinstance(own, list) for own in lists):
        raise ValueError(
            "A configuration file is an object with `tables`, a list; and `features`, "
            "a list, `optimizer` and `batch_size` if you like."
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
                f"`features`: {entry!r} names no table of {', '.join(tables)}."
            )
        own["table"] = tables[str(own["table"])]
        name = own.setdefault("name", own["table"].name)
        feature = _make(f"`features`: {name!r}", FeatureConfig, own)
        if name in configs:
            raise ValueError(
                f"`features` has two features {name!r}: give them a `name` each."
            )
        configs[name] = feature
    return Configuration(
        configs, _optimizer(given.get("optimizer")), given.get("batch_size")
    )


def _entry(where: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"`{where}`: an entry is an object. Received: {entry!r}.")
    return dict(entry)


def _optimizer(given: Any) -> optimizers.Optimizer | None:
    """An optimizer by its name, or an object of `name` and its arguments."""
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
            f"`optimizer`: {given!r} is not known; its `name` is one of "
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
        raise ValueError(f"{what} has no {' and no '.join(missing)}.")
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error


def _check_keys(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a key that would be ignored."""
    unknown = sorted({*map(str, given)} - {*known})
    if unknown:
        raise ValueError(
            f"{what} has the unknown key {unknown[0]!r}. Known are {', '.join(known)}."
        )
