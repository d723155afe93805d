"""The host's mixtures of experts, each shard of the tokens by itself."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import Mesh
from levanter.models.mixtral import MixtralConfig, MixtralSparseMoeBlock
from levanter.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

from helpers.aot_config import VOCAB_SIZE, config
from levanter_diloco.commands.compile.aot import abstract_run, tpu_devices
from levanter_diloco.commands.compile.slices import Slice
from levanter_diloco.host.moe import SHARD, experts_by_shard

Experts = Axis("experts", 4)
BY_DATA = {"batch": "data", "token": "data", "token_repeat": "data", SHARD: "data"}


@contextmanager
def devices(data: int, model: int = 1) -> Iterator[None]:
    with set_mesh(Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))):
        yield


def test_each_shard_multiplies_what_it_sorted() -> None:
    # Expert e multiplies by e + 1. Two shards of four rows each, sorted: experts 0 0 1 2 and 2 2 3 3.
    In, Out, Row = Axis("in", 1), Axis("out", 1), Axis("token_repeat", 8)
    weight = hax.named(jnp.arange(1.0, 5.0)[:, None, None], (Experts, In, Out))
    layer = hnn.MoELinear(weight, None, Experts, In, Out, use_gmm=False)
    sizes = hax.named(jnp.array([[2, 1, 1, 0], [0, 0, 2, 2]]), (Axis(SHARD, 2), Experts))
    with devices(2), hax.axis_mapping(BY_DATA), experts_by_shard():
        out = layer(hax.ones((Row, In)), sizes)
    np.testing.assert_array_equal(out.array[:, 0], [1, 1, 2, 3, 3, 3, 4, 4])


SIZES = {"max_seq_len": 8, "hidden_dim": 16, "num_heads": 2, "num_kv_heads": 2, "num_experts_per_tok": 2}
QWEN3 = Qwen3MoeConfig(**SIZES, moe_intermediate_dim=8, num_experts=4, router_aux_loss_coef=0.1)
MIXTRAL = MixtralConfig(**SIZES, intermediate_dim=8, n_routed_experts=4, lbl_coef=0.1, rzl_coef=0.1)
DENSE = Qwen3MoeConfig(**SIZES, moe_intermediate_dim=8, num_experts=4, dense_router_gradient=True)
BLOCKS = {
    "qwen3": (Qwen3MoeSparseMoeBlock, QWEN3),
    "mixtral": (MixtralSparseMoeBlock, MIXTRAL),
    "dense_router_gradient": (Qwen3MoeSparseMoeBlock, DENSE),
}


def outputs(kind: type, config: Any, mapping: dict) -> Any:
    """What a block makes of four sequences, what it says besides, and the gradient of a sum over both."""
    x = hax.random.normal(jax.random.PRNGKey(0), (Axis("batch", 4), config.max_Pos, config.Embed))
    block = kind.init(config, key=jax.random.PRNGKey(1))

    @eqx.filter_jit
    def call(block: Any, x: Any) -> Any:
        def total(both: Any) -> Any:
            block, x = both
            with hax.axis_mapping(mapping):
                out, extras = block(x)
            losses = [value.scalar() for name, value in extras.items() if name.endswith("loss")]
            return hax.sum(hax.square(out)).scalar() + sum(losses), (out, extras)

        return eqx.filter_value_and_grad(total, has_aux=True)((block, x))

    return jax.tree.leaves(eqx.filter(call(block, x), eqx.is_array))


@pytest.mark.parametrize("mapping", [{}, {"token": "data", "token_repeat": "data"}], ids=["unmapped", "mapped"])
@pytest.mark.parametrize("name", BLOCKS)
def test_block_on_shards_equals_the_host_on_one_device(name: str, mapping: dict) -> None:
    with devices(1):
        theirs = outputs(*BLOCKS[name], {})
    with devices(data=4, model=2), experts_by_shard():
        ours = outputs(*BLOCKS[name], {"batch": "data", "mlp": "model", **mapping})
    for left, right in zip(ours, theirs, strict=True):
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", ["data", ("data", "model")])
def test_experts_that_lie_on_devices_are_gathered(axes: Any) -> None:
    with devices(1):
        theirs = outputs(*BLOCKS["qwen3"], {})
    with devices(data=4, model=2), experts_by_shard():
        ours = outputs(*BLOCKS["qwen3"], {"batch": "data", "experts": axes})
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_sequence_without_a_batch_is_no_shard() -> None:
    x = hax.random.normal(jax.random.PRNGKey(0), (QWEN3.max_Pos, QWEN3.Embed))
    block = Qwen3MoeSparseMoeBlock.init(QWEN3, key=jax.random.PRNGKey(1))
    with devices(1), hax.axis_mapping({}):
        theirs, _ = block(x)
    with devices(4), hax.axis_mapping({"batch": "data"}), experts_by_shard():
        ours, _ = block(x)
    np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-6, atol=1e-6)


def test_methods_of_the_host_come_back() -> None:
    kinds = (Qwen3MoeSparseMoeBlock, MixtralSparseMoeBlock, hnn.MoELinear)
    before = [dict(vars(kind)) for kind in kinds]
    with pytest.raises(RuntimeError, match="traced no further"), experts_by_shard():
        assert [dict(vars(kind)) for kind in kinds] != before
        raise RuntimeError("traced no further")
    assert [dict(vars(kind)) for kind in kinds] == before


TPU_MODEL = {"type": "qwen3_moe", "moe_intermediate_dim": 128, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot")
def test_islands_use_the_grouped_matmul_on_tpu(tmp_path: Path) -> None:
    with abstract_run(tpu_devices(Slice.of("v5p-8"), 2), config(tmp_path, {}, **TPU_MODEL), VOCAB_SIZE) as run:
        inner = next(program for program in run.programs if program.name == "inner")
        text = inner.trace().lower().as_text()
    assert "gmm" in text and "tpu_custom_call" in text
    assert "ragged_dot" not in text
