"""A save: the label beside it and the checksums in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from levanter_diloco.checkpoint.checksum import sum_on_host
from levanter_diloco.checkpoint.integrity import CHECKSUMS
from levanter_diloco.checkpoint.label import Label
from levanter_diloco.checkpoint.saving import prepare
from levanter_diloco.options.config import DiLoCoConfig


@jax.tree_util.register_dataclass
@dataclass
class State:
    model: Any
    step: Any


def test_label_is_written_and_checksums_are_added(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("diloco",))
    state = State({"weight": jnp.arange(6.0)}, jnp.int32(4))
    saved = prepare(state, str(tmp_path / "step-3"), mesh, 2, DiLoCoConfig(wire="int8"))
    label = Label.read(str(tmp_path / "step-3"))
    assert label is not None and (label.islands, label.diloco["wire"]) == (2, "int8")
    assert saved.keys() == {"model", "step", CHECKSUMS}
    sums = np.asarray(saved[CHECKSUMS]).sum(axis=0, dtype=np.uint32)  # a row for each device, columns by name
    assert sums.tolist() == [
        sum_on_host(np.arange(6, dtype=np.float32), (0,), (6,)),
        sum_on_host(np.array(4, np.int32), (), ()),
    ]
