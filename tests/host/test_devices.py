"""`jax.devices` and its like for devices that are not here."""

from dataclasses import dataclass
from typing import Any

import jax
import pytest

from levanter_diloco.host.devices import as_if_here


@dataclass(frozen=True)
class Described:
    """A device as a compiler describes it."""

    id: int
    platform: str = "tpu"


def test_jax_names_the_devices_and_answers_by_backend_as_always() -> None:
    there: Any = [Described(0), Described(1), Described(2)]
    here = jax.devices()
    with as_if_here(there):
        assert jax.devices() == there and jax.local_devices() == there
        assert (jax.device_count(), jax.default_backend()) == (3, "tpu")
        assert jax.devices("cpu") == here
    assert jax.devices() == here and jax.default_backend() == "cpu"


def test_functions_come_back_after_an_error() -> None:
    names = ("devices", "local_devices", "device_count", "default_backend")
    before = [getattr(jax, name) for name in names]
    there: Any = [Described(0)]
    with pytest.raises(RuntimeError), as_if_here(there):
        raise RuntimeError
    assert [getattr(jax, name) for name in names] == before
