"""Who takes part in a sync: what the trainer makes of weights, of islands that come and go, and of broken ones."""

from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
import optax
import pytest
from levanter.checkpoint import save_checkpoint
from levanter.optim.config import AdamConfig
from levanter.schedule import ScheduleStep
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import Step, Toy, entered, recorder_of, run, toy_batch, toy_loss, trainer_config
from levanter_diloco.algorithm.participation import Participation
from levanter_diloco.algorithm.schedule import Schedule
from levanter_diloco.errors import OptionError, RunError
from levanter_diloco.islands.byte_count import count_of
from levanter_diloco.options.outer import SgdConfig

pytestmark = pytest.mark.usefixtures("compile_cache")

SGD = optax.sgd(0.1)


# --- The trainer


def toy(seed: int = 0) -> Toy:
    rng = np.random.default_rng(seed)
    return Toy.of(rng.normal(size=3), rng.normal(size=(2, 4)))


def batch(step: int, islands: int) -> dict:
    rng = np.random.default_rng(1000 + step)
    return toy_batch(rng.normal(size=(islands, 3)), rng.normal(size=(islands, 2, 4)))


def batches(islands: int, steps: int, spoiled: dict[tuple[int, int], float] | None = None) -> list[dict]:
    """A row for each island; `spoiled` puts a number in the place of one at `(inner step, island)`."""
    out = [batch(step, islands) for step in range(steps)]
    for (step, island), value in (spoiled or {}).items():
        embed = out[step - 1]["embed"]
        out[step - 1]["embed"] = hax.named(embed.array.at[island, 0].set(value), embed.axes)
    return out


def trained(
    path: Path,
    block: dict,
    *,
    spoiled: dict[tuple[int, int], float] | None = None,
    inner: optax.GradientTransformation = SGD,
    islands: int = 4,
    steps: int = 8,
    **options: Any,
) -> list[Step]:
    defaults = {"ici_islands": islands, "sync_period": 4, "outer": SgdConfig(learning_rate=0.5), "final_sync": False}
    config = trainer_config(
        path,
        {**defaults, **block},
        train_batch_size=islands,
        num_train_steps=steps,
        mesh=MeshConfig(axes={"data": 1, "model": -1}),
        **options,
    )
    return run(config, inner, toy(), batches(islands, steps, spoiled))


def embeds(step: Step) -> np.ndarray:
    """theta_k of the embedding, `[K, 3]`."""
    return step.state.islands.params.embed.array


def theta(step: Step) -> np.ndarray:
    return step.state.model.embed.array


def test_without_any_island_theta_stays_and_islands_train_on(tmp_path: Path) -> None:
    steps = trained(tmp_path, {"drop_rate": 1.0, "outer": SgdConfig(momentum=0.9)})
    start = toy().parts()["embed"]
    own = np.tile(start, (4, 1))
    for i, step in enumerate(steps):
        own -= 0.1 * (own - np.asarray(batch(i, 4)["embed"].array))
        np.testing.assert_allclose(embeds(step), own, atol=1e-6)
        assert np.array_equal(theta(step), start)
    assert steps[3].metrics["diloco/participants"] == 0
    assert not np.any(steps[-1].state.opt_state["rest"][0].trace.embed.array)
    assert steps[-1].state.outer_steps.tolist() == [0]


@pytest.mark.parametrize(
    "block", [{}, {"overlap_steps": 1}, {"wire": "bf16"}, {"overlap_steps": 2, "mixing_alpha": 0.5}]
)
def test_an_island_whose_gradient_is_lost_is_not_reset(block: dict, tmp_path: Path) -> None:
    steps = trained(tmp_path, {"drop_rate": 0.5, **block}, steps=10)
    weights = Participation(4, Schedule(4, 1, 0), drop_rate=0.5).weights(4, 0)
    assert 0 < weights.sum() < 4
    lag, alpha = block.get("overlap_steps", 0), block.get("mixing_alpha", 0)
    captured, before, after = embeds(steps[3]), embeds(steps[2 + lag]), embeds(steps[3 + lag])
    own = before - 0.1 * (before - np.asarray(batch(3 + lag, 4)["embed"].array))
    start = toy().parts()["embed"]
    if lag == 0:
        captured = own
    moved = start - 0.5 * (start - (weights[:, None] * captured).sum(0) / weights.sum())
    np.testing.assert_allclose(theta(steps[3 + lag]), moved, atol=5e-3 if block.get("wire") else 1e-6)
    taken = alpha * own + (1 - alpha) * theta(steps[3 + lag])
    np.testing.assert_allclose(after, np.where(weights[:, None] > 0, taken, own), atol=1e-6)
    assert steps[3 + lag].metrics["diloco/participants"] == weights.sum()


def test_weights_by_island(tmp_path: Path) -> None:
    steps = trained(tmp_path, {"weights": [1.0, 2.0, 0.0, 3.0]}, steps=4)
    own = embeds(steps[2]) - 0.1 * (embeds(steps[2]) - np.asarray(batch(3, 4)["embed"].array))
    start = toy().parts()["embed"]
    mean = (own[0] + 2 * own[1] + 3 * own[3]) / 6
    np.testing.assert_allclose(theta(steps[3]), start - 0.5 * (start - mean), atol=1e-6)


def test_equal_weights_change_no_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", {}, steps=5)[-1].state
    listed = trained(tmp_path / "listed", {"weights": [2.0] * 4}, steps=5)[-1].state
    tokens = trained(tmp_path / "tokens", {"weights": "tokens"}, steps=5)[-1].state
    for other in (listed, tokens):
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (plain, other)), strict=True))


# --- Islands that join and leave


@pytest.mark.parametrize("moments", ["fresh", "copied"])
def test_an_island_that_joins_starts_from_theta(moments: str, tmp_path: Path) -> None:
    inner = AdamConfig(learning_rate=1e-2, warmup=4, max_grad_norm=None).build(8)
    block = {"schedule_islands": [[0, 2], [6, 4]], "join_moments": moments}
    path = tmp_path / "run"
    steps = trained(path, block, inner=inner)
    for step in steps[:6]:
        assert {name for name in step.metrics if "loss_island" in name} == {f"train/loss_island_{k}" for k in (0, 1)}
        losses = [step.metrics[f"train/loss_island_{k}"] for k in (0, 1)]
        assert step.loss == pytest.approx(np.mean(losses))
    assert "train/loss_island_3" in steps[6].metrics
    # The loss of step 7 is at Theta for the islands that join, at their own parameters for the others.
    for k in range(4):
        at = steps[5].state.model if k >= 2 else steps[5].state.islands.params
        parts = {"embed": at.embed.array, "layers": at.layers.stacked.weight.array}
        parts = parts if k >= 2 else {name: x[k] for name, x in parts.items()}
        targets = {name: np.asarray(x.array)[k] for name, x in batch(6, 4).items()}
        expected = sum(0.5 * np.sum((parts[name] - targets[name]) ** 2) for name in parts)
        assert steps[6].metrics[f"train/loss_island_{k}"] == pytest.approx(expected, abs=1e-5)
    after, before = steps[6].state.islands.opt_state, steps[5].state.islands.opt_state
    assert after.count.tolist() == [7] * 4
    adam, earlier = after.inner_state[0], before.inner_state[0]
    assert adam.count.tolist() == ([7, 7, 1, 1] if moments == "fresh" else [7] * 4)
    kept = earlier.mu.embed.array[0] if moments == "copied" else 0
    joined = theta(steps[5]) - np.asarray(batch(6, 4)["embed"].array)[2]
    np.testing.assert_allclose(adam.mu.embed.array[2], 0.9 * kept + 0.1 * joined, atol=1e-6)


def test_an_island_that_left_is_not_in_the_mean(tmp_path: Path) -> None:
    steps = trained(tmp_path, {"schedule_islands": [[0, 4], [2, 1]]}, steps=4)
    own = embeds(steps[2])[0] - 0.1 * (embeds(steps[2])[0] - np.asarray(batch(3, 4)["embed"].array)[0])
    start = toy().parts()["embed"]
    np.testing.assert_allclose(theta(steps[3]), start - 0.5 * (start - own), atol=1e-6)
    assert steps[3].metrics["diloco/participants"] == 1
    assert steps[3].metrics["train/loss"] == steps[3].metrics["train/loss_island_0"]


# --- The guard


BLOCKS: dict[str, dict] = {
    "plain": {},
    "V1": {"overlap_steps": 1},
    "V3_alpha": {"overlap_steps": 3, "mixing_alpha": 0.5},
    "int4_feedback": {"wire": "int4", "wire_block": 2, "error_feedback": True},
    "pinned_host": {"outer_memory": "pinned_host"},
    "sharded": {"outer_memory": "sharded", "num_fragments": 2, "partition": "balanced", "overlap_steps": 1},
    "shared_slots": {"ici_islands": 2, "islands_per_slot": 2},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_nan_of_one_island_is_left_out_and_the_island_starts_anew(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Island 2 meets NaN in step 2: it must count for nothing, as if its gradient were lost.
    inner = AdamConfig(learning_rate=1e-2, warmup=4).build(12)
    steps = trained(tmp_path / "spoiled", BLOCKS[name], spoiled={(2, 2): np.nan}, inner=inner, steps=12)
    found = [i for i, step in enumerate(steps) if step.metrics.get("diloco/left_out")]
    assert caplog.text.count("is left out of the sync") == 1
    seeded = steps[found[0]]
    assert seeded.metrics["diloco/left_out"] == 1
    assert seeded.metrics["diloco/participants"] == 3
    assert "Island 2 is left out of the sync of fragment" in caplog.text
    assert np.array_equal(embeds(seeded)[2], theta(seeded))
    assert not np.any(seeded.state.islands.opt_state.inner_state[1].mu.embed.array[2])
    assert seeded.state.islands.opt_state.count.tolist() == [found[0] + 1] * 4
    assert not seeded.state.islands.failed.any()
    for state in (seeded.state, steps[-1].state):
        kept = state.model, state.opt_state, state.islands, state.crossed, state.residual
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept) if x.dtype.kind == "f")
    assert np.isfinite([step.loss for step in steps]).all()
    for step in steps:
        assert np.isfinite(theta(step)).all()
    assert steps[-1].metrics["train/loss_island_2"] < 100
    assert not np.array_equal(embeds(steps[-1])[2], theta(seeded))


def test_the_others_never_notice(tmp_path: Path) -> None:
    spoiled = trained(tmp_path / "spoiled", {}, spoiled={(2, 2): np.inf}, steps=4)
    weighed = trained(tmp_path / "weighed", {"weights": [1.0, 1.0, 0.0, 1.0]}, steps=4)
    for a, b in zip(spoiled, weighed, strict=True):
        assert np.array_equal(theta(a), theta(b))
        assert np.array_equal(np.delete(embeds(a), 2, 0), np.delete(embeds(b), 2, 0))


def test_parameters_that_are_not_finite_are_found_though_the_loss_is(tmp_path: Path) -> None:
    # An update that is not finite in the very step of the sync: no loss has seen it.
    steps = trained(tmp_path, {}, spoiled={(4, 1): np.inf}, steps=4)
    assert steps[3].metrics["diloco/left_out"] == 1
    assert np.isfinite(theta(steps[3])).all()


@pytest.mark.slow
def test_a_huge_outer_gradient_is_left_out_by_its_factor(tmp_path: Path) -> None:
    spoiled = {(3, 1): 1e4}
    for path, factor, left_out in (("off", None, 0), ("on", 10.0, 1), ("wide", 1e6, 0)):
        for overlap in (0, 2):
            block = {"guard_factor": factor, "overlap_steps": overlap}
            steps = trained(tmp_path / f"{path}{overlap}", block, spoiled=spoiled, steps=4 + overlap)
            assert steps[-1].metrics["diloco/left_out"] == left_out
            assert (np.abs(theta(steps[-1])).max() < 10) == bool(left_out)
            if left_out:
                assert np.array_equal(embeds(steps[-1])[1], theta(steps[-1]))


def test_what_was_captured_before_an_outlier_started_anew_counts_no_more(tmp_path: Path) -> None:
    # Fragment 0, captured after step 4, shows after step 6 that island 3 is far off; then fragment 1 is captured.
    block = {"sync_period": 4, "num_fragments": 2, "partition": "balanced", "overlap_steps": 2, "guard_factor": 5.0}
    steps = trained(tmp_path, block, spoiled={(1, 3): 1e4}, steps=10)
    syncs = [step.metrics for step in steps if "diloco/participants" in step.metrics]
    assert [sync["diloco/left_out"] for sync in syncs] == [0, 1, 1, 0]
    assert max(np.abs(theta(step)).max() for step in steps) < 10


@pytest.mark.parametrize("islands", [1, 2])
def test_all_islands_lost_end_the_run(islands: int, tmp_path: Path) -> None:
    spoiled = {(2 + k, k): np.nan for k in range(islands)}
    with pytest.raises(RunError, match=rf"no island has finite numbers left after step {1 + islands}\b.*guard: false"):
        trained(tmp_path, {}, spoiled=spoiled, islands=islands)


def test_without_guard_the_host_stops_on_nan_if_it_is_asked_to(tmp_path: Path) -> None:
    spoiled = {(2, 0): np.nan}
    with pytest.raises(RuntimeError, match="Loss is NaN"):
        trained(tmp_path / "stops", {"guard": False}, spoiled=spoiled)
    steps = trained(tmp_path / "goes_on", {"guard": False}, spoiled=spoiled, crash_on_nan=False, steps=4)
    assert np.isnan(steps[1].loss)
    assert np.isnan(theta(steps[3])[0])


def test_final_sync_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    block = {"sync_period": 6, "num_fragments": 3, "overlap_steps": 1, "final_sync": True}
    steps = trained(tmp_path, block, spoiled={(5, 3): np.nan}, steps=5)
    last = steps[-1]
    assert last.metrics["diloco/left_out/fragment_0"] == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(last.state) if x.dtype.kind == "f")
    assert np.array_equal(embeds(last)[3], theta(last))


def test_islands_left_out_of_different_fragments_do_not_end_the_run(tmp_path: Path) -> None:
    # Island k is far off in fragment k alone: each is left out of one sync and sound in the four others.
    rows = batches(4, 3)
    for batch in rows:
        embed, layers = batch["embed"], batch["layers"]
        batch["embed"] = hax.named(embed.array.at[0, 0].set(1e4), embed.axes)
        far = layers.array.at[1, 0, 0].set(1e4).at[2, 0, 1].set(1e4).at[3, 0, 2].set(1e4)
        batch["layers"] = hax.named(far, layers.axes)
    block = {"ici_islands": 4, "sync_period": 50, "num_fragments": 5, "guard_factor": 5.0}
    config = trainer_config(
        *(tmp_path, {**block, "outer": SgdConfig(learning_rate=0.5)}),
        **{"train_batch_size": 4, "num_train_steps": 3, "mesh": MeshConfig(axes={"data": 1, "model": -1})},
    )
    last = run(config, SGD, toy(), rows)[-1]
    assert [last.metrics[f"diloco/left_out/fragment_{f}"] for f in range(5)] == [1, 1, 1, 1, 0]
    assert [last.metrics[f"diloco/participants/fragment_{f}"] for f in range(5)] == [3, 3, 3, 3, 4]
    assert all(np.abs(x).max() < 10 for x in jax.tree.leaves(last.state.model))
    assert np.array_equal(embeds(last), np.tile(theta(last), (4, 1)))


def test_final_sync_where_the_data_ends_is_reported_and_heals_islands(tmp_path: Path) -> None:
    block = {"ici_islands": 4, "sync_period": 6, "num_fragments": 3, "overlap_steps": 1}
    options = {"train_batch_size": 4, "mesh": MeshConfig(axes={"data": 1, "model": -1})}
    ends = []
    for steps in (5, 99):  # the second run does not know that its fifth step is the last
        config = trainer_config(tmp_path / str(steps), block, num_train_steps=steps, **options)
        with entered(config, SGD, toy_loss) as trainer:
            state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
            state = trainer.train(state, batches(4, 5, {(5, 3): np.nan})).state
            metrics = recorder_of(trainer).steps[4]
        ends.append({name: value for name, value in metrics.items() if name.startswith(("diloco/", "train/loss"))})
        assert metrics["diloco/left_out/fragment_0"] == 1
        assert metrics["diloco/bytes_per_island"] == count_of(state.sent_bytes)
        assert np.array_equal(state.islands.params.embed.array[3], state.model.embed.array)
        assert not state.islands.failed.any()
    # The second run has reported its fifth step before; one sync of it too, under its plain names.
    planned, early = ends
    np.testing.assert_equal({name: early[name] for name in planned}, planned)


def test_an_island_that_leaves_between_capture_and_outer_step_is_in_the_metrics(tmp_path: Path) -> None:
    # Captured after step 4 on all islands; two leave after step 5; the outer step is in step 6.
    steps = trained(tmp_path, {"schedule_islands": [[0, 4], [5, 2]], "overlap_steps": 2})
    sync = steps[5].metrics
    assert "train/loss_island_2" in steps[4].metrics and "train/loss_island_2" not in sync
    start, islands = toy().parts(), steps[3].state.islands.params
    own = np.concatenate([islands.embed.array, islands.layers.stacked.weight.array.reshape(4, -1)], axis=1)
    moved = np.concatenate([start["embed"], start["layers"].reshape(-1)]) - own
    norms = np.linalg.norm(moved, axis=1)
    pairs = [(a, b) for a in range(4) for b in range(a)]
    cosine = sum(moved[a] @ moved[b] for a, b in pairs) / sum(norms[a] * norms[b] for a, b in pairs)
    assert (sync["diloco/participants"], sync["diloco/left_out"]) == (4, 0)
    assert sync["diloco/island_distance"] == pytest.approx(norms.mean(), abs=1e-5)
    assert sync["diloco/outer_grad_cosine"] == pytest.approx(cosine, abs=1e-5)


def test_an_island_that_does_not_train_is_not_left_out(tmp_path: Path) -> None:
    # Islands 2 and 3 are away and their numbers are spoiled: nothing of them is wanted, and the run goes on.
    spoiled = {(2, 2): np.nan, (2, 3): np.nan}
    steps = trained(tmp_path, {"schedule_islands": [[0, 2]]}, spoiled=spoiled)
    assert [step.metrics.get("diloco/left_out") for step in steps] == [None, None, None, 0] * 2
    assert steps[3].state.islands.status[:, 0].tolist() == [0] * 4


# --- Faults that other implementations had


def own_steps(start: np.ndarray, island: int, first: int, last: int) -> np.ndarray:
    """The embedding of one island after its inner steps `first` to `last` alone."""
    for step in range(first, last + 1):
        start = start - 0.1 * (start - np.asarray(batch(step - 1, 4)["embed"].array)[island])
    return start


def test_fresh_parameters_of_a_joiner_are_not_overwritten(tmp_path: Path) -> None:
    # Fragment 0 is captured after step 4 and merges after step 7; in between islands 2 and 3 join.
    block = {"schedule_islands": [[0, 2], [5, 4]], "overlap_steps": 3}
    steps = trained(tmp_path, block)
    for island in (2, 3):
        own = own_steps(theta(steps[4]), island, 6, 8)
        np.testing.assert_allclose(embeds(steps[7])[island], own, atol=1e-6)


def test_a_joiner_does_not_wipe_the_rest(tmp_path: Path) -> None:
    # Until the next sync nobody can tell that it has come.
    alone = trained(tmp_path / "alone", {"schedule_islands": [[0, 2]]}, steps=7)
    joined = trained(tmp_path / "joined", {"schedule_islands": [[0, 2], [5, 4]]}, steps=7)
    for a, b in zip(alone, joined, strict=True):
        assert np.array_equal(theta(a), theta(b))
        assert np.array_equal(embeds(a)[:2], embeds(b)[:2])


def test_learning_rate_of_a_joiner_is_that_of_the_global_step(tmp_path: Path) -> None:
    inner = AdamConfig(learning_rate=1e-2, warmup=4).build(8)
    steps = trained(tmp_path, {"schedule_islands": [[0, 1], [5, 4]]}, inner=inner)
    rates = steps[-1].state.islands.opt_state.hyperparams["learning_rate"]
    assert len(set(rates.tolist())) == 1
    everyone = trained(tmp_path / "all", {}, inner=inner)
    assert rates[0] == everyone[-1].state.islands.opt_state.hyperparams["learning_rate"][0]


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_broken_island_does_not_recover_in_a_loop(overlap: int, tmp_path: Path) -> None:
    # With V = 2 the next fragment is captured in the step in which the island is found to be broken.
    block = {"sync_period": 4, "num_fragments": 2, "partition": "balanced", "overlap_steps": overlap}
    steps = trained(tmp_path, block, spoiled={(1, 0): np.nan}, steps=10)
    syncs = [step.metrics for step in steps if "diloco/participants" in step.metrics]
    missed = 2 if overlap == 2 else 1
    assert [sync["diloco/left_out"] for sync in syncs] == [1] * missed + [0] * (len(syncs) - missed)
    assert [sync["diloco/participants"] for sync in syncs] == [3] * missed + [4] * (len(syncs) - missed)


@pytest.mark.parametrize("wire", ["f32", "int8"])
def test_all_islands_see_the_same_sync_succeed(wire: str, tmp_path: Path) -> None:
    block = {"ici_islands": 4, "sync_period": 2, "drop_rate": 0.5, "wire": wire, "final_sync": False}
    config = trainer_config(
        tmp_path, block, train_batch_size=4, num_train_steps=8, mesh=MeshConfig(axes={"data": 1, "model": -1})
    )
    with entered(config, SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
        for rows in batches(4, 8, {(3, 1): np.nan}):
            state = trainer.train_step(state, rows).state
            for x in jax.tree.leaves((state.model, state.opt_state, state.outer_steps)):
                assert len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1


# --- Resume


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "stops"), [(0, [4]), (2, [3, 7])])
def test_resume_draws_the_same_and_remembers_who_failed(overlap: int, stops: list[int], tmp_path: Path) -> None:
    inner = AdamConfig(learning_rate=1e-2, warmup=4).build(10)
    block = {
        **{
            "drop_rate": 0.3,
            "schedule_islands": [[0, 3], [3, 4], [7, 2]],
            "weights": "tokens",
            "overlap_steps": overlap,
        },
        **{"ici_islands": 4, "sync_period": 4, "num_fragments": 2, "partition": "balanced", "wire": "int8"},
        "overlap_steps": overlap,
    }
    data = batches(4, 10, {(5, 0): np.nan})
    options = {"train_batch_size": 4, "num_train_steps": 10, "mesh": MeshConfig(axes={"data": 1, "model": -1})}

    def go(path: Path, stop: int | None) -> Any:
        with entered(trainer_config(path, block, **options), inner, toy_loss) as trainer:
            state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
            for rows in data[int(state.step) : stop]:
                state = trainer.train_step(state, rows).state
            if stop is not None:
                save_checkpoint(state, stop, str(path / "checkpoints" / "toy" / f"step-{stop}"), is_temporary=False)
                jax.effects_barrier()
            return jax.tree.map(np.array, jax.tree.leaves(state))

    straight = go(tmp_path / "straight", None)
    for stop in stops:
        path = tmp_path / str(stop)
        go(path, stop)
        resumed = go(path, None)
        assert all(np.array_equal(a, b) for a, b in zip(straight, resumed, strict=True)), stop


def test_an_island_that_options_let_join_on_resume_starts_from_theta(tmp_path: Path) -> None:
    trained(tmp_path, {"schedule_islands": [[0, 2]], "final_sync": True}, steps=6)
    steps = trained(tmp_path, {"schedule_islands": [[0, 4]]}, steps=8)
    assert len(steps) == 2
    assert steps[0].state.active == 4
    assert steps[0].metrics["train/loss_island_3"] < 100


# --- Bad options


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"weights": [1.0]}, r"trainer\.diloco\.weights \(\[1\.0\]\) must have one number for each of the 4 islands"),
        (
            {"weights": [0.0, 0.0, 1.0, 1.0], "schedule_islands": [[0, 4], [9, 2]]},
            r"weights \(\[0\.0, 0\.0, 1\.0, 1\.0\]\) must give one of the first 2 islands a weight, .* from step 9 on",
        ),
        ({"schedule_islands": [[0, 5]]}, r"schedule_islands \(\[\[0, 5\]\]\) must name at most the 4 islands"),
    ],
)
def test_weights_and_counts_that_do_not_fit_the_islands_are_refused(block: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        trained(tmp_path, block)


def test_tokens_follow_a_batch_schedule(tmp_path: Path) -> None:
    config = trainer_config(
        tmp_path,
        {"ici_islands": 4, "weights": "tokens", "schedule_islands": [[0, 2], [1, 4]], "sync_period": 2},
        train_batch_size=[ScheduleStep(0, 4), ScheduleStep(1, 12)],
        mesh=MeshConfig(axes={"data": 1, "model": -1}),
    )
    config._validate_and_set_defaults()
    # Islands 0 and 1 have had 4 + 12 rows, 2 and 3 only the 12.
    np.testing.assert_allclose(config.participation.weights(2, 0), [1, 1, 0.75, 0.75])
