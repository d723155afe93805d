"""Methods that a benchmark compares: each one, and the options of `trainer.diloco` that it sets."""

from collections.abc import Callable
from typing import Any

_F32 = {"wire": "f32", "error_feedback": False}

METHODS: dict[str, Callable[[Any], dict[str, Any]]] = {  # Any: DiLoCoConfig, whose module imports jax
    "data_parallel": lambda diloco: {"enabled": False},
    "vanilla": lambda diloco: {"num_fragments": 1, "partition": "layers", "overlap_steps": 0, **_F32},
    "streaming": lambda diloco: {"overlap_steps": 0, **_F32},
    "overlap": lambda diloco: {"overlap_steps": max(diloco.overlap_steps, 1), **_F32},
    "bf16": lambda diloco: {"overlap_steps": 0, "wire": "bf16"},
    "int8": lambda diloco: {"overlap_steps": 0, "wire": "int8"},
    "int4": lambda diloco: {"overlap_steps": 0, "wire": "int4"},
    "e3m0": lambda diloco: {"overlap_steps": 0, "wire": "e3m0"},
}
"""Each method, and the options of `trainer.diloco` that it sets over those of the YAML."""

OPEN = "none"
"""The rate of a link that is not shaped."""
