"""The attendance of islands at a sync, and the guard that leaves out those whose numbers could spoil the mean."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from haliax.types import IntScalar
from jaxtyping import Array, Bool, Float, Int8

from ..algorithm.outer import norm
from ..axes import Params, island_axis
from .state import Islands, Status


class Attendance(NamedTuple):
    """Which islands are in the mean of a sync, with which weight, and what became of the others."""

    weights: Float[Array, " K"]
    """0 for one that is not in it."""

    status: Int8[Array, " K"]

    @classmethod
    def at(cls, islands: Islands, fragment: IntScalar) -> "Attendance":
        """Returns that of the latest capture of a fragment."""
        return cls(islands.weights[:, fragment], islands.status[:, fragment])

    @classmethod
    def of_message(cls, message: Float[Array, " K"]) -> "Attendance":
        """Reads what `message` says."""
        return cls(jnp.maximum(message, 0), jnp.maximum(-message, 0).astype(jnp.int8))

    @property
    def message(self) -> Float[Array, " K"]:
        """Both as one number an island, which joins a fragment on the wire: a weight, or minus a status."""
        return jnp.where(self.status == Status.COUNTED.value, self.weights, -self.status.astype(jnp.float32))

    def without(self, islands: Bool[Array, " K"]) -> "Attendance":
        """Leaves some islands out."""
        left_out = jnp.int8(Status.LEFT_OUT.value)
        return Attendance(jnp.where(islands, 0, self.weights), jnp.where(islands, left_out, self.status))

    def noted_in(self, islands: Islands, fragment: IntScalar) -> Islands:
        """Returns `islands` with this as the attendance of a fragment."""
        weights = islands.weights.at[:, fragment].set(self.weights)
        status = islands.status.at[:, fragment].set(self.status)
        return dataclasses.replace(islands, weights=weights, status=status)


class Guard(NamedTuple):
    """Leaves an island out of a sync whose outer gradient could spoil the mean."""

    enabled: bool
    """Whether it is left out for a loss or an outer gradient that is not finite."""

    factor: float | None
    """And for a norm of more than this multiple of the median of those that take part."""

    def note_losses(self, islands: Islands, losses: Float[Array, " K"]) -> Islands:
        """Notes which islands had a loss that is not finite."""
        if not self.enabled:
            return islands
        return dataclasses.replace(islands, failed=jnp.where(jnp.isfinite(losses), islands.failed, 1))

    def at_capture(
        self, islands: Islands, gradients: Params, weights: Float[Array, " K"], active: IntScalar
    ) -> Attendance:
        """Who attends by the options' weights, less those of which the guard knows a number that is not finite."""
        weights = jnp.asarray(weights)
        attendance = Attendance(weights, jnp.full(weights.shape, Status.COUNTED.value, jnp.int8))
        if not self.enabled:
            return attendance
        sound = jnp.isfinite(norm(gradients, island_axis(gradients))) & (islands.failed == 0)
        # One that does not train is not left out: nothing of it is wanted, whatever its numbers are.
        return attendance.without(~sound & (jnp.arange(len(weights)) < active))

    def at_reduce(self, attendance: Attendance, gradients: Params) -> Attendance:
        """Who attends, less those whose outer gradient is too long.

        The median needs the norms of all islands, so it crosses: with the reduce, not with the capture, behind which
        it would hold up the next step.
        """
        if self.factor is None:
            return attendance
        # Of those in the mean alone: one that is left out or absent would shift the median.
        norms, there = norm(gradients, island_axis(gradients)), attendance.weights > 0
        limit = self.factor * jnp.nanmedian(jnp.where(there, norms, jnp.nan))
        return attendance.without(there & (norms > limit))


def void(islands: Islands, chosen: Bool[Array, " K"]) -> Islands:
    """Takes back what was captured of those chosen islands that a sync has found to be broken: it counts no more."""
    broken = chosen & (islands.status == Status.LEFT_OUT.value).any(axis=1)
    voided = broken[:, None] & ((islands.weights > 0) | (islands.status != Status.COUNTED.value))
    status = jnp.where(voided, jnp.int8(Status.RESTARTED.value), islands.status)
    return dataclasses.replace(islands, weights=jnp.where(voided, 0, islands.weights), status=status)
