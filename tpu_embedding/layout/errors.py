"""The wording of errors about layouts and stacks."""

from __future__ import annotations

from collections.abc import Sequence


def input_shape(path: str, got: object) -> ValueError:
    """For what build() was given and is no shape of ids."""
    return ValueError(
        f"The input shape of feature {path} given to build() must be one of at least "
        f"one axis, with None for axes that are not known. Received: {got!r}."
    )


def layout_kind(table: str, got: object) -> ValueError:
    """For a TableConfig.layout that is no layout."""
    return ValueError(
        f"Table {table!r}: layout must be None, a TableLayout or a "
        f"SparseCoreTableLayout proto, got {got!r}."
    )


def layout_field(table: str, what: str, got: object, wanted: object) -> ValueError:
    """For a layout that was made for another table or other hardware."""
    return ValueError(
        f"Table {table!r}: {what} of its layout is {got!r}, but here it is {wanted!r}. "
        "Take the layout from an embedding of this table on this hardware, or leave "
        "layout=None."
    )


def layout_padding(table: str, padded: Sequence[int], shards: int) -> ValueError:
    """For a padded shape that cannot be cut into shards."""
    return ValueError(
        f"Table {table!r}: unsharded_padded_shape of its layout is {tuple(padded)}; it "
        f"needs two axes, each at least that of the table, and rows that {shards} "
        "SparseCores divide."
    )


def stack_of_two_kinds(stack: str, one: str, other: str) -> ValueError:
    """For a stack whose tables differ in what the hardware keeps once per stack."""
    return ValueError(
        f"Tables {one!r} and {other!r} are both in stack {stack!r}, but tables of one "
        "stack have one padded width, optimizer and quantization_config. Rename a "
        "table or give it another stacked_table_name in its layout."
    )


def stack_overlap(stack: str, one: str, other: str) -> ValueError:
    """For two tables at one place."""
    return ValueError(
        f"Tables {one!r} and {other!r} share rows of stack {stack!r}. Give them "
        "layouts that do not overlap, or rename a table: the name of a stack is that "
        'of its tables joined by "_".'
    )


def output_shape_missing(path: str, shape: object) -> ValueError:
    """For a feature whose samples a SparseCore cannot know beforehand."""
    return ValueError(
        f"Feature {path}: SparseCores need the whole output_shape in FeatureConfig, "
        f"per replica and without unknown axes, got {shape!r}. Set for example "
        "output_shape=[batch size per replica]; the Keras layer takes it from "
        "`batch_size`."
    )


def samples_not_divisible(path: str, samples: int, sparse_cores: int) -> ValueError:
    """For a feature whose samples cannot be dealt out to the SparseCores."""
    return ValueError(
        f"Feature {path}: its output_shape has {samples} samples per replica, which "
        f"the {sparse_cores} SparseCores of a device do not divide. Choose a batch "
        f"size per replica that is a multiple of {sparse_cores}."
    )


def limit_of_unknown_stack(
    argument: str, unknown: Sequence[str], names: Sequence[str]
) -> ValueError:
    """For limits of a stacked table that is not there."""
    return ValueError(
        f"SparseCoreEmbeddingConfig.{argument} names {', '.join(unknown)}, but the "
        f"stacked tables are {', '.join(names)}. Limits go by the name of the stack: "
        'the names of its tables, sorted and joined by "_".'
    )


def weights_of_preprocessed() -> ValueError:
    """For weights beside features that were prepared with their own."""
    return ValueError(
        "`weights` cannot be given for features that were preprocessed: pass them to "
        "preprocess_features."
    )


def not_preprocessed(got: object) -> TypeError:
    """For dequeue of something that enqueue did not give."""
    return TypeError(
        "dequeue takes what enqueue or preprocess_features returns, a "
        f"PreprocessedFeatures, got {type(got).__name__}. Use embedding_lookup for raw "
        "features."
    )


def preprocessed_features(got: int, wanted: int) -> ValueError:
    """For a batch of another embedding."""
    return ValueError(
        f"The preprocessed batch has {got} features, but this embedding has {wanted}. "
        "Preprocess it with this embedding."
    )


def preserved_outputs_type(got: object) -> TypeError:
    """For preserved outputs that are no dict."""
    return TypeError(
        "Preserved outputs are a dict by name of the stacked table, got "
        f"{type(got).__name__}. Pass the second output of embedding_lookup."
    )


def preserved_outputs_names(got: Sequence[str], wanted: Sequence[str]) -> ValueError:
    """For preserved outputs of other stacks."""
    return ValueError(
        f"Preserved outputs have the stacked tables {', '.join(map(str, got))}, but "
        f"this embedding has {', '.join(wanted)}. Pass the second output of "
        "embedding_lookup."
    )


def preserved_output(stack: str, got: object, wanted: type) -> ValueError:
    """For what is no batch of a stack, or that of another kind of combiner."""
    return ValueError(
        f"The batch of stacked table {stack!r} must be a {wanted.__name__}, got "
        f"{type(got).__name__}. Pass to apply_gradients the second output of "
        "embedding_lookup, and to a lookup what preprocess_features or enqueue of this "
        "embedding gives."
    )


def custom_function(table: str, what: str) -> NotImplementedError:
    """For a function of the user's in a class that has no place for it."""
    return NotImplementedError(
        f"Table {table!r}: only TPUEmbeddingV2 takes a {what}, as in TensorFlow. Use "
        "TPUEmbeddingV2, or one of the named optimizers and combiners."
    )


def combiner_with_minibatching(table: str) -> NotImplementedError:
    """For a CustomCombiner, whose ops take a batch whole."""
    return NotImplementedError(
        f"Table {table!r}: the ops with a CustomCombiner have no minibatches. Leave "
        "SparseCoreEmbeddingConfig.minibatching off, or use another combiner."
    )


def combiner_weights_saved(table: str) -> NotImplementedError:
    """For weights that the checkpoints of this package have no place for."""
    return NotImplementedError(
        f"Table {table!r}: tpu_embedding.checkpoint has no place for the weights of a "
        "CustomCombiner. Use tf.train.Checkpoint, which saves them too."
    )


def sparse_core_rule(table: str, optimizer: str) -> NotImplementedError:
    """For an optimizer that SparseCores have no op for."""
    return NotImplementedError(
        f"Table {table!r}: SparseCores have no op for {optimizer}. Use SGD, Adagrad, "
        "AdagradMomentum, FTRL or Adam, or the host engine."
    )


def sparse_core_option(
    table: str, option: str, got: object, wanted: object
) -> NotImplementedError:
    """For an option of an optimizer that the ops of SparseCores do not have."""
    return NotImplementedError(
        f"Table {table!r}: the SparseCore ops cannot carry {option}={got!r} of its "
        f"optimizer. Set {option}={wanted!r}, or use the host engine."
    )


def sparse_core_without_name(path: str, what: str) -> ValueError:
    """For a table or feature that SparseCores cannot name."""
    config = {"table": "TableConfig", "feature": "FeatureConfig"}[what]
    return ValueError(
        f"Feature {path}: under a strategy of SparseCores its {what} needs a name. "
        f"Give {config} a `name`."
    )


def sparse_core_without_optimizer(table: str) -> ValueError:
    """For a table that could not be trained."""
    return ValueError(
        f"Table {table!r} has no optimizer, and a strategy of SparseCores needs one. "
        "Give one to TableConfig or to the embedding, or build it outside of the "
        "strategy's scope for lookups alone."
    )


def sparse_core_sequence(path: str, length: int) -> ValueError:
    """For a sequence, whose number of samples only the input says."""
    return ValueError(
        f"Feature {path}: SparseCores need the whole output_shape in FeatureConfig, "
        f"which max_sequence_length={length} excludes. Give it as a RaggedTensor with "
        f"output_shape=[batch size per replica, {length}] and no max_sequence_length."
    )


def unpartitioned(stack: str) -> ValueError:
    """For a batch that was preprocessed for another engine."""
    return ValueError(
        f"The preprocessed batch has no sizes of stacked table {stack}: another engine "
        "made it. Preprocess it with this embedding."
    )


def preserved_size(stack: str, field: str, got: object, wanted: object) -> ValueError:
    """For preserved outputs of an embedding on other hardware or with other limits."""
    return ValueError(
        f"Preserved outputs of stacked table {stack!r}: `{field}` is of size {got}, "
        f"but this embedding has {wanted}. Pass the second output of its own "
        "embedding_lookup."
    )


def cores_per_replica(cores: int) -> NotImplementedError:
    """For a DeviceAssignment with several cores for each replica."""
    return NotImplementedError(
        f"Each replica has {cores} TPU cores, and embeddings on SparseCores need one. "
        "Use a DeviceAssignment of one core per replica."
    )


def minibatches_outside_of_replicas(replicas: int) -> RuntimeError:
    """For a batch that is to be cut as those of all replicas are."""
    return RuntimeError(
        f"With minibatching the batches of all {replicas} replicas must be cut at the "
        "same places, which one batch alone cannot tell. Give the raw features to "
        "embedding_lookup inside strategy.run, or raise the limits and leave "
        "minibatching off."
    )


def load_of_unknown_table(table: str, known: Sequence[str]) -> ValueError:
    """For a load of a table that is not there."""
    return ValueError(
        f"`shard_loads` names the table {table!r}, but the tables are "
        f"{', '.join(known)}. Leave it out, or name the tables as in the profile."
    )


def load_of_other_shards(table: str, got: int, wanted: int) -> ValueError:
    """For a load that was measured over another number of shards."""
    return ValueError(
        f"Table {table!r}: `shard_loads` has {got} numbers, but there are {wanted} "
        "SparseCores. Take a profile with that many shards."
    )
