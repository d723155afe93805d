"""DiLoCo and Streaming DiLoCo for Levanter.

Papers are cited by tag:
    [DiLoCo] Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv:2311.08105
    [Scaling] Charles et al., Scaling Laws for DiLoCo, arXiv:2503.09799
    [Streaming] Douillard et al., Streaming DiLoCo with overlapping communication, arXiv:2501.18512

Public names are imported when they are first asked for, so that importing the package stays instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithm.outer import island_gradients as island_gradients
    from .algorithm.outer import merge as merge
    from .algorithm.outer import outer_gradient as outer_gradient
    from .algorithm.outer import outer_step as outer_step
    from .algorithm.schedule import Schedule as Schedule
    from .algorithm.wire import WireFormat as WireFormat
    from .algorithm.wire import register_wire as register_wire
    from .fragments.partition import Partition as Partition
    from .islands.state import DiLoCoState as DiLoCoState
    from .network.link import LinkConfig as LinkConfig
    from .options.config import DiLoCoConfig as DiLoCoConfig
    from .options.outer import OuterOptimizerConfig as OuterOptimizerConfig
    from .training.config import DiLoCoTrainerConfig as DiLoCoTrainerConfig
    from .training.trainer import DiLoCoTrainer as DiLoCoTrainer

__version__ = "0.1.0"

_HOMES = {
    "algorithm.outer": ("island_gradients", "merge", "outer_gradient", "outer_step"),
    "algorithm.schedule": ("Schedule",),
    "algorithm.wire": ("WireFormat", "register_wire"),
    "fragments.partition": ("Partition",),
    "islands.state": ("DiLoCoState",),
    "network.link": ("LinkConfig",),
    "options.config": ("DiLoCoConfig",),
    "options.outer": ("OuterOptimizerConfig",),
    "training.config": ("DiLoCoTrainerConfig",),
    "training.trainer": ("DiLoCoTrainer",),
}


def __getattr__(name: str) -> Any:  # Any: whatever the name stands for
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no public name {name!r}")
