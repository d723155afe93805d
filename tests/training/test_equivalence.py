"""Islands against data parallelism and against runs of the stock host."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jmp
import numpy as np
import optax
import pytest
from levanter.optim.config import AdamConfig
from levanter.optim.muon import MuonConfig
from levanter.utils.mesh import MeshConfig

from helpers.host_runs import joined, llama, stock_config, stock_runs, text_batch, text_loss, z_loss
from helpers.toy_model import Toy, numbers, run, toy_batch
from helpers.toy_runs import (
    SGD,
    assert_bit_equal,
    config_of,
    difference,
    island,
    island_rows,
    mesh,
    momentum,
    outer,
    rows,
    toy,
)
from levanter_diloco.options.outer import AverageConfig, SgdConfig

pytestmark = pytest.mark.usefixtures("compile_cache")


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
    """The islands without their weights and status, of which there is one for each fragment."""
    return replace(step.state.islands, weights=None, status=None)


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
    assert config.islands.num_islands == 4
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
        assert config.islands.num_islands == 4
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
