"""Imports follow one order of packages, without exceptions."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "gfgen"

ORDER = [
    "gfgen.errors",
    "gfgen.log",
    "gfgen.layout",
    "gfgen.graph",
    "gfgen.job",
    "gfgen.snapshot",
    "gfgen.system",
    "gfgen.gfc",
    "gfgen.gfc.cuda",
    "gfgen.models.geometry",
    "gfgen.models.parallel",
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
    "gfgen.runtime.predict",
    "gfgen.runtime.worker",
    "gfgen.runtime.control",
    "gfgen.runtime.processes",
    "gfgen.runtime.simulate",
    "gfgen.runtime.report",
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
    "gfgen.__main__",
]
"""Packages and single modules. Each imports itself and what stands before it."""
MAX_MODULES = 16
"""Of one folder."""
MAY_IMPORT_TORCH = ("gfgen.gfc", "gfgen.models", "gfgen.runtime.worker")
HEAVY = {"torch", "diffusers", "transformers", "accelerate"}

MODULES = sorted(ROOT.rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES})


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place_of(module: str) -> int:
    """Of the longest listed name that the module's begins with."""
    while module not in ORDER:
        module = module.rpartition(".")[0]
        assert module, "every package has a place in the order: list it"
    return ORDER.index(module)


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports when it is itself imported: not inside functions, not for types."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    later = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) or is_for_types(node)]
    inside = {node for block in later for node in ast.walk(block)}
    for node in ast.walk(tree):
        if node in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                is_module = module_exists(node.module, alias.name)
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def module_exists(package: str, name: str) -> bool:
    folder = ROOT.parent / package.replace(".", "/")
    return (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_follow_the_order(path):
    module = name_of(path)
    if path.name == "__init__.py":
        assert not imports_of(path), "package __init__s import nothing"
        return
    for imported in imports_of(path):
        if imported.startswith("gfgen"):
            assert place_of(imported) <= place_of(module), f"{module} imports {imported}, which comes later"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_has_few_modules(folder):
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MAX_MODULES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_some_modules_import_torch(path):
    module = name_of(path)
    heavy = {imported.split(".")[0] for imported in imports_of(path)} & HEAVY
    allowed = module.startswith(MAY_IMPORT_TORCH) and not module.startswith("gfgen.models.geometry")
    assert allowed or not heavy, f"{module} imports {heavy}"


def test_there_are_no_import_cycles():
    graph = {name_of(path): {i for i in imports_of(path) if i.startswith("gfgen")} for path in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for imported in graph.get(module, ()):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_product_needs_nothing_outside_its_package(path):
    for imported in imports_of(path):
        assert imported.split(".")[0] not in ("benchmarks", "training", "tests"), imported
