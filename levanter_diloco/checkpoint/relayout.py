"""A state carried over to another layout: other islands, fragments, order of layers, cut, or events.

Theta and what the outer optimizer remembers follow their elements. Islands follow `resume_islands` where their number
changes. What is in flight ends here: the new layout has other fragments, and its schedule starts at this step.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis
from haliax.util import is_named_array
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from ..algorithm.moments import fresh_moments
from ..axes import FRAGMENT, ISLAND, Params, broadcast, without_island
from ..errors import PATH, OptionError
from ..fragments.partition import Partition, take_fragment
from ..islands.layout import InFlight, Layout
from ..islands.state import DiLoCoState, Islands
from ..islands.sync import Sync
from ..options.config import ResumeIslands

OF_AN_ISLAND = ("params", "opt_state", "key", "failed")
"""What of `Islands` goes on with its island where the layout changes; all else starts anew."""


def carry_over(
    old: DiLoCoState,
    new: DiLoCoState,
    before: Layout,
    after: Layout,
    sync: Sync,
    in_flight: InFlight,
    active: int,
) -> DiLoCoState:
    """Returns `new` with all that `old` has come to.

    Args:
        old: A state of the layout `before`.
        new: A state of the layout `after`, at the same step, as DiLoCo starts: nothing captured, no residual.
        before: The stored layout.
        after: The run's layout.
        sync: Sync of the layout `before`.
        in_flight: What is under way in `old`.
        active: How many islands of `old` train; those of other numbers hold nothing that counts.
    """
    # The new schedule starts at this step, and knows nothing of what the old one had begun.
    old = _landed(old, sync, in_flight)
    opt_state, outer_steps = old.opt_state, old.outer_steps
    if before.partition != after.partition:
        opt_state = _recut(old, new, before.partition, after.partition, sync.optimizer)
        # Fragments of the new cut hold elements of several old ones, whose counts differ by one at most.
        outer_steps = jnp.full_like(new.outer_steps, jnp.max(outer_steps))
    islands, residual, now_active = old.islands, new.residual, old.active
    if before.num_islands != after.num_islands:
        Island, policy = Axis(ISLAND, after.num_islands), after.diloco.resume_islands
        islands, now_active = _resettled(old, active, Island, policy, sync.inner_optimizer), new.active
    elif old.residual is not None and residual is not None:
        residual = old.residual
    going_on = {name: getattr(islands, name) for name in OF_AN_ISLAND}
    return dataclasses.replace(
        new,
        model=old.model,
        opt_state=opt_state,
        training_key=old.training_key,
        islands=dataclasses.replace(new.islands, **going_on),
        residual=residual,
        active=now_active,
        outer_steps=outer_steps,
        sent_bytes=old.sent_bytes,
    )


def check_recut(optimizer: optax.GradientTransformation, outer: Params, partition: Partition, name: str) -> None:
    """Refuses an outer optimizer whose state does not lie along the parameters, so that it cannot be cut anew.

    Args:
        optimizer: The outer optimizer.
        outer: Theta.
        partition: A partition of it.
        name: What the options call the optimizer.

    Raises:
        OptionError: If it is so.
    """
    whole = _named(optimizer.init(outer))
    own, known = ({x.axes for x in jax.tree.leaves(tree, is_leaf=is_named_array)} for tree in (whole, outer))
    if not own <= known or not all(_cuts(optimizer, outer, whole, partition, part) for part in partition.parts):
        raise OptionError(
            f"{PATH}.outer ({name}) must keep its state in the shape of the parameters to resume with other "
            "fragments; the num_fragments, layer_order, partition and mesh of the checkpoint work."
        )


def _cuts(
    optimizer: optax.GradientTransformation, outer: Params, whole: PyTree, partition: Partition, part: str
) -> bool:
    """Whether a part of the optimizer's state for all parameters is its state for that part."""
    init = hax.vmap(optimizer.init, Axis(FRAGMENT, partition.parts[part]))
    states = _named(init(partition.stacked(outer, part))), partition.stacked(whole, part)
    own, taken = (jax.tree.map(lambda x: frozenset(x.axes), state, is_leaf=is_named_array) for state in states)
    return own == taken


def _landed(state: DiLoCoState, sync: Sync, in_flight: InFlight) -> DiLoCoState:
    """Ends what is in flight: merges what has taken its outer step, and forgets what has not crossed whole."""
    for fragment in in_flight.merging:
        state = sync.merge(state, sync.partition.locate(fragment))
    if in_flight.begun and state.residual is not None:
        # What its pieces lost was lost by a message that no outer step has taken in.
        (place,) = map(sync.partition.locate, in_flight.crossing)
        none = jax.tree.map(jnp.zeros_like, sync.partition.take(state.residual, *place))
        state = dataclasses.replace(state, residual=sync.partition.put(state.residual, *place, none))
    return state


def _recut(
    old: DiLoCoState,
    new: DiLoCoState,
    before: Partition,
    after: Partition,
    optimizer: optax.GradientTransformation,
) -> dict[str, PyTree]:
    """The outer optimizer's state by the fragments of `after`.

    Named arrays lie along the parameters and follow their elements. Others, such as counts, are a fragment's own:
    all fragments go on with those of the one that has taken the most outer steps; they differ by one at most.
    """
    whole = _named(optimizer.init(old.theta))
    for part, count in before.parts.items():

        def put(index: Int[Array, ""], whole: PyTree, part: str = part) -> PyTree:
            return before.put(whole, part, index, _named(take_fragment(old.opt_state[part], index)))

        # A loop on the device: one program whatever the number of fragments.
        whole = jax.lax.fori_loop(0, count, put, whole)
    each = [_unnamed(old.opt_state[part]) for part in before.parts]
    # Its counts are the ones that a learning-rate schedule should go on from.
    latest = jnp.argmax(old.outer_steps)
    counts = jax.tree.map(lambda *xs: jnp.concatenate(xs)[latest], *each)

    def like(x: PyTree, value: PyTree) -> PyTree:
        return value.rearrange(x.axes) if is_named_array(x) else jnp.broadcast_to(value, x.shape)

    cut = {part: eqx.combine(after.stacked(whole, part), counts, is_leaf=is_named_array) for part in after.parts}
    return jax.tree.map(like, new.opt_state, cut, is_leaf=is_named_array)


def _resettled(
    old: DiLoCoState, num_old: int, Island: Axis, policy: ResumeIslands, optimizer: optax.GradientTransformation
) -> Islands:
    """The first K islands of `old` as K' of them. Island j replaces `[j*K // K', (j+1)*K // K')`, one at least."""
    count = Island.size
    first = [j * num_old // count for j in range(count)]
    groups = [slice(start, max((j + 1) * num_old // count, start + 1)) for j, start in enumerate(first)]

    def mean(x: Array) -> Array:
        # A count or a key has no mean.
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return nearest(x)
        return jnp.stack([x[group].astype(jnp.float32).mean(axis=0).astype(x.dtype) for group in groups])

    def nearest(x: Array) -> Array:
        return x[jnp.array(first)]

    islands = jax.tree.map(mean if policy == "mean" else nearest, old.islands)
    if policy == "fresh":
        one = jax.tree.map(without_island, jax.tree.map(lambda x: x[0], old.islands), is_leaf=is_named_array)
        params = old.theta_of_islands
        moments = fresh_moments(optimizer.init(params), one.opt_state)
        islands = dataclasses.replace(
            islands,
            params=broadcast(params, Island),
            opt_state=broadcast(moments, Island),
            failed=jnp.zeros(count, islands.failed.dtype),
        )
    return dataclasses.replace(islands, key=_keys(old.islands.key, first))


def _keys(keys: PRNGKeyArray, first: list[int]) -> PRNGKeyArray:
    """The random streams of `first`; an island that shares its with one before it gets another."""
    # Two islands with one stream would drop out the same units and see the same noise.
    nth = [j - first.index(source) for j, source in enumerate(first)]
    streams = zip(first, nth, strict=True)
    return jnp.stack([jax.random.fold_in(keys[source], n) if n else keys[source] for source, n in streams])


def _named(tree: PyTree) -> PyTree:
    return eqx.filter(tree, is_named_array, is_leaf=is_named_array)


def _unnamed(tree: PyTree) -> PyTree:
    return eqx.filter(tree, is_named_array, inverse=True, is_leaf=is_named_array)
