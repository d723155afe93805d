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
