"""Every element in one fragment, all fragments of one size, nothing moved to cut them."""

from functools import cache, partial
from math import prod
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.main.train_lm  # noqa: F401  registers the models' names
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray
from haliax.partitioning import pspec_for_axis
from haliax.util import is_named_array
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from levanter.models.lm_model import LmConfig
from levanter.trainer_state import trainables_only

from helpers.toy_model import Toy, cache_sizes
from levanter_diloco.axes import FRAGMENT, Params
from levanter_diloco.commands.compile.hlo import Program, collectives
from levanter_diloco.errors import ModelError, OptionError
from levanter_diloco.fragments.balanced import ROW, ROWS, BalancedPartition, _Rows
from levanter_diloco.fragments.partition import put_fragment, take_fragment

Island = Axis("diloco", 2)


def named(rows: Any, *axes: str) -> NamedArray:
    array = jnp.asarray(rows)
    return hax.named(array, [Axis(*pair) for pair in zip(axes, array.shape, strict=True)])


def leaves_of(tree: Params) -> list[NamedArray]:
    return jax.tree.leaves(tree, is_leaf=is_named_array)


def same(left: Any, right: Any) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def nonzero(tree: Params) -> np.ndarray:
    elements = np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    return elements[elements != 0]


FIVE = {"head": named([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], "vocab", "embed")}


def test_fragment_that_owns_a_row_less_ends_in_zeros():
    # 5 rows, P = 2: windows of 3; fragment 0 owns rows 0 and 1, fragment 1 owns rows 2, 3 and 4.
    partition = BalancedPartition(2, {"embed": 2})
    first, second = (partition.take(FIVE, ROWS, index)["head"] for index in range(2))
    assert first.axes == second.axes == (Axis(ROW, 3), Axis("embed", 2))
    assert first.array.tolist() == [[1, 2], [3, 4], [0, 0]]
    assert second.array.tolist() == [[5, 6], [7, 8], [9, 10]]


def test_put_leaves_the_row_that_it_does_not_own():
    partition = BalancedPartition(2, {"embed": 2})
    put = partition.put(FIVE, ROWS, 0, {"head": hax.full((Axis(ROW, 3), Axis("embed", 2)), -1)})["head"]
    assert put.array.tolist() == [[-1, -1], [-1, -1], [5, 6], [7, 8], [9, 10]]
    assert put.axes == FIVE["head"].axes


def test_layers_that_divide_are_shared_out_whole():
    toy = Toy.of(embed=[7.0, 8.0, 9.0], layers=[[0, 1, 2, 3]] * 2)
    fragment = BalancedPartition(4).take(toy, ROWS, 2)
    assert fragment.embed.array.tolist() == [8.0]
    assert fragment.layers.stacked.weight.array.tolist() == [[2], [2]]


def test_neighbouring_axes_become_rows_where_one_has_too_few():
    heads = {"weight": named(np.arange(12).reshape(1, 3, 4), "layer", "heads", "head_size")}
    taken = [BalancedPartition(6).take(heads, ROWS, index)["weight"] for index in range(6)]
    assert [x["layer", 0].array.tolist() for x in taken] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_sharded_axis_is_cut_in_every_shard():
    # Devices hold rows 0-3 and 4-7; a fragment has 2 rows of either.
    weight = {"up": named(np.arange(8), "mlp")}
    partition = BalancedPartition(2, {"mlp": 2})
    taken = partition.take(weight, ROWS, 1)["up"]
    assert taken.axes == (Axis("mlp", 2), Axis(ROW, 2))
    assert taken.array.tolist() == [[2, 3], [6, 7]]
    assert same(partition.put(weight, ROWS, 1, {"up": taken}), weight)


def test_one_fragment_is_everything():
    partition = BalancedPartition(1)
    partition.check(FIVE)
    assert partition.take(FIVE, ROWS, 0)["head"][ROW, 0].array.tolist() == FIVE["head"].array.tolist()
    assert partition.padding(FIVE) == 0


def test_parts_name_one_shape_for_all_fragments():
    partition = BalancedPartition(5)
    assert partition.parts == {ROWS: 5}
    assert [partition.locate(fragment) for fragment in (0, 4)] == [(ROWS, 0), (ROWS, 4)]


SHARDED = {"a": 2, "b": 3}


@st.composite
def leaf_axes(draw: st.DrawFn) -> tuple[Axis, ...]:
    """Up to three axes, of which `a` and `b` can be sharded."""
    names = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=3))
    return tuple(Axis(name, draw(st.integers(1, 5)) * SHARDED.get(name, 1)) for name in names)


def numbered(shapes: list[tuple[Axis, ...]]) -> tuple[list[NamedArray], int]:
    """Leaves whose elements are 1, 2, 3, ..., and how many there are."""
    sizes = [[axis.size for axis in axes] for axes in shapes]
    ends = np.cumsum([prod(mine) for mine in sizes])
    parts = np.split(np.arange(ends[-1]) + 1, ends[:-1])
    arrays = [jnp.asarray(part.reshape(mine)) for part, mine in zip(parts, sizes, strict=True)]
    return [hax.named(array, axes) for array, axes in zip(arrays, shapes, strict=True)], int(ends[-1])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(leaf_axes(), min_size=1, max_size=4), st.integers(1, 12), st.booleans(), st.booleans())
def test_every_element_is_in_one_fragment_and_comes_back(shapes: list, count: int, sharded: bool, islands: bool):
    partition = BalancedPartition(count, SHARDED if sharded else {})
    params, size = numbered([(*([Island] if islands else []), *axes) for axes in shapes])
    try:
        partition.check(params)
    except OptionError as error:
        partition = BalancedPartition(int(str(error).split()[-2]), partition.sharded)
        partition.check(params)
    take = jax.jit(lambda params, index: partition.take(params, ROWS, index))
    put = jax.jit(lambda params, index, values: partition.put(params, ROWS, index, values))
    fragments = [take(params, index) for index in range(partition.num_fragments)]
    owned = [nonzero(fragment) for fragment in fragments]
    assert np.array_equal(np.sort(np.concatenate(owned)), np.arange(size) + 1)
    assert all(mine.size > 0 for mine in owned)
    stacked = partition.stacked(params, ROWS)
    for index, (fragment, mine) in enumerate(zip(fragments, owned, strict=True)):
        assert same(put(params, index, fragment), params)
        negated = nonzero(put(params, index, jax.tree.map(jnp.negative, fragment)))
        assert np.array_equal(np.sort(-negated[negated < 0]), np.sort(mine))
        assert same(take_fragment(stacked, index), fragment)
    padded = partition.num_fragments * sum(leaf.size for leaf in leaves_of(fragments[0]))
    assert np.isclose(padded / size - 1, partition.padding(params))


def test_traced_index_needs_one_program():
    partition = BalancedPartition(3)
    take = jax.jit(lambda params, index: partition.take(params, ROWS, index))
    put = jax.jit(lambda params, index, values: partition.put(params, ROWS, index, values))
    for index in range(3):
        fragment = partition.take(FIVE, ROWS, index)
        assert same(take(FIVE, np.int32(index)), fragment)
        values = jax.tree.map(lambda x: x + 10, fragment)
        assert same(put(FIVE, np.int32(index), values), partition.put(FIVE, ROWS, index, values))
    assert cache_sizes(take, put) == [1, 1]


def test_first_row_is_right_where_the_product_exceeds_32_bits():
    rows = _Rows(first=0, last=1, shards=1, count=2_000_000_011, num_fragments=7)
    assert int(rows.start(jnp.int32(6))) == 6 * 2_000_000_011 // 7


def test_islands_are_cut_like_the_outer_parameters():
    islands = jax.tree.map(lambda x: x.broadcast_axis(Island), FIVE, is_leaf=is_named_array)
    partition = BalancedPartition(2)
    taken = partition.take(islands, ROWS, 0)["head"]
    assert taken.axes[0] == Island
    assert same(taken[Island, 1], partition.take(FIVE, ROWS, 0)["head"])


def test_momentum_of_zero_rows_stays_zero():
    params = jax.tree.map(lambda x: x.astype(jnp.float32), FIVE, is_leaf=is_named_array)
    partition, optimizer = BalancedPartition(2, {"embed": 2}), optax.adam(0.1)
    moments = hax.vmap(optimizer.init, Axis(FRAGMENT, 2))(partition.stacked(params, ROWS))
    fragment = partition.take(params, ROWS, 0)
    # Any: named arrays, of which optax knows nothing
    updates, mine = cast(Any, optimizer.update(fragment, take_fragment(moments, 0), fragment))
    assert updates["head"].axes == fragment["head"].axes
    assert updates["head"][ROW, 2].array.tolist() == [0, 0]
    stepped: Any = put_fragment(moments, 0, mine)
    assert stepped[0].count.tolist() == [1, 0]
    assert stepped[0].mu["head"][FRAGMENT, 0, ROW, 2].array.tolist() == [0, 0]


def test_frozen_leaves_are_in_no_fragment():
    params = {"base": None, "adapter": FIVE["head"]}
    partition = BalancedPartition(2)
    partition.check(params)
    fragment = partition.take(params, ROWS, 1)
    assert fragment["base"] is partition.stacked(params, ROWS)["base"] is None
    assert same(partition.put(params, ROWS, 1, fragment), params)


SMALL = {"hidden_dim": 64, "num_layers": 6, "num_heads": 4, "vocab": 300}
GATED = {"intermediate_dim": 128, "num_kv_heads": 2}
EXPERTS = {"moe_intermediate_dim": 32, "num_experts": 8, "num_experts_per_tok": 2}


def dense(embed: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    sizes = {"hidden_dim": embed, "intermediate_dim": mlp, "num_layers": layers, "vocab": vocab}
    return sizes | {"num_heads": heads, "num_kv_heads": kv_heads}


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": dense(4096, 12288, 36, 32, 8, 151_936),
    "llama": dense(4096, 14336, 32, 32, 8, 128_256),
    "gemma": dense(2048, 16384, 18, 8, 1, 256_000),
    "qwen3_moe": dense(2048, 6144, 48, 32, 4, 151_936)
    | {"moe_intermediate_dim": 768, "num_experts": 128, "num_experts_per_tok": 8},
    "gpt2": {"hidden_dim": 768, "num_layers": 12, "num_heads": 12, "vocab": 50_257},
}
"""Qwen3-8B, Llama-3-8B, Gemma 2B, Qwen3-30B-A3B and GPT-2."""

FSDP = {"embed": 8}
TENSOR = {"embed": 8, "mlp": 4, "heads": 4, "kv_head": 4}


@cache
def shapes_of(name: str, **options: Any) -> Params:
    """The trainable leaves of a model, as shapes; at its published size without options."""
    options = {"max_seq_len": 1024, **(options or MODELS[name])}
    Vocab = Axis("vocab", options.pop("vocab"))
    config = LmConfig.get_choice_class(name)(**options)
    return trainables_only(eqx.filter_eval_shape(config.build, Vocab, key=jax.random.PRNGKey(0)), True)


@pytest.mark.parametrize("sharded", [{}, FSDP, TENSOR], ids=["whole", "fsdp", "tensor"])
@pytest.mark.parametrize("count", [2, 7, 10, 37, 53])
@pytest.mark.parametrize("name", MODELS)
def test_fragments_of_models_are_within_five_percent_of_their_mean(name: str, count: int, sharded: dict):
    params = shapes_of(name)
    if name == "gemma":
        sharded = {axis: over for axis, over in sharded.items() if axis != "kv_head"}  # it has one
    partition = BalancedPartition(count, sharded)
    partition.check(params)
    size = sum(leaf.size for leaf in leaves_of(params))
    # All fragments have this shape, and own no more than it holds: it bounds the largest against the mean.
    fragment = eqx.filter_eval_shape(lambda params: partition.take(params, ROWS, 0), params)
    largest = sum(leaf.size for leaf in leaves_of(fragment))
    assert 1 <= largest / (size / count) <= 1.05
    assert np.isclose(largest * count / size - 1, partition.padding(params))


UNSTACKED = ("llama", SMALL | GATED | {"scan_layers": False})
ALTERNATING = ("olmo3", SMALL | GATED)
"""Sliding and full attention in turn, layers in a list."""
SPARSE = ("qwen3_moe", SMALL | GATED | EXPERTS)


@pytest.mark.parametrize("models", [[UNSTACKED], [ALTERNATING], [SPARSE, UNSTACKED]], ids=["list", "turns", "mixed"])
@pytest.mark.parametrize("count", [2, 5, 11])
def test_any_container_is_cut_evenly(models: list, count: int):
    params = [shapes_of(name, **options) for name, options in models]
    partition = BalancedPartition(count)
    partition.check(params)
    assert partition.padding(params) < 0.05
    held = [partition.describe(params, fragment) for fragment in range(count)]
    assert held == [f"share {fragment + 1} of {count} of every leaf" for fragment in range(count)]


MESH_AXES = {"diloco": "diloco", "embed": "data", "mlp": "model", "kv_head": "model"}
ON_MESH = {"embed": 2, "mlp": 2, "kv_head": 2}
WEIGHTS = {
    "q_proj": {"layer": 3, "kv_head": 4, "heads_per_group": 2, "head_size": 8, "embed": 32},
    "o_proj": {"layer": 3, "embed": 32, "kv_head": 4, "heads_per_group": 2, "head_size": 8},
    "up_proj": {"layer": 3, "mlp": 64, "embed": 32},
    "down_proj": {"layer": 3, "embed": 32, "mlp": 64},
    "norm": {"layer": 3, "embed": 32},
    "embeddings": {"vocab": 97, "embed": 32},
    "scale": {},
}


def on_mesh(tree: Params) -> Params:
    """Places arrays on 2 islands of 2 x 2 devices, by their axes."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("diloco", "data", "model"))

    def place(x: NamedArray) -> NamedArray:
        return hax.named(jax.device_put(x.array, NamedSharding(mesh, pspec_for_axis(x.axis_names, MESH_AXES))), x.axes)

    return jax.tree.map(place, tree, is_leaf=is_named_array)


@pytest.mark.parametrize("leading", [(), (Island,)], ids=["outer", "islands"])
def test_cutting_sharded_leaves_moves_nothing(leading: tuple):
    partition = BalancedPartition(5, ON_MESH)
    axes = [(*leading, *(Axis(*pair) for pair in sizes.items())) for sizes in WEIGHTS.values()]
    params = on_mesh(numbered(axes)[0])
    take = jax.jit(lambda params, index: partition.take(params, ROWS, index))
    put = jax.jit(lambda params, index, values: partition.put(params, ROWS, index, values), donate_argnums=0)
    fragment = take(params, np.int32(1))
    placed = on_mesh(fragment)
    for taken, expected in zip(jax.tree.leaves(fragment), jax.tree.leaves(placed), strict=True):
        assert taken.sharding.is_equivalent_to(expected.sharding, taken.ndim)
    assert same(jax.tree.map(np.asarray, fragment), partition.take(jax.tree.map(np.asarray, params), ROWS, 1))
    programs = [take.lower(params, np.int32(1)), put.lower(params, np.int32(1), placed)]
    programs.append(jax.jit(partial(partition.stacked, part=ROWS)).lower(params))
    assert [collectives(Program.of(program.compile().as_text() or "")) for program in programs] == [[], [], []]
    assert same(put(jax.tree.map(jnp.copy, params), np.int32(1), placed), params)


@pytest.mark.parametrize("count", [30, 32], ids=["rows_left", "no_rows_left"])
def test_fragment_is_updated_in_place(count: int):
    # Reading a window after it is overwritten would make XLA copy the whole leaf.
    partition = BalancedPartition(count, {"embed": 2})
    params = {"up": hax.ones((Axis("layer", 4), Axis("mlp", 512), Axis("embed", 64)))}

    @partial(jax.jit, donate_argnums=0)
    def step(params: Params, index: jax.Array) -> tuple[Params, Params]:
        before = partition.take(params, ROWS, index)
        after = jax.tree.map(lambda x: 0.5 * x, before)
        return partition.put(params, ROWS, index, after), jax.tree.map(lambda new, old: new - old, after, before)

    memory: Any = step.lower(params, np.int32(0)).compile().memory_analysis()  # Any: each backend's own class
    assert memory.temp_size_in_bytes < params["up"].array.nbytes / 4


def test_describe_counts_the_leaves_of_a_fragment():
    params = FIVE | {"scale": named(1.0)}
    partition = BalancedPartition(3)
    assert partition.describe(params, 0) == "share 1 of 3 of 1 of 2 leaves"
    assert partition.describe(params, 2) == "share 3 of 3 of every leaf"


def test_more_fragments_than_rows_are_refused_with_the_most_that_work():
    params = {"norm": named(np.ones(4), "embed"), "head": named(np.ones((7, 4)), "vocab", "embed")}
    with pytest.raises(OptionError) as error:
        BalancedPartition(9, {"embed": 4}).check(params)
    assert str(error.value) == (
        "trainer.diloco.num_fragments (9) leaves fragment 0 empty: no trainable leaf is cut into as many rows; "
        "7 works."
    )
    BalancedPartition(7, {"embed": 4}).check(params)


def test_rows_that_leave_a_fragment_empty_are_not_tolerated():
    # 102 outer rows for 103 fragments pad by 1 %, but leave fragment 0 empty; a shard of `mlp` has 103.
    params = {"up": hax.ones((Axis("embed", 102), Axis("mlp", 206)))}
    partition = BalancedPartition(103, {"mlp": 2})
    partition.check(params)
    assert partition.describe(params, 0) == "share 1 of 103 of every leaf"


def test_model_that_no_partition_can_cut_is_refused():
    with pytest.raises(ModelError, match="no trainable parameters"):
        BalancedPartition(2).check({"frozen": None})
    with pytest.raises(ModelError, match=r"^trainable leaf \['scale'\] is a ArrayImpl; fragments need NamedArrays\.$"):
        BalancedPartition(2).check({"scale": jnp.ones(3)})
