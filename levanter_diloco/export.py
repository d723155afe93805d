"""Whole tensors in the host's Hugging Face exports."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from levanter.compat import hf_checkpoints


@contextmanager
def whole_exports() -> Generator[None]:
    """Lets the host's export see every parameter whole, for as long as the context lasts.

    The host gathers a parameter with `jax.sharding.reshard`, which does nothing on a mesh whose axes are
    automatic, and then writes the first device's shard under the parameter's name. Here each shard of the
    file is gathered before the host looks at it.
    """
    host_save = hf_checkpoints.save_hf_shards

    def save(shards: Any, load_shard: Callable, *args: Any, **kwargs: Any) -> Any:  # Any: as the host's
        return host_save(shards, lambda keys: _gathered(load_shard(keys)), *args, **kwargs)

    hf_checkpoints.save_hf_shards = save
    try:
        yield
    finally:
        hf_checkpoints.save_hf_shards = host_save


def _gathered(weights: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    everywhere = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    return jax.jit(lambda weights: weights, out_shardings=everywhere)(dict(weights))
