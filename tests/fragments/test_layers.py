from functools import cache
from math import prod
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.main.train_lm  # noqa: F401  registers the models' names
import numpy as np
import optax
import pytest
from haliax import Axis
from haliax.nn import ScanCheckpointPolicy, Stacked
from haliax.util import is_named_array
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.models.lm_model import LmConfig
from levanter.trainer_state import trainables_only

from helpers.toy_model import Block, Toy, cache_sizes
from levanter_diloco.axes import FRAGMENT, Params
from levanter_diloco.fragments.layers import ROW, LayerPartition
from levanter_diloco.fragments.partition import Place, put_fragment, take_fragment

Island = Axis("diloco", 2)
NUM_LAYERS = 6
VALID = [1, 2, 3, 4, 7]
"""P for six layers: 1, and 1 more than each divisor of 6."""

SIZES = {"hidden_dim": 8, "num_layers": NUM_LAYERS, "num_heads": 2, "max_seq_len": 4}
GATED = {"intermediate_dim": 8, "num_kv_heads": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "qwen3": GATED,
    "qwen3_moe": {**GATED, "moe_intermediate_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma": GATED,
    "gpt2": {},
    "olmo2": GATED,
    "mixtral": GATED,
}


@cache
def shapes_of(name: str, **options: Any) -> Params:
    """The trainable leaves of a tiny model, as shapes."""
    config = LmConfig.get_choice_class(name)(**SIZES, **MODELS[name], **options)
    model = eqx.filter_eval_shape(config.build, Axis("vocab", 12), key=jax.random.PRNGKey(0))
    return trainables_only(model, True)


def numbered(shapes: Params, *leading: Axis) -> tuple[Params, int]:
    """Numbers the elements of all leaves 0, 1, 2, ... and counts them; `leading` axes come first in each leaf."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=is_named_array)
    axes = [(*leading, *leaf.axes) for leaf in leaves]
    counts = [prod(axis.size for axis in mine) for mine in axes]
    numbers = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    filled = [
        hax.named(jnp.asarray(number.reshape([axis.size for axis in mine])), mine)
        for number, mine in zip(numbers, axes, strict=True)
    ]
    return treedef.unflatten(filled), sum(counts)


def places(partition: LayerPartition) -> list[Place]:
    return [partition.locate(fragment) for fragment in range(partition.num_fragments)]


def elements(tree: Params) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def same(left: Any, right: Any) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def layers_of(partition: LayerPartition, index: int, params: Any) -> list[int]:
    """Layer numbers in one fragment of a toy whose layers hold their own number."""
    fragment = partition.take(params, "layers", index)
    assert fragment.embed is None
    weight = fragment.layers.stacked.weight
    assert {axis.name for axis in weight.axes} == {"entry", ROW}
    return weight["entry", 0].array.tolist()


TOY = Toy.of(embed=[7.0, 8.0, 9.0], layers=[[0, 1, 2, 3]] * 2)


def test_interleaved_fragments_take_every_other_layer():
    partition = LayerPartition(3, "interleaved")
    assert [layers_of(partition, i, TOY) for i in range(2)] == [[0, 2], [1, 3]]


def test_sequential_fragments_take_neighbours():
    partition = LayerPartition(3, "sequential")
    assert [layers_of(partition, i, TOY) for i in range(2)] == [[0, 1], [2, 3]]


def test_fragment_0_is_the_rest():
    fragment = LayerPartition(3, "interleaved").take(TOY, "rest", 0)
    assert fragment.embed.array.tolist() == [7.0, 8.0, 9.0]
    assert fragment.layers.stacked.weight is None


def test_one_fragment_is_everything():
    partition = LayerPartition(1, "interleaved")
    partition.check(TOY)
    assert partition.parts == {"rest": 1}
    assert same(partition.take(TOY, "rest", 0), TOY)


def test_put_replaces_the_fragment_alone():
    partition = LayerPartition(3, "interleaved")
    doubled = jax.tree.map(lambda x: 2 * x, partition.take(TOY, "layers", 1))
    put = partition.put(TOY, "layers", 1, doubled)
    assert put.layers.stacked.weight.array.tolist() == [[0, 2, 2, 6]] * 2
    assert put.layers.stacked.weight.axes == TOY.layers.stacked.weight.axes
    assert put.embed.array.tolist() == [7.0, 8.0, 9.0]


def test_put_of_the_rest_leaves_the_layers():
    partition = LayerPartition(3, "sequential")
    put = partition.put(TOY, "rest", 0, jax.tree.map(jnp.negative, partition.take(TOY, "rest", 0)))
    assert put.embed.array.tolist() == [-7.0, -8.0, -9.0]
    assert put.layers.stacked.weight.array.tolist() == [[0, 1, 2, 3]] * 2


def test_islands_are_cut_like_the_outer_parameters():
    islands = jax.tree.map(lambda x: x.broadcast_axis(Island), TOY, is_leaf=is_named_array)
    partition = LayerPartition(3, "interleaved")
    taken = partition.take(islands, "layers", 1).layers.stacked.weight
    assert taken.axes[0] == Island
    assert taken[Island, 1].array.tolist() == [[1, 3]] * 2
    assert (
        partition.put(islands, "layers", 1, partition.take(islands, "layers", 1)).layers.stacked.weight.axes[0]
        == Island
    )


@pytest.mark.parametrize("order", ["interleaved", "sequential"])
def test_traced_index_takes_and_puts_the_same(order: Any):
    partition = LayerPartition(3, order)
    take = jax.jit(lambda params, index: partition.take(params, "layers", index))
    put = jax.jit(lambda params, index, values: partition.put(params, "layers", index, values))
    for index in range(2):
        fragment = partition.take(TOY, "layers", index)
        assert same(take(TOY, index), fragment)
        values = jax.tree.map(lambda x: x + 10, fragment)
        assert same(put(TOY, index, values), partition.put(TOY, "layers", index, values))
    assert cache_sizes(take, put) == [1, 1]  # one program for all layer fragments


def test_optimizer_state_is_cut_with_its_counts():
    partition = LayerPartition(3, "interleaved")
    layers = partition.stacked(TOY, "layers")
    moments = hax.vmap(optax.adam(0.1).init, Axis(FRAGMENT, 2))(layers)
    mine = take_fragment(moments, 1)
    assert mine[0].count.shape == ()
    assert mine[0].mu.layers.stacked.weight.axis_names == layers.layers.stacked.weight["fragment", 0].axis_names
    stepped = put_fragment(moments, 1, jax.tree.map(lambda x: x + 1, mine))
    assert stepped[0].count.tolist() == [0, 1]
    assert same(take_fragment(stepped, 0), take_fragment(moments, 0))


@pytest.mark.parametrize("name", MODELS)
def test_models_leave_no_layer_in_the_rest(name: str):
    # One fragment for each of the six layers: the rest is what every model has outside them.
    params = shapes_of(name)
    partition = LayerPartition(7, "interleaved")
    partition.check(params)
    rest, layers = (eqx.filter_eval_shape(partition.stacked, params, part) for part in ("rest", "layers"))
    assert {leaf.axis_size(FRAGMENT) for leaf in jax.tree.leaves(layers, is_leaf=is_named_array)} == {NUM_LAYERS}
    for leaf in jax.tree.leaves(rest, is_leaf=is_named_array):
        assert not {"layer", "layers"} & set(leaf.axis_names)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=3, deadline=None)
@given(st.sampled_from(VALID), st.sampled_from(["interleaved", "sequential"]), st.booleans())
def test_every_element_is_in_one_fragment_and_comes_back(name: str, num_fragments: int, order: Any, islands: bool):
    params, count = numbered(shapes_of(name), *([Island] if islands else []))
    partition = LayerPartition(num_fragments, order)
    partition.check(params)

    @jax.jit
    def cut_and_mend(params: Params) -> tuple[list[Params], list[Params], Params]:
        fragments = [partition.take(params, *place) for place in places(partition)]
        back = [
            partition.put(params, *place, fragment)
            for place, fragment in zip(places(partition), fragments, strict=True)
        ]
        mended = jax.tree.map(jnp.zeros_like, params)
        for place, fragment in zip(places(partition), fragments, strict=True):
            mended = partition.put(mended, *place, fragment)
        return fragments, back, mended

    fragments, back, mended = cut_and_mend(params)
    assert np.array_equal(np.sort(np.concatenate([elements(f) for f in fragments])), np.arange(count))
    assert all(same(tree, params) for tree in back)
    assert same(mended, params)
    # P - 1 layer fragments of equal size, none empty.
    sizes = {elements(fragment).size for fragment in fragments[1:]}
    assert len(sizes) == (num_fragments > 1) and 0 not in sizes


def test_frozen_leaves_are_in_no_fragment():
    class Adapted(eqx.Module):
        base: Toy
        adapter: Toy

    which: Any = {"base": False, "adapter": True}  # Any: a mask has the structure of a model
    mask = Adapted(**which)
    params = trainables_only(Adapted(TOY, TOY), mask)
    partition = LayerPartition(3, "interleaved")
    partition.check(params)
    for place in places(partition):
        fragment = partition.take(params, *place)
        assert jax.tree.leaves(fragment.base) == []
        assert same(fragment.adapter, partition.take(TOY, *place))
        assert same(partition.put(params, *place, fragment), params)


def test_two_stacks_of_unequal_depth_are_both_cut():
    def stack(name: str, depth: int) -> Stacked:
        Layer = Axis(name, depth)
        return Stacked(Block(hax.arange(Layer)), Layer, ScanCheckpointPolicy.from_bool_or_str(False))

    model = {"encoder": stack("layers", 4), "decoder": stack("block", 2), "head": hax.arange(Axis("embed", 3))}
    partition = LayerPartition(3, "sequential")
    partition.check(model)
    second = partition.take(model, "layers", 1)
    assert second["encoder"].stacked.weight.array.tolist() == [2, 3]
    assert second["decoder"].stacked.weight.array.tolist() == [1]
    assert second["head"] is None
    with pytest.raises(ValueError, match=r"1 more than a divisor of the 2 layers; 1, 2, 3 work\.$"):
        LayerPartition(5, "sequential").check(model)


def test_describe_names_the_layers():
    assert LayerPartition(3, "interleaved").describe(TOY, 2) == "layers 1 3"
    assert LayerPartition(3, "sequential").describe(TOY, 2) == "layers 2 3"
    assert LayerPartition(3, "sequential").describe(TOY, 0) == "everything outside the layer stack"
    assert LayerPartition(1, "interleaved").describe(TOY, 0) == "all trainable parameters"


def test_fragments_that_do_not_divide_the_layers_are_refused_with_those_that_do():
    with pytest.raises(ValueError) as error:
        LayerPartition(4, "interleaved").check(TOY)
    assert str(error.value) == (
        "trainer.diloco.num_fragments (4) must be 1 more than a divisor of the 4 layers; 1, 2, 3, 5 work."
    )


@pytest.mark.parametrize("num_fragments", range(2, 9))
def test_fragment_counts_named_in_the_error_are_those_that_work(num_fragments: int):
    partition = LayerPartition(num_fragments, "interleaved")
    params = shapes_of("llama")
    if num_fragments in VALID:
        partition.check(params)
    else:
        with pytest.raises(ValueError, match=r"of the 6 layers; 1, 2, 3, 4, 7 work\.$"):
            partition.check(params)


def test_unscanned_model_is_refused_for_streaming_and_served_for_vanilla():
    params = shapes_of("llama", scan_layers=False)
    with pytest.raises(TypeError) as error:
        LayerPartition(3, "interleaved").check(params)
    assert str(error.value) == (
        "trainer.diloco.num_fragments (3) needs trainable layers in a stack (haliax.nn.Stacked), found none; "
        "1 works, or model.scan_layers: true where the model has that option."
    )
    LayerPartition(1, "interleaved").check(params)


def test_empty_fragment_0_is_refused():
    params = eqx.tree_at(lambda toy: toy.embed, TOY, None, is_leaf=is_named_array)
    with pytest.raises(ValueError) as error:
        LayerPartition(3, "interleaved").check(params)
    assert str(error.value) == (
        "trainer.diloco.num_fragments (3) leaves fragment 0 empty: no trainable parameters outside the layer stack; "
        "1 works."
    )
    LayerPartition(1, "interleaved").check(params)


def test_model_without_trainable_parameters_is_refused():
    nothing = trainables_only(TOY, False)
    with pytest.raises((TypeError, ValueError), match="no trainable parameters") as error:
        LayerPartition(1, "interleaved").check(nothing)
    assert "1 works" not in str(error.value)


def test_trainable_raw_array_is_refused_by_name():
    with pytest.raises(TypeError, match=r"^trainable leaf \['scale'\] is a ArrayImpl; fragments need NamedArrays\.$"):
        LayerPartition(1, "interleaved").check({"toy": TOY, "scale": jnp.ones(3)})
