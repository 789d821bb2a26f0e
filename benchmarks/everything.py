"""Runs everything that has an aim.

python -m benchmarks.everything [--quick]

Each part can be run alone; here it runs with its own defaults, or with --quick in a few
rounds and without the largest tables. build/bench/everything.md joins all tables,
that of all peers first.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import traceback
from collections.abc import Sequence

from benchmarks import (
    distributed,
    machine,
    measures,
    options,
    overview,
    preprocessing,
    run,
    vocabulary,
)

_TENSORFLOW = ("tfrs", "keras_rs", "tensorflow_nn")
_MODELS = ("model_dense", "model_fbgemm", "model_torch_dense")
_MODEL_NAMES = ("dlrm", "one_hot", "two_tower", "sequence")
# Scenario, optimizer, and the peers that support it. A peer takes seconds to minutes,
# mostly to make its tables.
RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dlrm", "adagrad", run.PEERS),
    ("dlrm", "sgd", ("fbgemm", "torch_embedding_bag", "tensorflow_nn")),
    ("dlrm", "rowwise_adagrad", ("fbgemm",)),
    ("dlrm", "adam", ("fbgemm", "torch_embedding_bag", "tensorflow_nn")),
    ("dlrm", "ftrl", ("tfrs", "tensorflow_nn")),
    ("small_batch", "adagrad", ("fbgemm", "torch_embedding_bag", *_TENSORFLOW)),
    ("small_bags", "adagrad", ("fbgemm", "tpu_embedding_packed")),
    ("bags", "adagrad", ("fbgemm", "torch_embedding_bag", "tfrs", "tensorflow_nn")),
    ("weights", "adagrad", ("fbgemm", "torch_embedding_bag")),
    ("two_tables", "adagrad", ("fbgemm", "tpu_embedding_packed")),
    *((f"batch_{size}", "adagrad", ("fbgemm",)) for size in (1, 256, 16_384)),
    ("growing", "adagrad", ("tpu_embedding_growing", "tfra")),
    ("one_hot", "adagrad", ("fbgemm", "torch_embedding_bag", *_TENSORFLOW)),
    ("one_huge_table", "adagrad", ("fbgemm",)),
    ("sequence", "adagrad", ("fbgemm", "torch_embedding_bag")),
    *((f"model_{name}", "adagrad", _MODELS) for name in _MODEL_NAMES),
)
# --quick leaves out these scenarios, whose tables have more than a million rows.
_SLOW = ("one_huge_table",)


def commands(*, quick: bool) -> list[tuple[str, list[str]]]:
    """The modules to run and their arguments, each without --out."""
    rounds = ["--rounds", "2"] if quick else []
    result = []
    for scenario, optimizer, peers in RUNS:
        if not (quick and scenario in _SLOW):
            what = ["--scenario", scenario, "--optimizer", optimizer]
            result.append(("run", [*what, *rounds, "--peers", *peers]))
    most_rows = ["--most-rows", "1000000"] if quick else []
    result.append(("vocabulary", [*rounds, *most_rows]))
    result.append(("distributed", rounds))
    rows = ["--vocabularies", "10000", most_rows[-1] if quick else "10000000"]
    one_table = ["--tables", "1", "--dim", "16"]
    result.append(("distributed", [*rounds, *rows, *one_table]))
    result.append(("preprocessing", rounds))
    result.append(("measures", ["--steps", "500" if quick else "3000"]))
    result.append(("serving", ["--rounds", "50"] if quick else []))
    return result


def _serving(arguments: Sequence[str]) -> None:
    from benchmarks import serving  # TensorFlow, only when all others are done

    serving.main(arguments)


MAINS = {
    "run": run.main,
    "vocabulary": vocabulary.main,
    "preprocessing": preprocessing.main,
    "distributed": distributed.main,
    "measures": measures.main,
    "serving": _serving,
}


def join(folder: pathlib.Path) -> str:
    """Joins all tables of a folder: all peers, then those with missed aims."""
    target = folder / "everything.md"
    first = overview.write(folder, "dlrm")
    done = {target, folder / "overview.md", *folder.glob("measures-*-*.md")}
    tables = [p.read_text() for p in sorted(folder.glob("*.md")) if p not in done]
    tables.sort(key=lambda table: "**missed**" not in table)
    tables = [machine.describe() + "\n", *filter(None, [first]), *tables]
    target.write_text("\n".join(tables))
    return target.read_text()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all and writes build/bench/everything.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options.add_out(parser)
    flags = parser.parse_args(arguments)
    with options.alone(flags.out):
        try:
            failed = _run(commands(quick=flags.quick), flags.out)
        finally:  # An interrupted run joins the results that exist.
            print(join(flags.out))
    if failed:
        sys.exit("Failed, see above:\n" + "\n".join(failed))


def _run(parts: Sequence[tuple[str, list[str]]], folder: pathlib.Path) -> list[str]:
    """Runs the parts; returns those that failed."""
    failed = []
    for index, (module, asked) in enumerate(parts):
        print(f"[{index + 1}/{len(parts)}] {module}", *asked, flush=True)
        try:
            MAINS[module]([*asked, "--out", str(folder)])
        except Exception:  # The other parts, which take an hour, go on.
            traceback.print_exc()
            failed.append(" ".join(["benchmarks." + module, *asked]))
    return failed


if __name__ == "__main__":
    main()
