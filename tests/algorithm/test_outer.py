import json
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helpers.paths import DATA
from helpers.toy_model import Toy
from levanter_diloco.algorithm.outer import island_gradients, merge, norm, outer_gradient, outer_step
from levanter_diloco.algorithm.schedule import Schedule
from levanter_diloco.axes import ISLAND, Params
from levanter_diloco.fragments.layers import LayerPartition
from levanter_diloco.fragments.partition import Partition
from levanter_diloco.options.outer import NesterovConfig

Embed = Axis("embed", 3)
CASES = json.loads((DATA / "trajectories.json").read_text())


def scalar(value: float, dtype: Any = jnp.float32) -> NamedArray:
    return hax.named(jnp.asarray(value, dtype), ())


def on_islands(values: Any, *axes: Axis, dtype: Any = jnp.float32) -> NamedArray:
    """The first axis of `values` is the island's."""
    return hax.named(jnp.asarray(values, dtype), (Axis(ISLAND, len(values)), *axes))


def broadcast(outer: Params, num_islands: int) -> Params:
    return jax.tree.map(lambda x: x.broadcast_axis(Axis(ISLAND, num_islands)), outer, is_leaf=is_named_array)


def synced(outer: Params, islands: Params, optimizer: optax.GradientTransformation) -> Params:
    """Theta after one sync with a fresh optimizer."""
    gradient = outer_gradient(island_gradients(outer, islands))
    return outer_step(optimizer, optimizer.init(outer), outer, gradient)[0]


values = st.floats(-100, 100, width=32)


def test_outer_step_matches_hand_computation():
    # Theta 3; islands 1 and 2: Delta_k 2 and 1, Delta 1.5, SGD(.5): 3 - .75
    outer, islands = scalar(3.0), on_islands([1.0, 2.0])
    assert island_gradients(outer, islands).array.tolist() == [2.0, 1.0]
    assert outer_gradient(island_gradients(outer, islands)).item() == 1.5
    assert synced(outer, islands, optax.sgd(0.5)).item() == 2.25


def test_merge_matches_hand_computation():
    outer, islands = scalar(3.0), on_islands([1.0, 2.0])
    assert merge(outer, islands, 0.0).array.tolist() == [3.0, 3.0]
    assert merge(outer, islands, 0.5).array.tolist() == [2.0, 2.5]
    assert merge(outer, islands, 0.75).array.tolist() == [1.5, 2.25]
    assert merge(outer, islands, 1.0).array.tolist() == [1.0, 2.0]


def test_norm_matches_hand_computation():
    tree = {"a": hax.named(jnp.array([3.0, 0.0, 0.0]), Embed), "b": scalar(4.0), "frozen": None}
    assert float(norm(tree)) == 5.0
    islands = {"a": on_islands([[3, 0, 0], [0, 0, 1]], Embed), "b": on_islands([4.0, 0.0])}
    assert norm(islands, Axis(ISLAND, 2)).tolist() == [5.0, 1.0]


eighths = st.integers(-800, 800).map(lambda n: n / 8)
"""Differences, and means over four, are exact in f32."""


@settings(deadline=None)  # the first example compiles
@given(eighths, eighths)
def test_one_island_with_plain_averaging_is_the_island(outer: float, island: float):
    assert synced(scalar(outer), on_islands([island]), optax.sgd(1.0)).item() == island


@settings(deadline=None)  # the first example compiles
@given(arrays(np.float32, (4, 3), elements=eighths), eighths)
def test_islands_with_plain_averaging_are_their_mean(islands: np.ndarray, start: float):
    outer = hax.named(jnp.full(3, start), Embed)
    assert synced(outer, on_islands(islands, Embed), optax.sgd(1.0)).array.tolist() == islands.mean(0).tolist()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@settings(deadline=None)  # the first example compiles
@given(arrays(np.float32, 3, elements=st.floats(-1e4, 1e4, width=32)), arrays(np.float32, (2, 3), elements=values))
def test_merge_with_alpha_0_copies_every_bit(dtype: Any, outer: np.ndarray, islands: np.ndarray):
    merged = merge(hax.named(jnp.asarray(outer), Embed), on_islands(islands, Embed, dtype=dtype), 0.0)
    assert merged.dtype == dtype
    expected = jnp.asarray(outer).astype(dtype)
    assert all(np.asarray(row).tobytes() == np.asarray(expected).tobytes() for row in merged.array)


def test_merge_with_alpha_0_does_not_spread_what_an_island_has():
    merged = merge(scalar(2.0), on_islands([float("nan"), float("inf")]), 0.0)
    assert merged.array.tolist() == [2.0, 2.0]


def test_merge_mixes_in_f32_where_islands_are_bf16():
    # .5*1 + .5*(1 + 2^-7 + 2^-9) = 1 + 2^-8 + 2^-10, which rounds to 1 + 2^-7. Theta in bf16 is 1 + 2^-7 (2^-9 is
    # lost); mixed in bf16 it would be the tie 1 + 2^-8, which goes to 1.
    outer = scalar(1 + 2**-7 + 2**-9)
    assert merge(outer, on_islands([1.0], dtype=jnp.bfloat16), 0.5).array.tolist() == [1 + 2**-7]


def test_gradients_are_f32_where_islands_are_bf16():
    # One of three islands is one bf16 step above 1; a bf16 mean would be 0 or a whole step.
    islands = on_islands([1.0, 1 + 2**-7, 1.0], dtype=jnp.bfloat16)
    gradients = island_gradients(scalar(1.0), islands)
    assert gradients.dtype == jnp.float32
    assert outer_gradient(gradients).item() == np.float32(-(2**-7)) / np.float32(3)


def test_small_updates_still_move_theta_where_islands_are_bf16():
    # Each sync moves Theta by 1e-4, far below the bf16 step of 2^-7 at 1: the islands see it after some 40 syncs.
    outer, optimizer = scalar(1.0), optax.sgd(1e-4 * 2**7)
    # pyrefly: ignore[bad-argument-type]  optax's trees are named arrays here, its types are plain ones
    state = optimizer.init(outer)
    for sync in range(1, 101):
        merged = merge(outer, on_islands([0.0, 0.0], dtype=jnp.bfloat16), 0.0)
        islands = (merged + 2**-7).astype(jnp.bfloat16)
        gradient = outer_gradient(island_gradients(merged[ISLAND, 0].astype(jnp.float32), islands))
        outer, state = outer_step(optimizer, state, outer, gradient)
        assert outer.dtype == jnp.float32
        assert outer.item() == pytest.approx(1 + 1e-4 * sync, abs=1e-5)


def test_anchor_of_the_gradient_is_theta_and_not_the_blended_copy():
    # alpha .5: the islands keep half of their distance, and it is in the next Delta.
    outer = scalar(4.0)
    islands = merge(outer, on_islands([0.0, 2.0]), 0.5)  # 2 and 3
    assert island_gradients(outer, islands).array.tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.5, momentum=0.9, nesterov=True),
        optax.adamw(0.1),
        optax.lion(0.1),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(optax.linear_schedule(1.0, 0.0, 3))),
    ],
    ids=["nesterov", "adamw", "lion", "clip-and-schedule"],
)
def test_outer_step_is_the_optimizer_on_plain_arrays(optimizer: optax.GradientTransformation):
    plain = jnp.array([1.0, -2.0, 0.5])
    outer = {"embed": hax.named(plain, Embed), "frozen": None}
    plain_state, state = optimizer.init(plain), optimizer.init(outer)
    for step in range(3):
        gradient = jnp.array([0.5, 0.25, -1.0]) * (step + 1)
        updates, plain_state = optimizer.update(gradient, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        outer, state = outer_step(optimizer, state, outer, {"embed": hax.named(gradient, Embed), "frozen": None})
        assert outer["frozen"] is None
        # pyrefly: ignore[no-matching-overload]  optax's trees are named arrays here, its types are plain ones
        np.testing.assert_allclose(outer["embed"].array, plain, rtol=1e-6)


def test_island_gradients_refuse_parameters_without_islands():
    with pytest.raises(ValueError, match=r"must lead with the axis 'diloco', found \('embed',\)"):
        island_gradients(hax.zeros(Embed), hax.zeros(Embed))
    with pytest.raises(ValueError, match=r"must lead with the axis 'diloco', found \('embed', 'diloco'\)"):
        island_gradients(hax.zeros(Embed), hax.zeros((Embed, Axis(ISLAND, 2))))


class Loop:
    """DiLoCo as the design words it, from the package's own functions and nothing else."""

    def __init__(
        self, outer: Params, num_islands: int, partition: Partition, schedule: Schedule, alpha: float, optimizer: Any
    ) -> None:
        self.outer, self.islands = outer, broadcast(outer, num_islands)
        self.partition, self.schedule, self.alpha, self.optimizer = partition, schedule, alpha, optimizer
        fragments = range(partition.num_fragments)
        self.moments = [optimizer.init(partition.take(outer, *partition.locate(f))) for f in fragments]
        self.captured: dict[int, Params] = {}

    def sync(self, step: int) -> None:
        """What follows inner step `step`, whose result is in `islands`."""
        # With V = 0 one fragment is captured, reduced and merged in this step; else they are different ones.
        if self.schedule.overlap_steps == 0:
            self._capture(self.schedule.captured(step))
        crossing = self.schedule.crossing(step)
        self._reduce(crossing.fragment if crossing and crossing.last else None)
        self._merge(self.schedule.merged(step))
        if self.schedule.overlap_steps > 0:
            self._capture(self.schedule.captured(step))

    def _capture(self, fragment: int | None) -> None:
        if fragment is not None:
            place = self.partition.locate(fragment)
            outer, islands = self.partition.take(self.outer, *place), self.partition.take(self.islands, *place)
            self.captured[fragment] = island_gradients(outer, islands)

    def _reduce(self, fragment: int | None) -> None:
        if fragment is not None:
            place = self.partition.locate(fragment)
            outer, gradient = self.partition.take(self.outer, *place), outer_gradient(self.captured.pop(fragment))
            after, self.moments[fragment] = outer_step(self.optimizer, self.moments[fragment], outer, gradient)
            self.outer = self.partition.put(self.outer, *place, after)

    def _merge(self, fragment: int | None) -> None:
        if fragment is not None:
            place = self.partition.locate(fragment)
            merged = merge(
                self.partition.take(self.outer, *place), self.partition.take(self.islands, *place), self.alpha
            )
            self.islands = self.partition.put(self.islands, *place, merged)

    @property
    def momentum(self) -> Params:
        found = jax.tree.map(jnp.zeros_like, self.outer)
        for fragment, state in enumerate(self.moments):
            place = self.partition.locate(fragment)
            found = self.partition.put(found, *place, optax.tree.get(state, "trace"))
        return found


INNER = {
    "sgd(0.1)": optax.sgd(0.1),
    "adamw(0.05,b1=0.9,b2=0.95,eps=1e-8,weight_decay=0.1)": optax.adamw(0.05, 0.9, 0.95, 1e-8, weight_decay=0.1),
}


def assert_close(toy: Toy, expected: dict[str, Any], what: str) -> None:
    for name, found in toy.parts().items():
        np.testing.assert_allclose(found, np.array(expected[name]), atol=1e-6, rtol=0, err_msg=f"{what} {name}")


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_loop_follows_the_reference_trajectory(case: dict[str, Any]):
    order = "sequential" if case["sequential_layers"] else "interleaved"
    overlap = case["overlap_steps"]
    outer_optimizer = NesterovConfig(learning_rate=case["outer_lr"], momentum=case["outer_momentum"]).build(14)
    loop = Loop(
        Toy.of(**CASES["init"]),
        case["islands"],
        LayerPartition(case["num_fragments"], order),
        Schedule(case["sync_period"], case["num_fragments"], overlap),
        case["mixing_alpha"],
        outer_optimizer,
    )
    target = {name: jnp.asarray(CASES["target"][name], jnp.float32) for name in ("embed", "layers")}
    # SGD and AdamW treat each element by itself, so one state over the island axis is a state for each island.
    inner = INNER[case["inner_optimizer"]]
    inner_state = inner.init(loop.islands)
    update = jax.jit(inner.update)

    def displaced(islands: Toy) -> Toy:
        """Both the gradient of the loss and what the loss is half the square of."""
        targets = (target["embed"], target["layers"])
        leaves, treedef = jax.tree.flatten(islands)
        return treedef.unflatten([x - goal for x, goal in zip(leaves, targets, strict=True)])

    trace = case["trace"]
    for step in range(1, len(trace) + 1):
        now = trace[step - 1]
        gradient = displaced(loop.islands)
        loss = sum(0.5 * jnp.sum(x**2, axis=range(1, x.ndim)) for x in jax.tree.leaves(gradient))
        np.testing.assert_allclose(loss, now["loss"], rtol=1e-6, err_msg=f"loss of step {step}")
        updates, inner_state = update(gradient, inner_state, loop.islands)
        loop.islands = optax.apply_updates(loop.islands, updates)
        loop.sync(step)
        # pyrefly: ignore[bad-argument-type]  optax's trees are named arrays here, its types are plain ones
        assert_close(loop.islands, now["inner"], f"islands after step {step}")
        # The reference steps Theta at the capture, one step before ours if V >= 1.
        lag = min(overlap, 1)
        if step > lag:
            assert_close(loop.outer, trace[step - 1 - lag]["outer"], f"Theta after step {step}")
            assert_close(loop.momentum, trace[step - 1 - lag]["trace"], f"momentum after step {step}")


def test_reference_trajectories_are_all_there():
    assert [case["name"] for case in CASES["cases"]] == [
        "vanilla_H3",
        "vanilla_H1",
        "stream_P3_H3",
        "stream_P3_H3_sequential",
        "stream_P5_H5",
        "stream_P3_H6",
        "stream_P3_H3_V1",
        "stream_P3_H3_V1_a05",
        "stream_P3_H3_a05",
        "vanilla_H3_adamw",
    ]


class Line(eqx.Module):
    weight: NamedArray
    bias: NamedArray


def test_linear_regression_follows_the_oracle_through_its_second_sync():
    # y = x.w + b from w = [2, 1], b = 1; two islands, mean squared error, inner SGD .1, H = 3, eta 1, beta .9.
    Feature = Axis("feature", 2)
    start = Line(hax.named(jnp.array([2.0, 1.0]), Feature), scalar(1.0))
    x = jnp.array([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    y = jnp.array([[1.0, 2.0], [2.0, 3.0]])

    def loss(params: tuple, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ params[0] + params[1] - y) ** 2)

    loop = Loop(start, 2, LayerPartition(1, "interleaved"), Schedule(3, 1, 0), 0.0, NesterovConfig(1.0).build(2))
    losses, found = [], []
    for step in range(1, 7):
        leaves, treedef = jax.tree.flatten(loop.islands)
        value, gradient = jax.vmap(jax.value_and_grad(loss))(tuple(leaves), x, y)
        loop.islands = treedef.unflatten([p - 0.1 * g for p, g in zip(leaves, gradient, strict=True)])
        loop.sync(step)
        losses.append(float(value[0]))
        found.append([*loop.outer.weight.array.tolist(), loop.outer.bias.item()])
    assert losses[:4] == pytest.approx([1, 0.49, 0.2401, 0.2075437], abs=1e-6)
    assert found[1] == [2.0, 1.0, 1.0]
    assert found[2] == pytest.approx([1.5345, 1.0494, 0.5839], abs=1e-6)
    assert found[5] == pytest.approx([1.26282, 1.247008, 0.509828], abs=1e-6)


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("inner", [optax.sgd(0.1, momentum=0.9), optax.adam(0.05)], ids=["momentum", "adam"])
def test_one_island_with_outer_sgd_is_lookahead(inner: optax.GradientTransformation, period: int):
    target, rate = jnp.array([0.5, -1.0, 2.0]), 0.4
    start = jnp.array([1.76, 0.4, 0.98])

    lookahead = optax.lookahead(inner, sync_period=period, slow_step_size=rate)
    params = optax.LookaheadParams.init_synced(start)
    state = lookahead.init(params)

    loop = Loop(
        hax.named(start, Embed), 1, LayerPartition(1, "interleaved"), Schedule(period, 1, 0), 0.0, optax.sgd(rate)
    )
    inner_state = inner.init(start)
    for step in range(1, 11):
        # pyrefly: ignore[missing-attribute]  optax's trees are named arrays here, its types are plain ones
        updates, state = lookahead.update(params.fast - target, state, params)
        params = optax.apply_updates(params, updates)
        fast = loop.islands.array[0]
        updates, inner_state = inner.update(fast - target, inner_state, fast)
        # pyrefly: ignore[bad-index]  optax's trees are named arrays here, its types are plain ones
        loop.islands = on_islands(optax.apply_updates(fast, updates)[None], Embed)
        loop.sync(step)
        # pyrefly: ignore[missing-attribute]  optax's trees are named arrays here, its types are plain ones
        np.testing.assert_allclose(loop.islands.array[0], params.fast, atol=1e-6, rtol=0)
        # pyrefly: ignore[missing-attribute]  optax's trees are named arrays here, its types are plain ones
        np.testing.assert_allclose(loop.outer.array, params.slow, atol=1e-6, rtol=0)
