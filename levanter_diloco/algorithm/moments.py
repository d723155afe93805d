"""Inner moments: the inner optimizer's state of an island that starts anew in the middle of a run."""

import jax
import optax
from jaxtyping import PyTree
from optax.schedules import InjectHyperparamsState, InjectStatefulHyperparamsState

INJECTED = InjectHyperparamsState, InjectStatefulHyperparamsState
"""States that hold the present learning rate, around those of the optimizer that takes it."""

COUNTERS = *INJECTED, optax.ScaleByScheduleState
"""States that count the run's steps for a learning-rate schedule."""


def fresh_moments(initial: PyTree, current: PyTree) -> PyTree:
    """Returns the optimizer state `initial` at the present place of its learning-rate schedule.

    The learning rate is a function of the global step, equal on all islands; moments, and the counts that
    correct their bias, are an island's own.

    Args:
        initial: State of the inner optimizer as its `init` returns it.
        current: A state of it, with the same axes, whose schedule has come to the present step.
    """

    def fresh(new: PyTree, old: PyTree) -> PyTree:
        # Its hyperparameters are those of the present step; what it wraps has moments.
        if isinstance(old, INJECTED):
            return old._replace(inner_state=new.inner_state)
        return old if isinstance(old, COUNTERS) else new

    return jax.tree.map(fresh, initial, current, is_leaf=lambda x: isinstance(x, COUNTERS))
