"""Imports go to a lower floor, or to a module of the same package on the same floor."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "gfgen"

FLOORS = {
    "gfgen.errors": 0,
    "gfgen.log": 0,
    "gfgen.layout": 1,
    "gfgen.graph": 2,
    "gfgen.job": 3,
    "gfgen.jobspec": 2,
    "gfgen.jobfields": 3,
    "gfgen.jobimage": 3,
    "gfgen.identity": 3,
    "gfgen.snapshot": 3,
    "gfgen.models.geometry": 3,
    "gfgen.policies": 4,
    "gfgen.gfc": 4,
    "gfgen.gfc.cuda": 5,
    "gfgen.runtime": 4,
    "gfgen.models": 5,
    "gfgen.runtime.outputs": 5,
    "gfgen.runtime.writer": 5,
    "gfgen.runtime.state": 6,
    "gfgen.runtime.worker": 6,
    "gfgen.runtime.worker_bare": 6,
    "gfgen.runtime.worker_forwards": 6,
    "gfgen.runtime.worker_gpu": 6,
    "gfgen.runtime.worker_graphs": 6,
    "gfgen.runtime.worker_jobs": 6,
    "gfgen.runtime.worker_staging": 6,
    "gfgen.runtime.arenas": 6,
    "gfgen.runtime.control": 7,
    "gfgen.runtime.workers": 7,
    "gfgen.runtime.pool": 6,
    "gfgen.runtime.profiles": 6,
    "gfgen.runtime.run_profile": 6,
    "gfgen.runtime.scaling": 6,
    "gfgen.models.calibration": 6,
    "gfgen.runtime.writes": 7,
    "gfgen.runtime.simulate": 7,
    "gfgen.runtime.profiled": 7,
    "gfgen.runtime.replay": 7,
    "gfgen.models.measure": 6,
    "gfgen.models.measure_forward": 6,
    "gfgen.models.measure_decode": 6,
    "gfgen.models.shapes": 6,
    "gfgen.runtime.simulation": 7,
    "gfgen.runtime.estimate": 7,
    "gfgen.runtime.plan": 7,
    "gfgen.runtime.plan_words": 7,
    "gfgen.runtime.plot_plan": 7,
    "gfgen.server": 8,
    "gfgen.bench": 8,
    "gfgen.cli": 9,
    "gfgen.__main__": 10,
}
MAY_IMPORT_TORCH = ("gfgen.gfc", "gfgen.models", "gfgen.runtime.worker", "gfgen.runtime.outputs")
HEAVY = {"torch", "diffusers", "transformers", "accelerate"}

MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    """The floor of the longest listed prefix; geometry's parts are on geometry's floor."""
    if module.startswith("gfgen.models.geometry"):
        module = "gfgen.models.geometry"
    while module not in FLOORS:
        module = module.rpartition(".")[0]
        assert module, "every module has a floor: list it"
    return FLOORS[module]


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
def test_imports_go_down(path):
    module = name_of(path)
    package = module.rpartition(".")[0]
    if path.name == "__init__.py":
        assert not imports_of(path), "package __init__s import nothing"
        return
    for imported in imports_of(path):
        if not imported.startswith("gfgen"):
            continue
        if floor_of(imported) == floor_of(module):
            assert imported.rpartition(".")[0] == package, f"{module} imports {imported} beside it"
        else:
            assert floor_of(imported) < floor_of(module), f"{module} imports {imported} above it"


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


def test_nothing_imports_what_trains_the_built_in_model():
    for path in MODULES:
        if name_of(path).startswith("gfgen.models.shapes"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith("gfgen.models.shapes"), path
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("gfgen.models.shapes") for alias in node.names), path
