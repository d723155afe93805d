"""The splash attention kernel for TPU on a mesh that is partly manual."""

from collections.abc import Generator
from contextlib import contextmanager

from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SplashAttentionKernel
from jax.sharding import AbstractMesh, NamedSharding


@contextmanager
def splash_on_manual_mesh() -> Generator[None]:
    """Lets the host use splash attention while a step is traced on a mesh with a manual axis.

    The kernel asks its sharding for the shape of a shard, and JAX has no answer on a mesh with a manual axis:
    the host then falls back to a slower attention, or fails where no other axis has several devices. The spec
    names no manual axis, so the same mesh with all axes automatic gives the answer.
    """
    original = SplashAttentionKernel.manual_sharding_spec

    def manual_sharding_spec(self: SplashAttentionKernel, sharding: NamedSharding) -> SplashAttentionKernel:
        automatic = AbstractMesh(sharding.mesh.axis_sizes, sharding.mesh.axis_names)
        return original(self, NamedSharding(automatic, sharding.spec))

    # pyrefly: ignore[bad-assignment]  the signature is the same
    SplashAttentionKernel.manual_sharding_spec = manual_sharding_spec
    try:
        yield
    finally:
        SplashAttentionKernel.manual_sharding_spec = original
