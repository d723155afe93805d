"""Eight CPU devices and no network, set before anything imports jax; the place where runs of the command happen."""

import gc
import os
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "HF_HUB_OFFLINE": "1",
    # Most of a small run is compilation; unoptimized code computes the same, three times sooner.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}

import pytest

TESTS = Path(__file__).parent

LONGEST_FIRST = (
    "main/test_train_lm.py",
    "commands/compile/test_audit.py",
    "main/test_kills.py",
    "main/test_processes.py",
    "training/test_resume.py",
    "training/test_equivalence.py",
    "islands/test_programs.py",
    "checkpoint/test_relayout.py",
    "training/test_participation.py",
    "commands/bench/test_command.py",
)
"""Files of a minute or more. One that started last would leave the other worker idle for as long as it takes."""

SLOW_SECONDS = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first; all others, and the tests within a file, keep their order."""
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}

    def place(item: pytest.Item) -> int:
        return rank.get(item.path.relative_to(TESTS).as_posix(), len(rank))

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that should be marked `slow`: a report, as a busy machine must fail nobody."""
    long = [
        (report.duration, report.nodeid)
        for report in terminalreporter.stats.get("passed", ())
        if report.when == "call" and report.duration > SLOW_SECONDS and "slow" not in report.keywords
    ]
    if long:
        terminalreporter.section(f"took more than {SLOW_SECONDS:.0f} s and are not marked slow")
    for seconds, name in sorted(long, reverse=True):
        terminalreporter.write_line(f"{seconds:.1f} s {name}")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compile cache of a run of the tests, on disk, for all of its workers and the processes that they start."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory, compiled: Path):
    """The text for runs of the command, and their compile cache."""
    from helpers.command_runs import Workplace  # here: only tests that run the command need what it imports
    from make_corpus import prepare

    root = tmp_path_factory.mktemp("workplace")
    prepare(root / "text")
    return Workplace(root, compiled)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Unloads what a file compiled: each program is mapped into the process, and Linux allows 65530 maps of one."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def compile_cache(compiled: Path):
    """Lets the trainers of all files share what they compile; not for tests that look at what is compiled."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(compiled),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield
