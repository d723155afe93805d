"""The inner optimizer's state of an island that starts anew in the middle of a run."""

import jax
import optax
from jaxtyping import PyTree
from optax.schedules import InjectHyperparamsState, InjectStatefulHyperparamsState

from .fragments import Params

COUNTERS = (InjectHyperparamsState, InjectStatefulHyperparamsState, optax.ScaleByScheduleState)
"""States that count the run's steps for a learning-rate schedule."""


def fresh_moments(optimizer: optax.GradientTransformation, opt_state: PyTree, params: Params) -> PyTree:
    """Returns the state of `optimizer` at its start, at the present place of its learning-rate schedule.

    The learning rate is a function of the global step, equal on all islands; moments, and the counts that
    correct their bias, are an island's own.

    Args:
        optimizer: The inner optimizer.
        opt_state: A state of it, whose schedule has come to the present step.
        params: The parameters it starts from, axes `{...}`.
    """

    def fresh(new: PyTree, old: PyTree) -> PyTree:
        if isinstance(old, InjectHyperparamsState | InjectStatefulHyperparamsState):
            return old._replace(inner_state=new.inner_state)
        return old if isinstance(old, optax.ScaleByScheduleState) else new

    return jax.tree.map(fresh, optimizer.init(params), opt_state, is_leaf=lambda x: isinstance(x, COUNTERS))
