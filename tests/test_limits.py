"""What does not fit on a TPU is an error when the embedding is made."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from described_tpu import Described
from software_tpu.calls import strategy_of

import tpu_embedding as te
from tpu_embedding import distribution, tpu_generations
from tpu_embedding.tpu_generations import GENERATIONS, GIB, SPARSE_CORE_TENSOR_BYTES


def make(
    generation: str,
    devices: int,
    rows: int,
    dim: int,
    tables: int = 1,
    optimizer: Any = None,
    **config: Any,
) -> Any:
    """Only the constructor, which makes no table."""
    features = {
        f"t{i}": te.FeatureConfig(
            te.TableConfig(rows, dim, name=f"t{i}"), output_shape=[64], name=f"f{i}"
        )
        for i in range(tables)
    }
    with strategy_of(generation, devices).scope():
        return te.TPUEmbeddingV2(
            features,
            optimizer or te.SGD(0.1),
            sparse_core_embedding_config=te.SparseCoreEmbeddingConfig(**config),
        )


def test_a_tensor_of_sparse_cores() -> None:
    most = SPARSE_CORE_TENSOR_BYTES // (128 * 4)
    make("v5p", 2, 2 * most, 128)
    with pytest.raises(
        ValueError,
        match=rf"^Table 't0' in stack 't0': {most + 32} rows .* on each of 2 devices "
        r"are 17179885568 bytes \(16\.00 GiB\).* at most 17179869184 bytes .* Use at "
        r"least 3 devices",
    ):
        make("v5p", 2, 2 * most + 1, 128)


@pytest.mark.parametrize(("generation", "devices"), [("v6e", 2), ("v5p", 2), ("7x", 2)])
def test_the_memory_of_a_device(generation: str, devices: int) -> None:
    hbm = GENERATIONS[generation].hbm_bytes
    rows = 15 * GIB // (4 * 128) * devices
    fits = hbm // (15 * GIB)
    make(generation, devices, rows, 128, fits)
    with pytest.raises(
        ValueError,
        match=rf"need \d+ bytes .* on each of 2 devices, but programs on {generation} "
        rf"can use {hbm} bytes .* too much. The largest are t\d: 15\.\d\d GiB",
    ):
        make(generation, devices, rows, 128, fits + 1)
    with pytest.raises(ValueError, match="an optimizer with fewer slots"):
        make(generation, devices, rows, 128, fits, te.Adam(0.1))


@pytest.mark.parametrize("generation", ["v5p", "v6e", "7x"])
def test_distinct_ids_of_a_partition(generation: str) -> None:
    known = GENERATIONS[generation]
    cores = 2 * known.sparse_cores_per_device
    most = known.max_unique_ids(cores)

    def limits(ids: int, unique: int) -> Any:
        return {
            "max_ids_per_table": {"t0": ids},
            "max_unique_ids_per_table": {"t0": unique},
        }

    make(generation, 2, 1000, 8, **limits(most, most))
    with pytest.raises(
        ValueError,
        match=rf"'t0'.*max_unique_ids_per_table\['t0'\] is {most + 64} and .* on "
        rf"{generation}\. Set max_unique_ids_per_table to at most {most} in "
        "SparseCoreEmbeddingConfig, with minibatching=True",
    ):
        make(generation, 2, 1000, 8, **limits(most, most + 64))
    ids = 1024 * most
    fewer = known.max_unique_ids(cores, ids)
    assert 0.7 * most < fewer < 0.9 * most
    make(generation, 2, 1000, 8, **limits(ids, fewer))
    possible = known.max_ids(cores, most)
    with pytest.raises(
        ValueError,
        match=rf"Set max_unique_ids_per_table to at most {fewer} or max_ids_per_table "
        rf"to at most {possible} in",
    ):
        make(generation, 2, 1000, 8, **limits(ids, most))
    possible = known.max_ids(cores, 256)
    make(generation, 2, 1000, 8, **limits(possible, 256))
    with pytest.raises(
        ValueError, match=rf"Set max_ids_per_table to at most {possible} in"
    ):
        make(generation, 2, 1000, 8, **limits(2 * possible, 256))
    with pytest.raises(
        ValueError,
        match=rf"max_unique_ids_per_table to at most {most}, and max_ids_per_table to "
        rf"{known.max_ids(cores, most)} in",
    ):
        make(generation, 2, 1000, 8, **limits(2 * possible, 2 * most))


@pytest.mark.parametrize(
    ("generation", "width", "most"),
    # What libtpu 0.0.30 compiles; 8 more it does not.
    [
        ("v6e", 64, 48),
        ("v6e", 176, 8),
        ("v5p", 128, 48),
        ("v5p", 344, 8),
        ("7x", 72, 48),
    ],
)
def test_rows_that_a_custom_combiner_gets(
    generation: str, width: int, most: int
) -> None:
    def create(valency: int, dim: int = width) -> None:
        combiner = te.CustomCombiner(lambda _, vectors: vectors[0], valency)
        feature = te.FeatureConfig(
            te.TableConfig(1000, dim, name="t", combiner=combiner), output_shape=[64]
        )
        with strategy_of(generation, 2).scope():
            te.TPUEmbeddingV2(feature, te.SGD(0.1))

    create(most)
    with pytest.raises(
        ValueError,
        match=rf"'t': its CustomCombiner gets up to {most + 1} rows of {width} columns "
        rf"for a sample, .* at most {most} such rows for {generation}\. Use a "
        rf"max_valency of at most {most}, or a smaller dim\.",
    ):
        create(most + 1)
    with pytest.raises(ValueError, match=r"at most 0 such rows .*\. Use a smaller dim"):
        create(1, 512)


@pytest.mark.parametrize("generation", ["v5p", "v6e", "7x"])
def test_columns_that_libtpu_compiles(generation: str) -> None:
    most = GENERATIONS[generation].max_width
    make(generation, 2, 1000, most)
    with pytest.raises(
        ValueError,
        match=rf"rows have {most + 8} columns, but libtpu 0\.0\.30 compiles updates of "
        rf"at most {most} columns for {generation}\. Use a smaller dim\.",
    ):
        make(generation, 2, 1000, most + 1)


def test_multiples_that_libtpu_cannot_round() -> None:
    """It ends with an internal error on 7x, and rounds them up on v6e."""
    for limit in (250, 256, 272):
        make("7x", 2, 1000, 8, max_unique_ids_per_table={"t0": limit})
    odd: Any = {"max_unique_ids_per_table": {"t0": 264}}
    make("v6e", 2, 1000, 8, **odd)
    with pytest.raises(ValueError, match=r"is 264, .* multiples of 16 for 7x\. Set it"):
        make("7x", 2, 1000, 8, **odd)

    def rule(gradient: Any, row: Any, *_: Any) -> Any:
        return row - gradient

    features = te.FeatureConfig(te.TableConfig(100, 8, name="t"), output_shape=[68])
    with (
        strategy_of("7x", 2).scope(),
        pytest.raises(ValueError, match=r"limit of 136 .* gives a multiple of 16\."),
    ):
        te.TPUEmbeddingV2(features, te.CustomOptimizer(rule, 0.1))


def test_several_limits_are_named() -> None:
    text = r"^Table 't0' in stack .* Also exceeded: device bytes of table 't0'\.$"
    with pytest.raises(ValueError, match=text):
        make("v6e", 2, 10**9, 128)


def test_tables_of_v2_to_v4() -> None:
    rows = GENERATIONS["v3"].hbm_bytes // (4 * 128)

    def make(rows: int, optimizer: Any) -> None:
        table = te.TableConfig(rows, 128, name="t")
        with strategy_of("v3", 2).scope():
            te.TPUEmbedding(te.FeatureConfig(table, name="f"), optimizer)

    make(rows, te.Adagrad(0.1))
    for more, optimizer in ((rows + 64, te.Adagrad(0.1)), (rows, te.Adam(0.1))):
        with pytest.raises(ValueError, match=r"programs on v3 can use .* t: "):
            make(more, optimizer)


def test_topologies() -> None:
    generation, devices = tpu_generations.topology("v5p:4x4x4")
    assert (generation.name, devices) == ("v5p", 64)
    assert tpu_generations.topology("7x:2x2x1")[1] == 8
    for wrong in ("v6e", "v6e:", "v6e:0x2", "2x2", ""):
        with pytest.raises(ValueError, match=r"for example 'v5p:2x2x1'"):
            tpu_generations.topology(wrong)
    with pytest.raises(ValueError, match="Unknown TPU generation 'v9'"):
        tpu_generations.topology("v9:2x2")
    assert tpu_generations.topology("v5p:16x20x28")[1] == 8960
    with pytest.raises(ValueError, match=r"has 272 chips, .* v6e topology has 256"):
        tpu_generations.topology("v6e:16x17")


def test_a_real_tpu_has_the_widest_limits_that_it_may_have() -> None:
    """It reports its SparseCores, not its name."""
    two, four = (tpu_generations.reported("V2", cores) for cores in (2, 4))
    assert two.spmem_bytes == GENERATIONS["7x"].spmem_bytes
    assert two.hbm_bytes == GENERATIONS["7x"].hbm_bytes
    assert two.max_unique_ids(8) >= GENERATIONS["7x"].max_unique_ids(8)
    assert four.hbm_bytes == GENERATIONS["v5p"].hbm_bytes
    assert tpu_generations.reported("V1", 0).hbm_bytes == 32 * GIB


@pytest.mark.parametrize("name", ["v6e", "v5p", "7x"])
def test_described_tpus_have_the_limits_of_their_generation(name: str) -> None:
    """The compiler's check knows which TPU it asks for."""
    described = GENERATIONS[name]
    strategy: Any = tf.distribute.TPUStrategy(
        Described("V2", described.sparse_cores_per_device, local=True)
    )
    setattr(strategy.extended, distribution.DESCRIBED_GENERATION, described)
    cores = described.sparse_cores_per_device * strategy.num_replicas_in_sync
    most = described.max_unique_ids(cores, 256)  # The default limit of ids.
    table = te.TableConfig(1000, 8, name="t")
    config = te.SparseCoreEmbeddingConfig(max_unique_ids_per_table={"t": most + 64})
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=rf"on {name}\. Set .* to at most {most} "),
    ):
        te.TPUEmbeddingV2(
            te.FeatureConfig(table, output_shape=[64]),
            te.SGD(0.1),
            sparse_core_embedding_config=config,
        )
