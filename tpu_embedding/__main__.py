"""The command line: `python -m tpu_embedding COMMAND ...`.

A command is a row in `_COMMANDS`: a name, a line of help, and a function that adds
arguments to a parser and says which function runs it. That function gets the arguments
and returns the exit code. Its module, and TensorFlow with it, is imported when it runs:
the help of a command needs neither.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_AddArguments = Callable[[argparse.ArgumentParser], None]
_CHECKPOINT_HELP = (
    "a TensorFlow checkpoint or its folder, a .keras or .weights.h5 file, a .npy or "
    ".npz file, or a folder of .npy files"
)

_MODULE: dict[str, Any] = {
    "dest": "module",
    "action": "store_true",
    "help": "run a module instead of a file, as `python -m`",
}
_ARGUMENTS: dict[str, Any] = {
    "nargs": argparse.REMAINDER,
    "help": "arguments that are passed to the program",
}
_ROOT_HELP = "object of the checkpoint that holds the tables, if there are several"


def _runs(parser: argparse.ArgumentParser, module: str, function: str) -> None:
    parser.set_defaults(run=(f"tpu_embedding.commands.{module}", function))


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect", help="list tables and slots with shapes, dtypes and norms"
    )
    inspect.add_argument("path", help=_CHECKPOINT_HELP)
    _runs(inspect, "files", "inspect")
    convert = commands.add_parser(
        "convert", help="write a checkpoint in another format"
    )
    convert.add_argument("path", help=_CHECKPOINT_HELP)
    convert.add_argument("destination", help="path of the new checkpoint")
    kinds = ("tensorflow", "sparse-core", "numpy")
    convert.add_argument(
        "--to",
        choices=kinds,
        default=kinds[0],
        help="format of the new checkpoint (default: %(default)s)",
    )
    convert.add_argument(
        "--like",
        metavar="CHECKPOINT",
        help="checkpoint whose layout the new one gets; required by `--to sparse-core`",
    )
    convert.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="rename a table; may be repeated",
    )
    convert.add_argument(
        "--no-slots", action="store_true", help="convert tables without slots"
    )
    convert.add_argument(
        "--new-root",
        metavar="NAME",
        help="name of the object that holds the tables in the new checkpoint (default: "
        "embedding)",
    )
    _runs(convert, "files", "convert")
    for command in (inspect, convert):
        command.add_argument("--root", metavar="OBJECT", help=_ROOT_HELP)
        command.add_argument("--json", action="store_true", help="print JSON")


def _add_delta(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    inspect = commands.add_parser(
        "inspect", help="check a delta and print what it contains"
    )
    inspect.add_argument("path", help="file of a delta")
    _runs(inspect, "files", "inspect_delta")
    apply = commands.add_parser("apply", help="write an export with deltas applied")
    apply.add_argument("path", help="folder of an export with `deltas=True`")
    apply.add_argument("deltas", nargs="+", help="files of deltas, the oldest first")
    apply.add_argument("--to", required=True, help="folder of the new export")
    _runs(apply, "files", "apply_deltas")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="folder of an export with `mapped=True`")
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="skip the checksums, for which all files are read",
    )
    _runs(parser, "files", "run_place")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help=_CHECKPOINT_HELP)
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="report.html",
        help="HTML file to write (default: %(default)s)",
    )
    parser.add_argument("--root", metavar="OBJECT", help=_ROOT_HELP)
    _runs(parser, "report", "run")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        default="host",
        metavar="PLACE",
        help="what stands in for TPUStrategy: host, mirrored:N, or N devices of an "
        "emulated TPU, such as v4:N or v6e:N (default: %(default)s)",
    )
    parser.add_argument("-m", **_MODULE)
    parser.add_argument(
        "--keras",
        action="store_true",
        help="replace keras.layers.Embedding by te.keras.Embedding, and wrap "
        "optimizers in te.keras.RowSparseOptimizer",
    )
    parser.add_argument("script", help="Python program for TPUs or for Keras")
    parser.add_argument("arguments", **_ARGUMENTS)
    _runs(parser, "run", "run")


def _add_try(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="end each run after N steps of `fit` (default: run the script to its end)",
    )
    parser.add_argument("script", help="Python program that calls `fit` of Keras")
    parser.add_argument("arguments", **_ARGUMENTS)
    _runs(parser, "programs", "run_try")


def _add_launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--processes",
        default="1",
        metavar="N[,N...]",
        help="number of processes on this host, at each start (default: %(default)s)",
    )
    add(
        "--servers",
        type=int,
        default=0,
        metavar="K",
        help="number of parameter servers on this host, beside `--processes` workers "
        "and a chief that runs the program (default: %(default)s)",
    )
    add(
        "--hosts",
        default="1",
        metavar="M[:M]",
        help="number of hosts that run this command, or the least and the most, 2:4 "
        "(default: %(default)s)",
    )
    add(
        "--address",
        metavar="HOST:PORT",
        help="one of the hosts, and a port of it that the others can reach",
    )
    add(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart a failed job at most N times (default: %(default)s)",
    )
    add(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long to wait for the other hosts (default: 600)",
    )
    add(
        "--exit-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long the others may run after the first process ended with exit "
        "code 0 (default: %(default)g)",
    )
    add("--status", metavar="FILE", help="write the state of the job to FILE, as JSON")
    add(
        "--status-interval",
        type=float,
        metavar="SECONDS",
        help="time between two writes of FILE (default: 60)",
    )
    add("-m", **_MODULE)
    add("program", help="Python program that reads TF_CONFIG")
    add("arguments", **_ARGUMENTS)
    _runs(parser, "launch", "run")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        help="the tables, as MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE: a feature "
        "configuration, or a function that returns one, alone or with an optimizer. Or "
        "a .json file (docs/planning.md)",
    )
    parser.add_argument("--batch-size", type=int, help="global batch size of a step")
    parser.add_argument(
        "--sample",
        metavar="NAME",
        help="batches of ids, as MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE of an iterable",
    )
    parser.add_argument(
        "--sample-batches",
        type=int,
        default=16,
        metavar="N",
        help="number of batches to read from the sample (default: %(default)s)",
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help="plan for this TPU, such as v6e:2x2; may be repeated. Machines are then "
        "planned only if `--processes` or `--machine-gib` is given (default: machines, "
        "and of each generation the smallest TPU that fits)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        action="append",
        metavar="N",
        help="plan for N machines; may be repeated (default: 2, 4 and 8)",
    )
    parser.add_argument(
        "--placement",
        choices=("auto", "rows", "whole"),
        default="auto",
        help="`placement` of DistributedOptions (default: %(default)s)",
    )
    parser.add_argument(
        "--machine-gib",
        type=float,
        metavar="GIB",
        help="memory of one machine (default: that of this one)",
    )
    parser.add_argument(
        "--pipelined",
        action="store_true",
        help="count the memory of `pipeline_execution_with_tensor_core=True` on "
        "SparseCores",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="FILE", help="draw the plan into FILE")
    _runs(parser, "plan", "run")


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "build",
        help="MODULE:FUNCTION or FILE.py:FUNCTION; the function takes a TPUStrategy "
        "and returns a step and the specs of its arguments (docs/tpu_check.md)",
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help="TPU to compile for, such as v5p:2x2x1; may be repeated (default: "
        "v6e:2x2)",
    )
    parser.add_argument(
        "--python",
        metavar="FILE",
        help="Python of the environment with libtpu (default: "
        "$TPU_EMBEDDING_TPU_CHECK_PYTHON, or this Python)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _runs(parser, "compile", "run")


_COMMANDS: tuple[tuple[str, str, _AddArguments], ...] = (
    (
        "try",
        "run a Keras program as it is and with te.keras; compare time, memory, losses",
        _add_try,
    ),
    ("run", "run a program for Keras or for TPUs without changing it", _add_run),
    ("report", "write an HTML page about the tables of a checkpoint", _add_report),
    ("checkpoint", "inspect and convert checkpoints", _add_checkpoint),
    ("plan", "print where tables fit: memory, limits, traffic and balance", _add_plan),
    (
        "launch",
        "start a program in several processes, and end all when one fails",
        _add_launch,
    ),
    (
        "server",
        "run the parameter server or worker that TF_CONFIG names",
        lambda parser: _runs(parser, "server", "run"),
    ),
    ("delta", "inspect deltas, and apply them to an export", _add_delta),
    ("place", "write the new path into an export that was moved", _add_place),
    ("compile", "compile a training step for a TPU, without having one", _add_compile),
)
# Commands whose log is for the user: they run the user's program, or a server.
_LOGGING = ("run", "launch", "server")
# Errors that a user can fix, besides TensorFlow's; others are shown with a traceback.
_EXPECTED = (OSError, ValueError, TypeError, NotImplementedError, RuntimeError)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what TensorFlow writes to stderr while it loads, unless loading fails."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(stderr, kept.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _message(error: Exception) -> str | None:
    """Returns the message of an error that a user can fix, or None for others."""
    if isinstance(error, KeyError):
        return str(error.args[0]) if error.args else "KeyError"
    if isinstance(error, _EXPECTED):
        return str(error) or type(error).__name__
    tf = sys.modules.get("tensorflow")
    if tf is not None and isinstance(error, tf.errors.OpError):
        return getattr(error, "message", None)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 2 after an error, printed to stderr."""
    parser = argparse.ArgumentParser(prog="python -m tpu_embedding")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_, add_arguments in _COMMANDS:
        add_arguments(commands.add_parser(name, help=help_, description=help_))
    parsed = parser.parse_args(arguments)
    module, function = parsed.run
    if "tensorflow" not in sys.modules and parsed.command not in _LOGGING:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _quiet():
        run = getattr(importlib.import_module(module), function)
    try:
        return run(parsed)
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
