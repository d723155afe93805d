"""The training state: a Levanter `TrainerState` of the outer model, plus what the islands hold."""

import dataclasses
from enum import IntEnum

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis
from haliax.types import IntScalar
from haliax.util import is_named_array
from jaxtyping import Array, Float, Int, Int8, PRNGKeyArray, PyTree
from levanter.callbacks import StepInfo
from levanter.trainer_state import TrainerState, make_floating_point_trainable_filter, trainables_only
from levanter.utils.jax_utils import move_tree_to_memory_kind
from levanter.utils.tree_utils import inference_mode

from ..axes import FRAGMENT, ISLAND, Params, broadcast
from ..fragments.windows import on_device
from .byte_count import Words, words_of
from .layout import Layout


class Status(IntEnum):
    """What became of an island in the sync of a fragment."""

    COUNTED = 0
    """It counts with its weight, which is 0 where it was absent or its outer gradient was lost."""

    LEFT_OUT = 1
    """The guard left it out, and it has not started anew since."""

    RESTARTED = 2
    """The guard left it out of this sync or of one under way with it, and it has started anew since."""


class Islands(eqx.Module):
    """What every island holds for itself; each array leads with the island axis, of size K."""

    params: Params
    """theta_k: trainable leaves only, axes `{diloco, ...}`, in the parameter dtype."""

    opt_state: PyTree
    """State of the host's inner optimizer. It never crosses between islands."""

    key: PRNGKeyArray
    """The island's own random stream."""

    failed: Int[Array, " K"]
    """1 if the guard has seen a loss that is not finite since the island last started anew; the host loads no bool."""

    weights: Float[Array, "K P"]
    """The island's weight in the latest sync of each fragment, fixed at its capture; 0 where it is not in the mean."""

    status: Int8[Array, "K P"]
    """Its `Status` in that sync."""

    @classmethod
    def copies_of(cls, host: TrainerState, layout: Layout) -> "Islands":
        """Islands that are all copies of a state of the host, but for a random stream that each has of its own."""
        num_islands, num_fragments = layout.num_islands, layout.diloco.num_fragments
        Island, key = Axis(ISLAND, num_islands), host.training_key
        return cls(
            params=broadcast(trainables_only(host.model, host.is_trainable), Island),
            opt_state=broadcast(host.opt_state, Island),
            # A single island draws what the host would: it is the run without DiLoCo, bit for bit.
            key=key[None] if num_islands == 1 else jax.random.split(key, num_islands),
            failed=jnp.zeros(num_islands, jnp.int32),
            weights=jnp.zeros((num_islands, num_fragments), jnp.float32),
            status=jnp.zeros((num_islands, num_fragments), jnp.int8),
        )


class DiLoCoState(TrainerState):
    """`model` is Theta and `opt_state` the outer optimizer's state, so that all of Levanter sees the outer model.

    The trainable leaves of `model` are f32 whatever the parameter dtype; frozen leaves exist once, here.
    `opt_state` holds, for each part of the partition, the states of its fragments along an axis `fragment`.
    """

    opt_state: dict[str, PyTree]  # pyrefly: ignore[bad-override-mutable-attribute]  the host leaves it open

    islands: Islands

    captured: dict[str, Params] | None
    """By part, Delta_k of the last captured fragment, axes `{diloco, ...}`, f32; `None` if V = 0."""

    crossed: dict[str, Params] | None
    """By part, the mean of what has crossed of it, axes `{...}`, f32; `None` if fragments cross in one piece."""

    residual: Params | None
    """What the wire format has lost so far, axes `{diloco, ...}`, f32; `None` without error feedback."""

    active: Int[Array, ""]
    """How many islands train: those of the lowest numbers."""

    outer_steps: Int[Array, " P"]
    """Outer steps taken by each fragment."""

    sent_bytes: Words
    """What each island has sent so far, as `byte_count` says: counted when it crosses, so that no later options, a
    wire or a number of fragments, put another price on it."""

    settled: Int[Array, ""]
    """Inner steps at the last final sync: captures up to there have no events left."""

    layout: dict[str, Int[Array, ""]]
    """The options that shape the state or its events, by name, with `islands` for K; where a resumed run has others,
    the state is carried over."""

    @property
    def theta(self) -> Params:
        """Theta itself: the trainable leaves of `model`, axes `{...}`, f32."""
        return trainables_only(self.model, self.is_trainable)

    @property
    def theta_of_islands(self) -> Params:
        """Theta as an island takes it up: axes `{...}`, in the parameter dtype, in device memory."""
        params = self.islands.params
        return jax.tree.map(lambda x, own: on_device(x).astype(own.dtype), self.theta, params, is_leaf=is_named_array)

    @property
    def model_on_devices(self) -> PyTree:
        """The outer model in device memory, for as long as it is held."""
        return move_tree_to_memory_kind(self.model, memory_kind="device")

    @property
    def eval_model(self) -> PyTree:
        return inference_mode(self.model_on_devices, True)

    @classmethod
    def of(cls, host: TrainerState, layout: Layout, optimizer: optax.GradientTransformation) -> "DiLoCoState":
        """Starts DiLoCo from a state of the host: Theta is its model, every island a copy of it, momentum fresh.

        Inner optimizer moments are copied to all islands; each island gets a random stream of its own, and
        a single island keeps the host's.
        """
        diloco, partition, num_islands = layout.diloco, layout.partition, layout.num_islands
        Island = Axis(ISLAND, num_islands)
        params = trainables_only(host.model, host.is_trainable)
        # f32 whatever the parameters are: a step of 1e-4 of a bf16 number would be rounded away.
        outer = jax.tree.map(lambda x: x.astype(jnp.float32), params, is_leaf=is_named_array)
        opt_state = {
            part: hax.vmap(optimizer.init, Axis(FRAGMENT, count))(partition.stacked(outer, part))
            for part, count in partition.parts.items()
        }
        # All fragments of a part have one shape, so one buffer serves them in turn.
        fragments = {part: partition.take(outer, part, 0) for part in partition.parts}
        return cls(
            step=host.step,
            model=eqx.combine(outer, host.model),
            optimizer=optimizer,
            opt_state=opt_state,
            training_key=host.training_key,
            is_trainable=host.is_trainable,
            mp=host.mp,
            model_averaging=None,  # pyrefly: ignore[bad-argument-type]  optional in the host, its type forgets it
            islands=Islands.copies_of(host, layout),
            captured=_zeros(broadcast(fragments, Island)) if diloco.overlap_steps else None,
            crossed=_zeros(fragments) if diloco.schedule.num_pieces > 1 else None,
            residual=_zeros(broadcast(outer, Island)) if diloco.error_feedback else None,
            active=jnp.asarray(num_islands, jnp.int32),
            outer_steps=jnp.zeros(diloco.num_fragments, jnp.int32),
            sent_bytes=words_of(0),
            settled=jnp.copy(host.step).astype(jnp.int32),
            layout={name: jnp.asarray(value, jnp.int32) for name, value in layout.facts.items()},
        )

    def restarted_at(self, model: PyTree) -> "DiLoCoState":
        """This state with the trainable leaves of `model`, in f32, as Theta, and every island a copy of them."""
        state = dataclasses.replace(self, model=eqx.combine(trainables_only(model, self.is_trainable), self.model))
        params = broadcast(state.theta_of_islands, Axis(ISLAND, len(self.islands.key)))
        return dataclasses.replace(state, islands=dataclasses.replace(self.islands, params=params))


class OuterStepInfo(StepInfo[DiLoCoState]):
    """What hooks see of a step: the outer model in device memory, wherever the state keeps it."""

    model = property(lambda self: self.state.model_on_devices)


def island_state(
    state: DiLoCoState, island: Islands, model: PyTree, optimizer: optax.GradientTransformation, step: IntScalar
) -> TrainerState:
    """Returns the state of a host trainer that trains one island.

    Args:
        state: Gives what all islands share: which leaves train, and the precision policy.
        island: What the island holds, without the island axis.
        model: Gives the leaves that `island` lacks.
        optimizer: The inner optimizer.
        step: Inner steps completed.
    """
    return TrainerState(
        step=step,
        model=eqx.combine(island.params, model, is_leaf=is_named_array),
        optimizer=optimizer,
        opt_state=island.opt_state,
        training_key=island.key,
        is_trainable=state.is_trainable,
        mp=state.mp,
        model_averaging=None,  # pyrefly: ignore[bad-argument-type]  optional in the host, its type forgets it
    )


def frozen_only(model: PyTree, is_trainable: PyTree) -> PyTree:
    """Returns `model` with `None` in place of every trainable leaf: what `trainables_only` leaves out."""
    # Integer leaves count as frozen even where a filter names them: there is no gradient to average.
    return eqx.filter(model, make_floating_point_trainable_filter(is_trainable), inverse=True, is_leaf=is_named_array)


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, tree)
