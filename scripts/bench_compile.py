"""Compiles a 36-layer model for two TPU slices with few and with many fragments: CPU time and size of all programs.

    .venv/bin/python scripts/bench_compile.py          # some minutes on two cores; no TPU is needed

Each count of fragments is compiled in turn, and the medians are compared; a run needs all of its programs.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import yaml  # pyrefly: ignore[untyped-import]  it ships no types

from levanter_diloco.commands.compile.aot import abstract_run, tpu_devices
from levanter_diloco.commands.compile.report import CompileReport
from levanter_diloco.commands.compile.slices import Slice
from levanter_diloco.main.train_lm import TrainDiLoCoLmConfig
from levanter_diloco.options.reading import read

MODEL = {
    "type": "llama",
    "max_seq_len": 128,
    "hidden_dim": 128,
    "intermediate_dim": 256,
    "num_layers": 36,
    "num_heads": 1,
    "num_kv_heads": 1,
}


def compiled(folder: Path, num_fragments: int, overlap: int, topology: str) -> tuple[float, CompileReport]:
    """CPU seconds from the first trace to the last executable of a run of two islands, and the report on it."""
    diloco = {"sync_period": 2 * num_fragments, "num_fragments": num_fragments, "overlap_steps": overlap}
    trainer = {"tracker": {"type": "noop"}, "train_batch_size": 64, "mesh": {"axes": {"data": -1}}, "diloco": diloco}
    path = folder / "run.yaml"
    path.write_text(yaml.dump({"model": MODEL, "trainer": trainer}))
    config = read(TrainDiLoCoLmConfig, ["--config_path", str(path)])
    tpu = Slice.of(topology)
    jax.clear_caches()
    with abstract_run(tpu_devices(tpu, 2), config, vocab_size=1024) as run:
        started = time.process_time()  # of all threads: other work on the machine does not count
        report = CompileReport.of(run, topology, 2, tpu.generation.hbm_gib)
        return time.process_time() - started, report


def code_bytes(report: CompileReport) -> int:
    """Size of all programs that fit."""
    return sum(one.memory_bytes.code for one in report.programs if one.memory_bytes is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fragments", type=int, nargs="+", default=[2, 37])
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--topology", default="v5p-8")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    seconds: dict[int, list[float]] = {fragments: [] for fragments in args.fragments}
    reports: dict[int, CompileReport] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for fragments in args.fragments:
                taken, report = compiled(Path(folder), fragments, args.overlap, args.topology)
                seconds[fragments].append(taken)
                reports[fragments] = report
    print(f"36 layers on 2 x {args.topology}, V={args.overlap}: all step programs, medians of {args.repeats}")
    medians = {fragments: statistics.median(taken) for fragments, taken in seconds.items()}
    sizes = {fragments: code_bytes(report) for fragments, report in reports.items()}
    first = args.fragments[0]
    for fragments, median in medians.items():
        size = sizes[fragments]
        ratios = f"{median / medians[first]:.2f}x the time, {size / sizes[first]:.2f}x the size"
        print(
            f"  P = {fragments:<3d} {len(reports[fragments].programs)} programs: {median:.1f} s, "
            f"{size / 1e6:.1f} MB, {ratios}"
        )


if __name__ == "__main__":
    main()
