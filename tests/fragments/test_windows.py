"""The outer state in other memory: the same bits, and no more of it on a device than the summary says."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import haliax as hax
import jax
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray
from haliax.partitioning import pspec_for_axis
from jax.sharding import NamedSharding
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import Toy, entered, recorder_of, run, toy_batch, toy_loss, trainer_config
from levanter_diloco.errors import OptionError
from levanter_diloco.fragments.windows import put_window, take_window
from levanter_diloco.islands.placement import Placement
from levanter_diloco.options.outer import OuterOptimizerConfig

MESH = MeshConfig(axes={"data": 1, "model": -1}, param_mapping={"entry": "data"})
BLOCK = {"sync_period": 6, "num_fragments": 3, "ici_islands": 2, "mixing_alpha": 0.5}
INNER = optax.adam(1e-2)


def toy() -> Toy:
    return Toy.of(np.arange(3.0), np.arange(8.0).reshape(2, 4))


def rows(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return toy_batch(rng.normal(size=(8, 3)), rng.normal(size=(8, 2, 4)))


BATCHES = [rows(step) for step in range(14)]


def assert_bit_equal(left: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def on_host(x: NamedArray) -> NamedArray:
    """In pinned host memory, each axis whole."""
    where = NamedSharding(jax.make_mesh((1,), ("data",)), pspec_for_axis(x.axis_names, {}), memory_kind="pinned_host")
    return NamedArray(jax.device_put(x.array, where), x.axes)


@pytest.mark.parametrize("start", [0, 3, 8, 11, 13, 21])
@pytest.mark.parametrize(
    "axes",
    [
        (("row", 24), ("embed", 2)),
        (("layer", 2), ("row", 24)),
        (("row", 24), ("layer", 2), ("embed", 2)),
        (("row", 25), ("embed", 2)),
    ],
    ids=["tiles", "along_tiles", "outer", "part_of_a_tile"],
)
def test_window_of_host_memory_is_that_of_device_memory(axes: tuple, start: int) -> None:
    x = hax.random.normal(jax.random.PRNGKey(0), tuple(Axis(*axis) for axis in axes))
    Window = Axis("row", 3)

    @jax.jit
    def window_and_doubled(x: NamedArray, start: Any) -> tuple[NamedArray, NamedArray]:
        window = take_window(x, Window, start)
        return window, put_window(x, "row", start, 2 * window)

    window, doubled = window_and_doubled(on_host(x), start)
    expected = hax.slice(x, "row", Window, start=start)
    assert window.axes == expected.axes and doubled.axes == x.axes
    assert window.array.sharding.memory_kind == "device" and doubled.array.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(window.array, expected.array)
    np.testing.assert_array_equal(doubled.array, hax.updated_slice(x, {"row": start}, 2 * expected).array)


def options(path: Path, memory: str, **block: Any) -> Any:
    return trainer_config(path, {**BLOCK, "outer_memory": memory, **block}, mesh=MESH)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize(("partition", "num_fragments"), [("layers", 3), ("balanced", 2)])
def test_run_takes_the_same_steps_wherever_the_outer_state_lies(
    partition: str, num_fragments: int, overlap: int, tmp_path: Path
) -> None:
    block = {"partition": partition, "num_fragments": num_fragments, "overlap_steps": overlap}
    device, *others = (
        run(options(tmp_path / memory, memory, **block), INNER, toy(), BATCHES)
        for memory in ("device", "pinned_host", "sharded")
    )
    assert device[-1].state.outer_steps.min() >= 2
    for theirs, *ours in zip(device, *others, strict=True):
        for step in ours:
            # Which half has crossed when a fragment crosses in two depends on how it is cut.
            assert_bit_equal(*(dataclasses.replace(one.state, crossed=None, layout={}) for one in (step, theirs)))
            for name in [name for name in theirs.metrics if name.startswith(("train/", "diloco/"))]:
                # A norm of shares adds up in another order.
                assert step.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "overlap"),
    [("device", "pinned_host", 2), ("pinned_host", "sharded", 1), ("sharded", "device", 1)],
)
def test_run_resumes_with_the_outer_state_in_other_memory(
    before: str, after: str, overlap: int, tmp_path: Path
) -> None:
    # The data ends after 4 steps, with a fragment captured and not yet merged.
    block = {"overlap_steps": overlap, "final_sync": False}
    whole = run(options(tmp_path / "whole", after, **block), INNER, toy(), BATCHES)
    run(options(tmp_path, before, **block), INNER, toy(), BATCHES[:4])
    resumed = run(options(tmp_path, after, **block), INNER, toy(), BATCHES)
    assert len(resumed) == 14 - 4
    for ours, theirs in zip(resumed, whole[4:], strict=True):
        assert_bit_equal(ours.state, theirs.state)


@pytest.mark.slow
def test_shares_that_have_crossed_in_part_are_dropped_where_there_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    block = {"overlap_steps": 2, "final_sync": False}
    run(options(tmp_path, "sharded", **block), INNER, toy(), BATCHES[:3])
    steps = run(options(tmp_path, "device", **block), INNER, toy(), BATCHES)
    assert "pieces_of_shares 1 -> 0" in caplog.text and "in flight is dropped" in caplog.text
    assert len(steps) == len(BATCHES) - 3


@dataclass(frozen=True)
class Clipped(OuterOptimizerConfig):
    """Not elementwise: what one element becomes depends on all of the fragment."""

    def build(self, outer_steps: int) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.7, momentum=0.9))


@pytest.mark.slow
def test_shares_are_stepped_by_an_optimizer_that_looks_at_the_whole_fragment(tmp_path: Path) -> None:
    device, sharded = (
        run(options(tmp_path / memory, memory, outer=Clipped()), INNER, toy(), BATCHES)[-1]
        for memory in ("device", "sharded")
    )
    assert device.metrics["diloco/outer_grad_norm/fragment_1"] > 0.1
    for a, b in zip(jax.tree.leaves(sharded.state), jax.tree.leaves(device.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("memory", ["device", "pinned_host", "sharded"])
def test_memory_added_is_that_of_the_compiled_program(memory: str, tmp_path: Path) -> None:
    with entered(options(tmp_path, memory, overlap_steps=1), INNER, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
        figures = recorder_of(trainer).summary
        traced = trainer.programs_for(state).trace_step(state, ((BATCHES[0],), {}))
    added = figures["diloco/memory_added_per_device"], figures["diloco/host_memory_added_per_device"]
    # Theta and momentum, 44 bytes each; the optimizer's two counts stay with the devices.
    assert added[1] == (88 if memory == "pinned_host" else 0)
    # Two slots have 16 bytes each of the layers' momentum; the embedding's three numbers cannot be halved. The
    # count of bytes sent has two words.
    assert sum(added) == 188 + 8 - (16 if memory == "sharded" else 0)
    # What an island has anyway: parameters and two moments of 44 bytes, Adam's count, a key, the step; whether it has
    # failed, and its weights and its status in three fragments.
    alone = 3 * 44 + 4 + 8 + 4 + 4 + 3 * 4 + 3
    # The program takes over the state's memory; on the CPU it does not tell the host's from the devices'.
    compiled: Any = traced.lower().compile().memory_analysis()  # Any: each backend's own class
    assert compiled.alias_size_in_bytes == alone + sum(added)


def test_largest_moment_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    # A device has one of the two entries, and P = 3 leaves two rows of the four layers: nothing that 4 slots divide.
    mesh = MeshConfig(axes={"data": 2}, param_mapping={"entry": "data"})
    config = trainer_config(tmp_path, {**BLOCK, "ici_islands": 4, "outer_memory": "sharded"}, mesh=mesh)
    with entered(config, INNER, toy_loss) as trainer, pytest.raises(OptionError) as error:
        trainer.initial_state(jax.random.PRNGKey(0), model=toy())
    assert str(error.value) == (
        "trainer.diloco.outer_memory (sharded) must find an axis of the largest outer moment {'fragment': 2, "
        "'entry': 2, 'row': 2} that 4 slots divide on every device; device works."
    )


def test_memory_that_the_devices_lack_is_refused() -> None:
    device = SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh: Any = SimpleNamespace(devices=np.array([device]))  # Any: no backend here lacks it
    with pytest.raises(OptionError) as error:
        Placement(mesh, {}, "pinned_host").check()
    assert str(error.value) == (
        "trainer.diloco.outer_memory (pinned_host) must be a memory of the devices, which have device; device works."
    )
