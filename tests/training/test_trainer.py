"""The trainer from end to end: trajectories, islands against stock runs, schedules, metrics."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from haliax.util import is_named_array
from helpers.host_runs import joined, llama, stock_config, stock_runs, text_batch, text_loss, z_loss
from helpers.paths import DATA
from helpers.toy_model import Embed, Toy, entered, numbers, run, toy_batch, toy_loss, trainer_config
from levanter.checkpoint import load_checkpoint
from levanter.optim.config import AdamConfig
from levanter.optim.muon import MuonConfig
from levanter.utils.mesh import MeshConfig

from levanter_diloco.algorithm.outer import outer_gradient
from levanter_diloco.options.config import AverageConfig, NesterovConfig, OuterOptimizerConfig, SgdConfig

pytestmark = pytest.mark.usefixtures("compile_cache")

DATA = json.loads((DATA / "trajectories.json").read_text())
SGD = optax.sgd(0.1)


def config_of(tmp_path: Path, block: dict, **options: Any) -> Any:
    """Options of a run with a folder of its own, so that it starts afresh."""
    return trainer_config(Path(tempfile.mkdtemp(dir=tmp_path)), block, **options)


def toy(seed: int = 0) -> Toy:
    rng = np.random.default_rng(seed)
    return Toy.of(rng.normal(size=3), rng.normal(size=(2, 4)))


def rows(seed: int, count: int) -> dict:
    rng = np.random.default_rng(1000 + seed)
    return toy_batch(rng.normal(size=(count, 3)), rng.normal(size=(count, 2, 4)))


def island_rows(steps: int, islands: int, count: int) -> list[list[dict]]:
    """`[step][island]`: a batch of `count` rows, all different."""
    return [[rows(islands * step + k, count) for k in range(islands)] for step in range(steps)]


def mesh(**axes: int) -> MeshConfig:
    """A mesh whose `model` takes the devices left; the toy's entries are sharded over `data`."""
    return MeshConfig(axes={"data": 1, "model": -1, **axes}, param_mapping={"entry": "data"})


def island(step: Any, k: int) -> Any:
    return jax.tree.map(lambda x: x[k], step.state.islands)


def outer(step: Any) -> Any:
    return step.state.model


def difference(left: Any, right: Any) -> float:
    """The largest absolute difference between leaves of two trees of the same arrays."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max((float(np.max(np.abs(np.float64(a) - np.float64(b)))) for a, b in pairs), default=0.0)


def assert_bit_equal(left: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def tree_of(trace: dict, name: str) -> dict[str, np.ndarray]:
    return {part: np.array(value) for part, value in trace[name].items()}


def momentum(step: Any, *, sequential: bool) -> dict[str, np.ndarray]:
    """The outer momentum in the toy's own shapes, from the states of all fragments."""
    rest = jax.tree.map(lambda x: x["fragment", 0], step.state.opt_state["rest"][0].trace, is_leaf=is_named_array)
    if "layers" not in step.state.opt_state:
        return rest.parts()
    layers = step.state.opt_state["layers"][0].trace.layers.stacked.weight
    order = ("entry", "fragment", "row") if sequential else ("entry", "row", "fragment")
    return {"embed": rest.embed.array, "layers": layers.rearrange(order).array.reshape(2, 4)}


# --- Golden trajectories


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["name"])
def test_trajectory_matches_golden(case: dict, tmp_path: Path) -> None:
    inner = SGD
    if case["inner_optimizer"].startswith("adamw"):
        inner = optax.adamw(0.05, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    block = {name: case[name] for name in ("sync_period", "num_fragments", "overlap_steps", "mixing_alpha")}
    order = "sequential" if case["sequential_layers"] else "interleaved"
    config = config_of(
        tmp_path,
        {**block, "layer_order": order, "ici_islands": 2, "final_sync": False},
        train_batch_size=2,
        mesh=mesh(),
    )
    steps = run(config, inner, Toy.of(**DATA["init"]), [toy_batch(**DATA["target"])] * 14)
    assert len(steps) == len(case["trace"]) == 14
    # MaxText steps Theta at the capture, we once the fragment has crossed: V steps later, or dh if that is less.
    early = min(case["overlap_steps"], config.diloco.schedule.steps_per_sync)
    for t, (step, golden) in enumerate(zip(steps, case["trace"], strict=True)):
        assert difference(step.state.islands.params, tree_of(golden, "inner")) < 1e-6
        losses = [step.metrics[f"train/loss_island_{k}"] for k in range(2)]
        np.testing.assert_allclose(losses, golden["loss"], atol=1e-5)
        if t >= early:
            moved = case["trace"][t - early]
            assert difference(outer(step), tree_of(moved, "outer")) < 1e-6
            trace = momentum(step, sequential=case["sequential_layers"])
            assert difference(trace, tree_of(moved, "trace")) < 1e-6


# --- Wire formats


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


# --- Equivalences with data parallel and with stock runs


def test_averaging_every_step_equals_data_parallel(tmp_path: Path) -> None:
    batches = [rows(step, 8) for step in range(14)]
    [stock] = stock_runs(stock_config(tmp_path, train_batch_size=8), SGD, toy(), [batches])
    config = config_of(tmp_path, {"sync_period": 1, "ici_islands": 4, "outer": AverageConfig()}, mesh=mesh())
    for ours, theirs in zip(run(config, SGD, toy(), batches), stock, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert difference(outer(ours), theirs.state.model) < 1e-6


@pytest.mark.parametrize("inner", [SGD, AdamConfig(learning_rate=1e-2).build(14)], ids=["sgd", "adam"])
def test_one_island_that_is_copied_every_step_equals_stock(inner: Any, tmp_path: Path) -> None:
    batches = [rows(step, 8) for step in range(14)]
    [stock] = stock_runs(stock_config(tmp_path, train_batch_size=8), inner, toy(), [batches])
    block = {"sync_period": 1, "ici_islands": 1, "outer": SgdConfig(learning_rate=1.0)}
    ours = run(config_of(tmp_path, block, mesh=mesh()), inner, toy(), batches)
    # Theta - (Theta - theta) is theta to the last bit only where theta did not change its scale.
    assert [step.loss for step in ours] == pytest.approx([step.loss for step in stock], rel=1e-6)
    assert difference(outer(ours[-1]), stock[-1].state.model) < 1e-6


@pytest.mark.slow
def test_one_island_that_is_copied_every_step_ends_at_the_stock_loss(tmp_path: Path) -> None:
    batches = [text_batch(step, 8) for step in range(10)]
    inner = AdamConfig(learning_rate=1e-3).build(10)
    [stock] = stock_runs(stock_config(tmp_path, train_batch_size=8), inner, llama(), [batches], text_loss)
    block = {"sync_period": 1, "ici_islands": 1, "outer": SgdConfig(learning_rate=1.0)}
    config = config_of(tmp_path, block, mesh=mesh(data=8), num_train_steps=10)
    ours = run(config, inner, llama(), batches, text_loss)
    assert ours[-1].loss == pytest.approx(stock[-1].loss, rel=1e-6)
    single = stock_config(tmp_path, {"data": 8}, train_batch_size=8)
    [same_mesh] = stock_runs(single, inner, llama(), [batches], text_loss)
    assert ours[-1].loss == same_mesh[-1].loss


@pytest.mark.slow
def islands_of(step: Any) -> Any:
    """The islands without their weights, of which there is one for each fragment."""
    return replace(step.state.islands, weights=None)


def test_fragments_synced_at_once_equal_vanilla(tmp_path: Path) -> None:
    batches = [rows(step, 8) for step in range(2)]

    def final(period: int, fragments: int, order: str = "interleaved", partition: str = "layers") -> Any:
        block = {"sync_period": period, "num_fragments": fragments, "layer_order": order, "partition": partition}
        block["ici_islands"] = 2
        config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=2)
        return run(config, SGD, toy(), batches)[-1]

    vanilla = final(2, 1)
    assert difference(outer(vanilla), numbers(toy())) > 0.01
    for fragments, order in ((3, "interleaved"), (3, "sequential"), (5, "interleaved"), (1, "interleaved")):
        streaming = final(15, fragments, order)
        assert_bit_equal(outer(streaming), outer(vanilla))
        assert_bit_equal(islands_of(streaming), islands_of(vanilla))
        assert_bit_equal(momentum(streaming, sequential=order == "sequential"), momentum(vanilla, sequential=False))
    balanced = final(15, 4, partition="balanced")
    assert_bit_equal(outer(balanced), outer(vanilla))
    assert_bit_equal(islands_of(balanced), islands_of(vanilla))


TOY_CASES = {
    "fsdp": ({"data": 2}, {}, SGD),
    "tensor": ({"model": 2}, {}, SGD),
    "accumulation": ({"model": 2}, {"per_device_parallelism": 1}, SGD),
    "accumulation_fsdp": ({"data": 2}, {"per_device_parallelism": 1}, optax.adam(1e-2)),
    "adam": ({"data": 2}, {}, AdamConfig(learning_rate=1e-2, warmup=2, max_grad_norm=None).build(14)),
    "clipping": ({"data": 2}, {}, optax.chain(optax.clip_by_global_norm(0.5), SGD)),
}


@pytest.mark.parametrize("name", TOY_CASES)
def test_islands_equal_stock_runs_between_syncs(name: str, tmp_path: Path) -> None:
    sizes, options, inner = TOY_CASES[name]
    batches = island_rows(6, 4, 4)
    stock = stock_runs(
        stock_config(tmp_path, sizes, train_batch_size=4, mesh=MeshConfig(param_mapping={"entry": "data"}), **options),
        inner,
        toy(),
        [[step[k] for step in batches] for k in range(4)],
    )
    block = {"sync_period": 9, "ici_islands": 4, "final_sync": False}
    config = config_of(tmp_path, block, mesh=mesh(**sizes), train_batch_size=16, num_train_steps=6, **options)
    assert config.layout.num_islands == 4
    ours = run(config, inner, toy(), [joined(step) for step in batches])
    for t, step in enumerate(ours):
        for k in range(4):
            assert step.metrics[f"train/loss_island_{k}"] == pytest.approx(stock[k][t].loss, rel=1e-6)
            assert difference(island(step, k).params, stock[k][t].state.model) < 1e-6
            assert difference(island(step, k).opt_state, stock[k][t].state.opt_state) < 1e-6
    assert difference(island(ours[-1], 0).params, island(ours[-1], 1).params) > 1e-3


ADAM = AdamConfig(learning_rate=1e-3, warmup=2, max_grad_norm=0.5)
MUON = MuonConfig(learning_rate=1e-3, adam_lr=1e-3, warmup=0, weight_decay=0.1)
LLAMA_CASES = {
    "fsdp_adam_z_loss_clipping": ({"data": 2}, ADAM, z_loss, "f32", {}, 5e-6),
    "tensor_muon": ({"model": 2}, MUON, text_loss, "f32", {}, 5e-6),
    "fsdp_muon_accumulation": ({"data": 2}, MUON, text_loss, "f32", {"per_device_parallelism": 1}, 5e-6),
    "fsdp_and_tensor_adam": ({"data": 2, "model": 2}, ADAM, text_loss, "f32", {}, 5e-6),
    "fsdp_bf16_compute": ({"data": 2}, ADAM, z_loss, "p=f32,c=bf16", {}, 2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LLAMA_CASES)
def test_llama_islands_equal_stock_runs_between_syncs(name: str, tmp_path: Path) -> None:
    sizes, inner, loss, precision, options, tolerance = LLAMA_CASES[name]
    options = {"mp": jmp.get_policy(precision), **options}
    islands = min(4, 8 // int(np.prod(list(sizes.values()))))
    batches = [[text_batch(4 * step + k, 4) for k in range(islands)] for step in range(4)]
    stock = stock_runs(
        stock_config(tmp_path, sizes, train_batch_size=4, **options),
        inner.build(14),
        llama(),
        [[step[k] for step in batches] for k in range(islands)],
        loss,
    )
    config = config_of(
        tmp_path,
        {"sync_period": 9, "ici_islands": islands, "final_sync": False},
        mesh=MeshConfig(axes={"data": 1, "model": 1, **sizes}),
        train_batch_size=4 * islands,
        num_train_steps=4,
        **options,
    )
    ours = run(config, inner.build(14), llama(), [joined(step) for step in batches], loss)
    for t, step in enumerate(ours):
        for k in range(islands):
            assert step.metrics[f"train/loss_island_{k}"] == pytest.approx(stock[k][t].loss, abs=tolerance)
            assert difference(island(step, k).params, stock[k][t].state.model) < tolerance
    assert difference(island(ours[-1], 0).params, island(ours[-1], 1).params) > 1e-4


def test_clipping_equals_the_single_device_value(tmp_path: Path) -> None:
    # one step, gradient clipped to norm 0.5, learning rate 1: every island moves by 0.5 exactly
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    config = config_of(
        tmp_path,
        {"sync_period": 9, "ici_islands": 2, "final_sync": False},
        mesh=mesh(data=2, model=2),
        num_train_steps=1,
    )
    [step] = run(config, inner, toy(), [rows(0, 8)])
    for k in range(2):
        pairs = zip(jax.tree.leaves(island(step, k).params), jax.tree.leaves(numbers(toy())), strict=True)
        assert np.sqrt(sum(np.sum(np.square(a - b)) for a, b in pairs)) == pytest.approx(0.5, rel=1e-6)


def test_outer_gradient_is_not_clipped(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {"sync_period": 1, "ici_islands": 2, "outer": AverageConfig()},
        mesh=mesh(),
        train_batch_size=2,
        num_train_steps=1,
    )
    # sgd(1) from 0 goes to the target: islands at 100 and 300 in every entry, Theta at 200
    batch = toy_batch(np.full((2, 3), [[100.0], [300.0]]), np.zeros((2, 2, 4)))
    [step] = run(config, optax.sgd(1.0), Toy.of(np.zeros(3), np.zeros((2, 4))), [batch])
    np.testing.assert_array_equal(outer(step).embed.array, [200.0, 200.0, 200.0])


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "per_slot", "overlap"), [(1, 4, 0), (2, 2, 0), (2, 2, 1)])
def test_islands_that_share_a_slot_equal_islands_on_slots_of_their_own(
    slots: int, per_slot: int, overlap: int, tmp_path: Path
) -> None:
    batches = island_rows(8, 4, 2)
    inner = AdamConfig(learning_rate=1e-2).build(14)

    def trained(slots: int, per_slot: int) -> list:
        block = {
            "sync_period": 3,
            "num_fragments": 3,
            "overlap_steps": overlap,
            "ici_islands": slots,
            "islands_per_slot": per_slot,
        }
        config = config_of(tmp_path, block, mesh=mesh(data=2), num_train_steps=8)
        assert config.layout.num_islands == 4
        return run(config, inner, toy(), [joined(step) for step in batches])

    for shared, own in zip(trained(slots, per_slot), trained(4, 1), strict=True):
        assert difference(shared.state, own.state) < 1e-6
        for name in own.metrics:
            if name.startswith(("diloco/", "train/")):
                assert shared.metrics[name] == pytest.approx(own.metrics[name], abs=1e-5), name


@pytest.mark.parametrize(("slots", "per_slot"), [(4, 1), (2, 2), (1, 4)])
def test_island_k_gets_its_rows_of_the_batch(slots: int, per_slot: int, tmp_path: Path) -> None:
    # sgd(1) from 0 goes to the mean target of an island's rows: rows 0..7 in pairs -> 0.5, 2.5, 4.5, 6.5
    block = {"sync_period": 9, "ici_islands": slots, "islands_per_slot": per_slot, "final_sync": False}
    config = config_of(tmp_path, block, mesh=mesh(data=2), num_train_steps=1)
    batch = toy_batch(np.arange(8.0)[:, None] * np.ones(3), np.zeros((8, 2, 4)))
    [step] = run(config, optax.sgd(1.0), Toy.of(np.zeros(3), np.zeros((2, 4))), [batch])
    np.testing.assert_allclose(step.state.islands.params.embed.array[:, 0], [0.5, 2.5, 4.5, 6.5], rtol=1e-6)


# --- Random streams


def noise_loss(model: Toy, batch: Any, *, key: Any = None) -> Any:
    """Its gradient for `embed` is noise drawn from `key`."""
    return toy_loss(model, batch) * 0 + hax.sum(model.embed * hax.random.normal(key, Embed))


def test_random_streams_differ_between_islands(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {"sync_period": 9, "ici_islands": 2, "islands_per_slot": 2, "final_sync": False},
        mesh=mesh(),
        num_train_steps=3,
    )
    steps = run(config, SGD, toy(), [rows(0, 8)] * 3, noise_loss)
    seen = [tuple(island(step, k).params.embed.array.tolist()) for step in steps for k in range(4)]
    assert len(set(seen)) == 12
    assert len({tuple(island(step, k).key.tolist()) for step in steps for k in range(4)}) == 12


def test_random_streams_equal_stock_runs_with_the_islands_keys(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    batches = [rows(0, 4)] * 3
    stock = stock_runs(stock_config(tmp_path, train_batch_size=4), SGD, toy(), [batches] * 2, noise_loss, keys=keys)
    block = {"sync_period": 9, "ici_islands": 2, "final_sync": False}
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=3)
    for t, step in enumerate(run(config, SGD, toy(), [rows(0, 8)] * 3, noise_loss)):
        for k in range(2):
            assert difference(island(step, k).params, stock[k][t].state.model) < 1e-6


def test_single_island_keeps_the_hosts_random_stream(tmp_path: Path) -> None:
    batches = [rows(0, 8)] * 3
    [stock] = stock_runs(stock_config(tmp_path, train_batch_size=8), SGD, toy(), [batches], noise_loss)
    block = {"sync_period": 9, "ici_islands": 1, "final_sync": False}
    ours = run(config_of(tmp_path, block, mesh=mesh(), num_train_steps=3), SGD, toy(), batches, noise_loss)
    for step, theirs in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(island(step, 0).key, theirs.state.training_key)
        assert difference(island(step, 0).params, theirs.state.model) < 1e-6


# --- Bit equality on islands and devices


def watched(config: Any, batches: list, model: Any = None, loss: Any = toy_loss) -> list[tuple[Any, list[str]]]:
    """Each step's state, and the names of arrays whose copies on different devices differ."""
    seen = []

    def unequal(state: Any) -> list[str]:
        names = []
        for path, x in jax.tree_util.tree_leaves_with_path(eqx.filter(state, eqx.is_array)):
            copies: dict[str, set[bytes]] = {}
            for shard in x.addressable_shards:
                copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
            if any(len(values) > 1 for values in copies.values()):
                names.append(jax.tree_util.keystr(path))
        return names

    with entered(config, SGD, loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy() if model is None else model)
        trainer.add_hook(lambda info: seen.append((numbers(info.state), unequal(info.state))), every=1)
        trainer.train(state, batches)
    return seen


@pytest.mark.parametrize(
    ("overlap", "alpha", "sizes"), [(0, 0.0, {"data": 2}), (1, 0.5, {}), (1, 0.5, {"data": 2}), (2, 0.0, {})]
)
def test_outer_state_is_bit_equal_on_all_devices(overlap: int, alpha: float, sizes: dict, tmp_path: Path) -> None:
    block = {"sync_period": 3, "num_fragments": 3, "overlap_steps": overlap, "mixing_alpha": alpha, "ici_islands": 2}
    config = config_of(tmp_path, block, mesh=mesh(**sizes), num_train_steps=10)
    states = watched(config, [rows(step, 8) for step in range(10)])
    assert [names for _, names in states] == [[]] * 11
    assert difference(states[-1][0].model, numbers(toy())) > 1e-3


def test_islands_are_bit_equal_after_a_sync_and_differ_before(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"sync_period": 3, "ici_islands": 4}, mesh=mesh(data=2), num_train_steps=9)
    for t, (state, _) in enumerate(watched(config, [rows(step, 8) for step in range(9)])[:-1], start=1):
        params = [jax.tree.map(lambda x, k=k: x[k], state.islands.params) for k in range(4)]
        if t % 3 == 0:
            for k in range(4):
                assert_bit_equal(params[k], state.model)
        else:
            assert min(difference(params[0], params[k]) for k in range(1, 4)) > 1e-3


def test_islands_share_the_synced_fragment_alone(tmp_path: Path) -> None:
    # P=3, dh=1: f1 = layers 0 2, f2 = layers 1 3, f0 = embed
    config = config_of(
        tmp_path,
        {"sync_period": 3, "num_fragments": 3, "ici_islands": 2, "final_sync": False},
        mesh=mesh(),
        num_train_steps=6,
    )
    for t, (state, _) in enumerate(watched(config, [rows(step, 8) for step in range(6)])[:-1], start=1):
        params, theta = state.islands.params, state.model
        layers = params.layers.stacked.weight.array
        fragment = t % 3
        equal = [bool((layers[0, :, i] == layers[1, :, i]).all()) for i in range(4)]
        assert equal == [fragment == 1 + i % 2 for i in range(4)]
        assert (params.embed.array[0] == params.embed.array[1]).all() == (fragment == 0)
        if fragment == 0:
            np.testing.assert_array_equal(params.embed.array[1], theta.embed.array)
        else:
            mine = slice(fragment - 1, None, 2)
            np.testing.assert_array_equal(layers[1][:, mine], theta.layers.stacked.weight.array[:, mine])


# --- Precision


def test_outer_state_stays_f32_and_moves_by_less_than_bf16_holds(tmp_path: Path) -> None:
    # Islands in bf16 go from 1 to 1 - 2^-7 in each inner step; the outer rate 2^-6 makes that -2^-13 of Theta,
    # 1.2e-4 relative, where bf16 has steps of 2^-8 below 1. Theta rounds to 1 in bf16, so each step repeats.
    config = config_of(
        tmp_path,
        {"sync_period": 1, "ici_islands": 2, "outer": NesterovConfig(learning_rate=2.0**-6, momentum=0.0)},
        mesh=mesh(),
        mp=jmp.get_policy("p=bf16,c=f32"),
        num_train_steps=4,
    )
    batch = toy_batch(np.zeros((8, 3)), np.zeros((8, 2, 4)))
    steps = run(config, optax.sgd(2.0**-7), Toy.of(np.ones(3), np.ones((2, 4))), [batch] * 4)
    theta = np.float32(1)
    for step in steps:
        theta -= np.float32(2.0**-6) * (theta - np.float32(1 - 2.0**-7))
        for leaf in jax.tree.leaves(outer(step)):
            assert leaf.dtype == np.float32
            np.testing.assert_array_equal(leaf, np.full_like(leaf, theta))
        assert {leaf.dtype for leaf in jax.tree.leaves(step.state.islands.params)} == {np.dtype(jnp.bfloat16)}
        floats = [x for x in jax.tree.leaves(step.state.opt_state) if jnp.issubdtype(x.dtype, jnp.inexact)]
        assert {x.dtype for x in floats} <= {np.dtype(np.float32)}


def test_outer_momentum_is_f32_with_bf16_parameters(tmp_path: Path) -> None:
    # Islands go from 1 to 1 - 2^-7: m1 = 2^-7, Theta = 1 - 2^-8 * 1.5 * 2^-7, which is 1 in bf16, so that they do it
    # again: m2 = 0.5 * 2^-7 + Theta - (1 - 2^-7)
    config = config_of(
        tmp_path,
        {"sync_period": 1, "ici_islands": 2, "outer": NesterovConfig(learning_rate=2.0**-8, momentum=0.5)},
        mesh=mesh(),
        mp=jmp.get_policy("p=bf16,c=bf16"),
        num_train_steps=2,
    )
    batch = toy_batch(np.zeros((8, 3)), np.zeros((8, 2, 4)))
    steps = run(config, optax.sgd(2.0**-7), Toy.of(np.ones(3), np.ones((2, 4))), [batch] * 2)
    first, second = (momentum(step, sequential=False) for step in steps)
    assert first["embed"].dtype == second["layers"].dtype == np.float32
    np.testing.assert_array_equal(first["layers"], np.full((2, 4), 2.0**-7))
    np.testing.assert_array_equal(second["embed"], np.full(3, 1.5 * 2.0**-7 * (1 - 2.0**-8)))


@pytest.mark.slow
def test_llama_with_bf16_parameters_moves_theta_in_f32(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {"sync_period": 1, "ici_islands": 2, "outer": NesterovConfig(learning_rate=1e-4)},
        mesh=MeshConfig(axes={"data": 4, "model": 1}),
        mp=jmp.get_policy("p=bf16,c=bf16"),
        num_train_steps=2,
    )
    steps = run(config, AdamConfig(learning_rate=1e-2, warmup=0).build(14), llama(), [text_batch(0, 8)] * 2, text_loss)
    leaves = jax.tree_util.tree_leaves_with_path
    for (path, first), (_, second) in zip(leaves(outer(steps[0])), leaves(outer(steps[1])), strict=True):
        assert first.dtype == second.dtype == np.float32
        assert (first != second).any(), jax.tree_util.keystr(path)
        assert np.max(np.abs(first - second)) < 1e-4
    assert {leaf.dtype for leaf in jax.tree.leaves(steps[1].state.islands.params)} == {np.dtype(jnp.bfloat16)}


# --- Frozen leaves


def test_frozen_leaves_are_unchanged_and_exist_once(tmp_path: Path) -> None:
    frozen = Toy(embed=False, layers=True)
    config = config_of(tmp_path, {"sync_period": 2, "ici_islands": 2}, mesh=mesh(), num_train_steps=4)
    steps = run(config, SGD, toy(), [rows(step, 8) for step in range(4)], is_trainable=frozen)
    for step in steps:
        np.testing.assert_array_equal(outer(step).embed.array, toy().embed.array)
        assert jax.tree.leaves(step.state.islands.params.embed) == []
        assert step.state.islands.params.layers.stacked.weight.array.shape == (2, 2, 4)
        assert sum(x.size for x in jax.tree.leaves(step.state.opt_state)) <= 8 + 1  # a momentum and a count
    assert difference(outer(steps[-1]).layers, numbers(toy()).layers) > 1e-3
    # 8 trainable numbers of 4 bytes cross in each of the two syncs
    assert [step.metrics["diloco/bytes_per_island"] for step in steps] == [0, 32, 32, 64]
    assert steps[1].metrics["diloco/synced_bytes"] == 32


@pytest.mark.parametrize("overlap", [0, 1])
def test_frozen_layers_do_not_move(overlap: int, tmp_path: Path) -> None:
    layers = toy().layers
    frozen = Toy(embed=True, layers=replace(layers, stacked=False))
    block = {"sync_period": 2, "overlap_steps": overlap, "ici_islands": 2}
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=4)
    steps = run(config, SGD, toy(), [rows(step, 8) for step in range(4)], is_trainable=frozen)
    np.testing.assert_array_equal(outer(steps[-1]).layers.stacked.weight.array, layers.stacked.weight.array)
    assert steps[-1].metrics["diloco/bytes_per_island"] % 12 == 0


# --- Schedule


@pytest.mark.slow
def test_gradient_accumulation_leaves_the_schedule_unchanged(tmp_path: Path) -> None:
    def synced(per_device: int) -> tuple[list, Any]:
        block = {"sync_period": 4, "num_fragments": 3, "ici_islands": 2}
        config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=7, per_device_parallelism=per_device)
        steps = run(config, SGD, toy(), [rows(step, 8) for step in range(7)])
        return [step.metrics.get("diloco/synced_fragment") for step in steps], steps[-1].state

    (plain, state), (accumulated, same) = synced(-1), synced(1)
    assert plain == accumulated == [1, 2, 0, 1, 2, 0, None]  # the last step's final sync is of several fragments
    assert difference(state, same) < 1e-6


def test_fragment_is_never_applied_before_its_first_capture(tmp_path: Path) -> None:
    # V=2, P=3, dh=3: captures at 3 6 9, merges at 5 8 11. Until then islands are stock runs.
    batches = island_rows(5, 2, 4)
    stock = stock_runs(
        stock_config(tmp_path, train_batch_size=4), SGD, toy(), [[step[k] for step in batches] for k in range(2)]
    )
    block = {"sync_period": 9, "num_fragments": 3, "overlap_steps": 2, "ici_islands": 2, "final_sync": False}
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=5)
    ours = run(config, SGD, toy(), [joined(step) for step in batches])
    for t in range(4):
        for k in range(2):
            assert difference(island(ours[t], k).params, stock[k][t].state.model) < 1e-6
    assert_bit_equal(outer(ours[2]), numbers(toy()))
    layers = [island(ours[4], k).params.layers.stacked.weight.array for k in range(2)]
    np.testing.assert_array_equal(layers[0][:, ::2], layers[1][:, ::2])
    assert (layers[0][:, 1::2] != layers[1][:, 1::2]).all()


@pytest.mark.slow
def test_learning_rate_is_the_stock_function_of_the_step(tmp_path: Path) -> None:
    inner = AdamConfig(learning_rate=1e-2, warmup=4, lr_schedule="cosine", min_lr_ratio=0.1).build(14)
    batches = [rows(step, 8) for step in range(14)]
    [stock] = stock_runs(stock_config(tmp_path, train_batch_size=8), inner, toy(), [batches])
    block = {"sync_period": 4, "num_fragments": 3, "overlap_steps": 1, "ici_islands": 2}
    ours = run(config_of(tmp_path, block, mesh=mesh()), inner, toy(), batches)
    rates = [float(step.state.opt_state.hyperparams["learning_rate"]) for step in stock]
    assert [step.metrics["optim/learning_rate"] for step in ours] == rates
    assert len(set(rates)) > 10
    for step, rate in zip(ours, rates, strict=True):
        np.testing.assert_array_equal(
            step.state.islands.opt_state.hyperparams["learning_rate"], np.float32([rate] * 2)
        )


# --- The final sync


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


# --- Outer optimizers


class FromOptax(OuterOptimizerConfig):
    """Any optax transformation, as a third party would register it."""

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        object.__setattr__(self, "transformation", transformation)

    def build(self, outer_steps: int) -> optax.GradientTransformation:
        return self.transformation


OUTER = {
    "adam": optax.adam(0.1),
    "clipped_sgd": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "schedule": optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5}), momentum=0.5),
    "lookahead_free_adamw": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OUTER)
@pytest.mark.parametrize("overlap", [0, 1])
def test_any_optax_transformation_steps_each_fragment_on_its_own(name: str, overlap: int, tmp_path: Path) -> None:
    optimizer = OUTER[name]
    block = {
        "sync_period": 3,
        "num_fragments": 3,
        "overlap_steps": overlap,
        "ici_islands": 2,
        "outer": FromOptax(optimizer),
        "final_sync": False,
    }
    num_steps = 8 + overlap
    config = config_of(tmp_path, block, mesh=mesh(), num_train_steps=num_steps)
    steps = run(config, SGD, toy(), [rows(step, 8) for step in range(num_steps)])

    def fragment(theta: Any, f: int) -> np.ndarray:
        parts = {"embed": theta.embed.array, "layers": theta.layers.stacked.weight.array}
        return parts["embed"] if f == 0 else parts["layers"][..., f - 1 :: 2]

    # Replays the outer optimizer on each fragment with optax alone, from the captured islands.
    theta, states = numbers(toy()), {}
    for f in range(3):
        value = jnp.asarray(fragment(theta, f))
        state = optimizer.init(value)
        count = 0
        for t in range(1, 9):
            if t % 3 != f:
                continue
            # Between the inner step and the merge nothing is visible with V = 0, so replay the inner step.
            before = [fragment(island(steps[t - 2], k).params, f) if t > 1 else fragment(theta, f) for k in range(2)]
            if overlap and t > 1:
                ends = [fragment(island(steps[t - 1], k).params, f) for k in range(2)]
            else:
                batch = rows(t - 1, 8)
                targets = [
                    batch["embed"].array.reshape(2, 4, 3).mean(1),
                    batch["layers"].array.reshape(2, 4, 2, 4).mean(1)[..., f - 1 :: 2],
                ][f > 0]
                ends = [before[k] - 0.1 * (before[k] - targets[k]) for k in range(2)]
            gradient = value - jnp.mean(jnp.stack(ends), 0)
            updates, state = optimizer.update(gradient, state, value)
            value = optax.apply_updates(value, updates)
            count += 1
            np.testing.assert_allclose(fragment(outer(steps[t - 1 + overlap]), f), value, atol=1e-5)
        assert steps[-1].state.outer_steps[f] == count
        states[f] = state
    rest, layers = steps[-1].state.opt_state["rest"], steps[-1].state.opt_state["layers"]
    counts = [x for x in jax.tree.leaves(rest) if x.dtype == np.int32]
    layer_counts = [x for x in jax.tree.leaves(layers) if x.dtype == np.int32]
    assert all(x.tolist() == [2] for x in counts)
    assert all(x.tolist() == [3, 3] for x in layer_counts)
    assert len(counts) == len(layer_counts) == (0 if name == "clipped_sgd" else len(counts))


# --- Metrics


def metrics_run(block: dict, tmp_path: Path, steps: int) -> list[dict]:
    """From 0 with sgd(1): after a step island k is at its target, all entries 2 for island 0 and 4 for island 1."""
    config = config_of(tmp_path, {"ici_islands": 2, **block}, mesh=mesh(), train_batch_size=2, num_train_steps=steps)
    batch = toy_batch(np.full((2, 3), [[2.0], [4.0]]), np.full((2, 2, 4), [[[2.0]], [[4.0]]]))
    return [s.metrics for s in run(config, optax.sgd(1.0), Toy.of(np.zeros(3), np.zeros((2, 4))), [batch] * steps)]


def test_metrics_of_vanilla_by_hand(tmp_path: Path) -> None:
    first, second = metrics_run({"sync_period": 2, "outer": SgdConfig(learning_rate=0.5)}, tmp_path, 2)
    # 11 entries: losses 0.5 * 11 * 4 and 0.5 * 11 * 16
    assert first["train/loss_island_0"] == pytest.approx(22)
    assert first["train/loss_island_1"] == pytest.approx(88)
    assert first["train/loss"] == pytest.approx(55)
    assert first["diloco/loss_spread"] == pytest.approx(66)
    assert first["diloco/bytes_per_island"] == 0
    assert {n for n in first if n.startswith("diloco/")} == {"diloco/loss_spread", "diloco/bytes_per_island"}
    # Delta_0 = -2, Delta_1 = -4, Delta = -3 in each of 11 entries; Theta moves by 1.5
    assert second["train/loss"] == pytest.approx(0)
    assert second["diloco/synced_fragment"] == 0
    assert second["diloco/synced_bytes"] == second["diloco/bytes_per_island"] == 44
    assert second["diloco/outer_grad_norm"] == pytest.approx(3 * 11**0.5)
    assert second["diloco/outer_update_norm"] == pytest.approx(1.5 * 11**0.5)
    assert second["diloco/island_distance"] == pytest.approx(3 * 11**0.5)
    assert second["diloco/island_distance_max"] == pytest.approx(4 * 11**0.5)
    assert second["diloco/outer_grad_cosine"] == pytest.approx(1)


def test_metrics_of_streaming_by_hand(tmp_path: Path) -> None:
    # P=3, dh=1; f1 and f2 have 4 entries, f0 has 3. Final sync after step 4: f1 has just synced, f2 and f0 sync.
    block = {"sync_period": 3, "num_fragments": 3, "outer": SgdConfig(learning_rate=0.5)}
    steps = metrics_run(block, tmp_path, 4)
    assert [m["diloco/bytes_per_island"] for m in steps] == [16, 32, 44, 44 + 16 + 16 + 12]
    assert [m.get("diloco/synced_fragment") for m in steps] == [1, 2, 0, None]
    assert [m.get("diloco/synced_bytes") for m in steps] == [16, 16, 12, None]
    assert steps[0]["diloco/outer_grad_norm"] == pytest.approx(3 * 4**0.5)
    assert steps[2]["diloco/outer_grad_norm"] == pytest.approx(3 * 3**0.5)
    assert {steps[3][f"diloco/synced_fragment/fragment_{f}"] for f in range(3)} == {0, 1, 2}
    assert steps[3]["diloco/synced_bytes/fragment_0"] == 12


def test_metrics_of_an_overlapped_sync_come_one_step_later(tmp_path: Path) -> None:
    block = {"sync_period": 2, "overlap_steps": 1, "outer": SgdConfig(learning_rate=0.5), "final_sync": False}
    steps = metrics_run(block, tmp_path, 3)
    assert [m.get("diloco/synced_fragment") for m in steps] == [None, None, 0]
    assert steps[2]["diloco/outer_grad_norm"] == pytest.approx(3 * 11**0.5)
    assert [m["diloco/bytes_per_island"] for m in steps] == [0, 0, 44]


def test_cosine_of_opposite_islands_is_minus_one(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, {"sync_period": 1, "ici_islands": 2}, mesh=mesh(), train_batch_size=2, num_train_steps=1
    )
    batch = toy_batch(np.full((2, 3), [[1.0], [-1.0]]), np.zeros((2, 2, 4)))
    [step] = run(config, optax.sgd(1.0), Toy.of(np.zeros(3), np.zeros((2, 4))), [batch])
    assert step.metrics["diloco/outer_grad_cosine"] == pytest.approx(-1)
    assert step.metrics["diloco/outer_grad_norm"] == pytest.approx(0, abs=1e-7)
    assert step.metrics["diloco/island_distance"] == pytest.approx(3**0.5)


def test_single_island_has_no_cosine(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"sync_period": 1, "ici_islands": 1}, mesh=mesh(), num_train_steps=1)
    [step] = run(config, SGD, toy(), [rows(0, 8)])
    assert "diloco/outer_grad_cosine" not in step.metrics
    assert step.metrics["diloco/loss_spread"] == 0


def test_bytes_continue_after_a_resume(tmp_path: Path) -> None:
    block = {"sync_period": 3, "num_fragments": 3, "ici_islands": 2, "final_sync": False}
    batches = [rows(step, 8) for step in range(7)]
    run(trainer_config(tmp_path, block, mesh=mesh(), num_train_steps=4), SGD, toy(), batches[:4])
    steps = run(trainer_config(tmp_path, block, mesh=mesh(), num_train_steps=7), SGD, toy(), batches)
    assert [step.metrics["diloco/bytes_per_island"] for step in steps] == [76, 88, 104]


def test_metrics_of_the_loss_function_are_means_over_islands(tmp_path: Path) -> None:
    def loss(model: Toy, batch: Any, *, key: Any = None) -> Any:
        return toy_loss(model, batch), {"first_target": hax.mean(batch["embed"])}

    config = config_of(tmp_path, {"sync_period": 9, "ici_islands": 2}, mesh=mesh(), num_train_steps=1)
    [step] = run(config, SGD, toy(), [toy_batch(np.arange(8.0)[:, None] * np.ones(3), np.zeros((8, 2, 4)))], loss)
    assert step.metrics["train/first_target"] == pytest.approx(3.5)


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
