"""What of the host is replaced while its `main` runs: who trains, and two of its functions."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree
from levanter.compat import hf_checkpoints

from .integrity import check
from .state import DiLoCoState
from .trainer import DiLoCoTrainer


@contextmanager
def islands_in(host: Any) -> Generator[None]:  # Any: a module whose names are replaced
    """Lets the host's `main` in `host` (such as `levanter.main.train_lm`) build a `DiLoCoTrainer`.

    The module's own names `Trainer` and `load_checkpoint` are replaced for as long as the context lasts; all
    else of its `main` is used as it is.
    """
    host_trainer, host_load = host.Trainer, host.load_checkpoint
    trainers: list[DiLoCoTrainer] = []

    def build(*args: Any, **kwargs: Any) -> DiLoCoTrainer:  # Any: as the host calls its own
        trainers.append(DiLoCoTrainer(*args, **kwargs))
        return trainers[-1]

    def load(tree: PyTree, path: str, **kwargs: Any) -> PyTree:
        check(path)
        if isinstance(tree, DiLoCoState):
            return trainers[-1].loader.adopt(tree, path)
        return host_load(tree, path, **kwargs)

    host.Trainer, host.load_checkpoint = build, load
    try:
        with _whole_exports():
            yield
    finally:
        host.Trainer, host.load_checkpoint = host_trainer, host_load


@contextmanager
def _whole_exports() -> Generator[None]:
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
