"""Checkpoints that are whole, damaged, or of another model."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from levanter.checkpoint import CheckpointerConfig, save_checkpoint
from levanter.tensorstore_serialization import _flatten_serializable_leaves
from levanter.utils.mesh import MeshConfig

from helpers.command_runs import corrupt
from helpers.toy_model import Toy, entered, numbers, save_now, toy_batch, toy_loss, trainer_config
from levanter_diloco.checkpoint.checksum import sums_of_shards
from levanter_diloco.checkpoint.integrity import check, checksum_of, stored_arrays, with_checksums
from levanter_diloco.checkpoint.label import Label
from levanter_diloco.cli import main
from levanter_diloco.commands.compile.audit import Audit
from levanter_diloco.errors import DamagedCheckpoint, ModelError
from levanter_diloco.options.config import DiLoCoConfig

SGD = optax.sgd(0.1)
STREAMING = {"sync_period": 6, "num_fragments": 3, "overlap_steps": 1, "final_sync": False}
ROWS = toy_batch(np.ones((8, 3)), np.ones((8, 2, 4)))


def toy(seed: int = 0) -> Toy:
    rng = np.random.default_rng(seed)
    return Toy.of(rng.normal(size=3), rng.normal(size=(2, 4)))


def options(path: Path, block: dict | None = None, **others: Any) -> Any:
    every = CheckpointerConfig(base_path=str(path / "checkpoints"), save_interval=None, keep=[{"every": 1}])
    mesh = MeshConfig(axes={"data": 1, "model": -1}, param_mapping={"entry": "data"})
    defaults = {"num_train_steps": 4, "mesh": mesh, "checkpointer": every}
    return trainer_config(path, {"ici_islands": 2, **STREAMING, **(block or {})}, **{**defaults, **others})


def started(config: Any, model: Any = None) -> Any:
    with entered(config, SGD, toy_loss) as trainer:
        return numbers(trainer.initial_state(jax.random.PRNGKey(0), model=toy(9) if model is None else model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints `step-1` to `step-3`."""
    path = tmp_path_factory.mktemp("saved")
    with entered(options(path, {"wire": "int4"}), SGD, toy_loss) as trainer:
        trainer.train(trainer.initial_state(jax.random.PRNGKey(0), model=toy()), [ROWS] * 4)
    return path


@pytest.fixture
def run_folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` to do damage in; its checkpoints."""
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints" / "toy"


def test_checksums_cross_between_no_devices(tmp_path: Path) -> None:
    with entered(options(tmp_path), SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
        mesh = trainer.device_mesh
        for x in jax.tree.leaves(eqx.filter(state.saveable_state, eqx.is_array)):
            compiled = sums_of_shards.lower(x, mesh, x.sharding.spec).compile()
            assert Audit.of(compiled, island_size=1).sent_bytes == 0
        names = sorted(_flatten_serializable_leaves(state.saveable_state)[0])
        rows = np.asarray(with_checksums(state.saveable_state, mesh)["checksums"])
    # Two islands of four devices: what both hold counts once, what is an island's on one of its devices.
    assert rows[:, names.index("model/embed")].nonzero()[0].tolist() == [0]
    assert rows[:, names.index("islands/params/embed")].nonzero()[0].tolist() == [0, 4]


def test_saved_checkpoint_is_whole_and_says_what_it_is(saved: Path) -> None:
    path = str(saved / "checkpoints" / "toy" / "step-2")
    sums = check(path)
    assert sums is not None
    assert sums.keys() == stored_arrays(path).keys() - {"checksums"}
    assert {
        "model/embed",
        "islands/params/embed",
        "captured/rest/embed",
        "opt_state/rest/0/trace/embed",
    } <= sums.keys()
    label = Label.read(path)
    assert label is not None and label.islands == 2
    assert {name: label.diloco[name] for name in STREAMING} == STREAMING
    assert label.diloco["wire"] == "int4"


def test_inspect_says_what_is_in_flight(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(saved / "checkpoints" / "toy" / "step-1")])
    printed = capsys.readouterr().out
    assert (
        "toy/step-1: 2 steps\nislands      K=2\nschedule     H=6 (6 in effect), P=3, V=1, layers, wire int4\n"
        in printed
    )
    assert "in flight    fragment 1, captured after step 2, merges after step 3\nouter steps  0 0 0 " in printed
    main(["inspect", str(saved / "checkpoints" / "toy")])
    assert "in flight    fragment 2, captured after step 4, merges after step 5" in capsys.readouterr().out


def test_inspect_of_a_damaged_checkpoint_is_one_line(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt(run_folder / "step-3", "islands/key")
    with pytest.raises(SystemExit) as exit:
        main(["inspect", str(run_folder)])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and "step-3 is damaged: islands/key differs from the checksum saved along" in line


def test_checksum_of_theta_is_the_same_on_other_devices(tmp_path: Path) -> None:
    found = set()
    for name, block in {
        "two": {"ici_islands": 2},
        "four": {"ici_islands": 4},
        "host": {"islands_per_slot": 2, "outer_memory": "pinned_host"},
        "shares": {"outer_memory": "sharded"},
    }.items():
        config = options(tmp_path / name, block)
        with entered(config, SGD, toy_loss) as trainer:
            state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
            save_now(trainer, state, step=1)
        sums = check(str(tmp_path / name / "checkpoints" / "toy" / "step-1"))
        assert sums is not None
        found.add(checksum_of(sums, "model"))
    assert len(found) == 1


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def all_files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", [flip, cut, lambda file: file.write_bytes(b""), Path.unlink])
def test_damage_to_any_file_is_found_or_harms_nothing(damage: Any, run_folder: Path) -> None:
    checkpoint, whole = run_folder / "step-3", run_folder / "whole"
    checkpoint.rename(whole)
    before, found = check(str(whole)), 0
    for file in all_files(whole):
        if file.name == "metadata.json":  # the host's mark that a checkpoint is one
            continue
        shutil.copytree(whole, checkpoint)
        damage(checkpoint / file.relative_to(whole))
        try:
            assert check(str(checkpoint)) == before  # the store leaves files behind that nothing refers to
        except DamagedCheckpoint as error:
            found += 1
            assert str(checkpoint) in str(error) and "\n" not in str(error) and len(str(error)) < 700
        shutil.rmtree(checkpoint)
    assert found >= 4  # diloco.json, manifest.json, manifest.ocdbt and the data


def test_one_bit_of_a_file_is_told_by_the_arrays_name(tmp_path: Path) -> None:
    # At this size an array is a file's raw bytes, which the store itself does not check.
    class Plain(eqx.Module):
        small: jax.Array
        large: jax.Array

    mesh = Mesh(np.array(jax.devices()), ("diloco",))
    state = Plain(jnp.ones(3), jax.random.normal(jax.random.PRNGKey(0), (64, 64)))
    save_checkpoint(with_checksums(state, mesh), 1, tmp_path)
    Label.of(8, DiLoCoConfig(), None).write(str(tmp_path))
    assert (check(str(tmp_path)) or {}).keys() == {"small", "large"}
    content = np.asarray(state.large).tobytes()
    (file,) = [file for file in (tmp_path / "d").iterdir() if content in file.read_bytes()]
    damaged = bytearray(file.read_bytes())
    damaged[damaged.find(content) + 5000] ^= 4
    file.write_bytes(damaged)
    with pytest.raises(DamagedCheckpoint, match=rf"{tmp_path} is damaged: large differs from the checksum"):
        check(str(tmp_path))


@pytest.mark.parametrize("name", ["model/embed", "islands/key", "opt_state/rest/0/trace/embed"])
def test_resume_names_the_damaged_array(name: str, run_folder: Path) -> None:
    corrupt(run_folder / "step-3", name)
    with pytest.raises(
        DamagedCheckpoint,
        match=rf"step-3 is damaged: {name} differs from .* trainer\.diloco\.on_damaged_checkpoint \(refuse\)",
    ):
        started(options(run_folder.parent.parent))


def test_previous_checkpoint_is_used_when_allowed(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    corrupt(run_folder / "step-3", "model/embed")
    (run_folder / "step-2" / "manifest.ocdbt").unlink()
    config = options(run_folder.parent.parent, {"on_damaged_checkpoint": "previous"})
    with caplog.at_level(logging.WARNING), entered(config, SGD, toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy(9))
        assert int(state.step) == 2
        trainer.train(state, [ROWS] * 2)
    assert "step-3 is damaged: model/embed differs" in caplog.text
    assert "step-2 is damaged" in caplog.text
    # Out of the way, so that the run could save its own.
    assert sorted(path.name for path in (run_folder / "damaged").iterdir()) == ["step-2", "step-3"]
    assert check(str(run_folder / "step-3")) is not None
    assert int(started(config).step) == 4


def test_no_whole_checkpoint_is_an_error(run_folder: Path) -> None:
    for checkpoint in run_folder.iterdir():
        if checkpoint.is_dir():
            corrupt(checkpoint, "model/embed")
    with pytest.raises(DamagedCheckpoint, match=r"step-3 is damaged: model/embed .*; no other is whole"):
        started(options(run_folder.parent.parent, {"on_damaged_checkpoint": "previous"}))


def test_killed_save_counts_as_no_checkpoint(run_folder: Path) -> None:
    # Speedtronic: weights and metadata are written apart; killed between the two, the one before is used.
    (run_folder / "step-3" / "metadata.json").unlink()
    assert int(started(options(run_folder.parent.parent)).step) == 3


def test_damaged_metadata_is_named(run_folder: Path) -> None:
    cut(run_folder / "step-3" / "metadata.json")
    with pytest.raises(DamagedCheckpoint, match=r"step-3 is damaged: metadata\.json cannot be read; remove the"):
        started(options(run_folder.parent.parent))


def test_another_model_is_named(run_folder: Path) -> None:
    class Other(eqx.Module):
        embedding: Any
        layers: Any

    other = Other(toy().embed, toy().layers)
    with pytest.raises(ModelError, match=r"step-3 is of another model, which lacks model/embed"):
        started(options(run_folder.parent.parent, {"num_fragments": 3}), other)


def test_label_of_a_run_with_formats_of_its_own_is_plain_json(saved: Path) -> None:
    label = json.loads((saved / "checkpoints" / "toy" / "step-1" / "diloco.json").read_text())
    assert label["diloco"]["outer"]["type"] == "nesterov"
    assert label["model"] is None  # a toy has no YAML
