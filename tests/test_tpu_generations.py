from __future__ import annotations

import dataclasses

import pytest

from tpu_embedding import tpu_generations


@pytest.mark.parametrize("name", tpu_generations.GENERATIONS)
def test_generation_is_found_by_its_own_name(name: str) -> None:
    assert tpu_generations.generation(name).name == name


@pytest.mark.parametrize("name", tpu_generations.GENERATIONS)
def test_only_sparse_core_generations_have_sparse_cores(name: str) -> None:
    generation = tpu_generations.generation(name)
    has_sparse_cores = generation.embedding == "sparse_core"
    assert (generation.sparse_cores_per_device > 0) == has_sparse_cores
    assert (generation.lane_width > 0) == has_sparse_cores
    assert (generation.row_multiple > 0) == has_sparse_cores


def test_sparse_cores_of_each_device() -> None:
    # As Google's jax-tpu-embedding has them, by device and not by chip.
    assert {
        name: generation.sparse_cores_per_device
        for name, generation in tpu_generations.GENERATIONS.items()
        if generation.embedding == "sparse_core"
    } == {"v5p": 4, "v6e": 2, "7x": 2}


def test_generations_of_each_kind() -> None:
    kinds = {name: g.embedding for name, g in tpu_generations.GENERATIONS.items()}
    assert kinds == {
        "v2": "v1",
        "v3": "v1",
        "v4": "v1",
        "v5e": "none",
        "v5p": "sparse_core",
        "v6e": "sparse_core",
        "7x": "sparse_core",
    }


def test_a_generation_is_a_value() -> None:
    generation = tpu_generations.generation("v5p")
    assert generation == dataclasses.replace(generation)
    with pytest.raises(dataclasses.FrozenInstanceError):
        generation.lane_width = 16  # pyright: ignore[reportAttributeAccessIssue]
