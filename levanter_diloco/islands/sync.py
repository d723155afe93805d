"""The verbs of a sync on the state: capture, reduce, outer step, merge [Streaming], and the restart of islands."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax.types import IntScalar
from haliax.util import is_named_array
from jaxtyping import Array, Bool, Float, PyTree

from ..algorithm.moments import fresh_moments
from ..algorithm.outer import island_gradients, merge, norm, outer_step
from ..axes import ISLAND, Params, broadcast, island_axis
from ..fragments.partition import Partition, Place, put_fragment, take_fragment
from .all_reduce import AllReduce, Reduced
from .byte_count import Words, added, words_of
from .guard import Attendance, Guard, void
from .placement import Placement
from .state import DiLoCoState


class SyncReport(NamedTuple):
    """Figures of one fragment's outer step."""

    island_distance: PyTree[Float[Array, " K"]]
    """`|Delta_k|`: how far each island had moved from Theta at the capture. Stays on its island."""

    outer_grad_norm: PyTree[Float[Array, ""]]
    outer_update_norm: PyTree[Float[Array, ""]]
    attendance: PyTree[Attendance]
    """Of all islands."""

    sent_bytes: PyTree[Words]
    """What each island has sent for it."""


@dataclass(frozen=True)
class Sync:
    """The verbs of a sync, as pure functions of the state; the index of a fragment's place may be traced.

    `weights` are those that the options give each island, `[K]`, 0 for one that is absent.
    """

    partition: Partition
    optimizer: optax.GradientTransformation
    mixing_alpha: float
    all_reduce: AllReduce
    placement: Placement
    inner_optimizer: optax.GradientTransformation
    guard: Guard

    def displacement(self, state: DiLoCoState, place: Place) -> Params:
        """Returns `Delta_k` of one fragment, axes `{diloco, ...}`, f32, each on its own island."""
        islands = self.partition.take(state.islands.params, *place)  # {diloco, ...}
        return island_gradients(self.partition.take(state.theta, *place), islands)

    def payload_bytes(self, gradients: Params, *, at_once: bool = False) -> int:
        """Bytes that an island sends for one sync of a fragment; one that is alone sends nothing.

        Args:
            gradients: As `displacement` returns them; shapes will do.
            at_once: Whether it crosses in one piece, as in a sync without overlap: pieces have paddings of their own.
        """
        return self._all_reduce(at_once).payload_bytes(gradients) if island_axis(gradients).size > 1 else 0

    def capture(self, state: DiLoCoState, place: Place, weights: Float[Array, " K"]) -> DiLoCoState:
        """Captures one fragment into the state, from where later steps reduce it (V >= 1)."""
        gradients = self.displacement(state, place)
        attendance = self.guard.at_capture(state.islands, gradients, weights, state.active)
        state = self._note(state, place, attendance)
        return dataclasses.replace(state, captured={**(state.captured or {}), place.part: gradients})

    def reduce(self, state: DiLoCoState, place: Place, piece: IntScalar) -> Reduced:
        """Returns `Delta`, axes `{...}`, f32, of the captured fragment, as far as it has crossed with this piece.

        The one exchange between islands. It reads nothing that the inner step writes, and may overlap it.
        """
        attendance = Attendance.at(state.islands, self.partition.number(place))
        return self._reduce(state, place, self._captured(state, place), attendance, piece)

    def outer_step(
        self, state: DiLoCoState, place: Place, reduced: Reduced, last: bool
    ) -> tuple[DiLoCoState, SyncReport | None]:
        """Takes in what `reduce` returned; with the last piece the fragment takes its outer step."""
        state = self._remember(state, place, reduced.residual)
        if not last:
            return dataclasses.replace(state, crossed={**(state.crossed or {}), place.part: reduced.mean}), None
        gradients = self._captured(state, place)
        state, _, report = self._outer_step(state, place, gradients, reduced, self.payload_bytes(gradients))
        return state, report

    def reduce_and_step(
        self, state: DiLoCoState, place: Place, piece: IntScalar, last: bool
    ) -> tuple[DiLoCoState, SyncReport | None]:
        """`reduce` and `outer_step` at once, apart from an inner step."""
        return self.outer_step(state, place, self.reduce(state, place, piece), last)

    def merge(self, state: DiLoCoState, place: Place) -> DiLoCoState:
        """Lets every island that took part take up Theta of one fragment."""
        return self._merge(state, place, self.partition.take(state.theta, *place))

    def sync(self, state: DiLoCoState, place: Place, weights: Float[Array, " K"]) -> tuple[DiLoCoState, SyncReport]:
        """A sync without overlap: capture, reduce, outer step and merge of one fragment at once."""
        gradients = self.displacement(state, place)
        attendance = self.guard.at_capture(state.islands, gradients, weights, state.active)
        reduced = self._reduce(state, place, gradients, attendance)
        state = self._remember(state, place, reduced.residual)
        payload = self.payload_bytes(gradients, at_once=True)
        state, after, report = self._outer_step(state, place, gradients, reduced, payload)
        return self._merge(state, place, after), report

    def restart(
        self, state: DiLoCoState, chosen: Bool[Array, " K"], active: IntScalar, copied: bool = False
    ) -> DiLoCoState:
        """Lets the chosen islands start anew from Theta, at the present place of the learning-rate schedule.

        Args:
            state: The state.
            chosen: Which islands.
            active: How many islands train from now on.
            copied: Whether they take the inner moments of island 0; else these are fresh.
        """
        islands = void(state.islands, chosen)
        Island = island_axis(islands.params)
        theta = state.theta_of_islands
        # Both branches are traced for themselves: `copied` is an option, fixed for a run.
        if copied:
            moments = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), islands.opt_state)
        else:
            moments = fresh_moments(broadcast(self.inner_optimizer.init(theta), Island), islands.opt_state)
        # What the wire has lost of an island was lost on its way from parameters that it no longer has.
        residual = None if state.residual is None else jax.tree.map(jnp.zeros_like, state.residual)

        def pick[T: PyTree](new: T, old: T) -> T:
            return jax.tree.map(lambda x, y: jnp.where(jnp.expand_dims(chosen, range(1, y.ndim)), x, y), new, old)

        islands = dataclasses.replace(
            islands,
            params=pick(broadcast(theta, Island), islands.params),
            opt_state=pick(moments, islands.opt_state),
            failed=jnp.where(chosen, 0, islands.failed),
        )
        return dataclasses.replace(
            state, islands=islands, residual=pick(residual, state.residual), active=jnp.asarray(active, jnp.int32)
        )

    def mark_settled(self, state: DiLoCoState) -> DiLoCoState:
        """Notes that no capture up to this step has an event left."""
        # A copy: the state is donated, and one buffer cannot be given away twice.
        return dataclasses.replace(state, settled=jnp.copy(state.step).astype(jnp.int32))

    def _all_reduce(self, at_once: bool) -> AllReduce:
        return dataclasses.replace(self.all_reduce, num_pieces=1) if at_once else self.all_reduce

    def _reduce(
        self,
        state: DiLoCoState,
        place: Place,
        gradients: Params,
        attendance: Attendance,
        piece: IntScalar | None = None,
    ) -> Reduced:
        """Reduces one piece of the gradients; without a piece all of it crosses at once."""
        # The weights cross with the fragment, so that all islands divide by the same sum.
        message = self.guard.at_reduce(attendance, gradients).message
        # A key of its own for each exchange, the same again after a resume.
        key = jax.random.fold_in(jax.random.fold_in(state.training_key, state.step), self.partition.number(place))
        residual = None if state.residual is None else self.partition.take(state.residual, *place)
        all_reduce = self._all_reduce(at_once=piece is None)
        if piece is None:
            return all_reduce.mean(gradients, message, key, residual=residual)
        so_far = None if state.crossed is None else state.crossed[place.part]
        return all_reduce.mean(gradients, message, key, piece, so_far, residual)

    def _outer_step(
        self, state: DiLoCoState, place: Place, gradients: Params, reduced: Reduced, payload: int
    ) -> tuple[DiLoCoState, Params, SyncReport]:
        """Takes the outer step of one fragment; with no island in the mean, Theta and its optimizer state stay.

        Also returns the new Theta of the fragment: read back from the state, it would cost a copy of the stack.
        """
        attendance = jax.tree.map(self.placement.everywhere, Attendance.of_message(reduced.weights))
        # With nobody in the mean it is 0, and a step on it would still move Theta by its momentum.
        taken = (attendance.weights > 0).any()
        # The anchor is Theta, never an island's blend of it: the islands' copies differ once alpha > 0.
        before = self.partition.take(state.theta, *place)
        moments = state.opt_state[place.part]
        current = self.placement.own(before), take_fragment(moments, place.index)
        stepped = outer_step(self.optimizer, current[1], current[0], reduced.mean)
        own, mine = jax.tree.map(lambda new, old: jnp.where(taken, new, old), stepped, current)
        after = self.placement.whole(own)
        moved = jax.tree.map(lambda new, old: new - old, after, before, is_leaf=is_named_array)
        norms = norm(gradients, island_axis(gradients)), norm(reduced.mean), norm(moved)
        sent = words_of(payload)
        state = dataclasses.replace(
            state,
            model=eqx.combine(self.partition.put(state.theta, *place, after), state.model),
            opt_state={**state.opt_state, place.part: put_fragment(moments, place.index, mine)},
            outer_steps=state.outer_steps.at[self.partition.number(place)].add(taken.astype(jnp.int32)),
            # A message that nobody counts in has crossed all the same.
            sent_bytes=added(state.sent_bytes, sent),
        )
        return self._note(state, place, attendance), after, SyncReport(*norms, attendance, sent)

    def _merge(self, state: DiLoCoState, place: Place, outer: Params) -> DiLoCoState:
        params = state.islands.params
        # An island whose outer gradient was lost is not reset: its progress is in its next one [DiLoCo, 3.2].
        present = hax.named(Attendance.at(state.islands, self.partition.number(place)).weights > 0, ISLAND)
        merged = merge(outer, self.partition.take(params, *place), self.mixing_alpha, present)
        islands = dataclasses.replace(state.islands, params=self.partition.put(params, *place, merged))
        return dataclasses.replace(state, islands=islands)

    def _note(self, state: DiLoCoState, place: Place, attendance: Attendance) -> DiLoCoState:
        islands = attendance.noted_in(state.islands, self.partition.number(place))
        return dataclasses.replace(state, islands=islands)

    def _remember(self, state: DiLoCoState, place: Place, residual: Params | None) -> DiLoCoState:
        if residual is None:
            return state
        return dataclasses.replace(state, residual=self.partition.put(state.residual, *place, residual))

    @staticmethod
    def _captured(state: DiLoCoState, place: Place) -> Params:
        assert state.captured is not None  # V >= 1
        return state.captured[place.part]
