"""`jax.devices` and its like, while a run is built for devices that are not here."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax


@contextlib.contextmanager
def as_if_here(devices: Sequence[jax.Device]) -> Generator[None]:
    """Lets `jax` name `devices` as those of this process; asked for a backend by name, it answers as always.

    From them the host derives the mesh, the number of slices, and its choice of kernels.
    """
    originals = {name: getattr(jax, name) for name in ("devices", "local_devices", "device_count", "default_backend")}

    def answer(name: str, value: Any) -> Callable:  # Any: what that function returns
        return lambda *args, **kwargs: originals[name](*args, **kwargs) if args or kwargs else value

    answers = {
        "devices": list(devices),
        "local_devices": list(devices),
        "device_count": len(devices),
        "default_backend": devices[0].platform,
    }
    try:
        for name, value in answers.items():
            setattr(jax, name, answer(name, value))
        yield
    finally:
        for name, original in originals.items():
            setattr(jax, name, original)
