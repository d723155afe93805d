"""Compiles a 36-layer model for two TPU slices with few and with many fragments: seconds and size of all programs.

    .venv/bin/python scripts/bench_compile.py          # some minutes on two cores; no TPU is needed

Each count of fragments is compiled in turn, and the medians are compared; a run needs all of its programs.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import yaml

from levanter_diloco.aot import run_on, tpu_devices
from levanter_diloco.cli import parse
from levanter_diloco.compile_report import report_of
from levanter_diloco.main.train_lm import TrainDiLoCoLmConfig
from levanter_diloco.slices import Slice

MODEL = {
    "type": "llama",
    "max_seq_len": 128,
    "hidden_dim": 128,
    "intermediate_dim": 256,
    "num_layers": 36,
    "num_heads": 1,
    "num_kv_heads": 1,
}


def compiled(folder: Path, num_fragments: int, overlap: int, topology: str) -> dict[str, Any]:  # Any: JSON
    """The report on a run of two islands that syncs every second step."""
    diloco = {"sync_period": 2 * num_fragments, "num_fragments": num_fragments, "overlap_steps": overlap}
    trainer = {"tracker": {"type": "noop"}, "train_batch_size": 64, "mesh": {"axes": {"data": -1}}, "diloco": diloco}
    path = folder / "run.yaml"
    path.write_text(yaml.dump({"model": MODEL, "trainer": trainer}))
    config = parse(TrainDiLoCoLmConfig, ["--config_path", str(path)])
    tpu = Slice.of(topology)
    jax.clear_caches()
    with run_on(tpu_devices(tpu, 2), config, vocab_size=1024) as run:
        return report_of(run, topology, 2, tpu.generation.hbm_gib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fragments", type=int, nargs="+", default=[2, 37])
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--topology", default="v5p-8")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    reports: dict[int, list[dict[str, Any]]] = {fragments: [] for fragments in args.fragments}  # Any: JSON
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for fragments, made in reports.items():
                made.append(compiled(Path(folder), fragments, args.overlap, args.topology))
    print(f"36 layers on 2 x {args.topology}, V={args.overlap}: all step programs, medians of {args.repeats}")
    figures = {fragments: summed(made) for fragments, made in reports.items()}
    base_seconds, base_size = figures[args.fragments[0]]
    for fragments, (seconds, size) in figures.items():
        programs = len(reports[fragments][0]["programs"])
        print(
            f"  P = {fragments:<3d} {programs} programs {seconds:7.1f} s {seconds / base_seconds:.2f}x "
            f"{size / 1e6:7.1f} MB {size / base_size:.2f}x"
        )


def summed(reports: list[dict[str, Any]]) -> tuple[float, int]:  # Any: JSON
    """Seconds to compile all programs of a run, the median, and their code's bytes."""
    seconds = [sum(one["compile_seconds"] for one in report["programs"]) for report in reports]
    return statistics.median(seconds), sum(one["memory_bytes"]["code"] for one in reports[0]["programs"])


if __name__ == "__main__":
    main()
