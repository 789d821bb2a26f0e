"""How far the tables of a stack are turned over the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpu_embedding.layout import errors


def rotations(
    tables: Sequence[str],
    cores: tuple[int, int],
    loads: Mapping[str, Sequence[float]],
) -> list[int]:
    """For each table of a stack the shard of its id 0.

    TensorFlow turns each table by one device more than the one before. Where loads
    are known, the heaviest table goes first, and each next one to where the fullest
    shard stays lowest: the greedy rule of Graham (1969). Of equals TensorFlow's comes
    first, then the least.

    >>> rotations(["a", "b"], (2, 1), {"a": [3, 1], "b": [1, 2]})
    [0, 0]
    >>> rotations(["a", "b"], (2, 1), {})
    [0, 1]

    Args:
      tables: Their names, in the order of the stack.
      cores: (devices, SparseCores of each).
      loads: By name of the table its load on each shard, were it not turned.
    """
    devices, per_device = cores
    shards = devices * per_device
    turns = [i * per_device % shards for i in range(len(tables))]
    total = [0.0] * shards

    def fullest(turn: int, load: Sequence[float]) -> float:
        return max(total[(s + turn) % shards] + load[s] for s in range(shards))

    known = [i for i, table in enumerate(tables) if table in loads]
    for i in sorted(known, key=lambda i: -sum(loads[tables[i]])):
        load = loads[tables[i]]
        heights = {turn: fullest(turn, load) for turn in (turns[i], *range(shards))}
        turns[i] = min(heights, key=lambda turn: heights[turn])
        for shard in range(shards):
            total[(shard + turns[i]) % shards] += load[shard]
    return turns


def check_loads(
    tables: Sequence[str], loads: Mapping[str, Sequence[float]], shards: int
) -> None:
    """Checks loads against the tables and shards that there are.

    Raises:
      ValueError: If one is of no table, or has not one number for each shard.
    """
    for table, load in loads.items():
        if table not in tables:
            raise errors.load_of_unknown_table(table, tables)
        if len(load) != shards:
            raise errors.load_of_other_shards(table, len(load), shards)
