"""`python -m tpu_embedding plan`."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tpu_embedding import optimizers
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.nest_utils import flatten_with_paths
from tpu_embedding.planning.placements import plan

_CONFIG_HELP = (
    "MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE, a feature configuration or a function "
    "without arguments that returns it, alone or with an optimizer; or a .json or "
    ".yaml file (docs/planning.md)"
)
_SAMPLE_HELP = (
    "MODULE:ATTRIBUTE of a data set of batches, or a .npz file with an array of ids "
    "for each feature, or its NAME.values and NAME.row_splits, cut into batches"
)


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("config", help=_CONFIG_HELP)
    parser.add_argument("--batch-size", type=int, help="samples of a step, in all")
    parser.add_argument("--sample", help=_SAMPLE_HELP)
    parser.add_argument(
        "--sample-batches", type=int, default=16, help="how many are read (16)"
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help="for example v6e:2x2; may be repeated (the smallest that fits of each)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        action="append",
        metavar="N",
        help="a number of machines; may be repeated (2, 4 and 8)",
    )
    parser.add_argument(
        "--machine-gib", type=float, help="memory of one machine (this one's)"
    )
    parser.add_argument(
        "--pipelined",
        action="store_true",
        help="with pipeline_execution_with_tensor_core, on SparseCores",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = load_configuration(arguments.config)
    batch_size = arguments.batch_size or config.batch_size
    sample = None
    if arguments.sample is not None:
        sample = load_sample(arguments.sample, config.features, batch_size)
    memory = arguments.machine_gib
    report = plan(
        config.features,
        config.optimizer,
        batch_size=batch_size,
        topologies=arguments.topology,
        processes=arguments.processes or (2, 4, 8),
        machine_bytes=None if memory is None else int(memory * 2**30),
        pipeline_execution_with_tensor_core=arguments.pipelined,
        sample=sample,
        sample_batches=arguments.sample_batches,
    )
    print(report.to_json() if arguments.json else report)
    if arguments.svg:
        pathlib.Path(arguments.svg).write_text(report.to_svg(), encoding="utf-8")
    return 0 if report.best is not None else 1


def load_attribute(name: str) -> Any:
    """Returns the attribute MODULE:ATTRIBUTE; a function without arguments is called.

    Args:
      name: The module may be dotted, or the path of a .py file.

    Raises:
      ValueError: If the name has another form, or the module no such attribute.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ValueError(
            f"Name a module and its attribute, as in `my_model:features`, or a .json "
            f"or .yaml file. Received: {name!r}."
        )
    path = pathlib.Path(module_name)
    if path.suffix == ".py":
        sys.path.insert(0, str(path.parent))
        module_name = path.stem
    else:
        sys.path.insert(0, ".")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"Cannot import {module_name!r}: {error}.") from error
    finally:
        del sys.path[0]
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no attribute {attribute!r}.")
        found = getattr(found, part)
    return found() if callable(found) else found


def load_configuration(name: str) -> Configuration:
    """Returns the configuration of a file or an attribute.

    Raises:
      ValueError: If it is of no known form; it names the entry.
      OSError: If the file cannot be read.
    """
    path = pathlib.Path(name)
    if path.suffix in (".json", ".yaml", ".yml"):
        text = path.read_text(encoding="utf-8")
        return _of_dict(json.loads(text) if path.suffix == ".json" else _yaml(text))
    found = load_attribute(name)
    if isinstance(found, tuple) and len(found) == 2 and _is_optimizer(found[1]):
        return Configuration(*found)
    return Configuration(found)


def load_sample(name: str, features: Any, batch_size: int | None) -> Any:
    """Returns the batches of a data set or of a .npz file.

    Args:
      name: MODULE:ATTRIBUTE, or the path of a .npz file.
      features: The feature configuration.
      batch_size: Samples of a batch, for files.

    Raises:
      ValueError: If a file lacks a feature, or there is no batch size for it.
    """
    if pathlib.Path(name).suffix != ".npz":
        return load_attribute(name)
    if batch_size is None:
        raise ValueError(f"{name} has no batches: pass --batch-size.")
    paths = [path for path, _ in flatten_with_paths(features)]
    with np.load(name, allow_pickle=False) as arrays:
        values = {key: arrays[key] for key in arrays.files}
    for path in paths:
        if path not in values and f"{path}.values" not in values:
            raise ValueError(
                f"{name} has no array {path!r}, nor {path + '.values'!r}. It has "
                f"{', '.join(sorted(values))}."
            )
    return _batches(paths, values, features, batch_size)


def _batches(
    paths: list[str], values: Mapping[str, np.ndarray], features: Any, size: int
) -> Iterator[Any]:
    """Cuts the arrays of a file; the last batch is left out if it is short."""
    counts = [
        len(values[path]) if path in values else len(values[f"{path}.row_splits"]) - 1
        for path in paths
    ]
    for start in range(0, min(counts) - size + 1, size):
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


def _is_optimizer(value: Any) -> bool:
    return value is None or hasattr(value, "learning_rate")


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError(
            "Reading YAML requires PyYAML: `pip install pyyaml`, or write JSON."
        ) from error
    return yaml.safe_load(text)


def _of_dict(given: Any) -> Configuration:
    """Converts the content of a JSON or YAML file."""
    if not isinstance(given, dict) or not given.get("tables"):
        raise ValueError(
            "A configuration file is an object with `tables`, a list; and `features`, "
            "`optimizer` and `batch_size` if you like."
        )
    tables = {}
    for entry in given["tables"]:
        own = _entry("tables", entry)
        if "name" not in own:
            raise ValueError(f"`tables`: {entry!r} has no `name`.")
        own["optimizer"] = _optimizer(own.get("optimizer"))
        tables[own["name"]] = _make("tables", TableConfig, own)
    features = given.get("features") or [
        {"name": name, "table": name} for name in tables
    ]
    configs = {}
    for entry in features:
        own = _entry("features", entry)
        if own.get("table") not in tables:
            raise ValueError(
                f"`features`: {entry!r} names no table of {', '.join(tables)}."
            )
        own["table"] = tables[own["table"]]
        name = own.setdefault("name", own["table"].name)
        configs[name] = _make("features", FeatureConfig, own)
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
    }
    make = known.get(str(own.pop("name", "")))
    if make is None:
        raise ValueError(
            f"`optimizer`: {given!r} is not known. Known are {', '.join(known)}."
        )
    return _make("optimizer", make, own)


def _make(where: str, make: Any, arguments: dict[str, Any]) -> Any:
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{where}`: {arguments!r}: {error}") from error
