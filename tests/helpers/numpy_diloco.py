"""Streaming DiLoCo with islands that come, go and miss syncs, in plain numpy: the algorithm as the design states it.

Parameters are one vector; a fragment is a mask over it. Nothing here is the package's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Vector = np.ndarray


@dataclass(frozen=True)
class Options:
    """By the words of the design; steps count completed inner steps, from 1."""

    sync_period: int
    num_fragments: int
    overlap_steps: int
    mixing_alpha: float
    num_islands: int
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    inner_rate: float = 0.1
    inner_momentum: float = 0.0
    phases: tuple[tuple[int, int], ...] = ()
    """`(step, count)`: the first `count` islands train once `step` steps are completed; none: all, always."""

    shares: tuple[float, ...] = ()
    """A weight for each island; none: all the same."""

    by_tokens: bool = False
    """Whether an island's weight is also the number of steps it has trained since the fragment's last capture."""

    lost: Callable[[int, int], Vector] | None = None
    """Which islands' outer gradients are lost in the sync of (step, fragment)."""

    final_sync: bool = True

    @property
    def spacing(self) -> int:
        return max(1, round(self.sync_period / self.num_fragments))

    @property
    def period(self) -> int:
        return self.num_fragments * self.spacing

    def captured(self, step: int) -> int | None:
        """The fragment captured after `step`."""
        return step % self.period // self.spacing if step > 0 and step % self.spacing == 0 else None

    def active(self, completed: int) -> int:
        """Islands that train in the step after `completed` steps."""
        count = self.num_islands
        completed = max(completed, 0)
        for start, value in self.phases:
            if start <= completed:
                count = value
        return count

    def weights(self, step: int, fragment: int) -> Vector:
        """Of the islands in the mean of a capture; 0 leaves one out."""
        weights = np.where(np.arange(self.num_islands) < self.active(step - 1), 1.0, 0.0)
        if self.shares:
            weights *= self.shares
        if self.by_tokens:
            last = max((s for s in range(1, step) if self.captured(s) == fragment), default=0)
            trained = [sum(k < self.active(s) for s in range(last, step)) for k in range(self.num_islands)]
            weights *= trained
        return np.where(self.lost(step, fragment), 0.0, weights) if self.lost else weights


@dataclass
class Capture:
    """A fragment on its way."""

    step: int
    fragment: int
    gradients: Vector
    """`Delta_k`, one row an island."""

    weights: Vector
    stepped: bool = False


@dataclass
class DiLoCo:
    """The state of a run; `step` trains one inner step and does what is due after it."""

    options: Options
    outer: Vector
    fragments: list[Vector]
    """A mask for each fragment; each element is in one."""

    islands: Vector = field(init=False)
    momentum: Vector = field(init=False)
    inner_momentum: Vector = field(init=False)
    in_flight: list[Capture] = field(default_factory=list)
    completed: int = 0

    def __post_init__(self) -> None:
        self.outer = np.array(self.outer, np.float64)
        self.islands = np.tile(self.outer, (self.options.num_islands, 1))
        self.momentum = np.zeros_like(self.outer)
        self.inner_momentum = np.zeros_like(self.islands)

    def step(self, gradient: Callable[[int, Vector], Vector], last: bool = False) -> None:
        """One inner step of every island that trains, by `gradient(island, parameters)`, and the events after it."""
        o = self.options
        active = o.active(self.completed)
        for k in range(o.active(self.completed - 1), active):  # those that join
            self.islands[k] = self.outer
            self.inner_momentum[k] = 0
        for k in range(active):
            slope = gradient(k, self.islands[k])
            self.inner_momentum[k] = slope + o.inner_momentum * self.inner_momentum[k]
            self.islands[k] -= o.inner_rate * self.inner_momentum[k]
        self.completed += 1
        t = self.completed
        if o.overlap_steps == 0:
            self.capture(o.captured(t))
        crossing = min(o.overlap_steps, o.spacing)
        self.outer_steps(t - crossing)
        self.merges(t - o.overlap_steps)
        if o.overlap_steps > 0:
            self.capture(o.captured(t))
        if last and o.final_sync:
            self.final_sync()

    def capture(self, fragment: int | None) -> None:
        if fragment is not None:
            weights = self.options.weights(self.completed, fragment)
            self.in_flight.append(Capture(self.completed, fragment, self.outer - self.islands, weights))

    def outer_steps(self, captured_until: int) -> None:
        """`m <- beta*m + Delta; Theta <- Theta - eta*(Delta + beta*m)` on what was captured; by nobody, nothing."""
        o = self.options
        for capture in self.in_flight:
            if capture.stepped or capture.step > captured_until:
                continue
            capture.stepped = True
            if capture.weights.sum() == 0:
                continue
            mask = self.fragments[capture.fragment]
            # A product with the weights would spread the NaN of an island that is left out.
            there = capture.weights > 0
            mean = np.average(capture.gradients[there], axis=0, weights=capture.weights[there])[mask]
            self.momentum[mask] = o.outer_momentum * self.momentum[mask] + mean
            self.outer[mask] -= o.outer_rate * (mean + o.outer_momentum * self.momentum[mask])

    def merges(self, captured_until: int) -> None:
        """`theta_k <- alpha*theta_k + (1-alpha)*Theta` on the islands that took part."""
        alpha = self.options.mixing_alpha
        for capture in [one for one in self.in_flight if one.step <= captured_until]:
            self.in_flight.remove(capture)
            mask = self.fragments[capture.fragment]
            for k in np.flatnonzero(capture.weights):
                self.islands[k, mask] = alpha * self.islands[k, mask] + (1 - alpha) * self.outer[mask]

    def final_sync(self) -> None:
        """The final sync: all that is in flight lands, and what islands hold beyond it is synced at once."""
        o, t = self.options, self.completed
        self.outer_steps(t)
        self.merges(t)
        for fragment in range(o.num_fragments):
            last = max((s for s in range(1, t + 1) if o.captured(s) == fragment), default=0)
            # A merge with alpha 0 takes away what an island did since the capture.
            settled = min(last + o.overlap_steps, t) if o.mixing_alpha == 0 and last else last
            if settled < t:
                self.capture(fragment)
                self.outer_steps(t)
                self.merges(t)
