"""DiLoCo in equations [DiLoCo, Streaming]: everything else moves arrays to this file and back.

Trees are `Params`: NamedArrays, with `None` where a leaf is not meant. `Island` is the axis `diloco`.
"""

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, AxisSelector, NamedArray
from haliax.util import is_named_array
from jaxtyping import Float, PyTree

from ..axes import ISLAND, Params


def island_gradients(outer: Params, islands: Params) -> Params:
    """Displacement of every island from the outer parameters: `Delta_k = Theta - theta_k` [DiLoCo].

    The sign is written here and nowhere else: a descent step moves Theta towards the islands.

    Args:
        outer: Theta, axes `{...}`, f32; the last global value, never an island's blended copy.
        islands: theta_k, axes `{diloco, ...}` in the parameter dtype, leaf for leaf like `outer`.

    Returns:
        Delta_k, axes `{diloco, ...}`, f32.

    Raises:
        ValueError: If a leaf of `islands` lacks the island axis.
    """

    def displacement(outer: NamedArray, islands: NamedArray) -> NamedArray:
        if islands.axis_names[:1] != (ISLAND,):
            raise ValueError(f"island parameters must lead with the axis {ISLAND!r}, found {islands.axis_names}.")
        # In f32: of two bf16 numbers that are near the difference would keep a few bits.
        return outer.broadcast_axis(islands.resolve_axis(ISLAND)) - islands.astype(jnp.float32)

    return jax.tree.map(displacement, outer, islands, is_leaf=is_named_array)


def outer_gradient(gradients: Params, weights: NamedArray | None = None, Island: AxisSelector = ISLAND) -> Params:
    """Mean of the islands' outer gradients: `Delta = sum_k(w_k * Delta_k) / sum_k(w_k)`, in f32 [DiLoCo].

    The definition. On a mesh, `all_reduce.AllReduce.mean` computes it with one exchange.

    Args:
        gradients: Delta_k, axes `{diloco, ...}`.
        weights: w_k >= 0, axes `{diloco}`, not all 0; without them all are equal.
        Island: The axis.
    """
    if weights is None:
        return jax.tree.map(lambda x: hax.mean(x, Island), gradients, is_leaf=is_named_array)
    total = hax.sum(weights, Island)
    return jax.tree.map(lambda x: hax.sum(weights * x, Island) / total, gradients, is_leaf=is_named_array)


def outer_step(
    optimizer: optax.GradientTransformation, opt_state: PyTree, outer: Params, gradient: Params
) -> tuple[Params, PyTree]:
    """One step of the outer optimizer on one fragment: `(Theta, m) <- OuterOpt(Theta, m, Delta)` [DiLoCo].

    Args:
        optimizer: Any optax transformation; only its `update` is called.
        opt_state: Its state for this fragment, as `init` or the last step returned it.
        outer: Theta of this fragment, f32.
        gradient: Delta, axes and dtype of `outer`, equal on every island.

    Returns:
        The new Theta and the new state.
    """
    # Nesterov: `m <- beta*m + Delta; Theta <- Theta - eta*(Delta + beta*m)` [DiLoCo].
    updates, opt_state = optimizer.update(gradient, opt_state, outer)
    return optax.apply_updates(outer, updates), opt_state


def merge(outer: Params, islands: Params, mixing_alpha: float, present: NamedArray | None = None) -> Params:
    """Islands take up the outer parameters: `theta_k <- alpha*theta_k + (1-alpha)*Theta` [Streaming].

    An overwrite, not an update: `p + (q - p)` is not `q` in floats, and islands must be equal after alpha = 0.

    Args:
        outer: Theta, axes `{...}`, f32.
        islands: theta_k, axes `{diloco, ...}`.
        mixing_alpha: alpha in [0, 1], a Python float: 0 copies Theta bit for bit.
        present: Which islands took part in the sync, axes `{diloco}`; the others keep what they have, as an island
            whose outer gradient was lost is not reset [DiLoCo]. All, if not given.

    Returns:
        The new theta_k, axes and dtype of `islands`.
    """

    def merged(outer: NamedArray, island: NamedArray) -> NamedArray:
        target = outer.broadcast_axis(island.resolve_axis(ISLAND))
        # alpha = 0 takes no arithmetic: `0*theta_k` would be NaN for an island that is not finite.
        if mixing_alpha != 0:
            target = mixing_alpha * island.astype(jnp.float32) + (1 - mixing_alpha) * target
        target = target.astype(island.dtype)
        return target if present is None else hax.where(present, target, island).rearrange(island.axes)

    return jax.tree.map(merged, outer, islands, is_leaf=is_named_array)


def norm(tree: Params, Kept: Axis | None = None) -> Float[jax.Array, "..."]:
    """L2 norm over all elements of all leaves, in f32; one for each element of `Kept` if given."""

    def square_sum(x: NamedArray) -> jax.Array:
        square = hax.square(x.astype(jnp.float32))
        over = [axis for axis in square.axes if Kept is None or axis.name != Kept.name]
        return hax.sum(square, over).array

    leaves = jax.tree.leaves(tree, is_leaf=is_named_array)
    return jnp.sqrt(sum(map(square_sum, leaves), start=jnp.zeros(())))
