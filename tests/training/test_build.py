"""The sync that the options name."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import trainer_config
from levanter_diloco.islands.guard import Guard
from levanter_diloco.islands.layout import Layout
from levanter_diloco.islands.sync import Sync
from levanter_diloco.training.build import build_sync


def sync_of(folder: Path, steps: int, **block: Any) -> Sync:
    config = trainer_config(folder, {"ici_islands": 2, **block}, mesh=MeshConfig(axes={"data": 1, "model": -1}))
    config.num_train_steps = steps
    config._validate_and_set_defaults()
    layout = Layout(config.diloco, config.islands.num_islands, config.island_sharding)
    return build_sync(config, layout.partition, optax.sgd(0.1))


def test_options_arrive_where_they_are_used(tmp_path: Path) -> None:
    block = {"sync_period": 6, "num_fragments": 3, "overlap_steps": 2, "mixing_alpha": 0.5, "guard_factor": 4.0}
    sync = sync_of(tmp_path, 12, **block, wire="int4", wire_block=64, wire_rounding="stochastic")
    assert (sync.mixing_alpha, sync.guard, sync.all_reduce.num_pieces) == (0.5, Guard(True, 4.0), 2)
    wire = sync.all_reduce.wire
    assert (type(wire).__name__, wire.block, wire.stochastic) == ("Int4", 64, True)


@pytest.mark.parametrize(("steps", "final_sync", "outer_steps"), [(12, True, 3), (13, True, 4), (12, False, 2)])
def test_outer_schedule_ends_with_the_run(steps: int, final_sync: bool, outer_steps: int, tmp_path: Path) -> None:
    # A linear rate of 1 that falls to 0 over the outer steps of a fragment: after n of them it is 0.
    from levanter_diloco.options.outer import SgdConfig

    outer = SgdConfig(learning_rate=1.0, lr_schedule="linear")
    optimizer = sync_of(tmp_path, steps, sync_period=6, outer=outer, final_sync=final_sync).optimizer
    state, moved = optimizer.init(jnp.zeros(())), []
    for _ in range(outer_steps + 1):
        update, state = optimizer.update(jnp.ones(()), state)
        moved.append(float(jnp.asarray(update)))
    assert moved[0] == -1 and moved[-1] == 0 and all(moved[:-1])
