"""Times the inner step against the stock host step, islands that share devices, and compilation, in turn in one run.

    .venv/bin/python scripts/bench_inner.py            # all of it, a few minutes on two cores

Prints ratios of medians; single timings on a shared machine mean little.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import jax
import levanter.tracker
from haliax import Axis, NamedArray
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker.tracker import NoopConfig, NoopTracker
from levanter.trainer import Trainer
from levanter.utils.mesh import MeshConfig

from levanter_diloco.algorithm.schedule import Crossing
from levanter_diloco.islands.state import DiLoCoState
from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.training.config import DiLoCoTrainerConfig
from levanter_diloco.training.trainer import DiLoCoTrainer

Vocab = Axis("vocab", 1024)


def trainer_config(folder: Path, diloco: DiLoCoConfig, batch: int, data: int = -1) -> DiLoCoTrainerConfig:
    return DiLoCoTrainerConfig(
        id="bench",
        tracker=NoopConfig(),
        watch=WatchConfig(interval=0),
        log_jaxprs=False,
        log_xla_hlo=False,
        log_dir=folder / "logs",
        train_batch_size=batch,
        num_train_steps=10_000,
        require_accelerator=False,
        mesh=MeshConfig(axes={"data": data}),
        checkpointer=CheckpointerConfig(base_path=str(folder / "checkpoints"), save_interval=None, keep=None),
        diloco=diloco,
    )


class Arm:
    """One trainer with its state, stepped on the same random batch."""

    def __init__(self, folder: Path, diloco: DiLoCoConfig, model: LlamaConfig, batch: int, data: int = -1):
        config = trainer_config(folder, diloco, batch, data)
        config._validate_and_set_defaults()
        kind = DiLoCoTrainer if diloco.enabled else Trainer
        self.trainer = kind(config, AdamConfig(learning_rate=1e-3).build(10_000), _loss)
        key = jax.random.PRNGKey(0)
        with self.trainer:
            self.state = self.trainer.initial_state(key, model_init=lambda: model.build(Vocab, key=key))
            tokens = jax.random.randint(key, (batch, model.max_seq_len), 0, Vocab.size)
            Batch = Axis(str(config.batch_axis_name), batch)
            example = jax.vmap(lambda row: LmExample.causal(NamedArray(row, (model.max_Pos,))))(tokens)
            self.batch = jax.tree.map(
                lambda x: NamedArray(x.array, (Batch.name, *x.axis_names)) if isinstance(x, NamedArray) else x,
                example,
                is_leaf=lambda x: isinstance(x, NamedArray),
            )

    def step(self) -> float:
        """Seconds of one step, the wait for the loss included."""
        start = time.perf_counter()
        with self.trainer:
            step: Any = self.trainer._jit_train_step_fn_no_hook  # Any: the host's type has no arguments
            result = step(self.state, (self.batch,), {})
            result.loss.item()
        self.state = result.new_state
        return time.perf_counter() - start


def _loss(model: Any, *batch: Any, **kwargs: Any) -> Any:  # Any: as the host's ComputeLossFunction
    return model.compute_next_token_loss(*batch, **kwargs)


def compile_seconds(arm: Arm) -> float:
    """Seconds to trace and compile the three step programs."""
    assert isinstance(arm.trainer, DiLoCoTrainer) and isinstance(arm.state, DiLoCoState)
    arm.trainer._programs = None
    programs = arm.trainer.programs_for(arm.state)
    start = time.perf_counter()
    with arm.trainer:
        for crossing in (None, Crossing(0, 0, last=True), Crossing(1, 0, last=True)):
            programs.trace_step(arm.state, ((arm.batch,), {}), crossing=crossing).lower().compile()
    return time.perf_counter() - start


def compare(title: str, arms: dict[str, Callable[[], Arm]], steps: int) -> None:
    """Steps the arms in turn and prints the ratio of each median to the first."""
    built = {name: make() for name, make in arms.items()}
    compile_seconds = {name: arm.step() for name, arm in built.items()}
    for arm in built.values():
        arm.step()
    seconds: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(steps):
        for name, arm in built.items():
            seconds[name].append(arm.step())
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    base = next(iter(medians.values()))
    print(title)
    for name, median in medians.items():
        ratio = f"{median / base:.3f}x"
        print(f"  {name:44s} {1e3 * median:8.1f} ms {ratio:>8s}   first step {compile_seconds[name]:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args()
    model = LlamaConfig(
        max_seq_len=128,
        hidden_dim=args.hidden,
        intermediate_dim=3 * args.hidden,
        num_layers=args.layers,
        num_heads=4,
        num_kv_heads=2,
        gradient_checkpointing=False,
    )
    stock = DiLoCoConfig(enabled=False)
    with tempfile.TemporaryDirectory() as name, levanter.tracker.current_tracker(NoopTracker()):
        folder = Path(name)
        never = 10**6
        compare(
            "inner step, same devices and rows per device",
            {
                "stock host, data 4": lambda: Arm(folder, stock, model, 16),
                "2 islands x data 2": lambda: Arm(folder, DiLoCoConfig(sync_period=never, ici_islands=2), model, 16),
                "4 islands x data 1": lambda: Arm(folder, DiLoCoConfig(sync_period=never, ici_islands=4), model, 16),
            },
            args.steps,
        )
        shared = DiLoCoConfig(sync_period=never, islands_per_slot=4, dcn_islands=1)
        compare(
            "four islands on the same four devices",
            {
                "4 slots": lambda: Arm(folder, DiLoCoConfig(sync_period=never, ici_islands=4), model, 16),
                "islands_per_slot: 4": lambda: Arm(folder, shared, model, 16),
            },
            args.steps,
        )
        print("compilation of the three step programs, trace to executable")
        built = {
            fragments: Arm(
                folder, DiLoCoConfig(sync_period=fragments, num_fragments=fragments, ici_islands=2), model, 16
            )
            for fragments in (2, args.layers + 1)
        }
        seconds: dict[int, list[float]] = {fragments: [] for fragments in built}
        for repeat in range(6):
            for fragments, arm in built.items():
                taken = compile_seconds(arm)
                if repeat > 0:  # the first also traces what later ones find in caches
                    seconds[fragments].append(taken)
        medians = {fragments: statistics.median(times) for fragments, times in seconds.items()}
        for fragments, median in medians.items():
            print(f"  P = {fragments:<40d} {median:8.1f} s  {median / medians[2]:.3f}x")


if __name__ == "__main__":
    main()
