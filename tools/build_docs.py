"""Builds the documentation and the API reference: `make docs`.

Copies the pages into build/docs_source, writes one page for each public name and one of
all names by task, and calls mkdocs. A warning of mkdocs, such as a broken link or an
argument without documentation, is an error.
"""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "docs_source"
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"),
    "docs",
)
# The packages whose `__all__` is what users may rely on.
PUBLIC_PACKAGES = (
    "tpu_embedding",
    "tpu_embedding.keras",
    "tpu_embedding.checkpoint",
    "tpu_embedding.planning",
    "tpu_embedding.serving",
    "tpu_embedding.testing",
    "tpu_embedding.interop",
    "tpu_embedding.estimator",
)

# Methods of its classes that Keras or this package calls; users call all others.
KERAS = PUBLIC_PACKAGES[1]
KERAS_CALLS = (
    r"^(add_weight|core_of_model|make_tables|__call__|quantized_call|compute_\w+|on_\w+"
    r"|(get_(build_)?|(build_)?from_)config|(save|load)_own_variables)$"
)
# The `__all__` of this package is a part of the outermost package's.
OPTIMIZERS = "tpu_embedding.optimizers"
# The class with the options of all optimizers; the docstring of each names it.
OPTIONS = "tpu_embedding.optimizers.base.Optimizer"
# The tasks of the outermost package's names; its optimizers are those of OPTIMIZERS.
TASKS = {
    "Configuration": (
        "TableConfig",
        "FeatureConfig",
        "GrowingVocabulary",
        "Hashing",
        "VocabularyContents",
        "FrozenTable",
        "CustomCombiner",
        "QuantizationConfig",
        "RowIdInitializer",
        "SparseCoreEmbeddingConfig",
    ),
    "Classes": (
        "TPUEmbedding",
        "TPUEmbeddingV2",
        "TPUEmbeddingV0",
        "TPUEmbeddingForServing",
        "serving_embedding_lookup",
        "pack",
        "PackedFeatures",
        "PartitionedCsrFormatTensor",
    ),
    "Optimizers": (),
    "Several machines": ("DistributedOptions", "ClusterCoordinator"),
    "Telemetry": ("Telemetry", "Figure"),
    "Programs for TPUs, unchanged": ("install", "uninstall"),
    "Memory": ("plan",),
}


def source_of(module: str) -> pathlib.Path:
    """Returns the file of a module or a package."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(package: str) -> list[str]:
    """Reads the `__all__` of a package from its source."""
    path = source_of(package)
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if "__all__" in {alias.name for alias in node.names}:
                names = public_names(node.module)
        elif ast.unparse(node) == "__all__ += _optimizers.__all__":
            names += public_names(OPTIMIZERS)
    if not names:
        raise ValueError(f"{path} has no literal __all__.")
    return names


def tasks() -> dict[str, list[str]]:
    """Returns all public names by task, each as it is imported."""
    outermost, _, *others = PUBLIC_PACKAGES
    found = {KERAS: [f"{KERAS}.{name}" for name in public_names(KERAS)]}
    for task, names in TASKS.items():
        found[task] = [f"{outermost}.{name}" for name in names]
    optimizers = sorted(public_names(OPTIMIZERS), key=str.lower)
    found["Optimizers"] = [f"{outermost}.{name}" for name in optimizers]
    for package in others:
        found[package] = [f"{package}.{name}" for name in public_names(package)]
    return found


def summary(name: str) -> str:
    """Returns the first sentence of the docstring of a public name or package."""
    if name in PUBLIC_PACKAGES:
        tree = ast.parse(source_of(name).read_text())
        return (ast.get_docstring(tree) or "").split("\n\n")[0]
    module, _, own = name.rpartition(".")
    path = source_of(module)
    body = ast.parse(path.read_text()).body
    lazy = [node for part in body if isinstance(part, ast.If) for node in part.body]
    for node in [*body, *lazy]:
        if isinstance(node, ast.ImportFrom) and node.module:
            imported = {alias.name for alias in node.names}
            starred = "*" in imported and own in public_names(node.module)
            if starred or own in imported:
                return summary(f"{node.module}.{own}")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == own:
            return f"`{ast.unparse(node.value).lstrip('_')}`"
        elif getattr(node, "name", None) == own:
            text = ast.get_docstring(node) or ""  # pyright: ignore[reportArgumentType]
            return " ".join(text.split("\n\n")[0].split())
    raise ValueError(f"{path} neither defines nor imports {own}.")


def reference_index() -> str:
    """Makes the page of all public names, by task."""
    lines = ["# API", "", "`te` is `tpu_embedding`. Each name has a page.", ""]
    for task, names in tasks().items():
        package = task in PUBLIC_PACKAGES
        lines += [
            f"## `{task.replace('tpu_embedding', 'te')}`" if package else f"## {task}"
        ]
        lines += [
            "",
            *([summary(task), ""] if package else []),
            "| name | what it is |",
        ]
        lines += ["|---|---|"]
        for name in names:
            own = name.rpartition(".")[2]
            words = summary(name).replace("|", "\\|")
            lines += [f"| [`{own}`]({name}.md) | {words} |"]
        if task == "Optimizers":
            lines += [
                f"| [`optimizers.base.Optimizer`]({OPTIONS}.md) | {summary(OPTIONS)} |"
            ]
        lines += [""]
    return "\n".join(lines)


def reference_page(name: str, *, members: bool) -> str:
    """Makes the API page of a public name."""
    package, _, own = name.rpartition(".")
    # A function with the same name as its module is found in the module.
    module = ROOT.joinpath(*package.split("."), f"{own}.py")
    lines = [
        "---",
        f"title: {own}",
        "search:",
        "  boost: 0.5",
        "---",
        "",
        f"`{package}` · [all names](index.md)",
    ]
    lines += ["", f"::: {name}" + f".{own}" * module.exists(), "    options:"]
    lines += ["      heading_level: 1"]
    if not members:
        lines += ["      members: false", "      inherited_members: false"]
    if package == KERAS:
        lines += [f"      filters: ['!^_(?!_init__$)', '!{KERAS_CALLS}']"]
    return "\n".join([*lines, ""])


def write_sources() -> None:
    """Fills the folder that mkdocs reads."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    (SOURCE / "api").mkdir(parents=True)
    for name in PAGES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, SOURCE / name)
        else:
            shutil.copy(ROOT / name, SOURCE / name)
    (SOURCE / "api" / "index.md").write_text(reference_index())
    for task, names in tasks().items():
        for name in names:
            # Methods of optimizers are for engines; users set their attributes.
            page = reference_page(name, members=task != "Optimizers")
            (SOURCE / "api" / f"{name}.md").write_text(page)
    page = reference_page(OPTIONS, members=False)
    (SOURCE / "api" / f"{OPTIONS}.md").write_text(page)
    index = SOURCE / "docs" / "index.md"
    text = index.read_text()
    words = "API reference: `make docs` builds it."
    assert words in text
    index.write_text(text.replace(words, "[API reference](../api/index.md)."))


def site_options() -> dict[str, str]:
    """Returns the variables that mkdocs.yml reads: the version, and a repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    command = ["git", "remote", "get-url", "origin"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    origin = ran.stdout.strip() if ran.stdout.startswith("https://") else ""
    return {
        "DOCS_NAME": f"{project['name']} {project['version']}",
        "DOCS_REPOSITORY": project.get("urls", {}).get("Repository", origin),
    }


def main() -> int:
    """Builds the site; returns the exit status of mkdocs."""
    write_sources()
    # With --quiet, mkdocs does not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # The theme advertises its successor otherwise.
    environment = {**os.environ, **site_options(), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
