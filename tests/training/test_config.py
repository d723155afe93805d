"""The trainer's options on a mesh: mappings, batches, and the shardings of a state."""

from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import pytest
from haliax import Axis
from haliax.partitioning import set_mesh
from haliax.util import is_named_array
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path
from levanter.trainer_state import TrainerState
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import Toy, trainer_config
from levanter_diloco.islands.layout import Layout
from levanter_diloco.islands.state import DiLoCoState


@pytest.mark.parametrize("num_islands", [1, 2, 4, 8])
def test_batch_rows_of_an_island_lie_on_its_devices(num_islands: int, tmp_path: Path):
    config = trainer_config(tmp_path, {"ici_islands": num_islands}, train_batch_size=16)
    config._validate_and_set_defaults()
    rows = 16 // num_islands
    with set_mesh(config.device_mesh):
        batch = hax.shard(hax.arange(Axis("batch", 16)), config.compute_axis_mapping)
    slot_of = {device: slot for slot, devices in enumerate(config.device_mesh.devices) for device in devices.flat}
    found: dict[int, set[int]] = {island: set() for island in range(num_islands)}
    for shard in batch.array.addressable_shards:
        found[slot_of[shard.device]] |= set(np.asarray(shard.data).tolist())
    assert found == {island: set(range(island * rows, (island + 1) * rows)) for island in range(num_islands)}


def test_mappings_of_the_run_and_of_one_island(tmp_path: Path):
    config = trainer_config(tmp_path, {"ici_islands": 2})
    config._validate_and_set_defaults()
    assert config.compute_axis_mapping["batch"] == ("diloco", "replica_dcn", "replica", "data")
    assert config.compute_axis_mapping["diloco"] == config.parameter_axis_mapping["diloco"] == "diloco"
    island = config.island_config
    assert island.compute_axis_mapping["batch"] == ("replica_dcn", "replica", "data")
    assert "diloco" not in island.compute_axis_mapping and "diloco" not in island.parameter_axis_mapping
    assert island.parameter_axis_mapping["embed"] == config.parameter_axis_mapping["embed"] == "data"
    assert island.train_batch_size == 4


def test_without_the_block_the_mesh_is_the_hosts(tmp_path: Path):
    config = trainer_config(tmp_path, None)
    assert "diloco" not in config.device_mesh.shape
    assert "diloco" not in config.compute_axis_mapping and "diloco" not in config.parameter_axis_mapping


def test_batch_that_islands_do_not_divide_is_refused_before_any_data(tmp_path: Path):
    config = trainer_config(tmp_path, {"ici_islands": 4}, train_batch_size=12)
    with pytest.raises(ValueError) as error:
        config._validate_and_set_defaults()
    assert str(error.value) == (
        "trainer.train_batch_size (12) must be a multiple of 8: 4 islands x 2 rows (the island's data axes x "
        "trainer.per_device_parallelism); 16 works."
    )


def test_sharding_of_the_state_follows_its_axes(tmp_path: Path):
    # `entry` over data; everything of an island on the island; the run's own counts and keys everywhere.
    mesh = MeshConfig(axes={"data": -1}, param_mapping={"entry": "data"})
    diloco = {"ici_islands": 2, "num_fragments": 3, "sync_period": 6, "overlap_steps": 1}
    config = trainer_config(tmp_path, diloco, mesh=mesh)
    model = Toy.of(np.zeros(3), np.zeros((2, 4)))
    host = TrainerState.init(optax.adam(0.1), model, key=jax.random.PRNGKey(0), is_trainable=True)
    state = DiLoCoState.of(host, Layout(config.diloco, 2, {}), optax.sgd(0.7, momentum=0.9))
    state = eqx.filter(state, eqx.is_array)
    shardings = config.placement.shardings(state)
    paths = [path for path, _ in tree_leaves_with_path(state, is_leaf=is_named_array)]
    specs = {keystr(path): sharding.spec for path, sharding in zip(paths, shardings, strict=True)}
    outer, own = PartitionSpec("data", None), PartitionSpec("diloco")
    layers = "layers.stacked.weight"
    expected = {
        f".model.{layers}": outer,
        ".model.embed": PartitionSpec(None),
        f".opt_state['layers'][0].trace.{layers}": PartitionSpec(None, "data", None),  # fragment, entry, row
        ".opt_state['rest'][0].trace.embed": PartitionSpec(None, None),
        f".islands.params.{layers}": PartitionSpec("diloco", *outer),
        f".islands.opt_state[0].mu.{layers}": PartitionSpec("diloco", *outer),
        ".islands.opt_state[0].count": own,
        ".islands.key": own,
        f".captured['layers'].{layers}": PartitionSpec("diloco", "data", None),
        ".step": PartitionSpec(),
        ".training_key": PartitionSpec(),
        ".outer_steps": PartitionSpec(),
        ".settled": PartitionSpec(),
        ".layout['islands']": PartitionSpec(),
    }
    assert {path: specs[path] for path in expected} == expected
    assert all(spec[:1] == ("diloco",) for path, spec in specs.items() if path.startswith((".islands", ".captured")))
