"""The wording of the errors of serving; see `tpu_embedding.errors`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def unknown_features(unknown: Iterable[str], known: Iterable[str]) -> ValueError:
    """Inputs for features that are not configured."""
    return ValueError(
        f"`inputs` has the features {', '.join(unknown)}, which `feature_config` "
        f"lacks. It has {', '.join(known)}."
    )


def table_missing(table: str, path: str) -> ValueError:
    """A feature whose table is not among those given."""
    return ValueError(
        f"`tables` lacks table {table} of feature {path}. Its keys must be the "
        "TableConfig objects of `feature_config` themselves."
    )


def table_kind(table: str, expected: object, value: Any) -> ValueError:
    """A table of another shape, or one that does not hold floating point numbers."""
    return ValueError(
        f"Table {table} must be a floating point variable or tensor of shape "
        f"{expected}. Received: {_kind(value)}."
    )


def under_tpu_strategy() -> RuntimeError:
    """Serving is done by the CPU."""
    return RuntimeError(
        "TPUEmbeddingForServing cannot be created under a TPU strategy: it serves on "
        "the CPU. Create it outside of `strategy.scope()` and restore the checkpoint "
        "there."
    )


def sparse_core_restore_info(value: object) -> NotImplementedError:
    """Checkpoints in SparseCore's own layout."""
    return NotImplementedError(
        "TPUEmbeddingForServing cannot carry `experimental_sparsecore_restore_info="
        f"{value!r}`: it restores whole tables. Leave it at None and restore a "
        "checkpoint of whole tables."
    )


def export_source(value: object) -> TypeError:
    """Something without tables."""
    return TypeError(
        "The first argument of export must be a TPUEmbedding, a TPUEmbeddingV2, a "
        "TPUEmbeddingForServing, or, together with `feature_config`, a dict of tables "
        f"by TableConfig. Received: {value!r}."
    )


def feature_config_twice() -> ValueError:
    """An embedding and a feature configuration."""
    return ValueError(
        "export takes `feature_config` only with a dict of tables: an embedding has "
        "its own. Leave it out."
    )


def feature_config_missing() -> ValueError:
    """A dict of tables alone."""
    return ValueError(
        "export needs `feature_config` for a dict of tables: it says which feature "
        "looks up which table."
    )


def invalid_ids_of_embedding() -> ValueError:
    """A rule for ids where the embedding has one already."""
    return ValueError(
        "export takes `invalid_ids` only with a dict of tables: an embedding keeps "
        "the rule it was made with. Leave it out."
    )


def same_input_name(name: str, sources: tuple[str, str]) -> ValueError:
    """Two inputs of a signature would be called the same."""
    return ValueError(
        f"Both {sources[0]} and {sources[1]} would be the input {name!r} of the "
        "exported model. Rename one of them in the feature configuration."
    )


def unknown_signature(value: object, known: Iterable[str]) -> ValueError:
    """A signature that export cannot make by itself."""
    return ValueError(
        f"Unknown signature {value!r}. Known are {', '.join(known)}; pass a dict of "
        "names and Signature objects for others."
    )


def no_signature() -> ValueError:
    """A model that nobody could call."""
    return ValueError("export needs at least one signature.")


def unknown_storage(value: object, known: Iterable[str]) -> ValueError:
    """A storage that does not exist."""
    return ValueError(f"Unknown storage {value!r}. Known are {', '.join(known)}.")


def unknown_names(argument: str, names: Iterable[str], known: Iterable[str]) -> Any:
    """Names that stand for nothing in the configuration."""
    return ValueError(
        f"`{argument}` names {', '.join(names)}; known are {', '.join(known)}."
    )


def dense_input(name: str, value: object) -> ValueError:
    """An input of the model that cannot be one of a batch."""
    return ValueError(
        f"`dense_inputs[{name!r}]` must be a tf.TensorSpec whose first axis is the "
        f"batch, [None, ...], and whose other axes are known. Received: {value!r}."
    )


def single_name(argument: str, value: str) -> TypeError:
    """A string where names are expected: its letters would be taken for them."""
    return TypeError(
        f"`{argument}` must be a list of names. Received the string {value!r}; pass "
        f"[{value!r}]."
    )


def dense_inputs_without_model() -> ValueError:
    """Inputs that nothing would read."""
    return ValueError(
        "`dense_inputs` go to the model, and there is none. Pass `model`, or leave "
        "them out."
    )


def own_signatures(argument: str) -> ValueError:
    """An option of the signatures that export makes by itself."""
    return ValueError(
        f"`{argument}` is for the signatures that export makes by itself. A Signature "
        "of your own has its weights and further inputs in its Request: leave "
        f"`{argument}` out."
    )


def most_samples(value: object) -> ValueError:
    """A limit that no batch keeps."""
    return ValueError(f"`most_samples` must be an int >= 1. Received: {value!r}.")


def model_output(value: object) -> TypeError:
    """A model whose result cannot be named."""
    return TypeError(
        "The exported model must return a tensor or a dict of tensors. Received: "
        f"{value!r}."
    )


def no_folder(path: object) -> ValueError:
    """A path that is empty, which would be the working directory."""
    return ValueError(f"`path` must name a new or an empty folder. Received: {path!r}.")


def folder_not_empty(path: object) -> ValueError:
    """A folder in which something else might be lost."""
    return ValueError(
        f"{path} exists and is not an empty folder. Give export a new path."
    )


def unstorable(table: str, row: int, value: float, storage: str) -> Exception:
    """A value that the storage has no code for."""
    return tf.errors.InvalidArgumentError(
        None,
        None,
        f"Table {table}: row {row} holds {value}, which {storage} cannot store. Mend "
        'the table, or export it with storage "float32".',
    )


def _kind(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype.name} of shape {tuple(value.shape)}"
    return repr(value)
