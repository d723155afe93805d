"""The binding: the host's `main` builds a `DiLoCoTrainer` and loads checkpoints of DiLoCo runs."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxtyping import PyTree

from ..checkpoint.integrity import check
from ..host.main import replaced_in
from ..islands.state import DiLoCoState
from .trainer import DiLoCoTrainer


@contextmanager
def islands_in(host: Any) -> Generator[None]:  # Any: a module of the host
    """Lets the host's `main` in `host`, such as `levanter.main.train_lm`, train on islands while the context lasts."""
    trainers: list[DiLoCoTrainer] = []

    def build(*args: Any, **kwargs: Any) -> DiLoCoTrainer:  # Any: as the host calls its own
        trainers.append(DiLoCoTrainer(*args, **kwargs))
        return trainers[-1]

    def load(host_load: Callable, tree: PyTree, path: str, options: Mapping[str, Any]) -> PyTree:
        check(path)
        if isinstance(tree, DiLoCoState):
            return trainers[-1].loader.adopt(tree, path)
        return host_load(tree, path, **options)

    with replaced_in(host, build, load):
        yield
