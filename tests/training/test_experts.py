"""Mixtures of experts on islands, against the stock host on one device."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import levanter.tracker
import optax
import pytest
from haliax.partitioning import set_mesh
from levanter.models.mixtral import MixtralConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig
from levanter.utils.mesh import MeshConfig

from helpers.host_runs import LLAMA, Vocab, joined, stock_config, stock_runs, text_batch, text_loss
from helpers.toy_model import entered, run
from helpers.toy_runs import config_of, difference, island
from levanter_diloco.errors import OptionError

pytestmark = pytest.mark.usefixtures("compile_cache")

SIZES = {name: getattr(LLAMA, name) for name in ("max_seq_len", "hidden_dim", "num_heads", "num_kv_heads")}
SIZES |= {"num_layers": 2, "num_experts_per_tok": 2}
# Losses of the router large enough that a wrong one shows.
QWEN3 = Qwen3MoeConfig(
    **SIZES,
    moe_intermediate_dim=64,
    head_dim=8,
    num_experts=4,
    router_aux_loss_coef=0.1,
    gradient_checkpointing=False,
)
MIXTRAL = MixtralConfig(
    **SIZES,
    intermediate_dim=64,
    n_routed_experts=4,
    lbl_coef=0.1,
    rzl_coef=0.1,
    use_flash_attention=False,
    flash_attention_block_size=None,
    gradient_checkpointing=False,
)


@cache
def model(config: Any) -> Any:
    return hax.named_jit(config.model_type.init)(Vocab, config, key=jax.random.PRNGKey(1))


def loss(model: Any, example: Any, *, key: Any = None) -> Any:
    """The loss, without the metrics that Mixtral logs: the host's own training of it fails on them."""
    with levanter.tracker.defer_tracker_for_jit():
        return text_loss(model, example, key=key)


def trained(
    tmp_path: Path, config: Any, axes: dict, mapping: dict | None = None, per_slot: int = 1, **options: Any
) -> tuple[list, list]:
    """Two steps of four rows on each of two islands: those of the islands, and of the stock host on one device.

    The gradient of every parameter can be read from a step of it: the learning rate is 1.
    """
    batches = [[text_batch(2 * step + k, 4) for k in range(2)] for step in range(2)]
    # The router's losses are those of a microbatch: two rows on either side.
    microbatch: dict[str, Any] = {"per_device_parallelism": 2} if options else {}
    single = stock_config(tmp_path, train_batch_size=4, **microbatch)
    streams = [[step[k] for step in batches] for k in range(2)]
    stock = stock_runs(single, optax.sgd(1.0), model(config), streams, loss)
    ours = config_of(
        tmp_path,
        {"sync_period": 9, "ici_islands": 2 // per_slot, "islands_per_slot": per_slot, "final_sync": False},
        mesh=MeshConfig(axes={"replica": -1, "data": 1, "model": 1, **axes}, compute_mapping=mapping or {}),
        train_batch_size=8,
        num_train_steps=2,
        **options,
    )
    return run(ours, optax.sgd(1.0), model(config), [joined(step) for step in batches], loss), stock


TOKENS = {"token": ["replica", "data"], "token_repeat": ["replica", "data"]}
CASES: dict[str, tuple[Any, dict, dict[str, Any]]] = {
    "fsdp": (QWEN3, {"data": 4}, {}),
    "two_data_axes": (QWEN3, {"data": 2}, {}),
    "tensor": (QWEN3, {"model": 4}, {}),
    "fsdp_and_tensor": (QWEN3, {"data": 2, "model": 2}, {}),
    "mapped": (QWEN3, {"data": 4}, {"mapping": TOKENS}),
    "accumulation": (QWEN3, {"data": 2, "model": 2}, {"per_device_parallelism": 1}),
    "shared_slot": (QWEN3, {"data": 4, "model": 2}, {"per_slot": 2}),
    "recomputed": (replace(QWEN3, gradient_checkpointing=True), {"data": 2, "model": 2}, {}),
    "mixtral_fsdp_and_tensor": (MIXTRAL, {"data": 2, "model": 2}, {}),
    "mixtral_mapped_accumulation": (
        MIXTRAL,
        {"data": 2, "model": 2},
        {"mapping": TOKENS, "per_device_parallelism": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_islands_with_experts_equal_the_host_on_one_device(name: str, tmp_path: Path) -> None:
    config, axes, options = CASES[name]
    ours, stock = trained(tmp_path, config, axes, **options)
    for t, step in enumerate(ours):
        for k in range(2):
            assert step.metrics[f"train/loss_island_{k}"] == pytest.approx(stock[k][t].loss, abs=1e-5)
            assert difference(island(step, k).params, stock[k][t].state.model) < 1e-5
    assert difference(island(ours[-1], 0).params, island(ours[-1], 1).params) > 1e-2


@pytest.mark.slow
def test_outer_model_with_mapped_tokens_evaluates_as_on_one_device(tmp_path: Path) -> None:
    theta, batch, losses = model(QWEN3), text_batch(0, 8), []
    with set_mesh(stock_config(tmp_path).device_mesh):
        expected = hax.named_jit(text_loss, axis_resources={})(theta, batch).item()
    mesh = MeshConfig(axes={"data": 2, "model": 2}, compute_mapping=TOKENS)
    config = config_of(tmp_path, {"sync_period": 9, "ici_islands": 2}, mesh=mesh, num_train_steps=1)
    with entered(config, optax.sgd(0.0), loss) as trainer:
        evaluate = hax.named_jit(loss, axis_resources=trainer.compute_axis_mapping)
        trainer.add_hook(lambda info: losses.append(evaluate(info.eval_model, batch).item()), every=1)
        trainer.train(trainer.initial_state(jax.random.PRNGKey(0), model=theta), [batch])
    assert losses[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"compute_mapping": {"token": "model"}},
            "compute_mapping.token (model) must lie where the batch does (data)",
        ),
        (
            {"shared_mapping": {"token_repeat": ["data", "model"]}},
            "shared_mapping.token_repeat (data, model) must lie",
        ),
        ({"compute_mapping": {"experts": "model"}}, "compute_mapping.experts (model) must be left out"),
        ({"shared_mapping": {"experts": "data"}}, "shared_mapping.experts (data) must be left out"),
    ],
)
def test_mapping_that_experts_cannot_follow_is_refused(options: dict, said: str, tmp_path: Path) -> None:
    mesh = MeshConfig(axes={"data": 2, "model": 2}, **options)
    config = config_of(tmp_path, {"sync_period": 9, "ici_islands": 2}, mesh=mesh)
    with pytest.raises(OptionError, match=re.escape(f"trainer.mesh.{said}")):
        config._validate_and_set_defaults()
