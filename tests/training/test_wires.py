"""Wire formats in a run: equal Theta on all islands, near f32."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.toy_model import entered, numbers, run, toy_loss
from helpers.toy_runs import SGD, config_of, difference, mesh, outer, rows, toy
from levanter_diloco.algorithm.outer import outer_gradient
from levanter_diloco.options.outer import AverageConfig

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4", "e3m0"])
def test_wire_keeps_theta_equal_on_all_islands_and_near_f32(wire: str, tmp_path: Path) -> None:
    block = {"sync_period": 4, "num_fragments": 3, "overlap_steps": 1, "mixing_alpha": 0.5, "ici_islands": 4}
    batches = [rows(step, 8) for step in range(14)]
    exact = run(config_of(tmp_path, block, mesh=mesh()), SGD, toy(), batches)[-1]
    config = config_of(tmp_path, {**block, "wire": wire, "wire_block": 16}, mesh=mesh())
    with entered(config, SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
        state = trainer.train(state, batches).state
        for x in jax.tree.leaves((state.model, state.opt_state)):
            assert len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1
        # The embedding's 3 elements, and a layer fragment's 4, are cut among 2 devices: a block of 16 on each. In bf16
        # four islands scatter: a block of 32 bytes for each, and the f32 mean of one.
        island = 2 * {"bf16": 4 * 32 + 64, "int8": 16 + 4, "int4": 8 + 4, "e3m0": 8 + 4}[wire]
        assert trainer.traffic.by_fragment == (island, island, island)
    assert 0 < difference(numbers(state.model), outer(exact)) < 0.3


def test_error_feedback_is_kept_in_the_state(tmp_path: Path) -> None:
    # One fragment, one sync: what int4 loses of an island's gradient is the island's residual.
    block = {"sync_period": 1, "ici_islands": 2, "wire": "int4", "wire_block": 4, "error_feedback": True}
    config = config_of(tmp_path, {**block, "outer": AverageConfig()}, mesh=mesh(), num_train_steps=1)
    [step] = run(config, SGD, toy(), [rows(0, 8)])
    exact = config_of(tmp_path, {"sync_period": 1, "ici_islands": 2, "outer": AverageConfig()}, mesh=mesh())
    without = run(exact, SGD, toy(), [rows(0, 8)])[0]
    lost = outer_gradient(step.state.residual)
    assert max(np.abs(x).max() for x in jax.tree.leaves(lost)) > 1e-3
    # Theta - mean(sent) + mean(lost): the mean of the islands is what f32 makes Theta.
    assert difference(jax.tree.map(jnp.subtract, outer(step), lost), outer(without)) < 1e-6
