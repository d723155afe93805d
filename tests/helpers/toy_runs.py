"""Runs of the toy: their options, their batches, and how their states compare."""

import json
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from haliax.util import is_named_array
from levanter.utils.mesh import MeshConfig

from helpers.paths import DATA
from helpers.toy_model import Toy, entered, numbers, toy_batch, toy_loss, trainer_config

GOLDEN = json.loads((DATA / "trajectories.json").read_text())
SGD = optax.sgd(0.1)


def config_of(tmp_path: Path, block: dict, **options: Any) -> Any:
    """Options of a run with a folder of its own, so that it starts afresh."""
    return trainer_config(Path(tempfile.mkdtemp(dir=tmp_path)), block, **options)


def toy(seed: int = 0) -> Toy:
    rng = np.random.default_rng(seed)
    return Toy.of(rng.normal(size=3), rng.normal(size=(2, 4)))


def rows(seed: int, count: int) -> dict:
    rng = np.random.default_rng(1000 + seed)
    return toy_batch(rng.normal(size=(count, 3)), rng.normal(size=(count, 2, 4)))


def island_rows(steps: int, islands: int, count: int) -> list[list[dict]]:
    """`[step][island]`: a batch of `count` rows, all different."""
    return [[rows(islands * step + k, count) for k in range(islands)] for step in range(steps)]


def mesh(**axes: int) -> MeshConfig:
    """A mesh whose `model` takes the devices left; the toy's entries are sharded over `data`."""
    return MeshConfig(axes={"data": 1, "model": -1, **axes}, param_mapping={"entry": "data"})


def island(step: Any, k: int) -> Any:
    return jax.tree.map(lambda x: x[k], step.state.islands)


def outer(step: Any) -> Any:
    return step.state.model


def difference(left: Any, right: Any) -> float:
    """The largest absolute difference between leaves of two trees of the same arrays."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max((float(np.max(np.abs(np.float64(a) - np.float64(b)))) for a, b in pairs), default=0.0)


def assert_bit_equal(left: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def tree_of(trace: dict, name: str) -> dict[str, np.ndarray]:
    return {part: np.array(value) for part, value in trace[name].items()}


def momentum(step: Any, *, sequential: bool) -> dict[str, np.ndarray]:
    """The outer momentum in the toy's own shapes, from the states of all fragments."""
    rest = jax.tree.map(lambda x: x["fragment", 0], step.state.opt_state["rest"][0].trace, is_leaf=is_named_array)
    if "layers" not in step.state.opt_state:
        return rest.parts()
    layers = step.state.opt_state["layers"][0].trace.layers.stacked.weight
    order = ("entry", "fragment", "row") if sequential else ("entry", "row", "fragment")
    return {"embed": rest.embed.array, "layers": layers.rearrange(order).array.reshape(2, 4)}


def watched(config: Any, batches: list, model: Any = None, loss: Any = toy_loss) -> list[tuple[Any, list[str]]]:
    """Each step's state, and the names of arrays whose copies on different devices differ."""
    seen = []

    def unequal(state: Any) -> list[str]:
        names = []
        for path, x in jax.tree_util.tree_leaves_with_path(eqx.filter(state, eqx.is_array)):
            copies: dict[str, set[bytes]] = {}
            for shard in x.addressable_shards:
                copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
            if any(len(values) > 1 for values in copies.values()):
                names.append(jax.tree_util.keystr(path))
        return names

    with entered(config, SGD, loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy() if model is None else model)
        trainer.add_hook(lambda info: seen.append((numbers(info.state), unequal(info.state))), every=1)
        trainer.train(state, batches)
    return seen
