"""Tables and slots in files: saved, read and moved between any two kinds.

>>> import tempfile
>>> import tpu_embedding as te
>>> from tpu_embedding import checkpoint
>>> films = te.TableConfig(8, 2, te.RowIdInitializer(), name="films")
>>> embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.Adagrad(0.1))
>>> path = checkpoint.save(embedding, tempfile.mkdtemp() + "/model")
>>> table = checkpoint.read(path)["films"]
>>> table.parameters.read(3, 5).tolist()
[[3.0, 3.0], [4.0, 4.0]]
>>> list(table.slots)
['accumulators']
"""

from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint, LogicalTable
from tpu_embedding.checkpoint.saving import read, read_layouts, restore, save
from tpu_embedding.layout.partition import TableLayout

__all__ = [
    "LogicalCheckpoint",
    "LogicalTable",
    "TableLayout",
    "read",
    "read_layouts",
    "restore",
    "save",
]


def __dir__() -> list[str]:
    return sorted(__all__)
