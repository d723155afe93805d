"""Eight CPU devices and no network, set before anything imports jax; the place where runs of the command happen."""

import os

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "HF_HUB_OFFLINE": "1",
    # Most of a small run is compilation; unoptimized code computes the same, three times sooner.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}

import pytest


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory):
    """The text for runs of the command, and their shared compile cache."""
    from command import Workplace  # here: only tests that run the command need what it imports

    from levanter_diloco.text import prepare

    root = tmp_path_factory.mktemp("workplace")
    prepare(root / "text")
    return Workplace(root)
