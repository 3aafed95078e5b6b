"""The house rules of the package, from one table of limits. Numbers only go down.

Raising one needs its reason in the commit.
"""

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROOT = REPOSITORY / "gfgen"

LIMITS = {
    "lines of the package": 66_271,
    "files of the package": 287,
    "lines of the core": 5_553,
    "files of the core": 24,
    "modules of one folder": 13,
    "methods of one class": 25,
    "folders that name reuse": 4,
    "folders that name lora": 5,
    "folders that name offload": 1,
    "folders that name fp8": 3,
    "folders that name upscale": 3,
}
"""The core is the list of docs/core.md. A folder names a feature if a name in its code contains the word."""
ORDER = [
    "gfgen.errors",
    "gfgen.layout",
    "gfgen.graph",
    "gfgen.job",
    "gfgen.snapshot",
    "gfgen.system",
    "gfgen.log",
    "gfgen.gfc",
    "gfgen.gfc.cuda",
    "gfgen.models.geometry",
    "gfgen.models.parallel",
    "gfgen.models.streaming",
    "gfgen.models.fast",
    "gfgen.models.loading",
    "gfgen.models.lora",
    "gfgen.models.ahead",
    "gfgen.models.families",
    "gfgen.models.stepping",
    "gfgen.policies",
    "gfgen.runtime.ipc",
    "gfgen.runtime.core",
    "gfgen.runtime.files",
    "gfgen.runtime.publish",
    "gfgen.runtime.predict",
    "gfgen.runtime.worker",
    "gfgen.runtime.control",
    "gfgen.runtime.processes",
    "gfgen.runtime.simulate",
    "gfgen.models",
    "gfgen.session",
    "gfgen.server.protocol",
    "gfgen.server.store",
    "gfgen.server.shown",
    "gfgen.server.jobs",
    "gfgen.server.http",
    "gfgen.server.bridge",
    "gfgen.bench",
    "gfgen.cluster",
    "gfgen.cli.shown",
    "gfgen.cli",
    "gfgen.api",
    "gfgen.ray",
    "gfgen.__main__",
]
"""Packages and single modules. Each imports itself and what stands before it."""
MAY_IMPORT_TORCH = ("gfgen.gfc", "gfgen.models", "gfgen.runtime.worker")
HEAVY = {"torch", "diffusers", "transformers", "accelerate"}

MODULES = sorted(ROOT.rglob("*.py"))


# The table ------------------------------------------------------------------------------------


def core_files() -> list[Path]:
    """The files that docs/core.md lists: a numbered line begins with each."""
    listed = re.findall(
        r"^\d+\. `(gfgen/[\w/]+\.py)`", (REPOSITORY / "docs/core.md").read_text(), re.MULTILINE
    )
    return [REPOSITORY / path for path in listed]


def num_lines(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


@functools.cache
def names_by_folder() -> dict[Path, str]:
    """The names in the code of each folder, without comments and strings."""
    names: dict[Path, set[str]] = {}
    for path in MODULES:
        with tokenize.open(path) as file:
            tokens = {
                each.string for each in tokenize.generate_tokens(file.readline) if each.type == tokenize.NAME
            }
        names.setdefault(path.parent, set()).update(tokens)
    return {folder: " ".join(sorted(found)).lower() for folder, found in names.items()}


def folders_that_name(feature: str) -> list[str]:
    return [
        str(folder.relative_to(REPOSITORY)) for folder, names in names_by_folder().items() if feature in names
    ]


def num_methods(path: Path) -> list[int]:
    """Of each class of a module; properties count."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        sum(isinstance(each, functions) for each in node.body)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def measured() -> dict[str, int]:
    """By row of the table: what is there now."""
    core = core_files()
    folders = {path.parent for path in MODULES}
    values = {
        "lines of the package": num_lines(MODULES),
        "files of the package": len(MODULES),
        "lines of the core": num_lines(core),
        "files of the core": len(core),
        "modules of one folder": max(
            sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders
        ),
        "methods of one class": max(max(num_methods(path), default=0) for path in MODULES),
    }
    features = {row: row.removeprefix("folders that name ") for row in LIMITS if row.startswith("folders")}
    return values | {row: len(folders_that_name(feature)) for row, feature in features.items()}


def test_no_number_rises():
    values = measured()
    rows = [f"{'':30}{'limit':>8}{'now':>8}"]
    for row, limit in LIMITS.items():
        mark = "  rises" if values[row] > limit else "  lower it" if values[row] < limit else ""
        rows.append(f"{row:30}{limit:8}{values[row]:8}{mark}")
    names = {row: folders_that_name(row.split()[-1]) for row in LIMITS if row.startswith("folders that")}
    rows += [f"{row}: {', '.join(names[row])}" for row in names if values[row] > LIMITS[row]]
    assert all(values[row] <= limit for row, limit in LIMITS.items()), "\n".join(["", *rows])


def test_the_core_is_there():
    missing = [str(path) for path in core_files() if not path.is_file()]
    assert not missing, "docs/core.md lists files that are gone"


# Imports --------------------------------------------------------------------------------------


def name_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place_of(module: str) -> int:
    """Of the longest listed name that the module's begins with."""
    while module not in ORDER:
        module = module.rpartition(".")[0]
        assert module, "every package has a place in the order: list it"
    return ORDER.index(module)


def imported_by(nodes: Iterator[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                is_module = module_exists(node.module, alias.name)
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


@functools.cache
def all_imports_of(path: Path) -> set[str]:
    """Modules that a file imports, also inside functions and for types."""
    return imported_by(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Modules that a file imports when it is itself imported: not inside functions, not for types."""
    tree = ast.parse(path.read_text())
    later = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) or is_for_types(node)]
    inside = {node for block in later for node in ast.walk(block)}
    return imported_by(node for node in ast.walk(tree) if node not in inside)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def module_exists(package: str, name: str) -> bool:
    folder = REPOSITORY / package.replace(".", "/")
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules of which each reaches all others."""
    reached = {module: reach(graph, module) for module in graph}
    both = {module: {other for other in reached[module] if module in reached[other]} for module in graph}
    return {frozenset(others) for others in both.values() if others}


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += graph[module]
    return found


def test_no_modules_import_each_other():
    names = {name_of(path) for path in MODULES}
    found = circles({name_of(path): all_imports_of(path) & names for path in MODULES})
    assert not found, "\n".join(" <-> ".join(sorted(circle)) for circle in found)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_follow_the_order(path):
    module = name_of(path)
    if path.name == "__init__.py":
        assert not imports_of(path), "package __init__s import nothing"
        return
    for imported in imports_of(path):
        if imported.startswith("gfgen"):
            assert place_of(imported) <= place_of(module), f"{module} imports {imported}, which comes later"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_some_modules_import_torch(path):
    module = name_of(path)
    heavy = {imported.split(".")[0] for imported in imports_of(path)} & HEAVY
    allowed = module.startswith(MAY_IMPORT_TORCH) and not module.startswith("gfgen.models.geometry")
    assert allowed or not heavy, f"{module} imports {heavy}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_product_needs_nothing_outside_its_package(path):
    for imported in imports_of(path):
        assert imported.split(".")[0] not in ("benchmarks", "training", "tests"), imported
