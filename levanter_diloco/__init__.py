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
    from .config import DiLoCoConfig as DiLoCoConfig
    from .config import OuterOptimizerConfig as OuterOptimizerConfig
    from .fragments import Partition as Partition
    from .link import LinkConfig as LinkConfig
    from .outer import island_gradients as island_gradients
    from .outer import merge as merge
    from .outer import outer_gradient as outer_gradient
    from .outer import outer_step as outer_step
    from .schedule import Schedule as Schedule
    from .state import DiLoCoState as DiLoCoState
    from .trainer import DiLoCoTrainer as DiLoCoTrainer
    from .trainer_config import DiLoCoTrainerConfig as DiLoCoTrainerConfig
    from .wire import WireFormat as WireFormat
    from .wire import register_wire as register_wire

__version__ = "0.1.0"

_HOMES = {
    "config": ("DiLoCoConfig", "OuterOptimizerConfig"),
    "fragments": ("Partition",),
    "link": ("LinkConfig",),
    "outer": ("island_gradients", "merge", "outer_gradient", "outer_step"),
    "schedule": ("Schedule",),
    "state": ("DiLoCoState",),
    "trainer": ("DiLoCoTrainer",),
    "trainer_config": ("DiLoCoTrainerConfig",),
    "wire": ("WireFormat", "register_wire"),
}


def __getattr__(name: str) -> Any:  # Any: whatever the name stands for
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no public name {name!r}")
