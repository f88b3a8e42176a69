"""What holds across the whole package: who imports whom, names, docstrings, sizes, no pickle."""

import ast
import importlib
import pkgutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitlab

PACKAGE = Path(vitlab.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {str(f.relative_to(PACKAGE)): ast.parse(f.read_text(encoding="utf-8")) for f in FILES}

ARROWS = {  # a package of ours -> what it may import of ours, beside itself
    "models": set(),
    "data": set(),
    "weights": {"models"},
    "evaluation": {"weights", "data", "models"},
    "analysis": {"weights", "data", "models"},
    "deployment": {"weights", "data", "models"},
    "training": {"evaluation", "weights", "data", "models"},
}
ALSO = {  # a file -> what it may import beyond that
    "weights/bundle.py": {"data"},
    "weights/predictor.py": {"data"},
    "weights/formats.py": {"data"},
}
TOP = {"__init__.py", "__main__.py", "cli.py", "flags.py", "report.py", "runs.py"}  # may import all
COMMENTED = {"ViTConfig", "StemConfig", "BiTConfig", "TrainConfig", "Preprocess", "Augment"}


def imports(tree: ast.Module) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_ours(tree: ast.Module) -> set[str]:
    """Parts of vitlab that a file imports: packages and top-level modules."""
    return {name.split(".")[1] for name in imports(tree) if name.startswith("vitlab.")}


@pytest.mark.parametrize("file", TREES)
def test_arrows(file: str) -> None:
    package, _, inside = file.partition("/")
    if not inside:
        assert package in TOP, "say here what a new top-level module is for"
        return
    if package in ("studies", "commands"):
        return
    allowed = ARROWS[package] | ALSO.get(file, set()) | {package}
    assert of_ours(TREES[file]) <= allowed


def test_models_need_torch_alone() -> None:
    for file, tree in TREES.items():
        if file.startswith("models/"):
            outside = {name.split(".")[0] for name in imports(tree)} - {"vitlab", "torch"}
            assert outside <= sys.stdlib_module_names, file


def test_public_names_are_callable_after_every_import() -> None:
    """No module hides a function of its name."""
    for module in pkgutil.walk_packages(vitlab.__path__, "vitlab."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in vitlab.__all__:
        assert callable(getattr(vitlab, name)), name
    assert set(vitlab.__all__) <= set(dir(vitlab))


@pytest.mark.parametrize(
    "code",
    [
        "import vitlab",
        "import vitlab.cli",
        "import sys; sys.argv = ['vitlab', '--help']; from vitlab.cli import main; main()",
        "from vitlab.cli import main; assert main(['nonsense']) == 2",
    ],
)
def test_torch_stays_away_until_it_is_needed(code: str) -> None:
    ask = "import sys; assert not {'torch', 'torchvision', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{ask}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_changes_neither_environment_nor_threads() -> None:
    code = """
import os, torch
before = dict(os.environ), torch.get_num_threads(), torch.get_num_interop_threads()
import vitlab, vitlab.cli, vitlab.runs
vitlab.create("vit-ti16", image=16, depth=1)(torch.zeros(1, 3, 16, 16))
assert before == (dict(os.environ), torch.get_num_threads(), torch.get_num_interop_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def is_verb(file: str, name: str) -> bool:
    return file.startswith("commands/") and name.islower()


@pytest.mark.parametrize("file", TREES)
def test_what_is_public_has_a_docstring(file: str) -> None:
    tree = TREES[file]
    assert ast.get_docstring(tree) or not tree.body, "a module"
    # The docstring of a command's options is its help.
    bare = [
        node.name for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not (node.name.startswith("_") or is_verb(file, node.name) or ast.get_docstring(node))
    ]  # fmt: skip
    assert not bare


@pytest.mark.parametrize("file", TREES)
def test_files_are_short(file: str) -> None:
    most = {"models/vit.py": 350, "models/resnet.py": 255}.get(file, 400)
    assert len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.parametrize("file", TREES)
def test_nothing_is_pickled(file: str) -> None:
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    assert not pickles & {name.split(".")[0] for name in imports(TREES[file])}
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            # torchvision's own format is torch's; what we keep for ourselves never is.
            assert called != "torch.save" or file == "weights/files.py", f"line {node.lineno}"
            assert called != "torch.load" or given.get("weights_only") == "True"
            assert given.get("allow_pickle") != "True", f"line {node.lineno}"


def configurations() -> Iterator[tuple[str, str, ast.ClassDef]]:
    for file, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in COMMENTED:
                yield node.name, file, node


@pytest.mark.parametrize(("name", "file", "node"), list(configurations()))
def test_every_field_of_a_configuration_has_a_comment(
    name: str, file: str, node: ast.ClassDef
) -> None:
    with tokenize.open(PACKAGE / file) as f:
        commented = {
            t.start[0] for t in tokenize.generate_tokens(f.readline) if t.type == tokenize.COMMENT
        }
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    assert fields
    for part in fields:
        lines = range(part.lineno, (part.end_lineno or part.lineno) + 1)
        assert commented & set(lines), f"{name}.{ast.unparse(part.target)}"
    assert "frozen=True, kw_only=True" in ast.unparse(node.decorator_list[0])


def test_no_configuration_is_missed() -> None:
    assert {name for name, _, _ in configurations()} == COMMENTED
