"""Resumed with other islands, fragments, cuts or meshes: every element keeps its place, and training goes on."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import pytest
from haliax.nn import ScanCheckpointPolicy, Stacked
from levanter.checkpoint import CheckpointerConfig, save_checkpoint
from levanter.optim.config import AdamConfig
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import Block, Embed, Entry, Layer, Toy, entered, numbers, toy_batch, toy_loss, trainer_config
from levanter_diloco.errors import ModelError, OptionError
from levanter_diloco.options.outer import AdamConfig as OuterAdamConfig
from levanter_diloco.options.outer import OuterOptimizerConfig, SgdConfig

pytestmark = pytest.mark.usefixtures("compile_cache")

LR, ETA, BETA = 0.1, 0.7, 0.9
SGD = optax.sgd(LR)
ADAM = AdamConfig(learning_rate=1e-2, warmup=4).build(20)
P3 = {"sync_period": 6, "num_fragments": 3, "final_sync": False}  # captures at 2 4 6 8 ...: f1 f2 f0 f1
WHOLE = MeshConfig(axes={"data": 1, "model": -1}, param_mapping={"entry": "data"})
HALVES = MeshConfig(axes={"data": 2, "model": -1}, param_mapping={"entry": "data"})
PARTS = ("embed", "layers")


def toy(seed: int = 0) -> Toy:
    rng = np.random.default_rng(seed)
    return Toy.of(rng.normal(size=3), rng.normal(size=(2, 4)))


def targets(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1000 + step)
    return {"embed": rng.normal(size=(8, 3)).astype(np.float32), "layers": rng.normal(size=(8, 2, 4)).astype("f4")}


def options(path: Path, block: dict, mesh: MeshConfig = WHOLE, **others: Any) -> Any:
    return trainer_config(path, block, mesh=mesh, **{"num_train_steps": 20, **others})


@dataclass(frozen=True)
class Saved:
    """A checkpoint and what was in it."""

    path: Path
    state: Any


def saved(path: Path, block: dict, steps: int, inner: Any = SGD, mesh: MeshConfig = WHOLE) -> Saved:
    with entered(options(path, block, mesh), inner, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
        for step in range(steps):
            state = trainer.train_step(state, toy_batch(**targets(step))).state
        save_checkpoint(state.saveable_state, steps, path / "saved")
        return Saved(path / "saved", numbers(state))


def assert_placed(state: Any, where: list) -> None:
    """Every array lies where programs return it: no outer state is replicated whose parameter is sharded."""
    arrays = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    for x, sharding in zip(arrays, where, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def resumed(
    path: Path,
    block: dict,
    old: Saved,
    inner: Any = SGD,
    mesh: MeshConfig = WHOLE,
    *,
    steps: int = 0,
    keep: bool = False,
    **others: Any,
) -> list:
    """The state as it is resumed, and after each of `steps` more steps; `keep` saves the last under `path`."""
    config = options(path, block, mesh, load_checkpoint_path=str(old.path), **others)
    with entered(config, inner, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(99), model=toy(99))
        assert_placed(state, config.placement.shardings(state))
        states = [numbers(state)]
        for step in range(int(states[0].step), int(states[0].step) + steps):
            state = trainer.train_step(state, toy_batch(**targets(step))).state
            states.append(numbers(state))
        if keep:
            save_checkpoint(state.saveable_state, 99, path / "saved")
    return states


def follows(states: list, steps: Iterator[dict[str, np.ndarray]]) -> None:
    """Theta of each state is what the reference says."""
    for state, theta in zip(states, steps, strict=False):
        for part, x in state.model.parts().items():
            np.testing.assert_allclose(x, theta[part], rtol=1e-5, atol=1e-6)


def same(left: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def going_on(islands: Any) -> tuple:
    """What of the islands goes on in another layout; their weights are of fragments that are no more."""
    return islands.params, islands.opt_state, islands.key, islands.failed


# What a fragment owns, in numpy: its elements of the embedding and of the weights {entry, layer}.


def owned_by_layers(num_fragments: int, order: str = "interleaved") -> list[dict[str, np.ndarray]]:
    if num_fragments == 1:
        return [{"embed": np.full(3, True), "layers": np.full((2, 4), True)}]
    stride = num_fragments - 1
    layer = np.arange(4)
    of = layer % stride if order == "interleaved" else layer // (4 // stride)
    own = [{"embed": np.full(3, False), "layers": np.tile(of == f, (2, 1))} for f in range(stride)]
    return [{"embed": np.full(3, True), "layers": np.full((2, 4), False)}, *own]


def owned_by_rows(num_fragments: int, axis: int) -> list[dict[str, np.ndarray]]:
    """Fragment f owns rows `[f*R // P, (f+1)*R // P)` of each leaf; `axis` has the rows of the layers' weights."""

    def own(shape: tuple[int, ...], along: int, f: int) -> np.ndarray:
        rows = np.indices(shape)[along]
        count = shape[along]
        return (f * count // num_fragments <= rows) & (rows < (f + 1) * count // num_fragments)

    fragments = range(num_fragments)
    return [{"embed": own((3,), 0, f), "layers": own((2, 4), axis, f)} for f in fragments]


LAYERS3, SEQUENTIAL3, LAYERS5 = owned_by_layers(3), owned_by_layers(3, "sequential"), owned_by_layers(5)
BALANCED = {**P3, "partition": "balanced", "num_fragments": 2, "sync_period": 4}
LAYOUTS: dict[str, tuple[dict, list]] = {
    "P3": (P3, LAYERS3),
    "P3_sequential": ({**P3, "layer_order": "sequential"}, SEQUENTIAL3),
    "P2": ({**P3, "num_fragments": 2}, owned_by_layers(2)),
    "P5": ({**P3, "num_fragments": 5}, LAYERS5),
    "P1": ({**P3, "num_fragments": 1}, owned_by_layers(1)),
    "balanced_P2": (BALANCED, owned_by_rows(2, axis=0)),  # two rows of 4: whole entries
    "balanced_P4": ({**BALANCED, "num_fragments": 4}, owned_by_rows(4, axis=1)),  # four rows: whole layers
}


def momentum(state: Any, owned: list) -> dict[str, np.ndarray]:
    """The momentum of each element, as the fragment that owns it holds it."""
    whole = {"embed": np.full(3, np.nan, "f4"), "layers": np.full((2, 4), np.nan, "f4")}
    parts = [part for part in ("rest", "layers", "rows") if part in state.opt_state]
    fragments = [
        (state.opt_state[part][0].trace, i) for part in parts for i in range(len(state.opt_state[part][1].count))
    ]
    for own, (trace, i) in zip(owned, fragments, strict=True):
        for name, held in (("embed", trace.embed), ("layers", trace.layers.stacked.weight)):
            if held is not None and own[name].any():
                # A window of rows may end in one that is not owned.
                shape = [np.unique(along).size for along in own[name].nonzero()]
                whole[name][own[name]] = held.array[i][tuple(map(slice, shape))].ravel()
    assert not any(np.isnan(x).any() for x in whole.values())
    return whole


def reference(
    state: Any, owned: list, start: dict[str, np.ndarray], sync: int, num_islands: int
) -> Iterator[dict[str, np.ndarray]]:
    """DiLoCo in numpy from a state's values and a momentum: Theta after each further step."""
    theta = {name: x.copy() for name, x in state.model.parts().items()}
    islands = {name: x.copy() for name, x in state.islands.params.parts().items()}
    start = {name: x.copy() for name, x in start.items()}
    step = int(state.step)
    while True:
        rows = {name: x.reshape(num_islands, -1, *x.shape[1:]).mean(axis=1) for name, x in targets(step).items()}
        step += 1
        for name in PARTS:
            islands[name] -= LR * (islands[name] - rows[name])
        if step % sync == 0:
            own = owned[step // sync % len(owned)]
            for name in PARTS:
                mask = own[name]
                gradient = (theta[name] - islands[name].mean(axis=0))[mask]
                start[name][mask] = BETA * start[name][mask] + gradient
                theta[name][mask] -= ETA * (gradient + BETA * start[name][mask])
                islands[name][:, mask] = theta[name][mask]
        yield {name: x.copy() for name, x in theta.items()}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """K = 4, P = 3 after 7 steps: fragments 1, 2, 0 have synced at 2, 4, 6, so the islands stand apart."""
    return saved(tmp_path_factory.mktemp("four"), {**P3, "ici_islands": 4}, 7)


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """K = 4 with Adam inside the islands, after 9 steps: fragment 1 has synced twice."""
    return saved(tmp_path_factory.mktemp("adam"), {**P3, "ici_islands": 4}, 9, ADAM)


@pytest.mark.parametrize("name", ["P2", "P5", "P1", "P3_sequential", "balanced_P2"])
def test_elements_keep_theta_and_momentum_and_sync_on(name: str, four: Saved, tmp_path: Path) -> None:
    block, owned = LAYOUTS[name]
    first, *later = resumed(tmp_path, {**block, "ici_islands": 4}, four, steps=7)
    before = momentum(four.state, LAYERS3)
    assert min(np.abs(x).min() for x in before.values()) > 0
    same(momentum(first, owned), before)
    for field in ("model", "step", "training_key"):
        same(getattr(first, field), getattr(four.state, field))
    same(going_on(first.islands), going_on(four.state.islands))
    assert int(first.settled) == 7
    assert first.outer_steps.tolist() == [1] * len(owned)
    sync = max(1, round(block["sync_period"] / len(owned)))
    follows(later, reference(four.state, owned, before, sync, 4))
    assert later[-1].outer_steps.sum() == len(owned) + 14 // sync - 7 // sync


def test_change_upon_change_and_back(four: Saved, tmp_path: Path) -> None:
    old = four
    for number, name in enumerate(["P5", "balanced_P4", "P1", "P3"]):
        block, owned = LAYOUTS[name]
        path = tmp_path / str(number)
        (state,) = resumed(path, {**block, "ici_islands": 4}, old, keep=True)
        same(momentum(state, owned), momentum(four.state, LAYERS3))
        old = Saved(path / "saved", state)
    same(going_on(old.state.islands), going_on(four.state.islands))
    for field in ("model", "opt_state", "outer_steps", "layout"):
        same(getattr(old.state, field), getattr(four.state, field))


def test_all_fragments_go_on_with_the_most_outer_steps(adam: Saved, tmp_path: Path) -> None:
    assert adam.state.outer_steps.tolist() == [1, 2, 1]
    (state,) = resumed(tmp_path, {**P3, "num_fragments": 2, "ici_islands": 4}, adam, ADAM)
    assert state.outer_steps.tolist() == [2, 2]
    assert [state.opt_state[part][1].count.tolist() for part in ("rest", "layers")] == [[2], [2]]


def taken(tree: Any, islands: list[int]) -> Any:
    return jax.tree.map(lambda x: x[np.array(islands)], tree)


@pytest.mark.parametrize(("count", "source"), [(2, [0, 2]), (1, [0]), (3, [0, 1, 2]), (8, [0, 0, 1, 1, 2, 2, 3, 3])])
def test_other_islands_go_on_as_the_nearest(count: int, source: list[int], adam: Saved, tmp_path: Path) -> None:
    per_slot = {"islands_per_slot": 3} if count == 3 else {"ici_islands": count}
    (state,) = resumed(tmp_path, {**P3, **per_slot}, adam, ADAM, train_batch_size=24)
    for field in ("model", "opt_state", "outer_steps", "training_key"):
        same(getattr(state, field), getattr(adam.state, field))
    for field in ("params", "opt_state"):
        same(getattr(state.islands, field), taken(getattr(adam.state.islands, field), source))
    keys = [tuple(key) for key in state.islands.key]
    assert len(set(keys)) == count
    assert [k for j, k in enumerate(keys) if source.index(source[j]) == j] == [
        tuple(key) for key in taken(adam.state.islands.key, sorted(set(source)))
    ]


def test_one_island_becomes_four_and_four_sync(tmp_path: Path) -> None:
    old = saved(tmp_path / "one", P3, 3)
    first, *later = resumed(tmp_path, {**P3, "ici_islands": 4}, old, steps=1)
    same(first.opt_state, old.state.opt_state)
    same(first.islands.params, taken(old.state.islands.params, [0] * 4))
    follows(later, reference(first, LAYERS3, momentum(old.state, LAYERS3), 2, 4))


def test_four_islands_become_two_with_other_fragments_and_sync(four: Saved, tmp_path: Path) -> None:
    block, owned = LAYOUTS["P2"]
    first, *later = resumed(tmp_path, {**block, "ici_islands": 2}, four, steps=6)
    before = momentum(four.state, LAYERS3)
    same(momentum(first, owned), before)
    follows(later, reference(first, owned, before, 3, 2))


def test_fresh_islands_are_theta_with_fresh_moments(adam: Saved, tmp_path: Path) -> None:
    (state,) = resumed(tmp_path, {**P3, "ici_islands": 2, "resume_islands": "fresh"}, adam, ADAM)
    for part, x in state.islands.params.parts().items():
        for island in x:
            np.testing.assert_array_equal(island, adam.state.model.parts()[part])
    old, new = adam.state.islands.opt_state, state.islands.opt_state
    assert new.count.tolist() == old.count[:2].tolist() == [9, 9]  # of the learning rate's schedule
    assert new.hyperparams["learning_rate"].tolist() == old.hyperparams["learning_rate"][:2].tolist()
    assert all(x.any() for x in jax.tree.leaves(old.inner_state))
    assert not any(x.any() for x in jax.tree.leaves(new.inner_state))


def test_mean_islands_are_the_mean_of_those_they_replace(adam: Saved, tmp_path: Path) -> None:
    (state,) = resumed(tmp_path, {**P3, "ici_islands": 2, "resume_islands": "mean"}, adam, ADAM)

    def check(new: np.ndarray, old: np.ndarray) -> None:
        if np.issubdtype(old.dtype, np.floating):
            old = old.reshape(2, 2, *old.shape[1:]).mean(axis=1)
            np.testing.assert_allclose(new, old, rtol=1e-6)
        else:
            np.testing.assert_array_equal(new, old[::2])

    jax.tree.map(check, going_on(state.islands), going_on(adam.state.islands))


@pytest.mark.slow
@pytest.mark.parametrize("block", [P3, BALANCED], ids=["layers", "balanced"])
def test_other_mesh_inside_the_island(block: dict, tmp_path: Path) -> None:
    block = {**block, "ici_islands": 2}
    old = saved(tmp_path / "whole", block, 4, mesh=WHOLE)
    first, *later = resumed(tmp_path, block, old, mesh=HALVES, steps=2)
    # On halves of `entry` no row is an entry, so rows are layers.
    owned = (LAYERS3, LAYERS3) if block["num_fragments"] == 3 else (owned_by_rows(2, axis=0), owned_by_rows(2, axis=1))
    before = momentum(old.state, owned[0])
    same(momentum(first, owned[1]), before)
    same((first.model, going_on(first.islands)), (old.state.model, going_on(old.state.islands)))
    follows(later, reference(old.state, owned[1], before, 2, 2))


IN_FLIGHT = {**P3, "ici_islands": 2, "mixing_alpha": 0.5}
CAPTURED = {  # V, steps, fragments to merge, the one to drop; captures of f1 f2 at 2 4
    "not_crossing_yet": (1, 2, [], 1),
    "half_crossed": (2, 3, [], 1),
    "crossed_and_the_next_half": (5, 5, [1], 2),
    "nothing": (1, 1, [], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_fragments_in_flight_are_merged_or_dropped(name: str, tmp_path: Path, caplog: Any) -> None:
    overlap, steps, merged, dropped = CAPTURED[name]
    old = saved(tmp_path / "old", {**IN_FLIGHT, "overlap_steps": overlap}, steps)
    with caplog.at_level(logging.INFO, "levanter_diloco.checkpoint.loading"):
        block = {**IN_FLIGHT, "mixing_alpha": 0.5 if merged else 0.0}
        first, *later = resumed(tmp_path, block, old, steps=6 if name == "half_crossed" else 0)
    same((first.model, first.opt_state), (old.state.model, old.state.opt_state))
    assert int(first.settled) == steps
    assert first.captured is None
    theta = old.state.model.parts()
    for part, island in old.state.islands.params.parts().items():
        mixed = np.where(
            LAYERS3[merged[0]][part] if merged else False,
            np.float32(0.5) * island + np.float32(0.5) * theta[part],
            island,
        )
        np.testing.assert_allclose(first.islands.params.parts()[part], mixed, rtol=1e-6 if merged else 0)
    # As with V = 0 from here on: the progress of the fragment that was dropped goes into its next sync.
    follows(later, reference(old.state, LAYERS3, momentum(old.state, LAYERS3), 2, 2))
    [line] = [record.message for record in caplog.records if "another layout" in record.message]
    assert f"overlap_steps {overlap} -> 0" in line
    assert (f"fragments {merged} in flight are merged now" in line) == bool(merged)
    assert (f"fragment {dropped} in flight is dropped" in line) == (dropped is not None)


def test_other_period_with_a_fragment_in_flight(tmp_path: Path) -> None:
    # f1 of step 2 is dropped; with dh = 3 it is captured again in step 3, and its outer step is in step 4.
    block = {**IN_FLIGHT, "overlap_steps": 1}
    old = saved(tmp_path / "old", block, 2)
    states = resumed(tmp_path, {**block, "sync_period": 9}, old, steps=3)
    assert [state.outer_steps.tolist() for state in states] == [[0, 0, 0]] * 2 + [[0, 1, 0]] * 2


FEEDBACK = {
    **{**BALANCED, "ici_islands": 2, "mixing_alpha": 0.5, "overlap_steps": 2},
    **{"wire": "int4", "wire_block": 2, "error_feedback": True},
}


@pytest.fixture(scope="module")
def feedback(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Captures of f1 f0 f1 at 2 4 6, each crosses in two steps: after 7 steps the last has crossed half."""
    return saved(tmp_path_factory.mktemp("feedback"), FEEDBACK, 7)


def test_what_the_wire_lost_is_kept_while_the_islands_are(feedback: Saved, tmp_path: Path) -> None:
    lost, owned = feedback.state.residual.parts(), owned_by_rows(2, axis=0)
    assert all(x[:, own[part]].any() for part, x in lost.items() for own in owned)
    (state,) = resumed(tmp_path, {**FEEDBACK, "partition": "layers"}, feedback)
    for part, x in state.residual.parts().items():
        # Half of f1 has crossed, and what that lost is of no use.
        np.testing.assert_array_equal(x, np.where(owned[1][part], 0, lost[part]))
    (state,) = resumed(tmp_path, {**FEEDBACK, "ici_islands": 4}, feedback)
    assert [x.shape[0] for x in jax.tree.leaves(state.residual)] == [4, 4]
    assert not any(x.any() for x in jax.tree.leaves(state.residual))
    assert not any(x.any() for x in jax.tree.leaves((state.captured, state.crossed)))


def test_error_feedback_goes_off_and_on(feedback: Saved, tmp_path: Path, caplog: Any) -> None:
    off = {**FEEDBACK, "error_feedback": False, "wire": "f32"}
    (state,) = resumed(tmp_path, off, feedback, keep=True)
    assert state.residual is None
    with caplog.at_level(logging.INFO, "levanter_diloco.checkpoint.loading"):
        (state,) = resumed(tmp_path, FEEDBACK, Saved(tmp_path / "saved", state))
    assert not any(x.any() for x in jax.tree.leaves(state.residual))
    assert "error feedback starts at zero" in caplog.text


def test_pieces_of_shares_in_flight_are_not_completed_by_others(feedback: Saved, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "levanter_diloco.checkpoint.loading"):
        (state,) = resumed(tmp_path, {**FEEDBACK, "outer_memory": "sharded"}, feedback)
    for field in ("model", "opt_state"):
        same(getattr(state, field), getattr(feedback.state, field))
    same(going_on(state.islands), going_on(feedback.state.islands))
    assert "pieces_of_shares 0 -> 1" in caplog.text
    assert "fragment 1 in flight is dropped" in caplog.text


def test_mean_of_more_islands_is_a_copy(feedback: Saved, tmp_path: Path) -> None:
    (state,) = resumed(tmp_path, {**FEEDBACK, "ici_islands": 4, "resume_islands": "mean"}, feedback)
    same(state.islands.params, taken(feedback.state.islands.params, [0, 0, 1, 1]))


def test_change_is_said_in_one_line(adam: Saved, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "levanter_diloco.checkpoint.loading"):
        resumed(tmp_path, {**P3, "num_fragments": 2, "ici_islands": 2}, adam, ADAM)
        resumed(tmp_path, {**P3, "ici_islands": 4}, adam, ADAM)
    [line] = [record.message for record in caplog.records if "another layout" in record.message]
    assert str(adam.path) in line
    assert "islands 4 -> 2, num_fragments 3 -> 2: Theta and the outer optimizer's state carry over" in line
    assert "islands start by resume_islands copy_nearest" in line


def test_full_state_of_another_layout_starts_a_run(adam: Saved, tmp_path: Path) -> None:
    block, owned = LAYOUTS["balanced_P2"]
    with entered(options(tmp_path, {**block, "ici_islands": 2}), ADAM, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy(99))
        state = numbers(trainer.loader.adopt(state, str(adam.path)))
    same(state.model, adam.state.model)
    same(momentum(state, owned), momentum(adam.state, LAYERS3))
    same(state.islands.params, taken(adam.state.islands.params, [0, 2]))
    assert int(state.settled) == 0


@OuterOptimizerConfig.register_subclass("summing")
class SummingConfig(SgdConfig):
    """Remembers one number a leaf."""

    def build(self, outer_steps: int) -> optax.GradientTransformation:
        def init(params: Any) -> Any:
            return jax.tree.map(hax.sum, params, is_leaf=hax.util.is_named_array)

        return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def test_what_cannot_be_carried_is_refused(four: Saved, tmp_path: Path) -> None:
    block = {**P3, "ici_islands": 4}
    outer = (
        r"trainer\.diloco\.outer \(adam\) must have the state that the checkpoint \S+saved holds, which lacks opt_st"
    )
    for change in ({}, {"num_fragments": 2}):
        with pytest.raises(OptionError, match=outer + ".* saved with works"):
            resumed(tmp_path, {**block, **change, "outer": OuterAdamConfig()}, four)
    with pytest.raises(OptionError, match=r"outer \(sgd\) .* which holds opt_state/\S*trace\S* besides"):
        resumed(tmp_path, {**block, "outer": SgdConfig()}, four)
    with pytest.raises(OptionError, match=r"^optimizer must have .* which lacks islands/opt_state/"):
        resumed(tmp_path, {**block, "ici_islands": 2}, four, ADAM)


def test_checkpoint_of_another_model_is_refused(four: Saved, tmp_path: Path) -> None:
    shape = r"model/layers/stacked/weight has the shape \[2, 4\] and here \[2, 3\]"
    Three = Layer.resize(3)
    stack = Stacked(Block(hax.zeros((Entry, Three))), Three, ScanCheckpointPolicy.from_bool_or_str(False))
    for fragments in (1, 4):  # P = 3 does not cut these layers
        block = {**P3, "ici_islands": 4, "num_fragments": fragments}
        config = options(tmp_path, block, load_checkpoint_path=str(four.path))
        with (
            entered(config, SGD, toy_loss) as trainer,
            pytest.raises(ModelError, match=f"is of another model, .*{shape}"),
        ):
            trainer.initial_state(jax.random.PRNGKey(0), model=Toy(hax.zeros(Embed), stack))


def test_outer_state_that_is_not_along_the_parameters_is_not_cut_anew(tmp_path: Path) -> None:
    block = {**P3, "outer": SummingConfig()}
    old = saved(tmp_path / "old", block, 1)
    (state,) = resumed(tmp_path, {**block, "ici_islands": 2}, old)  # as it is with other islands
    same(state.opt_state, old.state.opt_state)
    with pytest.raises(OptionError, match=r"outer \(summing\) must keep its state in the shape of the parameters"):
        resumed(tmp_path, {**block, "num_fragments": 2}, old)


def test_resume_islands_is_one_of_three(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"resume_islands \(copy\) must be one of copy_nearest, fresh, mean"):
        options(tmp_path, {"resume_islands": "copy"})


def test_frozen_parameters_stay_as_they_are_built(tmp_path: Path) -> None:
    every = jax.tree.map(lambda _: True, toy(), is_leaf=hax.util.is_named_array)
    frozen = eqx.tree_at(lambda model: model.embed, every, replace=False)
    block = {**BALANCED, "ici_islands": 2}
    with entered(options(tmp_path, block), SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy(), is_trainable=frozen)
        save_checkpoint(state.saveable_state, 0, tmp_path / "saved")
    config = options(
        tmp_path, {**P3, "num_fragments": 1, "ici_islands": 4}, load_checkpoint_path=str(tmp_path / "saved")
    )
    with entered(config, SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy(99), is_trainable=frozen)
        state = numbers(state)
    same(state.model.embed, toy(99).embed)
    same(state.model.layers, toy().layers)
    assert state.islands.params.embed is None


def test_islands_that_do_not_train_are_nobodys_nearest(tmp_path: Path) -> None:
    # Of four islands two train: as two islands they go on themselves, and not island 2 for the second.
    block = {"sync_period": 6, "ici_islands": 4, "schedule_islands": [[0, 2]]}
    old = saved(tmp_path / "old", block, steps=3)
    first, *_ = resumed(tmp_path, {"sync_period": 6, "ici_islands": 2}, old, steps=4)
    same(first.islands.params, taken(old.state.islands.params, [0, 1]))
    assert int(first.active) == 2


def test_a_killed_save_is_out_of_the_way_of_another_layout(tmp_path: Path) -> None:
    # Its arrays have the shapes of the old layout, and the store would refuse to write others over them.
    block = {"sync_period": 6, "ici_islands": 4, "final_sync": False}
    keep = CheckpointerConfig(base_path=str(tmp_path / "run"), save_interval=None, keep=[{"every": 2}])
    for name, steps in (("ici_islands", 5), ("islands_per_slot", 5)):
        own = {**block, name: 4 if name == "ici_islands" else 2}
        with entered(options(tmp_path, own, num_train_steps=steps, checkpointer=keep), SGD, toy_loss) as trainer:
            state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
            trainer.train(state, [toy_batch(**targets(step)) for step in range(int(state.step), steps)])
        if name == "ici_islands":
            (tmp_path / "run" / "toy" / "step-4" / "metadata.json").unlink()
    assert (tmp_path / "run" / "toy" / "step-4" / "metadata.json").exists()
    assert (tmp_path / "run" / "toy" / "damaged" / "step-4" / "manifest.json").exists()
