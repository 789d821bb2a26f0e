"""What is public: `__all__` of the public packages, and nothing else."""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import subprocess
from typing import Any

import build_docs
import keras
import pytest

import tpu_embedding
from tpu_embedding import __main__ as command_line

PACKAGES = [
    module.name
    for module in pkgutil.walk_packages(tpu_embedding.__path__, "tpu_embedding.")
    if module.ispkg
]


# Public since commit d6493b1, or before: programs of users import them.
NAMES = {
    "tpu_embedding": """
        Adadelta Adagrad AdagradMomentum Adam CenteredRMSProp ClusterCoordinator
        CustomCombiner CustomOptimizer DistributedOptions FTRL FeatureConfig
        Figure FrequencyEstimator FrozenTable GrowingVocabulary Momentum
        PackedFeatures PartitionedCsrFormatTensor ProximalAdagrad ProximalYogi
        QuantizationConfig RMSProp RowIdInitializer RowwiseAdagrad SGD
        SparseCoreEmbeddingConfig TPUEmbedding TPUEmbeddingForServing
        TPUEmbeddingV0 TPUEmbeddingV2 TableConfig Telemetry VocabularyContents
        checkpoint estimator install interop keras pack plan planning serving
        serving_embedding_lookup testing uninstall
    """,
    "tpu_embedding.keras": """
        Embedding RowSparseOptimizer TPUEmbedding TelemetryCallback convert
        translate_keras_optimizer unconvert
    """,
    "tpu_embedding.checkpoint": """
        LogicalCheckpoint LogicalTable TableLayout read read_layouts restore
        save
    """,
    "tpu_embedding.planning": """
        ArrayBytes PlanReport PlannedPlacement StackLimits TableStatistics plan
    """,
    "tpu_embedding.serving": """
        DeltaWriter Report Request Signature TableReport apply_delta
        delta_blocks export
    """,
    "tpu_embedding.testing": """
        CompileReport LocalServers SoftwareTPUStrategy StackReport compile_step
    """,
    "tpu_embedding.interop": """
        AdagradMomentumParameters AdagradParameters AdamParameters AdaptedSpec
        EmbeddingColumn EmbeddingConfigSpec FeatureConfig
        FrequencyEstimatorParameters FtrlParameters ImportedTables
        MomentumParameters ProximalAdagradParameters ProximalYogiParameters
        RMSPropParameters StochasticGradientDescentParameters TableConfig
        embedding_column get_configs_from_feature_columns
        import_estimator_checkpoint shared_embedding_columns
    """,
    "tpu_embedding.estimator": """
        ClassificationOutput EmbeddingProfiler EstimatorSpec InputPipelineConfig
        ModeKeys PredictOutput ProfileOptions RegressionOutput RunConfig
        ServingInputReceiver TPUConfig TPUEstimator TPUEstimatorSpec
        TableStatistics WarmStartSettings
        build_parsing_serving_input_receiver_fn
        build_raw_serving_input_receiver_fn dense_features sequence_features
    """,
}


@pytest.mark.parametrize("package", NAMES)
def test_names_stay_public(package: str):
    module = importlib.import_module(package)
    assert {*NAMES[package].split()} <= {*module.__all__}
    assert all(hasattr(module, name) for name in module.__all__)


COMMANDS = "checkpoint delta place report run try server plan compile"


def test_commands_stay(monkeypatch: pytest.MonkeyPatch):
    functions = []
    monkeypatch.setattr(
        command_line, "_runs", lambda _, *names: functions.append(names)
    )
    for _, _, add_arguments in command_line._COMMANDS:
        add_arguments(argparse.ArgumentParser())
    assert {*COMMANDS.split()} <= {name for name, _, _ in command_line._COMMANDS}
    for module, function in functions:
        found = importlib.import_module(f"tpu_embedding.commands.{module}")
        assert callable(getattr(found, function))


@pytest.mark.parametrize("package", build_docs.PUBLIC_PACKAGES)
def test_public_packages_show_nothing_else(package: str):
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)
    assert set(build_docs.public_names(package)) == set(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_other_packages_say_that_they_are_private(package: str):
    module = importlib.import_module(package)
    assert isinstance(module.__all__, list)
    outermost = ".".join(package.split(".")[:2])
    public = outermost in build_docs.PUBLIC_PACKAGES
    doc = importlib.import_module(outermost).__doc__ or ""
    assert doc.startswith("Private: ") != public


def test_the_facade_loads_packages_when_they_are_used():
    for package in build_docs.PUBLIC_PACKAGES[1:]:
        name = package.rpartition(".")[2]
        assert getattr(tpu_embedding, name) is importlib.import_module(package)
    with pytest.raises(AttributeError, match="no attribute 'engine'"):
        _ = tpu_embedding.engine
    with pytest.raises(AttributeError, match=r"in `tpu_embedding\.estimator`"):
        _ = tpu_embedding.interop.TPUEstimator  # Where it was before.


def undocumented(name: str, value: Any) -> list[str]:
    """Public classes, functions and methods of ours without a docstring."""
    if inspect.ismodule(value) or not callable(value):
        return []
    found = [] if inspect.getdoc(value) else [name]
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            if attribute.startswith("_") or not inspect.isroutine(member):
                continue
            # getattr: a docstring may come from the base class.
            if not inspect.getdoc(getattr(value, attribute)):
                found.append(f"{name}.{attribute}")
    return found


@pytest.mark.parametrize("package", build_docs.PUBLIC_PACKAGES)
def test_public_names_have_docstrings(package: str):
    module = importlib.import_module(package)
    found = [
        missing
        for name in module.__all__
        for missing in undocumented(name, getattr(module, name))
    ]
    assert found == []


def test_the_reference_has_each_public_name_once():
    names = [name for names in build_docs.tasks().values() for name in names]
    assert len(names) == len({*names})
    outermost = build_docs.PUBLIC_PACKAGES[0]
    packages = {*build_docs.PUBLIC_PACKAGES}
    assert {*names} == {
        f"{package}.{name}"
        for package in packages
        for name in build_docs.public_names(package)
        if f"{package}.{name}" not in packages
    } | {f"{outermost}.plan"}
    page = build_docs.reference_index()
    assert "| [`Adagrad`](tpu_embedding.Adagrad.md) | " in page
    assert "| |" not in page  # Each name is described.


@pytest.mark.parametrize("name", ["Embedding", "TPUEmbedding", "TelemetryCallback"])
def test_the_reference_leaves_out_what_keras_calls(name: str):
    own = {n for n in vars(getattr(tpu_embedding.keras, name)) if n[0] != "_"}
    of_keras = {*dir(keras.layers.Embedding), *dir(keras.callbacks.Callback)}
    shown = {n for n in own if not re.search(build_docs.KERAS_CALLS, n)}
    assert shown & of_keras <= {"build", "call"}
    assert {"call", "freeze_vocabulary", "read"} & own <= shown
    assert build_docs.KERAS_CALLS in build_docs.reference_page(
        f"{build_docs.KERAS}.{name}", members=True
    )


def test_the_site_has_the_version():
    assert build_docs.site_options()["DOCS_NAME"].startswith("tpu_embedding 0.")


def test_warnings_of_the_site_are_counted(monkeypatch: pytest.MonkeyPatch):
    """With --quiet, mkdocs --strict accepts links that lead nowhere."""
    commands = []
    monkeypatch.setattr(build_docs, "write_sources", lambda: None)
    monkeypatch.setattr(build_docs, "site_options", dict)
    monkeypatch.setattr(
        build_docs.subprocess,
        "run",
        lambda command, **_: (
            commands.append(command) or subprocess.CompletedProcess([], 3)
        ),
    )
    assert build_docs.main() == 3
    assert "--strict" in commands[0]
    assert not {"--quiet", "-q"} & {*commands[0]}
