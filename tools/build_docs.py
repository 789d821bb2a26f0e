"""Builds the documentation and the API reference: `make docs`.

Copies the pages into build/docs_source, writes one page for each public package, with
all names of its `__all__`, and calls mkdocs. A warning of mkdocs, such as a broken link
or an argument without documentation, is an error.
"""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "docs_source"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "docs")
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


# Its `__all__` is a part of the outermost package's.
OPTIMIZERS = "tpu_embedding.optimizers"


def public_names(package: str) -> list[str]:
    """The `__all__` of a package, read from its source."""
    path = ROOT.joinpath(*package.split(".")) / "__init__.py"
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
        elif ast.unparse(node) == "__all__ += _optimizers.__all__":
            names += public_names(OPTIMIZERS)
    if not names:
        raise ValueError(f"{path} has no literal __all__.")
    return names


def reference_page(package: str) -> str:
    """The API page of a package: its docstring, then each public name."""
    lines = [f"# {package}", "", f"::: {package}", "    options:"]
    lines += ["      members: false", "      show_root_heading: false", ""]
    names = public_names(package)
    if package == PUBLIC_PACKAGES[0]:
        subpackages = {name.rpartition(".")[2] for name in PUBLIC_PACKAGES[1:]}
        optimizers = sorted(public_names(OPTIMIZERS), key=str.lower)
        names = sorted({*names} - subpackages - {*optimizers}, key=str.lower)
    else:
        optimizers = []
    for name in names:
        # A function that is called as its module is found in the module.
        module = ROOT.joinpath(*package.split("."), f"{name}.py")
        lines += [f"::: {package}.{name}" + f".{name}" * module.exists(), ""]
    if optimizers:
        # Their methods are for engines; users set their attributes.
        for name in ("optimizers.base.Optimizer", *optimizers):
            lines += [f"::: {package}.{name}", "    options:"]
            lines += ["      members: false", "      inherited_members: false", ""]
    return "\n".join(lines)


def write_sources() -> None:
    """Fills the folder that mkdocs reads."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    (SOURCE / "api").mkdir(parents=True)
    for name in PAGES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, SOURCE / name)
        else:
            shutil.copy(ROOT / name, SOURCE / name)
    for package in PUBLIC_PACKAGES:
        (SOURCE / "api" / f"{package}.md").write_text(reference_page(package))
    index = SOURCE / "docs" / "index.md"
    text = index.read_text()
    words = "API reference: `make docs` builds it."
    assert words in text
    index.write_text(text.replace(words, "[API reference](../api/tpu_embedding.md)."))


def main() -> int:
    """Builds the site; returns the exit status of mkdocs."""
    write_sources()
    # With --quiet, mkdocs does not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # The theme advertises its successor otherwise.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
