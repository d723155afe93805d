"""`jax.ensure_compile_time_eval`, used by the host's rotary embeddings, on a mesh that is partly manual."""

import contextlib
from collections.abc import Generator

import jax
from jax.sharding import AbstractMesh


@contextlib.contextmanager
def constants_outside_the_mesh() -> Generator[None]:
    """Lets the host's `jax.ensure_compile_time_eval` run while a mesh is partly manual.

    Its rotary embeddings compute constants under it, and JAX refuses to run an operation eagerly in such
    a mesh. Constants need no mesh.
    """
    original = jax.ensure_compile_time_eval

    @contextlib.contextmanager
    def outside() -> Generator[None]:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), original():
            yield

    jax.ensure_compile_time_eval = outside
    try:
        yield
    finally:
        jax.ensure_compile_time_eval = original
