"""Checkpoints of version 0.1.0, kept as that version wrote them, and what this one makes of them.

Two islands of the toy, three fragments, V = 1, int8 with error feedback; island 1 met a NaN in step 5. After step 6 it
is left out of fragment 0, which is in flight; after step 8 it has started anew, and fragment 1 is in flight.
"""

import tarfile
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
import optax
import pytest
from levanter.utils.mesh import MeshConfig

from helpers.paths import DATA
from helpers.toy_model import Step, entered, run, toy_batch, toy_loss, trainer_config
from helpers.toy_runs import toy
from levanter_diloco.checkpoint.codec import holds_islands, is_old, stored_facts
from levanter_diloco.commands.inspect import CheckpointReport, InFlight
from levanter_diloco.islands.byte_count import count_of
from levanter_diloco.islands.state import Status

BLOCK = {"sync_period": 6, "num_fragments": 3, "ici_islands": 2, "overlap_steps": 1, "mixing_alpha": 0.5}
BLOCK |= {"wire": "int8", "wire_block": 4, "error_feedback": True, "final_sync": False}
SGD = optax.sgd(0.1, momentum=0.9)


def batch(step: int) -> dict:
    rng = np.random.default_rng(1000 + step)
    rows = toy_batch(rng.normal(size=(4, 3)), rng.normal(size=(4, 2, 4)))
    if step == 4:
        rows["embed"] = hax.named(rows["embed"].array.at[2:].set(np.nan), rows["embed"].axes)
    return rows


BATCHES = [batch(step) for step in range(12)]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("0.1.0")
    with tarfile.open(DATA / "checkpoints_0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def config(folder: Path, **block: Any) -> Any:
    mesh = MeshConfig(axes={"data": 1, "model": -1})
    return trainer_config(folder, {**BLOCK, **block}, mesh=mesh, train_batch_size=4, num_train_steps=12)


def resumed(old: Path, folder: Path, saved: int, **block: Any) -> list[Step]:
    options = config(folder, **block)
    options.load_checkpoint_path = str(old / f"step-{saved}")
    return run(options, SGD, toy(99), BATCHES)


def test_facts_are_read(old: Path) -> None:
    path = str(old / "step-5")
    assert holds_islands(path) and is_old(path)
    facts = stored_facts(path)
    assert (facts["islands"], facts["num_fragments"], facts["overlap_steps"]) == (2, 3, 1)
    assert CheckpointReport.of(path).in_flight == (InFlight(fragment=0, captured=6, merges=7),)


@pytest.mark.parametrize(
    ("saved", "weights", "status", "outer_steps"),
    [
        (5, [[1, 1, 1], [0, 1, 1]], [[0, 0, 0], [Status.LEFT_OUT, 0, 0]], [0, 1, 1]),
        (7, [[1, 1, 1], [0, 1, 0]], [[0, 0, 0], [Status.RESTARTED, 0, Status.RESTARTED]], [1, 1, 1]),
    ],
)
def test_status_and_bytes_are_those_of_then(
    saved: int, weights: list, status: list, outer_steps: list, old: Path, tmp_path: Path
) -> None:
    options = config(tmp_path)
    options.load_checkpoint_path = str(old / f"step-{saved}")
    with entered(options, SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy(99))
        assert int(state.step) == saved + 1
        assert state.islands.weights.tolist() == weights and state.islands.status.tolist() == status
        assert state.outer_steps.tolist() == outer_steps
        assert count_of(state.sent_bytes) == 32 * sum(outer_steps)  # as its metrics said
        assert {name: int(x) for name, x in state.layout.items()} == stored_facts(str(old / f"step-{saved}"))


@pytest.mark.slow
@pytest.mark.parametrize("saved", [5, 7])
def test_run_goes_on_as_if_never_stopped(saved: int, old: Path, tmp_path: Path) -> None:
    whole = run(config(tmp_path / "whole"), SGD, toy(), BATCHES)[saved + 1 :]
    # Other processors may round otherwise, so that the steps before the checkpoint differ in the last place.
    for ours, theirs in zip(resumed(old, tmp_path / "resumed", saved), whole, strict=True):
        for a, b in zip(jax.tree.leaves(ours.state), jax.tree.leaves(theirs.state), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        assert ours.metrics["diloco/bytes_per_island"] == theirs.metrics["diloco/bytes_per_island"]


def test_run_goes_on_in_another_layout(old: Path, tmp_path: Path) -> None:
    steps = resumed(old, tmp_path, 7, num_fragments=1, overlap_steps=0, wire="f32", error_feedback=False)
    last = steps[-1]
    assert np.isfinite(last.state.model.embed.array).all()
    assert len(steps) == 4 and last.state.outer_steps.tolist() == [2]
    assert last.metrics["diloco/bytes_per_island"] == 96 + 4 * 11  # what was sent, and one sync of 11 elements in f32


def test_run_that_starts_adopts_an_old_state(old: Path, tmp_path: Path) -> None:
    options = config(tmp_path)
    with entered(options, SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy(99))
        adopted = trainer.loader.adopt(state, str(old / "step-7"))
        assert adopted.islands.status.tolist() == [[0, 0, 0], [Status.RESTARTED, 0, Status.RESTARTED]]
        assert count_of(adopted.sent_bytes) == 96
