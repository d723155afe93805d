"""Imports of the package point down the layer table of the design; the table is kept here."""

import ast
import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

import levanter_diloco

PACKAGE = Path(levanter_diloco.__file__).parent

LAYERS = {
    0: [
        "__init__",
        "errors",
        "flags",
        "kinds",
        "link",
        "slices",
        "hlo",
        "flops",
        "config",
        "schedule",
        "participation",
        "wire",
        "text",
        "model_size",
        "simulate",
        "forecast",
        "plan_report",
        "plan",
        "namespaces",
        "bench",
    ],
    1: ["memory", "fragments", "layer_partition", "balanced_partition", "partition", "outer", "moments", "checksum"],
    2: [
        *("mesh", "cut", "exchange", "state", "placement", "inner", "sync", "layout", "relayout", "programs"),
        *("embedding", "attention", "audit", "island_rows", "label", "integrity"),
    ],
    3: [
        *("trainer_config", "metrics", "stored", "checkpoint", "recovery", "orbax", "summary", "json_lines"),
        *("trainer", "binding", "tracker", "attendance", "island_data"),
    ],
    4: ["plugin"],
    5: [
        *("cli", "reading", "main.__init__", "main.train_lm", "main.bench_lm", "aot", "compile", "compile_report"),
        *("export", "inspect_checkpoint"),
    ],
}
LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}
MODULES = sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))


def for_type_checker(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_by(module: str) -> set[str]:
    """Full names of all that a module imports, anywhere in the file; names from a package count as modules.

    Imports for the type checker count too, but for those of the package itself: they are its public names.
    """
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    package = ["levanter_diloco", *module.split(".")[:-1]]
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    if module == "__init__":
        tree.body = [node for node in tree.body if not for_type_checker(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return names


def own_imports(module: str) -> set[str]:
    own = {
        name.removeprefix("levanter_diloco.") for name in imported_by(module) if name.startswith("levanter_diloco.")
    }
    return own & LAYER_OF.keys()


def test_every_module_has_a_layer():
    assert sorted(LAYER_OF) == MODULES


def test_own_imports_are_found():
    # The tests below would pass on an empty set.
    assert own_imports("layer_partition") == {"config", "errors", "fragments", "memory"}
    assert {"partition", "binding", "trainer_config"} <= own_imports("main.train_lm")
    assert {"config", "json_lines"} <= own_imports("plugin")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str):
    upwards = {name for name in own_imports(module) if LAYER_OF[name] > LAYER_OF[module]}
    assert not upwards, f"{module} (layer {LAYER_OF[module]}) imports {upwards} from above"


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_each_other_and_not_the_public_names(module: str):
    # `from levanter_diloco import DiLoCoTrainer` would hide the layer.
    through_package = {
        name for name in imported_by(module) if name.count(".") == 1 and name.startswith("levanter_diloco.")
    }
    assert {name.removeprefix("levanter_diloco.") for name in through_package} <= LAYER_OF.keys() | {"main"}


def test_public_names_for_the_type_checker_are_those_at_run_time():
    (block,) = filter(for_type_checker, ast.parse((PACKAGE / "__init__.py").read_text()).body)
    homes = {alias.asname: f"levanter_diloco.{node.module}" for node in block.body for alias in node.names}
    assert "DiLoCoConfig" in homes and "outer_gradient" in homes
    for name, home in homes.items():
        assert getattr(levanter_diloco, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="'levanter_diloco' has no public name 'DiLoCo'"):
        _ = levanter_diloco.DiLoCo


@pytest.mark.parametrize("module", LAYERS[0] + LAYERS[1])
def test_lower_layers_do_not_know_the_host(module: str):
    assert not {name for name in imported_by(module) if name.split(".")[0] == "levanter"}


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


def test_plan_needs_neither_jax_nor_the_host():
    flags = "'plan', '--params', '10e9', '--layers', '48', '--step_seconds', '0.8', '--rate', '10gbit', '--json'"
    started = time.monotonic()
    loaded = modules_after(f"import levanter_diloco.cli as cli; cli.main([{flags}])")
    assert "levanter_diloco.simulate" in loaded
    assert not loaded & {"jax", "levanter", "haliax", "optax", "numpy"}
    assert time.monotonic() - started < 10  # 0.4 s on an idle machine; the host alone takes 15


def test_bench_leaves_jax_and_the_host_to_its_processes():
    loaded = modules_after("import levanter_diloco.bench")
    assert "levanter_diloco.namespaces" in loaded
    assert not loaded & {"jax", "levanter", "haliax", "optax", "numpy"}


def test_lower_layers_load_without_the_host():
    names = [f"levanter_diloco.{module}" for module in LAYERS[0] + LAYERS[1] if module != "__init__"]
    loaded = modules_after(f"import {', '.join(names)}")
    assert set(names) <= loaded
    assert "levanter" not in loaded
