"""The names of the host's `main` that are replaced while it runs: `Trainer`, `load_checkpoint`, and its export."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree
from levanter.compat import hf_checkpoints
from levanter.trainer import Trainer


@contextmanager
def replaced_in(
    host: Any, trainer: Callable[..., Trainer], load: Callable[[Callable, PyTree, str, Mapping[str, Any]], PyTree]
) -> Generator[None]:  # Any: a module, and options of the host's
    """Lets `main` of a module of the host, such as `levanter.main.train_lm`, build and load what we give it.

    The module's own names `Trainer` and `load_checkpoint` are replaced for as long as the context lasts; all
    else of its `main` is used as it is.

    Args:
        host: The module.
        trainer: Called in the place of `Trainer`.
        load: Called in the place of `load_checkpoint`, with the host's own function before its tree, its path and its
            options.
    """
    host_trainer, host_load = host.Trainer, host.load_checkpoint
    host.Trainer = trainer
    host.load_checkpoint = lambda tree, path, **options: load(host_load, tree, path, options)
    try:
        with whole_exports():
            yield
    finally:
        host.Trainer, host.load_checkpoint = host_trainer, host_load


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
