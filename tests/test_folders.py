"""The table of folders: each answers one question, imports point down it, and inside a folder nothing forms a circle.

A module that is named in a string, to be imported when it is asked for, counts as imported.
"""

import ast
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import levanter_diloco

PACKAGE = Path(levanter_diloco.__file__).parent

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}

BOTTOM = ("errors", "console", "axes")

MAY_IMPORT = {
    "errors": (),
    "console": (),
    "axes": (),
    "host": (),
    "network": ("errors",),
    "algorithm": ("axes",),
    "options": ("errors", "network", "algorithm"),
    "fragments": ("errors", "axes", "options"),
    "islands": ("errors", "axes", "host", "algorithm", "options", "fragments"),
    "checkpoint": ("errors", "axes", "algorithm", "options", "fragments", "islands"),
    "training": ("errors", "axes", "host", "algorithm", "options", "fragments", "islands", "checkpoint"),
    "plugin": ("options", "training"),
    "main": ("errors", "console", "axes", "network", "options", "fragments", "checkpoint", "training"),
    "commands": (
        *("errors", "console", "host", "network", "algorithm", "options", "islands", "checkpoint", "training", "main"),
    ),
    "cli": ("console", "main", "commands"),
}
"""From the bottom, each folder or module of the package, and what of it each may import."""

KNOW_NO_HOST = (*BOTTOM, "network", "algorithm", "fragments")


def place(module: str) -> str:
    """The row of the table that a module belongs to."""
    return module.partition(".")[0]


def imported_by(path: Path, package: list[str]) -> set[str]:
    """Full names of all that a file imports, anywhere in it; names from a package count as modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value.partition(":")[0]} if node.value.startswith("levanter_diloco.") else set()
    return names


def imports(module: str) -> set[str]:
    package = ["levanter_diloco", *module.split(".")[:-1]]
    return imported_by(MODULES[module], package)


def own_imports(module: str) -> set[str]:
    own = {name.removeprefix("levanter_diloco.") for name in imports(module) if name.startswith("levanter_diloco.")}
    return own & MODULES.keys() - {module}


def test_own_imports_are_found():
    # The tests below would pass on an empty set.
    assert own_imports("fragments.layers") >= {"options.config", "errors", "fragments.partition", "axes"}
    assert own_imports("main.train_lm") >= {"training.binding", "training.config", "main.program", "console"}
    assert own_imports("plugin") == {"options.config", "training.json_lines"}
    assert own_imports("cli") >= {"main.train_lm", "commands.inspect", "commands.plan.command"}


def test_every_module_has_a_place_and_every_place_a_module():
    assert set(map(place, MODULES)) == MAY_IMPORT.keys()


def test_table_points_down():
    order = list(MAY_IMPORT)
    for name, below in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(name) for other in below), name


@pytest.mark.parametrize("module", MODULES)
def test_imports_keep_to_the_table(module: str):
    allowed = {place(module), *MAY_IMPORT[place(module)]}
    others = {name for name in own_imports(module) if place(name) not in allowed}
    assert not others, f"{module} imports {others}, and may import {allowed}"


def test_table_allows_no_more_than_is_used():
    for name, below in MAY_IMPORT.items():
        used = {place(other) for module in MODULES if place(module) == name for other in own_imports(module)}
        assert set(below) == used - {name}, name


def test_nothing_forms_a_circle():
    graph = {module: own_imports(module) for module in MODULES}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_each_other_and_not_the_public_names(module: str):
    # `from levanter_diloco import DiLoCoTrainer` would hide where it is from.
    own = {name for name in imports(module) if name.startswith("levanter_diloco.")}
    through_package = {name for name in own if name.count(".") == 1}
    assert {name.removeprefix("levanter_diloco.") for name in through_package} <= MAY_IMPORT.keys()


def test_public_names_for_the_type_checker_are_those_at_run_time():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.asname: f"levanter_diloco.{node.module}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert "DiLoCoConfig" in homes and "outer_gradient" in homes
    for name, home in homes.items():
        assert name is not None and getattr(levanter_diloco, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="'levanter_diloco' has no public name 'DiLoCo'"):
        _ = levanter_diloco.DiLoCo


def test_host_folder_knows_no_diloco():
    for module, path in MODULES.items():
        if place(module) == "host":
            assert "diloco" not in path.read_text().lower(), module


@pytest.mark.parametrize("module", [module for module in MODULES if place(module) in KNOW_NO_HOST])
def test_lower_folders_do_not_know_the_host(module: str):
    assert not {name for name in imports(module) if name.split(".")[0] == "levanter"}


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_package_imports_neither_jax_nor_the_host():
    loaded = modules_after("import levanter_diloco")
    assert "levanter_diloco" in loaded
    assert not loaded & {"jax", "jaxlib", "levanter", "haliax", "optax", "equinox", "numpy"}


def test_help_of_the_command_needs_neither_jax_nor_the_host():
    loaded = modules_after("import levanter_diloco.cli as cli; cli.main(['--help'])")
    assert not loaded & {"jax", "levanter", "haliax"}


def test_options_need_neither_jax_nor_the_host():
    loaded = modules_after("import levanter_diloco.options.config")
    assert "levanter_diloco.options.outer" in loaded
    assert not loaded & {"jax", "jaxlib", "levanter", "haliax", "optax", "equinox"}


def test_plan_needs_neither_jax_nor_the_host():
    flags = "'plan', '--params', '10e9', '--layers', '48', '--step_seconds', '0.8', '--rate', '10gbit', '--json'"
    loaded = modules_after(f"import levanter_diloco.cli as cli; cli.main([{flags}])")
    assert "levanter_diloco.commands.plan.simulate" in loaded
    assert not loaded & {"jax", "levanter", "haliax", "optax"}


def test_bench_leaves_jax_and_the_host_to_its_processes():
    loaded = modules_after("import levanter_diloco.commands.bench.command")
    assert "levanter_diloco.network.namespaces" in loaded
    assert not loaded & {"jax", "levanter", "haliax", "optax"}


def test_lower_folders_load_without_the_host():
    names = [f"levanter_diloco.{module}" for module in MODULES if place(module) in KNOW_NO_HOST]
    loaded = modules_after(f"import {', '.join(names)}")
    assert set(names) <= loaded
    assert "levanter" not in loaded


def test_no_test_file_imports_another():
    # What two of them need is in tests/helpers/.
    tests = Path(__file__).parent
    files = sorted(tests.rglob("test_*.py"))
    assert Path(__file__) in files
    for path in files:
        names = {part for name in imported_by(path, []) for part in name.split(".")}
        assert not names & {file.stem for file in files}, path.relative_to(tests)
