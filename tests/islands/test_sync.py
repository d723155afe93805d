"""The verbs of a sync on a state, by hand: outer 3, islands at 1 and 2."""

import dataclasses
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray
from haliax.partitioning import set_mesh
from jax.sharding import Mesh
from levanter.trainer_state import TrainerState

from levanter_diloco.algorithm.codecs import wire_format
from levanter_diloco.fragments.partition import Place
from levanter_diloco.islands.all_reduce import AllReduce
from levanter_diloco.islands.byte_count import count_of
from levanter_diloco.islands.guard import Guard
from levanter_diloco.islands.layout import Layout
from levanter_diloco.islands.placement import Placement
from levanter_diloco.islands.state import DiLoCoState, Status
from levanter_diloco.islands.sync import Sync
from levanter_diloco.options.config import DiLoCoConfig

Embed, Island = Axis("embed", 1), Axis("diloco", 2)
MESH = Mesh(np.array(jax.devices()[:2]), ("diloco",))
MAPPING = {"diloco": "diloco"}
ALL, ALIKE = Place("rest", 0), jnp.ones(2)
INNER = optax.adam(0.1)


def scalar(value: float) -> NamedArray:
    return hax.named(jnp.array([value], jnp.float32), Embed)


def built(islands: tuple[float, float], alpha: float = 0.0, **block: Any) -> tuple[Sync, DiLoCoState]:
    diloco = DiLoCoConfig(sync_period=4, mixing_alpha=alpha, **block)
    layout, optimizer = Layout(diloco, 2, {}), optax.sgd(0.5)
    wire = wire_format(diloco.wire, 2, False)
    placement = Placement(MESH, MAPPING)
    all_reduce = AllReduce(MESH, MAPPING, wire)
    sync = Sync(layout.partition, optimizer, alpha, all_reduce, placement, INNER, Guard(True, None))
    host = TrainerState.init(INNER, {"weight": scalar(3.0)}, key=jax.random.PRNGKey(0), is_trainable=True)
    state = DiLoCoState.of(host, layout, optimizer)
    moved = {"weight": hax.named(jnp.array(islands, jnp.float32)[:, None], (Island, Embed))}
    return sync, moved_to(state, moved)


def moved_to(state: DiLoCoState, params: Any) -> DiLoCoState:
    return dataclasses.replace(state, islands=dataclasses.replace(state.islands, params=params))


def theta(state: DiLoCoState) -> float:
    return state.theta["weight"].array.item()


def islands_of(state: DiLoCoState) -> list[float]:
    return state.islands.params["weight"].array[:, 0].tolist()


@pytest.mark.parametrize(("alpha", "islands"), [(0.0, [2.25, 2.25]), (0.5, [1.625, 2.125])])
def test_sync_without_overlap(alpha: float, islands: list[float]) -> None:
    # mean 1.5 -> outer gradient 1.5 -> SGD(0.5): Theta 3 - 0.75; merged as alpha*theta_k + (1-alpha)*2.25
    sync, state = built((1.0, 2.0), alpha)
    with set_mesh(MESH):
        state, report = sync.sync(state, ALL, ALIKE)
    assert theta(state) == 2.25 and islands_of(state) == islands
    assert state.outer_steps.tolist() == [1] and count_of(state.sent_bytes) == 4
    assert report.island_distance.tolist() == [2, 1]
    assert (report.outer_grad_norm.item(), report.outer_update_norm.item()) == (1.5, 0.75)


def test_capture_reduce_outer_step_and_merge_in_turn() -> None:
    # Between the capture and the merge the islands go on: what they do then is no part of Delta.
    sync, state = built((1.0, 2.0), overlap_steps=1)
    with set_mesh(MESH):
        state = sync.capture(state, ALL, ALIKE)
        state = moved_to(state, {"weight": hax.named(jnp.array([[10.0], [20.0]]), (Island, Embed))})
        state, report = sync.outer_step(state, ALL, sync.reduce(state, ALL, jnp.int32(0)), last=True)
        assert report is not None and theta(state) == 2.25
        assert islands_of(state) == [10, 20]
        state = sync.merge(state, ALL)
    assert islands_of(state) == [2.25, 2.25]


def test_weights_shift_the_mean() -> None:
    # (3*2 + 1*1) / 4 = 1.75 -> 3 - 0.875
    sync, state = built((1.0, 2.0))
    with set_mesh(MESH):
        state, _ = sync.sync(state, ALL, jnp.array([3.0, 1.0]))
    assert theta(state) == 2.125


def test_absent_island_is_not_reset_and_with_none_theta_stays() -> None:
    sync, state = built((1.0, 2.0))
    with set_mesh(MESH):
        one, _ = sync.sync(state, ALL, jnp.array([1.0, 0.0]))
        none, _ = sync.sync(state, ALL, jnp.zeros(2))
    assert theta(one) == 2.0 and islands_of(one) == [2.0, 2.0]  # island 1 has its own 2, by chance Theta's
    assert theta(none) == 3.0 and islands_of(none) == [1.0, 2.0] and none.outer_steps.tolist() == [0]


def test_broken_island_is_left_out_and_starts_anew() -> None:
    sync, state = built((1.0, np.nan))
    with set_mesh(MESH):
        state, _ = sync.sync(state, ALL, ALIKE)
        assert theta(state) == 2.0 and state.islands.status.tolist() == [[Status.COUNTED], [Status.LEFT_OUT]]
        state = sync.restart(state, jnp.array([False, True]), 2)
    assert islands_of(state) == [2.0, 2.0]
    assert state.islands.status.tolist() == [[Status.COUNTED], [Status.RESTARTED]]


def test_what_the_wire_loses_is_sent_along_next_time() -> None:
    # Two elements share a scale: of 1 and 0.1 int4 sends 1 and 1/7; what is left is 0 and 0.1 - 1/7.
    Two = Axis("embed", 2)
    sync, state = built((3.0, 3.0), wire="int4", wire_block=2, error_feedback=True)
    model = {"weight": hax.named(jnp.zeros(2), Two)}
    host = TrainerState.init(INNER, model, key=jax.random.PRNGKey(0), is_trainable=True)
    layout = Layout(DiLoCoConfig(wire="int4", wire_block=2, error_feedback=True), 2, {})
    state = DiLoCoState.of(host, layout, sync.optimizer)
    state = moved_to(state, {"weight": hax.named(jnp.array([[-1.0, -0.1]] * 2), (Island, Two))})
    with set_mesh(MESH):
        state, _ = sync.sync(state, ALL, ALIKE)
    assert state.residual is not None
    np.testing.assert_allclose(state.residual["weight"].array, [[0, 0.1 - 1 / 7]] * 2, atol=1e-6)
