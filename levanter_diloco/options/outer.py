"""Outer optimizers: the options of `trainer.diloco.outer`, and what each builds.

optax is imported where one is built: the options are read, checked and planned with where no jax is.
"""

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import draccus

from .rules import require, require_one_of

if TYPE_CHECKING:
    import optax

LrSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class OuterOptimizerConfig(draccus.ChoiceRegistry, abc.ABC):
    """Base of `diloco.outer`: builds the optimizer that steps the outer parameters.

    Register a subclass under a name to make any optax transformation usable from YAML:
    `@OuterOptimizerConfig.register_subclass("lion")`.
    """

    learning_rate: float = 0.7
    """eta: peak outer learning rate, >= 0. 0.7 is the best of [DiLoCo] for 8 islands."""

    lr_schedule: LrSchedule = "constant"
    """How the rate falls from `learning_rate` to `min_lr_ratio * learning_rate`, in outer steps: `constant`, `linear`
    or `cosine`."""

    warmup: int = 0
    """Outer steps over which the rate rises, the first at `learning_rate / (warmup + 1)`; >= 0."""

    min_lr_ratio: float = 0.0
    """Final rate over peak rate, in [0, 1]; no effect on a constant schedule."""

    def __post_init__(self) -> None:
        rate = self.learning_rate
        require(rate >= 0, "outer.learning_rate", rate, "be at least 0", 0.7)
        require(rate < math.inf, "outer.learning_rate", rate, "be finite", 0.7)
        require_one_of(get_args(LrSchedule), "outer.lr_schedule", self.lr_schedule)
        require(self.warmup >= 0, "outer.warmup", self.warmup, "be at least 0", 0)
        require(0 <= self.min_lr_ratio <= 1, "outer.min_lr_ratio", self.min_lr_ratio, "lie in [0, 1]", 0.1)

    @classmethod
    def default_choice_name(cls) -> str:
        return "nesterov"

    @property
    def name(self) -> str:
        """What YAML calls it; of a class that is not registered, its own name."""
        own = type(self)
        return own.get_choice_name(own) if own in self.get_known_choices().values() else own.__name__

    def schedule(self, outer_steps: int) -> "optax.Schedule":
        """Learning rate as a function of the outer steps a fragment has taken, of `outer_steps` in all."""
        import optax

        decay_steps = max(outer_steps - self.warmup, 1)
        after = {
            "constant": optax.constant_schedule(self.learning_rate),
            "linear": optax.linear_schedule(self.learning_rate, self.learning_rate * self.min_lr_ratio, decay_steps),
            "cosine": optax.cosine_decay_schedule(self.learning_rate, decay_steps, alpha=self.min_lr_ratio),
        }[self.lr_schedule]
        if self.warmup == 0:
            return after
        # Not from 0: a fragment whose first outer step is empty would throw its first period away.
        first = self.learning_rate / (self.warmup + 1)
        rise = optax.linear_schedule(first, self.learning_rate, self.warmup)
        return optax.join_schedules([rise, after], [self.warmup])

    @abc.abstractmethod
    def build(self, outer_steps: int) -> "optax.GradientTransformation":
        """Returns the outer optimizer of one fragment, which takes `outer_steps` steps in the run."""


@OuterOptimizerConfig.register_subclass("sgd")
@dataclass(frozen=True)
class SgdConfig(OuterOptimizerConfig):
    """Outer SGD, with heavy-ball momentum if asked for."""

    momentum: float = 0.0
    """beta in [0, 1)."""

    nesterov: bool = False
    """Whether the momentum looks ahead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, "outer.momentum", self.momentum, "lie in [0, 1)", 0.9)

    def build(self, outer_steps: int) -> "optax.GradientTransformation":
        import optax

        return optax.sgd(self.schedule(outer_steps), self.momentum or None, self.nesterov)


@OuterOptimizerConfig.register_subclass("nesterov")
@dataclass(frozen=True)
class NesterovConfig(SgdConfig):
    """`m <- beta*m + Delta; Theta <- Theta - eta*(Delta + beta*m)`, the outer optimizer of [DiLoCo]."""

    momentum: float = 0.9
    nesterov: bool = True


@OuterOptimizerConfig.register_subclass("average")
@dataclass(frozen=True)
class AverageConfig(SgdConfig):
    """Theta becomes the mean of the islands, as in local SGD (FedAvg)."""

    learning_rate: float = 1.0


@OuterOptimizerConfig.register_subclass("adam")
@dataclass(frozen=True)
class AdamConfig(OuterOptimizerConfig):
    """Outer Adam."""

    learning_rate: float = 0.3
    beta1: float = 0.9
    """Decay of the mean of outer gradients, in [0, 1)."""

    beta2: float = 0.95
    """Decay of the mean of their squares, in [0, 1)."""

    epsilon: float = 0.1
    """Large, as in [DiLoCo]: outer gradients are small and few."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.beta1 < 1, "outer.beta1", self.beta1, "lie in [0, 1)", 0.9)
        require(0 <= self.beta2 < 1, "outer.beta2", self.beta2, "lie in [0, 1)", 0.95)
        require(self.epsilon >= 0, "outer.epsilon", self.epsilon, "be at least 0", 0.1)

    def build(self, outer_steps: int) -> "optax.GradientTransformation":
        import optax

        return optax.adam(self.schedule(outer_steps), self.beta1, self.beta2, self.epsilon)
