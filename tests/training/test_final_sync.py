"""The final sync: what is in flight and what is unsynced at the last step."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from levanter.checkpoint import load_checkpoint
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import Toy, numbers, run, toy_batch, trainer_config
from helpers.toy_runs import assert_bit_equal, config_of, difference, mesh, rows, toy, watched
from levanter_diloco.options.outer import AverageConfig

pytestmark = pytest.mark.usefixtures("compile_cache")


def last_states(block: dict, tmp_path: Path, num_train_steps: int, batches: list, **options: Any) -> list[Any]:
    """States seen by every hook, the closing one included."""
    config = config_of(tmp_path, {"ici_islands": 2, **block}, mesh=mesh(), num_train_steps=num_train_steps, **options)
    return [state for state, _ in watched(config, batches)]


def merged_islands(state: Any) -> bool:
    pairs = zip(jax.tree.leaves(state.model), jax.tree.leaves(state.islands.params), strict=True)
    return all((islands == theta).all() for theta, islands in pairs)


@pytest.mark.parametrize("early", [False, True], ids=["last_step", "data_ends"])
def test_final_sync_of_vanilla(early: bool, tmp_path: Path) -> None:
    batches = [rows(step, 8) for step in range(5)]
    with_sync = last_states({"sync_period": 3}, tmp_path, 99 if early else 5, batches)
    without = last_states({"sync_period": 3, "final_sync": False}, tmp_path, 99 if early else 5, batches)
    assert_bit_equal(with_sync[3].islands, without[3].islands)
    assert_bit_equal(without[-1].model, without[2].model)
    assert without[-1].outer_steps.tolist() == [1]
    assert with_sync[-1].outer_steps.tolist() == [2]
    assert merged_islands(with_sync[-1])
    assert difference(with_sync[-1].model, without[-1].model) > 1e-3


@pytest.mark.parametrize("early", [False, True], ids=["last_step", "data_ends"])
def test_final_sync_on_a_sync_point_does_nothing_more(early: bool, tmp_path: Path) -> None:
    batches = [rows(step, 8) for step in range(6)]
    with_sync = last_states({"sync_period": 3}, tmp_path, 99 if early else 6, batches)[-1]
    without = last_states({"sync_period": 3, "final_sync": False}, tmp_path, 99 if early else 6, batches)[-1]
    assert with_sync.outer_steps.tolist() == without.outer_steps.tolist() == [2]
    assert_bit_equal(with_sync.model, without.model)


def test_final_sync_by_hand(tmp_path: Path) -> None:
    # H=3, 4 steps, outer rate 1 without momentum: Theta ends at the mean of the islands.
    block = {"sync_period": 3, "outer": AverageConfig()}
    batches = [rows(step, 8) for step in range(4)]
    without = last_states({**block, "final_sync": False}, tmp_path, 4, batches)[-1]
    means = jax.tree.map(lambda x: x.mean(0), without.islands.params)
    assert difference(last_states(block, tmp_path, 4, batches)[-1].model, means) < 1e-6


@pytest.mark.parametrize(
    ("overlap", "alpha", "steps", "outer_steps", "early"),
    [
        # P=3, dh=2: captures f1 at 2, f2 at 4, f0 at 6, f1 at 8. Syncs of the fragments f0 f1 f2:
        (0, 0.0, 7, [2, 2, 2], False),  # each has one step's progress
        (0, 0.0, 8, [2, 2, 2], True),  # f1 has just synced; f0 and f2 sync once more
        (0, 0.5, 8, [2, 2, 2], False),  # the same: f1's blend is not progress since its sync
        (2, 0.0, 8, [1, 2, 2], True),  # f0 merges at 8 and is done, f1 in flight is merged, f2 syncs once more
        (2, 0.0, 8, [1, 2, 2], False),
        (2, 0.5, 8, [2, 2, 2], False),  # f0 keeps half of what it did in 7 and 8
        (3, 0.0, 8, [1, 2, 2], True),  # f0 (captured at 6) and f1 (at 8) are in flight
        (3, 0.5, 8, [2, 2, 2], True),
        (1, 0.0, 2, [1, 1, 1], False),
    ],
)
def test_final_sync_of_fragments(
    overlap: int, alpha: float, steps: int, outer_steps: list, early: bool, tmp_path: Path
) -> None:
    block = {"sync_period": 6, "num_fragments": 3, "overlap_steps": overlap, "mixing_alpha": alpha}
    batches = [rows(step, 8) for step in range(steps)]
    states = last_states(block, tmp_path, 99 if early else steps, batches)
    assert states[-1].outer_steps.tolist() == outer_steps
    assert int(states[-1].step) == int(states[-1].settled) == steps
    if alpha == 0:
        assert merged_islands(states[-1])


def test_final_sync_merges_what_is_in_flight_first(tmp_path: Path) -> None:
    # P=1, H=3, V=2, 4 steps: captured at 3, half of it has crossed in 4; what else would come in 5 comes at the end
    # of 4: the other half, Theta's step and the merge. alpha=.5: theta_k = (theta_k + Theta) / 2, which is then
    # synced with the outer rate 1: Theta = mean of those.
    block = {"sync_period": 3, "overlap_steps": 2, "mixing_alpha": 0.5, "outer": AverageConfig()}
    batches = [rows(step, 8) for step in range(5)]
    states = last_states({**block, "final_sync": False}, tmp_path, 5, batches)
    open_end, longer = states[3], states[4]
    final = last_states(block, tmp_path, 4, batches[:4])[-1]
    pairs = zip(jax.tree.leaves(longer.model), jax.tree.leaves(open_end.islands.params), strict=True)
    blend = [0.5 * islands + 0.5 * theta for theta, islands in pairs]
    theta = [x.mean(0) for x in blend]
    assert difference(final.model, theta) < 1e-6
    merged = [0.5 * islands + 0.5 * theta for theta, islands in zip(theta, blend, strict=True)]
    assert difference(final.islands.params, merged) < 1e-6
    assert final.outer_steps.tolist() == [2]


def test_final_sync_comes_before_the_last_checkpoint(tmp_path: Path) -> None:
    for early, steps in ((False, 5), (True, 99)):
        block = {"sync_period": 3, "ici_islands": 2}
        config = trainer_config(tmp_path / str(early), block, mesh=mesh(), num_train_steps=steps)
        final = watched(config, [rows(step, 8) for step in range(5)])[-1][0]
        path = tmp_path / str(early) / "checkpoints" / "toy" / "step-4"
        saved = load_checkpoint(toy(), str(path), subpath="model", axis_mapping={}, mesh=config.device_mesh)
        assert_bit_equal(numbers(saved), final.model)
        assert final.outer_steps.tolist() == [2]


def test_training_after_a_final_sync_settles_its_own_progress(tmp_path: Path) -> None:
    # P=3, dh=2, V=2. The first run ends at 5 and merges f2 (captured at 4) there. The second ends at 6: f2 has
    # trained for one step since, although its own merge would have been at 6.
    block = {"sync_period": 6, "num_fragments": 3, "overlap_steps": 2, "ici_islands": 2}
    batches = [rows(step, 8) for step in range(6)]
    first = watched(trainer_config(tmp_path, block, mesh=mesh(), num_train_steps=5), batches[:5])[-1][0]
    assert merged_islands(first)
    second = watched(trainer_config(tmp_path, block, mesh=mesh(), num_train_steps=6), batches[5:])[-1][0]
    assert int(second.step) == 6
    assert merged_islands(second)
    assert (second.outer_steps - first.outer_steps).tolist() == [1, 1, 1]


def test_final_sync_takes_all_of_a_fragment_that_otherwise_crosses_in_pieces(tmp_path: Path) -> None:
    # Nothing syncs in 3 steps but at their end, where overlap has no step left to hide in.
    model = Toy.of(np.arange(3.0), np.arange(8.0).reshape(2, 4))
    random = np.random.default_rng(0)
    batches = [toy_batch(random.normal(size=(8, 3)), random.normal(size=(8, 2, 4))) for _ in range(3)]
    ends = []
    for overlap in (0, 2):
        block = {"sync_period": 8, "ici_islands": 2, "overlap_steps": overlap}
        mesh = MeshConfig(axes={"data": 1, "model": -1})
        config = trainer_config(tmp_path / str(overlap), block, num_train_steps=3, mesh=mesh)
        ends.append(run(config, optax.sgd(0.1), model, batches)[-1].state)
    for name, value in ends[0].model.parts().items():
        np.testing.assert_array_equal(ends[1].model.parts()[name], value)
        assert not np.array_equal(value, model.parts()[name])
