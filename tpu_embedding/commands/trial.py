"""`python -m tpu_embedding try SCRIPT`: compares a Keras script as it is and by rows.

The script runs in two processes, one after the other. A process reports each step of
`fit` as a line of JSON on its standard output; the script prints to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tpu_embedding.commands.programs import prepare

_WAYS = {"plain": "as it is", "rows": "by rows"}
_SEED = 1
_BAR = 30
_ROUNDING = 1e-4  # Larger relative differences of a loss are not from rounding.
_LAYER = re.compile(r"layer .* \((\d+) x (\d+)\)")  # A layer whose rows are updated.
_MOST_FILES = 20_000  # The most files that are searched for what the first run wrote.
_REASON = """\
Where ids repeat in a batch, optimizers of Keras 3 square and clip the gradient of each
occurrence; by rows the gradients of a row are summed first, as Keras does with dense
gradients (docs/keras_embedding.md). Compare the validation loss of whole runs: if it is
worse by rows, change the learning rate, or keep the script as it is."""


class _Enough(BaseException):
    """Ends a script after the requested steps; `except Exception` does not stop it."""


@dataclasses.dataclass
class Run:
    """The report of one process.

    Attributes:
      wall: Seconds of each step, without the first, which traces the model.
      cpu: Seconds of CPU of each of these steps.
      losses: The losses that `fit` shows: after each step the mean of the epoch so far.
      total: Seconds of CPU of the whole process.
      peak: The peak of the memory of the process, in bytes.
      notes: Each object that was built, and why it was not converted, or "".
    """

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    total: float = 0.0
    peak: int = 0
    notes: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def compare(plain: Run, rows: Run, wrote: Sequence[str] = ()) -> str:
    """Returns a table of both runs, what was replaced, and why the rest was not.

    `wrote` has the files that the first run wrote.
    """
    lines = [f"{'':28}{'as it is':>14}{'by rows':>14}"]

    def line(name: str, values: Sequence[Any], unit: str = "") -> None:
        lines.append(f"{name:28}" + "".join(f"{v:>14}" for v in values) + unit)

    pair = (plain, rows)
    steps = min(len(run.losses) for run in pair)
    medians = [0.0, 0.0]
    if steps > 1:
        for name, field in (("step, wall", "wall"), ("step, CPU", "cpu")):
            medians = [statistics.median(getattr(run, field)) for run in pair]
            ratio = medians[1] / max(medians[0], 1e-9)
            line(name, [f"{m * 1e3:.1f} ms" for m in medians], f"{ratio:>9.1%}")
    line("whole script, CPU", [f"{run.total:.1f} s" for run in pair])
    line("peak memory", [f"{run.peak / 2**20:.0f} MiB" for run in pair])
    for step in sorted({1, steps // 4, steps // 2, steps} & set(range(1, steps + 1))):
        line(f"loss, step {step}", [f"{run.losses[step - 1]:.6g}" for run in pair])
    if steps:
        pairs = list(zip(plain.losses[:steps], rows.losses[:steps], strict=True))
        apart = max(abs(a - b) for a, b in pairs)
        lines.append(f"largest difference of losses in {steps} steps: {apart:.3g}")
        if any(abs(a - b) > _ROUNDING * abs(a) for a, b in pairs):
            last, by_rows = pairs[-1]
            direction = "higher" if by_rows > last else "lower"
            lines.append(f"The last loss is {direction} by rows.")
            if any(not why for _, why in rows.notes):
                lines.append(_REASON)
    else:
        lines.append(
            "There are no losses and step times: the script does not call `fit`."
        )
    shares = _shares(rows.notes) if steps > 1 else {}
    for what, why in rows.notes:
        lines.append(f"left as it is: {what}: {why}" if why else f"by rows: {what}")
        if what in shares:
            saved = (medians[0] - medians[1]) * shares[what] * 1e3
            pays = "saved" if saved > 0 else "lost, so it does not pay"
            lines[-1] += f": about {abs(saved):.1f} ms of CPU {pays} in a step"
    if wrote:
        more = ", ..." if len(wrote) > 5 else ""
        lines.append(
            f"The first run wrote {', '.join(wrote[:5])}{more}. If the script reads\n"
            "these files, the runs did not start alike. Remove them, and run `try` in\n"
            "a copy of the folder."
        )
    if not rows.notes:
        lines.append(
            "Nothing was replaced: the script built no Embedding and no optimizer."
        )
    return "\n".join(lines)


def _shares(notes: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Returns the share of each replaced layer in the values of all their tables."""
    sizes = {
        what: int(match[1]) * int(match[2])
        for what, why in notes
        if not why and (match := _LAYER.fullmatch(what))
    }
    return {what: size / sum(sizes.values()) for what, size in sizes.items()}


def try_script(script: str, arguments: Sequence[str], steps: int) -> int:
    """Runs a script in both ways and prints the comparison; returns 1 after an error.

    A run ends after `steps` steps; if `steps` is 0, when the script ends.
    """
    if steps < 0:
        raise ValueError(f"--steps must not be negative. Received: {steps}.")
    if not os.path.isfile(script):
        raise FileNotFoundError(f"There is no script {script!r}.")
    before = _files(script)
    plain = _run("plain", steps, script, arguments)
    after = _files(script)
    rows = None if plain is None else _run("rows", steps, script, arguments)
    if plain is None or rows is None:
        return 1
    wrote = [path for path, written in after.items() if before.get(path) != written]
    print(compare(plain, rows, sorted(wrote)))
    return 0


def _files(script: str) -> dict[str, tuple[int, int]]:
    """Returns time and size of files beside a script and in the working directory."""
    found: dict[str, tuple[int, int]] = {}
    for top in {os.path.realpath(os.path.dirname(script) or "."), os.getcwd()}:
        for folder, folders, names in os.walk(top):
            hidden = [f for f in folders if f.startswith(".") or f == "__pycache__"]
            for name in hidden:
                folders.remove(name)
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # It is gone.
                    state = os.stat(path)
                    found[os.path.relpath(path)] = state.st_mtime_ns, state.st_size
            if len(found) > _MOST_FILES:
                break
    return found


def _run(way: str, steps: int, script: str, arguments: Sequence[str]) -> Run | None:
    """Runs a script in its own process; prints why and returns None if it failed."""
    command = [sys.executable, "-m", "tpu_embedding.commands.trial"]
    command += [way, str(steps), script]
    found = Run()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as printed,
        subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=printed, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            _take(found, json.loads(line))
            if not found.peak:  # The last line, with the peak, is no step.
                _draw(way, len(found.losses), steps)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if process.wait() == 0:
            return found
        printed.seek(0)
        tail = "".join(printed.readlines()[-20:])
    print(f"error: {script} failed {_WAYS[way]}:\n{tail}", file=sys.stderr)
    return None


def _take(run: Run, message: dict[str, Any]) -> None:
    if "loss" in message:
        run.losses.append(message["loss"])
        if message["timed"]:
            run.wall.append(message["wall"])
            run.cpu.append(message["cpu"])
    else:
        run.total, run.peak = message["total"], message["peak"]
        run.notes = [tuple(note) for note in message["notes"]]


def _draw(way: str, done: int, steps: int) -> None:
    """Draws the progress of a run on a terminal."""
    if not sys.stderr.isatty():
        return
    filled = min(_BAR, _BAR * done // steps) if steps else 0
    bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] " if steps else ""
    of = f" of {steps}" if steps else ""
    print(f"\r{_WAYS[way]:9} {bar}step {done}{of}", end="", file=sys.stderr, flush=True)


def _child(arguments: Sequence[str]) -> None:
    """Runs a script in one way in this process, and reports."""
    way, steps, script, *rest = arguments
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The script prints to standard error.
    notes: list[tuple[str, str]] = []

    def report(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    def replace() -> None:
        from tpu_embedding.keras.keras_api import keras_api
        from tpu_embedding.keras.rows import converting  # Loads Keras.

        if way == "rows":
            converting.convert_process(lambda what, why: notes.append((what, why)))
        keras_api.set_random_seed(_SEED)
        _watch_fit(keras_api, int(steps), report)

    with contextlib.suppress(_Enough):
        prepare(script, rest, replace)()
    import resource  # Not on Windows.

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    report(total=time.process_time(), peak=peak, notes=notes)


def _watch_fit(keras_api: Any, steps: int, report: Callable[..., None]) -> None:
    fit = keras_api.Model.fit
    signature = inspect.signature(fit)
    watcher = _watcher(keras_api.Callback, steps, report)

    @functools.wraps(fit)
    def watched(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get("callbacks") or []
        if not isinstance(given, (list, tuple)):
            given = [given]
        bound.arguments["callbacks"] = [*given, watcher()]
        return fit(*bound.args, **bound.kwargs)

    keras_api.Model.fit = watched


def _watcher(base: Any, steps: int, report: Callable[..., None]) -> Any:
    done = 0

    class Watcher(base):
        """Reports the steps of one call of `fit`."""

        _since: tuple[float, float] | None = None  # When the previous step ended.

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal done
            done += 1
            now = time.perf_counter(), time.process_time()
            then = self._since or now
            report(
                loss=float((logs or {}).get("loss", float("nan"))),
                timed=self._since is not None,
                wall=now[0] - then[0],
                cpu=now[1] - then[1],
            )
            self._since = time.perf_counter(), time.process_time()
            if done == steps:
                raise _Enough

    return Watcher


def run(arguments: argparse.Namespace) -> int:
    """Runs `try`."""
    return try_script(arguments.script, arguments.arguments, arguments.steps)


if __name__ == "__main__":
    _child(sys.argv[1:])
