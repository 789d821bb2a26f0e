"""Times exported lookups beside tf.nn.safe_embedding_lookup_sparse, in turn.

python -m benchmarks.serving [--rounds 300]

Writes build/bench/serving.{json,md,png}.

Both sides are SavedModels with a signature of sparse tensors, loaded into sessions as
a server does, and asked the same in one process, A B A B. Each of a scenario's features
has a table of its own. The last line of a scenario takes our dense or ragged signature,
which the peer does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from benchmarks import aims, options, picture, report
from tpu_embedding import serving

BATCHES = (1, 32, 1024)
ROWS, DIM = 100_000, 32
PEER = "tf.nn.safe_embedding_lookup_sparse"
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Features, ids and batch sizes of one comparison.

    Attributes:
      name: The name on the command line.
      features: The number of features.
      ids: The number of ids of each sample in each feature.
      other: Our signature that is timed beside "sparse".
    """

    name: str
    features: int
    ids: int
    other: str


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("one_feature", 1, 1, "dense"),
        Scenario("one_hot", 26, 1, "dense"),
        Scenario("multi_hot", 8, 10, "ragged"),
    )
}


class Peer(tf.Module):
    """The tables, looked up by TensorFlow's own function."""

    def __init__(self, tables: Sequence[tf.Variable]) -> None:
        super().__init__()
        self.tables = list(tables)

    def save(self, path: str) -> None:
        """Writes a SavedModel with a signature like our "sparse" one."""
        specs = {}
        for index in range(len(self.tables)):
            for part, shape in (
                ("indices", [None, 2]),
                ("values", [None]),
                ("dense_shape", [2]),
            ):
                name = f"f{index}_{part}"
                specs[name] = tf.TensorSpec(shape, tf.int64, name=name)
        function = tf.function(self._look_up).get_concrete_function(specs)
        tf.saved_model.save(self, path, signatures={"sparse": function})

    def _look_up(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        outputs = {}
        for index, table in enumerate(self.tables):
            ids = tf.SparseTensor(
                inputs[f"f{index}_indices"],
                inputs[f"f{index}_values"],
                inputs[f"f{index}_dense_shape"],
            )
            outputs[f"f{index}"] = tf.nn.safe_embedding_lookup_sparse(
                table, ids, combiner="mean"
            )
        return outputs


class Session:
    """A SavedModel in a session, as in a server."""

    def __init__(self, path: str) -> None:
        self._session = tf.compat.v1.Session(graph=tf.Graph())
        with self._session.graph.as_default():
            loaded = tf.compat.v1.saved_model.load(self._session, ["serve"], path)
        self._signatures = loaded.signature_def

    def call(self, kind: str, inputs: dict[str, np.ndarray]) -> Call:
        """Returns a function that asks a signature for all of its outputs."""
        signature = self._signatures[kind]
        feeds = {signature.inputs[name].name: x for name, x in inputs.items()}
        fetches = [info.name for info in signature.outputs.values()]
        ask = self._session.make_callable(fetches, feed_list=list(feeds))
        return lambda: ask(*feeds.values())

    def num_ops(self, kind: str, inputs: dict[str, np.ndarray]) -> int:
        """Counts the ops of a call, which take most of the time of small batches."""
        signature, metadata = self._signatures[kind], tf.compat.v1.RunMetadata()
        self._session.run(
            [info.name for info in signature.outputs.values()],
            {signature.inputs[name].name: x for name, x in inputs.items()},
            tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE),
            metadata,
        )
        return sum(len(d.node_stats) for d in metadata.step_stats.dev_stats)


def make_inputs(scenario: Scenario, batch: int) -> dict[str, dict[str, np.ndarray]]:
    """Makes the same random ids for each signature."""
    generator = np.random.default_rng(0)
    inputs: dict[str, dict[str, np.ndarray]] = {"sparse": {}, "dense": {}, "ragged": {}}
    for index in range(scenario.features):
        name = f"f{index}"
        values = generator.integers(0, ROWS, batch * scenario.ids)
        indices = np.argwhere(np.ones([batch, scenario.ids], bool))
        inputs["sparse"] |= {
            f"{name}_indices": indices,
            f"{name}_values": values,
            f"{name}_dense_shape": np.array([batch, scenario.ids]),
        }
        inputs["dense"][name] = values
        inputs["ragged"] |= {
            f"{name}_values": values,
            f"{name}_row_splits": np.arange(batch + 1) * scenario.ids,
        }
    return inputs


def export(scenario: Scenario, folder: pathlib.Path) -> dict[str, Session]:
    """Exports the peer and ours, and loads both again."""
    configs = [
        te.TableConfig(ROWS, DIM, combiner="mean", name=f"t{index}")
        for index in range(scenario.features)
    ]
    generator = tf.random.Generator.from_seed(0)
    tables = [tf.Variable(generator.normal([ROWS, DIM])) for _ in configs]
    serving.export(
        dict(zip(configs, tables, strict=True)),
        folder / "ours",
        feature_config={f"f{i}": te.FeatureConfig(c) for i, c in enumerate(configs)},
        signatures=["sparse", scenario.other],
    )
    Peer(tables).save(str(folder / "peer"))
    return {side: Session(str(folder / side)) for side in ("peer", "ours")}


def time_in_turn(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Measures the median microseconds of each call."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):  # The first calls optimise the graph.
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(own) for name, own in seconds.items()}


def measure(scenario: Scenario, rounds: int) -> dict[int, dict[str, float]]:
    """Measures the microseconds of the peer and our two signatures, by batch size."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        sessions = export(scenario, pathlib.Path(folder))
        for batch in BATCHES:
            inputs = make_inputs(scenario, batch)
            calls = {
                PEER: sessions["peer"].call("sparse", inputs["sparse"]),
                "ours, sparse": sessions["ours"].call("sparse", inputs["sparse"]),
                f"ours, {scenario.other}": sessions["ours"].call(
                    scenario.other, inputs[scenario.other]
                ),
            }
            found[batch] = time_in_turn(calls, rounds)
    return found


def table(scenario: Scenario, found: dict[int, dict[str, float]]) -> str:
    """Returns a table of the medians, our multiples of the peer's, and missed aims."""
    title = f"{scenario.name}, {scenario.features} x {scenario.ids} ids, microseconds"
    heads = [title, *(f"batch {batch}" for batch in found)]
    lines = [heads, ["---"] * len(heads)]
    for name in next(iter(found.values())):
        cells = (_cell(name, times) for times in found.values())
        lines.append([name, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(name: str, times: dict[str, float]) -> str:
    ratio = times[name] / times[PEER]
    mark = f", aim {aims.SERVING:g} **missed**" if missed(name, times) else ""
    return f"{times[name]:.0f} ({ratio:.3f}{mark})"


def missed(name: str, times: dict[str, float]) -> bool:
    """Returns whether a row of ours takes longer than the aim allows."""
    return name != PEER and times[name] > aims.SERVING * times[PEER]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints; writes build/bench/serving.{json,md,png}."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = list(SCENARIOS)
    parser.add_argument("--scenarios", nargs="+", choices=known, default=known)
    options.add_rounds(parser, 300)
    options.add_out(parser)
    flags = parser.parse_args(arguments)
    results = {}
    with options.alone(flags.out):
        for name in flags.scenarios:
            print(f"  {name} ...", flush=True)
            results[name] = measure(SCENARIOS[name], flags.rounds)
            _write(flags.out, results)
    print((flags.out / "serving.md").read_text())


def _write(folder: pathlib.Path, results: dict[str, dict]) -> None:
    (folder / "serving.json").write_text(json.dumps(results, indent=2) + "\n")
    tables = [table(SCENARIOS[name], found) for name, found in results.items()]
    text = "### serving\n\nAn exported lookup, the median (over the peer's).\n"
    (folder / "serving.md").write_text("\n".join([text, *tables]))
    rows = {
        f"{scenario}, batch {batch}": {
            name: picture.Bar(times[PEER] / times[name], missed(name, times))
            for name in times
            if name != PEER
        }
        for scenario, found in results.items()
        for batch, times in found.items()
    }
    picture.bars(folder / "serving.png", "serving", report.FASTER, rows)


if __name__ == "__main__":
    main()
