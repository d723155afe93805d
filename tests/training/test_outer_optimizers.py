"""Outer optimizers: any optax transformation, a state for each fragment."""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers.toy_model import numbers, run
from helpers.toy_runs import SGD, config_of, island, mesh, outer, rows, toy
from levanter_diloco.options.outer import OuterOptimizerConfig

pytestmark = pytest.mark.usefixtures("compile_cache")


class FromOptax(OuterOptimizerConfig):
    """Any optax transformation, as a third party would register it."""

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        object.__setattr__(self, "transformation", transformation)

    def build(self, outer_steps: int) -> optax.GradientTransformation:
        return self.transformation


OUTER = {
    "adam": optax.adam(0.1),
    "clipped_sgd": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "schedule": optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5}), momentum=0.5),
    "lookahead_free_adamw": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OUTER)
@pytest.mark.parametrize("overlap", [0, 1])
def test_any_optax_transformation_steps_each_fragment_on_its_own(name: str, overlap: int, tmp_path: Path) -> None:
    optimizer = OUTER[name]
    block = {
        "sync_period": 3,
        "num_fragments": 3,
        "overlap_steps": overlap,
        "ici_islands": 2,
        "outer": FromOptax(optimizer),
        "final_sync": False,
    }
    num_steps = 8 + overlap
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=num_steps)
    steps = run(config, SGD, toy(), [rows(step, 8) for step in range(num_steps)])

    def fragment(theta: Any, f: int) -> np.ndarray:
        parts = {"embed": theta.embed.array, "layers": theta.layers.stacked.weight.array}
        return parts["embed"] if f == 0 else parts["layers"][..., f - 1 :: 2]

    # Replays the outer optimizer on each fragment with optax alone, from the captured islands.
    theta, states = numbers(toy()), {}
    for f in range(3):
        value = jnp.asarray(fragment(theta, f))
        state = optimizer.init(value)
        count = 0
        for t in range(1, 9):
            if t % 3 != f:
                continue
            # Between the inner step and the merge nothing is visible with V = 0, so replay the inner step.
            before = [fragment(island(steps[t - 2], k).params, f) if t > 1 else fragment(theta, f) for k in range(2)]
            if overlap and t > 1:
                ends = [fragment(island(steps[t - 1], k).params, f) for k in range(2)]
            else:
                batch = rows(t - 1, 8)
                targets = [
                    batch["embed"].array.reshape(2, 4, 3).mean(1),
                    batch["layers"].array.reshape(2, 4, 2, 4).mean(1)[..., f - 1 :: 2],
                ][f > 0]
                ends = [before[k] - 0.1 * (before[k] - targets[k]) for k in range(2)]
            gradient = value - jnp.mean(jnp.stack(ends), 0)
            updates, state = optimizer.update(gradient, state, value)
            value = cast(Any, optax.apply_updates(value, updates))  # Any: optax returns any tree
            count += 1
            np.testing.assert_allclose(fragment(outer(steps[t - 1 + overlap]), f), value, atol=1e-5)
        assert steps[-1].state.outer_steps[f] == count
        states[f] = state
    rest, layers = steps[-1].state.opt_state["rest"], steps[-1].state.opt_state["layers"]
    counts = [x for x in jax.tree.leaves(rest) if x.dtype == np.int32]
    layer_counts = [x for x in jax.tree.leaves(layers) if x.dtype == np.int32]
    assert all(x.tolist() == [2] for x in counts)
    assert all(x.tolist() == [3, 3] for x in layer_counts)
    assert len(counts) == len(layer_counts) == (0 if name == "clipped_sgd" else len(counts))
