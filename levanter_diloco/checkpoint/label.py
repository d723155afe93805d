"""`diloco.json`, which lies beside a checkpoint's manifest: what the run was that made it.

Process 0 writes it when a save starts, as the host writes its manifest; a save that is killed leaves no metadata.json,
and without that the host takes the folder for no checkpoint.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import draccus
from jaxtyping import PyTree
from levanter.models.lm_model import LmConfig, LmHeadModel
from rigging.filesystem.storage_path import StoragePath, prefix_join

from ..options.config import DiLoCoConfig
from ..options.outer import NesterovConfig

LABEL = "diloco.json"


@dataclass(frozen=True)
class Label:
    """What a checkpoint says of its run."""

    islands: int
    """K."""

    diloco: dict[str, Any]
    """The block `trainer.diloco` with the options left out at their defaults: P, H, V, wire, partition and the rest.
    Kept as it was written: a reader need not know the run's own optimizers and wire formats."""

    model: dict[str, Any] | None
    """The block `model` of a language model; None of another."""

    vocab_size: int | None
    """Rows of the model's embedding; more than the tokenizer has, if the mesh needs it."""

    @classmethod
    def of(cls, num_islands: int, diloco: DiLoCoConfig, model: PyTree) -> "Label":
        """Describes a run; a model whose options have no YAML goes undescribed."""
        # The optimizer apart: it may be of a class that is not registered, or hold what has no YAML.
        block = draccus.encode(dataclasses.replace(diloco, outer=NesterovConfig()))
        block["outer"] = {"type": diloco.outer.name, **vars(diloco.outer)}
        if not isinstance(model, LmHeadModel) or type(model.config) not in LmConfig.get_known_choices().values():
            return cls(num_islands, block, None, None)
        return cls(num_islands, block, draccus.encode(model.config, LmConfig), model.Vocab.size)

    @classmethod
    def read(cls, checkpoint: str) -> "Label | None":
        """The label of the checkpoint at the path `checkpoint`; None if it has none.

        Raises:
            OSError, ValueError: If it cannot be read.
        """
        path = StoragePath(prefix_join(checkpoint, LABEL))
        if not path.exists():
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{LABEL} is not as it was written: {error}") from error

    def write(self, checkpoint: str) -> None:
        path = StoragePath(prefix_join(checkpoint, LABEL))
        path.parent.mkdirs()
        path.write_text(json.dumps(vars(self), indent=2, default=str))
