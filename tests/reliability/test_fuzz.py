"""Random configurations, inputs and steps against the NumPy reference.

`make fuzz` draws them for minutes, from other seeds each time; here are a few.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import cc_programs
import hypothesis
import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf
from conformance import cases
from conformance.test_embedding_v2 import Stepwise
from conformance.test_invalid_ids import spoiled
from conformance.twin import Batch, Feature, Table, Twin
from cpu_engines import EACH_ENGINE
from hypothesis import strategies as st
from reliability import fuzz

import tpu_embedding as te
from tpu_embedding import distribution

RATE = 0.25
RULES = [
    (case.cls, {**common, **options})
    for case in optimizer_cases.OPTIMIZERS
    for options in case.options
    for common in optimizer_cases.COMMON_OPTIONS
]
names = st.sampled_from(sorted(cases.INPUT_BY_NAME))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is drawn; the ids and gradients come from the seed."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    v2: bool
    pipelined: bool
    traced: bool
    steps: int
    seed: int


@st.composite
def optimizers(draw: st.DrawFn) -> Any:
    cls, options = draw(st.sampled_from(RULES))
    return cls(learning_rate=RATE, **options)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    quantization = st.builds(
        te.QuantizationConfig, st.integers(2, 9), st.just(-1.0), st.just(1.5)
    )
    return Table(
        rows=draw(st.integers(4, 90)),
        dim=draw(st.integers(1, 20)),
        combiner=draw(st.sampled_from(cases.COMBINERS)),
        optimizer=draw(optimizers()),
        quantization=draw(st.none() | quantization),
        invalid_ids=draw(st.sampled_from(["error", "drop", "mod"])),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    drawn = tuple(draw(st.lists(tables(), min_size=1, max_size=3)))
    features = st.builds(
        Feature,
        st.sampled_from([f"t{i}" for i in range(len(drawn))]),
        names.map(cases.INPUT_BY_NAME.__getitem__),
        st.booleans(),
    )
    return Problem(
        tables=drawn,
        features=tuple(draw(st.lists(features, min_size=1, max_size=4))),
        v2=draw(st.booleans()),
        pipelined=draw(st.booleans()),
        traced=draw(st.sampled_from([False, False, False, True])),
        steps=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def batch_of(rng: np.random.Generator, twin: Twin) -> Batch:
    """A batch with wrong ids where the table has a rule for them."""
    batch = twin.draw(rng)
    for replica in batch.values:
        for name, value in replica.items():
            if twin.tables[twin.features[name].table].invalid_ids != "error":
                replica[name] = spoiled(rng, value)
    return batch


def train(problem: Problem) -> None:
    rng = np.random.default_rng(problem.seed)
    tables_by_name = {f"t{i}": table for i, table in enumerate(problem.tables)}
    # By first use, as the plan has them.
    used = dict.fromkeys(feature.table for feature in problem.features)
    twin = Twin(
        {name: tables_by_name[name] for name in used},
        {f"f{i}": feature for i, feature in enumerate(problem.features)},
        None,
        function=tf.function if problem.traced else lambda step: step,
        make=Stepwise if problem.v2 else te.TPUEmbedding,
        inside=problem.v2,
        pipeline_execution_with_tensor_core=problem.pipelined
        and os.environ.get(distribution.ENGINE_VARIABLE) != "portable",
    )
    for step in range(problem.steps):
        twin.step(rng, batch_of(rng, twin), ["f0"] if step % 2 else [])
    twin.check_variables()


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_against_the_reference(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, engine)
    # The portable engine's calls take longer; the host's are drawn more often.
    few = {"host": 1, "portable": 4}[engine]
    default = hypothesis.settings.default
    assert default is not None
    settings = hypothesis.settings(
        default,
        max_examples=max(default.max_examples // few, 1),
        suppress_health_check=list(hypothesis.HealthCheck),
        # A problem is small as it is drawn; to make it smaller takes minutes.
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    settings(hypothesis.given(problems())(train))()


@pytest.mark.second_tier
def test_libfuzzer_s_entry_compiles() -> None:
    """As far as g++ can tell; `make fuzz-clang` links it with libFuzzer."""
    define = "-DTPU_EMBEDDING_LIBFUZZER"
    assert define in fuzz.LIBFUZZER
    main = str(cc_programs.TESTS / "fuzz_main.cc")
    command = [*cc_programs.COMPILER, *cc_programs.FLAGS, "-fsyntax-only", define, main]
    compiled = cc_programs.run(command)
    assert compiled.returncode == 0, compiled.stderr


def test_a_machine_without_clang_is_told_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match="needs clang with libFuzzer, and 'no-clang'"):
        fuzz.compile_libfuzzer("no-clang", tmp_path)


@pytest.mark.second_tier
def test_the_core_under_sanitizers(seed: int, tmp_path: pathlib.Path) -> None:
    """Mutated features and batches, from another seed than `make fuzz`."""
    print(fuzz.run_driver("address", seconds=5, seed=seed, folder=tmp_path))
