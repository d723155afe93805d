"""Options of a small run to compile ahead of time, for devices that are not here."""

from pathlib import Path
from typing import Any

import yaml

from levanter_diloco.main.train_lm import TrainDiLoCoLmConfig
from levanter_diloco.options.reading import read

VOCAB_SIZE = 1024

MODEL = {
    "type": "llama",
    "max_seq_len": 128,
    "hidden_dim": 256,  # 64 on each of 4 devices: a TPU would pad that axis to 128
    "intermediate_dim": 512,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "gradient_checkpointing": False,
}


def write(folder: Path, diloco: dict, **model: Any) -> Path:
    """Writes the YAML of a run of 12 steps, with a period of 6 in 3 fragments."""
    trainer = {
        "id": "compiled",
        "tracker": {"type": "noop"},
        "checkpointer": {"base_path": str(folder / "checkpoints")},
        "train_batch_size": 8,
        "num_train_steps": 12,
        "mesh": {"axes": {"data": -1}},
        "diloco": {"sync_period": 6, "num_fragments": 3, **diloco},
    }
    optimizer = {"type": "adam", "learning_rate": 1.0e-3, "warmup": 0, "lr_schedule": "constant"}
    path = folder / "run.yaml"
    path.write_text(yaml.dump({"model": {**MODEL, **model}, "optimizer": optimizer, "trainer": trainer}))
    return path


def config(folder: Path, diloco: dict, **model: Any) -> TrainDiLoCoLmConfig:
    return read(TrainDiLoCoLmConfig, ["--config_path", str(write(folder, diloco, **model))])
