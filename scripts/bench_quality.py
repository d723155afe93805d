"""Trains the quickstart's model in several ways on the same sequences, and compares the outer validation losses.

    .venv/bin/python scripts/bench_quality.py islands --output .quickstart/quality   # data parallel, K = 1, 2, 4
    .venv/bin/python scripts/bench_quality.py islands --output .quickstart/quality --plot losses.png
    .venv/bin/python scripts/bench_quality.py wires --output .quickstart/quality     # the wire formats
    .venv/bin/python scripts/bench_quality.py drops --output .quickstart/quality     # outer gradients that are lost
    .venv/bin/python scripts/bench_quality.py schedules --output .quickstart/quality # islands that come and go

Each run is `levanter-diloco train_lm` on configs/one_device.yaml with other options, in a process of its own, on one
CPU device. A seed sets the initial model and the order of the data, alike in every arm. Finished runs are kept in the
output folder and not repeated.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).parents[1] / "configs/one_device.yaml"


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    options: dict[str, Any]
    """Of `trainer.diloco`; they replace the config's."""

    expected: float | None = None
    """Loss relative to data parallelism of the 35M model in arXiv:2503.09799, table of losses at H = 30."""

    steps: int | None = None
    """Of the run, where it is not the config's."""


def islands(count: int, period: int, outer_lr: float, expected: float | None = None) -> Arm:
    """Vanilla DiLoCo, with the outer learning rate that is best for its islands in small models, arXiv:2503.09799."""
    outer = {"type": "nesterov", "learning_rate": outer_lr}
    options = {"islands_per_slot": count, "sync_period": period, "num_fragments": 1, "outer": outer}
    return Arm(f"K={count}, H={period}", options, expected)


def wire(name: str) -> Arm:
    """Two islands with the settings of arXiv:2501.18512 besides the wire: streaming, overlap of a step, alpha 0.5."""
    outer = {"type": "nesterov", "learning_rate": 0.6}
    overlap = {"overlap_steps": 1, "mixing_alpha": 0.5}
    return Arm(name, {"islands_per_slot": 2, "num_fragments": 3, **overlap, "outer": outer, "wire": name})


def drop(rate: float) -> Arm:
    """Four islands, 30 outer steps, in which outer gradients are lost as in arXiv:2311.08105, section 3.2."""
    arm = islands(4, 10, 0.8)
    return Arm(f"drop {rate:.0%}", {**arm.options, "drop_rate": rate})


def compute(name: str, counts: list[int]) -> Arm:
    """Up to four islands in equal phases, always 600 island steps in all [arXiv:2311.08105, section 3.2]."""
    phase = 600 // sum(counts)
    schedule = [[i * phase, count] for i, count in enumerate(counts)]
    arm = islands(4, 10, 0.8)
    return Arm(name, {**arm.options, "schedule_islands": schedule}, steps=phase * len(counts))


GROUPS = {
    "islands": [
        Arm("data parallel", {"enabled": False}),
        islands(1, 30, 0.6, 3.482 / 3.485),
        islands(1, 100, 0.6),
        islands(2, 30, 0.6, 3.508 / 3.485),
        islands(2, 100, 0.6),
        islands(4, 30, 0.8, 3.554 / 3.485),
        islands(4, 100, 0.8),
    ],
    "drops": [drop(rate) for rate in (0.0, 0.1, 0.3, 0.5)],
    "schedules": [
        compute("constant, 4 islands", [4]),
        compute("constant, 1 island", [1]),
        compute("doubling, 2 to 4", [2, 4]),
        compute("halving, 4 to 2", [4, 2]),
        compute("ramping up, 1 to 4", [1, 2, 3, 4]),
        compute("ramping down, 4 to 1", [4, 3, 2, 1]),
    ],
    "wires": [wire(name) for name in ("f32", "bf16", "int8", "int4", "e3m0")],
}
"""The first arm of each group is the one that the others are compared with."""


def run(arm: Arm, seed: int, output: Path) -> Path:
    """Trains one arm unless that is done; returns its metrics."""
    folder = output / f"{arm.name}, seed {seed}".replace(", ", "_").replace(" ", "-")
    metrics = folder / "metrics.jsonl"
    done = folder / "done"
    if done.exists():
        return metrics
    metrics.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load(CONFIG.read_text())
    trainer = config["trainer"]
    trainer["diloco"] |= arm.options
    trainer |= {"id": folder.name, "seed": seed, "log_dir": str(folder / "logs")}
    trainer["tracker"] = {"type": "json_lines", "path": str(metrics)}
    trainer["checkpointer"] = {"base_path": str(folder / "checkpoints"), "save_interval": None, "keep": []}
    trainer["load_checkpoint"] = False
    trainer["num_train_steps"] = arm.steps or trainer["num_train_steps"]
    trainer["steps_per_eval"] = trainer["num_train_steps"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "levanter_diloco.main.train_lm", "--config_path", str(folder / "config.yaml")]
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, env=environment, cwd=CONFIG.parents[1], stdout=log, stderr=log, check=True)
    done.touch()
    return metrics


def records(metrics: Path) -> list[dict[str, float]]:
    lines = (json.loads(line) for line in metrics.read_text().splitlines())
    return [line for line in lines if "step" in line]


def final_loss(metrics: Path) -> float:
    return [line["eval/loss"] for line in records(metrics) if "eval/loss" in line][-1]


def table(arms: list[Arm], losses: dict[str, list[float]]) -> str:
    """Markdown: mean over the seeds, spread (largest minus smallest), and the ratio to the first arm, seed by seed."""
    lines = ["| | loss | spread | perplexity | against the first | 35M in the paper |", "|---|---|---|---|---|---|"]
    first = losses[arms[0].name]
    for arm in arms:
        own = losses[arm.name]
        mean = statistics.mean(own)
        ratio = statistics.mean(mine / theirs - 1 for mine, theirs in zip(own, first, strict=True))
        paper = "" if arm.expected is None else f"{arm.expected - 1:+.1%}"
        against = "" if arm is arms[0] else f"{ratio:+.1%}"
        spread = max(own) - min(own)
        lines.append(f"| {arm.name} | {mean:.3f} | {spread:.3f} | {math.exp(mean):.1f} | {against} | {paper} |")
    return "\n".join(lines)


def plot(arms: list[Arm], metrics: dict[str, Path], path: Path, window: int = 10) -> None:
    """Draws the training loss of every island of one seed, as means of `window` steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [arm for arm in arms if "islands_per_slot" in arm.options]
    figure, panels = pyplot.subplots(2, (len(shown) + 1) // 2, sharex=True, sharey=True, figsize=(10, 5.5))
    for arm, panel in zip(shown, panels.T.flat, strict=True):
        curves = {"data parallel": (arms[0].name, "train/loss")}
        curves |= {f"island {k}": (arm.name, f"train/loss_island_{k}") for k in range(arm.options["islands_per_slot"])}
        for label, (run, metric) in curves.items():
            values = [line[metric] for line in records(metrics[run]) if metric in line]
            means = [statistics.mean(values[i : i + window]) for i in range(0, len(values) - window + 1, window)]
            steps = range(window, len(means) * window + 1, window)
            panel.plot(steps, means, label=label, lw=1, color="black" if label == "data parallel" else None)
        panel.set_title(arm.name, fontsize=9)
        panel.legend(fontsize=7)
    figure.supxlabel("step")
    figure.supylabel("training loss")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--plot", type=Path, help="draw the islands' losses of seed 0 to this file")
    options = parser.parse_args()
    arms, output = GROUPS[options.group], options.output.resolve()
    grid = [(arm, seed) for seed in range(options.seeds) for arm in arms]
    with ThreadPoolExecutor(options.jobs) as pool:
        paths = list(pool.map(lambda item: run(item[0], item[1], output), grid))
    by_run = {(arm.name, seed): path for (arm, seed), path in zip(grid, paths, strict=True)}
    losses = {arm.name: [final_loss(by_run[arm.name, seed]) for seed in range(options.seeds)] for arm in arms}
    print(table(arms, losses))
    if options.plot:
        plot(arms, {arm.name: by_run[arm.name, 0] for arm in arms}, options.plot)


if __name__ == "__main__":
    main()
