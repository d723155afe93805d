"""Runs programs in processes of their own, as a user does, and reads what they leave behind."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import yaml

COMMAND = (str(Path(sys.executable).with_name("levanter-diloco")), "train_lm")
MODULE = (sys.executable, "-m", "levanter_diloco.main.train_lm")
# The host's program, left as our command leaves it: its loader threads can kill an interpreter that is torn down.
HOST_PROGRAM = """
import levanter.config
import levanter.main.train_lm
from levanter_diloco.console import leave
levanter.config.main(levanter.main.train_lm.main)()
leave()
"""
HOST = (sys.executable, "-c", HOST_PROGRAM)

ONE_PROCESS = """
import json, sys
from levanter_diloco.cli import main
from levanter_diloco.console import leave
for path in json.loads(sys.argv[1]):
    main(["train_lm", "--config_path", path])
leave()
"""

STREAMING = {"sync_period": 6, "num_fragments": 3, "ici_islands": 2, "overlap_steps": 1, "mixing_alpha": 0.5}
"""A capture every second step: fragments 1 2 0 1 2 0 1 of steps 2 4 6 8 10 12 14."""


@dataclass(frozen=True)
class Workplace:
    """A folder with the text, and one compile cache for all processes: a cold run takes 45 s, a warm one 12."""

    root: Path

    compiled: Path
    """The compile cache."""

    def config(self, name: str, diloco: Mapping[str, Any] | None = None, **changes: Any) -> Path:
        """Writes the tiny YAML of a run that keeps everything it makes in `root/name`; returns the YAML's path.

        Args:
            name: The run's folder and its id.
            diloco: The block `trainer.diloco`; None leaves it out.
            changes: Options by their YAML path, with `__` for the dots; they replace what is there.
        """
        text, out = self.root / "text", self.root / name
        config: dict[str, Any] = {
            "data": {
                "tokenizer": str(text / "tokenizer"),
                "cache_dir": str(self.root / "cache"),
                "components": {
                    "topics": {
                        "source": {
                            "type": "url",
                            "train_urls": [str(text / "train.jsonl")],
                            "validation_urls": [str(text / "validation.jsonl")],
                        }
                    }
                },
            },
            "model": {
                "type": "llama",
                "tokenizer": str(text / "tokenizer"),
                "max_seq_len": 64,
                "hidden_dim": 32,
                "intermediate_dim": 64,
                "num_layers": 4,
                "num_heads": 4,
                "num_kv_heads": 2,
                "gradient_checkpointing": False,
            },
            "optimizer": {"type": "adam", "learning_rate": 3e-3, "warmup": 0, "lr_schedule": "constant"},
            "trainer": {
                "id": name,
                "tracker": {"type": "json_lines", "path": str(out / "metrics.jsonl")},
                "log_dir": str(out / "logs"),
                "mp": "p=f32,c=f32",
                "train_batch_size": 8,
                "num_train_steps": 14,
                "steps_per_eval": 7,
                "max_eval_batches": 2,
                "checkpointer": {"base_path": str(out / "checkpoints"), "save_interval": None, "keep": [{"every": 1}]},
                "mesh": {"axes": {"data": -1}},
                "watch": {"interval": 0},
                "log_jaxprs": False,
                "log_xla_hlo": False,
                "require_accelerator": False,
                "distributed": {"initialize_jax_distributed": False},
            },
        }
        if diloco is not None:
            config["trainer"]["diloco"] = dict(diloco)
        for path, value in changes.items():
            *blocks, option = path.split("__")
            place = config
            for block in blocks:
                place = place.setdefault(block, {})
            place[option] = copy.deepcopy(value)
        out.mkdir(exist_ok=True)
        path = out / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    def environment(self, more: Mapping[str, str] | None = None, *, devices: int = 4) -> dict[str, str]:
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "HF_HUB_OFFLINE": "1",
            **(more or {}),
        }

    def run(self, program: tuple[str, ...], config: Path, *flags: str, **environment: str) -> "Finished":
        """Runs `program` on `config` to its end."""
        done = subprocess.run(
            [*program, "--config_path", str(config), *flags],
            env=self.environment(environment),
            cwd=config.parent,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Finished(config.parent, done.returncode, done.stdout, done.stderr)

    def run_all(self, *configs: Path, devices: int = 4) -> None:
        """Runs the command on one YAML after the other in one process; each must succeed."""
        done = subprocess.run(
            [sys.executable, "-c", ONE_PROCESS, json.dumps([str(config) for config in configs])],
            env=self.environment(devices=devices),
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def start(self, config: Path, log: str = "stderr.txt", program: tuple[str, ...] = COMMAND, **environment: str):
        """Starts `program` on `config` in the background; its stderr goes to a file of the run."""
        with (config.parent / log).open("a") as stderr:
            return subprocess.Popen(
                [*program, "--config_path", str(config)],
                env=self.environment(environment),
                cwd=config.parent,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    folder: Path
    returncode: int
    stdout: str
    stderr: str

    def succeeded(self) -> "Finished":
        assert self.returncode == 0, self.stderr[-3000:]
        return self


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """`{step: {metric: value}}`; a step that was run again after a kill counts as run last."""
    return {line["step"]: line for line in records(folder) if "step" in line}


def summary(folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for line in records(folder):
        merged |= line.get("summary", {})
    return merged


def checkpoint(folder: Path, step: int) -> Path:
    """The checkpoint that the run in `folder` took at the tracker's `step`."""
    return folder / "checkpoints" / folder.name / f"step-{step}"


def arrays(path: Path, under: str = "") -> dict[str, np.ndarray]:
    """Every array of the checkpoint at `path` whose name starts with `under`, without that; no checksums."""
    manifest = json.loads((path / "manifest.json").read_text())
    found = {}
    for array in manifest["arrays"]:
        if array["path"].startswith(under) and array["path"] != "checksums":
            store = {"driver": manifest["kvstore_driver"], "base": f"file://{path}", "path": array["path"]}
            opened = tensorstore.open({"driver": manifest["array_driver"], "kvstore": store}).result()
            found[array["path"].removeprefix(under)] = np.asarray(opened.read().result())
    assert found, f"nothing under {under!r} in {path}"
    return found


def corrupt(checkpoint: Path, name: str) -> None:
    """Changes one bit of the array `name`, so that the store finds nothing wrong."""
    base = {"driver": "ocdbt", "base": f"file://{checkpoint}", "path": name}
    store = tensorstore.open({"driver": "zarr3", "kvstore": base}).result()
    values = np.array(store.read().result())
    values.view(np.uint8).ravel()[0] ^= 1
    store.write(values).result()


def assert_same(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Bit for bit, name by name."""
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name, strict=True)
