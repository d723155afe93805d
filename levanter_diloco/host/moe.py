"""Mixture of experts: dispatch and grouped matmul for each shard of the tokens."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, current_thread_local_mapping, physical_axis_name, pspec_for_axis
from levanter.models.mixtral import MixtralSparseMoeBlock
from levanter.models.qwen3_moe import Qwen3MoeSparseMoeBlock

TOKENS = ("token", "token_repeat")
"""The host's axes of tokens, and of tokens once for each expert that they go to."""

SHARD = "token_shard"
"""Ours: the devices over which the tokens are split, so that counts of a shard are not taken for those of all."""


@contextmanager
def experts_by_shard() -> Generator[None]:
    """Lets the host's MoE blocks sort, count and multiply the tokens of a shard by themselves while a step is traced.

    As the host has it, either no token axis is sharded, and every device holds what all tokens need; or `token` and
    `token_repeat` are mapped, and the sort and the counts are a shard's while its ragged dot and its load balancing
    take them for everybody's: wrong losses. Here the token axes lie where `batch` does, each shard's rows go
    through the grouped matmul (megablox on TPU, whatever haliax has elsewhere), and the loads that the router's losses
    look at are those of all tokens. Experts are gathered for it: the host has no exchange of tokens.

    The mapping is haliax's at the time of the call, so the same serves an evaluation on the whole mesh.
    """
    with ExitStack() as stack:
        for block in (Qwen3MoeSparseMoeBlock, MixtralSparseMoeBlock):
            stack.enter_context(_replaced(block, "__call__", _on_sharded_tokens))
            stack.enter_context(_replaced(block, "_permute", _counted_by_shard))
        # Mixtral takes its loads from `_permute`.
        stack.enter_context(_replaced(Qwen3MoeSparseMoeBlock, "_route", _with_loads_of_all))
        stack.enter_context(_replaced(hnn.MoELinear, "__call__", _grouped_matmul))
        yield


@contextmanager
def _replaced(owner: type, name: str, build: Callable[[Callable], Callable]) -> Generator[None]:
    """Puts what `build` makes of the host's method in its place."""
    original = vars(owner)[name]
    setattr(owner, name, build(getattr(owner, name)))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _on_sharded_tokens(host_call: Callable) -> Callable:
    """Maps the token axes of a block to where the batch lies."""

    def call(self: Any, x: NamedArray, *, key: Any = None) -> tuple[NamedArray, dict[str, NamedArray]]:
        mapping = current_thread_local_mapping()
        if mapping is None or hax.partitioning._get_mesh() is None:
            return host_call(self, x, key=key)
        with hax.axis_mapping(_token_mapping(mapping, x)):
            out, extras = host_call(self, x, key=key)
        # Mixtral's loads, and its loss that is linear in them, still have the axis; all shards have as many tokens.
        return out, {name: hax.mean(x, SHARD) if SHARD in x.axis_names else x for name, x in extras.items()}

    return call


def _token_mapping(mapping: ResourceMapping, x: NamedArray) -> ResourceMapping:
    """`mapping` inside a block: tokens are split as the batch of `x` is, and nothing is split by experts."""
    inside = {name: axes for name, axes in mapping.items() if name not in (*TOKENS, SHARD, "experts")}
    if "batch" not in x.axis_names or "batch" not in mapping:
        return inside
    return {**inside, **dict.fromkeys((*TOKENS, SHARD), mapping["batch"])}


def _counted_by_shard(host_permute: Callable) -> Callable:
    """Gives the sizes of the groups an axis of shards; the host says of each shard's that they are everybody's."""

    def permute(self: Any, x_flat: NamedArray, chosen: NamedArray, TokenRepeat: Axis) -> tuple[NamedArray, ...]:
        rows, _, order = host_permute(self, x_flat, chosen, TokenRepeat)
        return rows, _loads(chosen, self.config.Experts), order

    return permute


def _with_loads_of_all(host_route: Callable) -> Callable:
    def route(self: Any, logits: NamedArray, Token: Axis, TopExperts: Axis) -> tuple[NamedArray, ...]:
        weights, chosen, _ = host_route(self, logits, Token, TopExperts)
        return weights, chosen, hax.sum(_loads(chosen, self.config.Experts), SHARD)

    return route


def _loads(chosen: NamedArray, Experts: Axis) -> NamedArray:
    """How many tokens of each shard go to each expert, axes `{token_shard, experts}`."""

    def count(chosen: jax.Array) -> jax.Array:
        return jnp.bincount(chosen.reshape(-1), length=Experts.size)[None]

    Shard = Axis(SHARD, hax.partitioning.physical_axis_size(SHARD) or 1)
    counts = _by_shard(count, (chosen,), (Shard, Experts))
    return hax.named(counts, (Shard, Experts))


def _grouped_matmul(host_call: Callable) -> Callable:
    """Multiplies the rows of each shard with the experts they were sorted by."""

    def call(self: hnn.MoELinear, inputs: NamedArray, group_sizes: NamedArray, *, key: Any = None) -> NamedArray:
        if SHARD not in group_sizes.axis_names:
            return host_call(self, inputs, group_sizes, key=key)
        inputs = inputs.rearrange((..., self.In))
        weight = self.weight.rearrange((..., self.In, self.Out))
        contracted = physical_axis_name(self.In)  # by tensor parallelism, of the second matmul

        def multiply(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
            out = hnn.ragged_dot(rows, weight, sizes[0])
            return out if contracted is None else jax.lax.psum(out, contracted)

        Out = (*inputs.axes[:-1], self.Out)
        out = hax.named(_by_shard(multiply, (inputs, weight, group_sizes), Out), Out)
        return hax.auto_sharded(out if self.bias is None else out + self.bias)

    return call


def _by_shard(fn: Callable[..., jax.Array], args: tuple[NamedArray, ...], Out: tuple[Axis, ...]) -> jax.Array:
    """Calls `fn` on each device's part of `args`: a kernel of a TPU must not be left to XLA to partition."""
    mapped = jax.shard_map(
        fn,
        mesh=hax.partitioning._get_mesh(),
        in_specs=tuple(pspec_for_axis(x.axes) for x in args),
        out_specs=pspec_for_axis(Out),
        check_vma=False,  # kernels say nothing of how their results vary
    )
    return mapped(*(x.array for x in args))
