"""`python -m tpu_embedding checkpoint inspect | convert | diff`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_embedding.checkpoint import errors, report
from tpu_embedding.checkpoint.checkpoint_view import (
    LogicalTable,
    named_matrices,
    without_slots,
)
from tpu_embedding.checkpoint.formats import read, read_layouts
from tpu_embedding.checkpoint.numpy_format import write_numpy
from tpu_embedding.checkpoint.progress import TextProgress
from tpu_embedding.checkpoint.saving import DEFAULT_ROOT
from tpu_embedding.checkpoint.writing import WriteOptions, write_tensorflow

_PATH_HELP = (
    "a TensorFlow checkpoint or its folder, weights of Keras, a .npy or .npz file or a "
    "folder of .npy files"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands and their arguments."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_inspect, _add_convert, _add_diff):
        command = add(commands)
        command.add_argument("--root", help="the object that holds the tables")
        command.add_argument("--json", action="store_true", help="print JSON")


def _add_inspect(commands: Any) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "inspect", help="list tables and slots with shapes, dtypes and norms"
    )
    command.add_argument("path", help=_PATH_HELP)
    command.set_defaults(run=_inspect)
    return command


def _add_convert(commands: Any) -> argparse.ArgumentParser:
    command = commands.add_parser("convert", help="write a checkpoint as another kind")
    command.add_argument("path", help=_PATH_HELP)
    command.add_argument("destination", help="the new checkpoint")
    command.add_argument("--to", choices=_WRITERS, default="tensorflow")
    command.add_argument(
        "--like", help="for sparse-core: a checkpoint whose layout record is taken"
    )
    command.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="give a table another name; may be repeated",
    )
    command.add_argument("--no-slots", action="store_true", help="leave the slots out")
    command.add_argument(
        "--new-root",
        help=f"what the object is called in the new checkpoint ({DEFAULT_ROOT})",
    )
    command.set_defaults(run=_convert)
    return command


def _add_diff(commands: Any) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "diff", help="compare two checkpoints; the exit code is 1 if they differ"
    )
    command.add_argument("path", help=_PATH_HELP)
    command.add_argument("other", help="as PATH")
    command.add_argument("--other-root", help="as --root, for OTHER")
    command.set_defaults(run=_diff)
    return command


def _inspect(arguments: argparse.Namespace) -> int:
    checkpoint = read(arguments.path, root=arguments.root)
    arrays = report.inspect(checkpoint, TextProgress())
    facts = {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "updates": checkpoint.updates,
    }
    if arguments.json:
        _print_json({**facts, "arrays": [dataclasses.asdict(a) for a in arrays]})
        return 0
    updates = "" if checkpoint.updates is None else f", {checkpoint.updates} updates"
    print(f"{checkpoint.path} ({checkpoint.format}{updates})")
    header = [field.name for field in dataclasses.fields(report.ArrayReport)]
    print(report.table_text(header, map(_cells, arrays)))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.to == "numpy" and arguments.new_root is not None:
        raise errors.new_root_of_arrays()
    if arguments.to != _SPARSE_CORE and arguments.like is not None:
        raise errors.like_without_sparse_core(arguments.to)
    if arguments.to == _SPARSE_CORE and not arguments.like:
        raise errors.sparse_core_without_like()
    checkpoint = read(arguments.path, root=arguments.root)
    tables = _renamed(checkpoint, arguments.rename)
    if arguments.no_slots:
        tables = without_slots(tables)
    checkpoint.verify()
    options = WriteOptions(
        DEFAULT_ROOT if arguments.new_root is None else arguments.new_root,
        layouts=read_layouts(arguments.like) if arguments.like else None,
        updates=None if arguments.no_slots else checkpoint.updates,
    )
    path = _WRITERS[arguments.to](arguments.destination, tables, options)
    if arguments.json:
        _print_json({"path": path, "tables": list(tables)})
    else:
        print(f"Wrote to {path}: {', '.join(tables)}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    differences = report.diff(
        read(arguments.path, root=arguments.root),
        read(arguments.other, root=arguments.other_root),
        TextProgress(),
    )
    if arguments.json:
        _print_json([dataclasses.asdict(difference) for difference in differences])
    else:
        header = [field.name for field in dataclasses.fields(report.Difference)]
        print(report.table_text(header, map(_cells, differences)))
    return int(any(difference.state != report.SAME for difference in differences))


def _renamed(
    tables: Mapping[str, LogicalTable], renames: Sequence[str]
) -> dict[str, LogicalTable]:
    names: dict[str, str] = {}
    for rename in renames:
        old, _, new = rename.partition("=")
        if old not in tables or not new:
            raise errors.rename_argument(rename, tables)
        if old in names:
            raise errors.renamed_twice(old, (names[old], new))
        names[old] = new
    renamed = {
        names.get(name, name): dataclasses.replace(table, name=names.get(name, name))
        for name, table in tables.items()
    }
    if len(renamed) < len(tables):
        raise errors.rename_argument(", ".join(renames), tables)
    return renamed


def _write_tensorflow(
    path: str, tables: Mapping[str, LogicalTable], options: WriteOptions
) -> str:
    return write_tensorflow(path, tables, options, TextProgress())


def _write_arrays(
    path: str, tables: Mapping[str, LogicalTable], options: WriteOptions
) -> str:
    if options.updates is not None:
        print(
            f"NumPy files do not keep the number of updates, {options.updates}.",
            file=sys.stderr,
        )
    return write_numpy(path, named_matrices(tables), TextProgress())


_SPARSE_CORE = "sparse-core"
_WRITERS = {
    "tensorflow": _write_tensorflow,
    _SPARSE_CORE: _write_tensorflow,
    "numpy": _write_arrays,
}


def _cells(record: Any) -> list[Any]:
    values = [getattr(record, field.name) for field in dataclasses.fields(record)]
    return ["-" if value is None else value for value in values]


def _print_json(value: Any) -> None:
    print(report.json_text(value))
