"""A model small enough to check by hand, and a trainer that runs it in this process.

The problem of `data/trajectories.json`: `loss_k = 0.5*|embed - target_k|^2 + 0.5*|layers - target_k|^2`, four
stacked layers, the targets of island k as its row of the batch.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
import optax
from haliax import Axis, NamedArray
from haliax.nn import ScanCheckpointPolicy, Stacked
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.tracker.tracker import DictTracker, NoopConfig
from levanter.utils.mesh import MeshConfig

from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.training.config import DiLoCoTrainerConfig
from levanter_diloco.training.trainer import DiLoCoTrainer

Embed, Entry, Layer = Axis("embed", 3), Axis("entry", 2), Axis("layer", 4)


class Block(eqx.Module):
    weight: NamedArray


class Toy(eqx.Module):
    embed: NamedArray
    layers: Stacked

    @classmethod
    def of(cls, embed: Any, layers: Any) -> "Toy":
        """`embed` of shape [3]; `layers` of shape [2, 4], whose second axis is the layers."""
        weight = hax.named(jnp.asarray(layers, jnp.float32), (Entry, Layer))
        stack = Stacked(Block(weight), Layer, ScanCheckpointPolicy.from_bool_or_str(False))
        return cls(hax.named(jnp.asarray(embed, jnp.float32), Embed), stack)

    def parts(self) -> dict[str, np.ndarray]:
        return {"embed": np.asarray(self.embed.array), "layers": np.asarray(self.layers.stacked.weight.array)}


def toy_loss(model: Any, batch: Any, *, key: Any = None) -> Any:  # Any: as the host's protocol of a loss
    """Mean over the rows of half the squared distance to each row's target."""
    embed = hax.sum(hax.square(model.embed - batch["embed"]), Embed)
    layers = hax.sum(hax.square(model.layers.stacked.weight - batch["layers"]), (Entry, Layer))
    return hax.mean(0.5 * (embed + layers))


def toy_batch(embed: Any, layers: Any) -> dict[str, NamedArray]:
    """One row of targets for each leading index."""
    Batch = Axis("batch", len(embed))
    return {
        "embed": hax.named(jnp.asarray(embed, jnp.float32), (Batch, Embed)),
        "layers": hax.named(jnp.asarray(layers, jnp.float32), (Batch, Entry, Layer)),
    }


def trainer_config(tmp_path: Any, diloco: dict | None, **options: Any) -> DiLoCoTrainerConfig:
    """Options of a quiet run on CPU; islands lie on the ICI side, the rest of the devices is `data`."""
    defaults: dict[str, Any] = {
        "id": "toy",
        "tracker": NoopConfig(),
        "watch": WatchConfig(interval=0),
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "log_dir": tmp_path / "logs",
        "train_batch_size": 8,
        "num_train_steps": 14,
        "require_accelerator": False,
        "mesh": MeshConfig(axes={"data": -1}),
        "checkpointer": CheckpointerConfig(base_path=str(tmp_path / "checkpoints"), save_interval=None, keep=None),
    }
    defaults["diloco"] = DiLoCoConfig(enabled=False) if diloco is None else DiLoCoConfig(**diloco)
    return DiLoCoTrainerConfig(**(defaults | options))


class Recorder(DictTracker):
    """Keeps `{step: {metric: value}}`, all calls for a step merged, and the summary."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}

    def log(self, metrics: Any, *, step: int | None, commit: bool | None = None) -> None:
        if step is not None:
            self.steps.setdefault(int(step), {}).update(metrics)

    def log_summary(self, metrics: Any) -> None:
        self.summary.update(metrics)


@contextlib.contextmanager
def entered(
    config: DiLoCoTrainerConfig, optimizer: optax.GradientTransformation, loss: Any
) -> Iterator[DiLoCoTrainer]:
    """A `DiLoCoTrainer` inside its mesh, with a `Recorder` as its tracker: `recorder_of(trainer)`."""
    config._validate_and_set_defaults()
    with levanter.tracker.current_tracker(Recorder()), DiLoCoTrainer(config, optimizer, loss) as trainer:
        yield trainer


def recorder_of(trainer: DiLoCoTrainer) -> Recorder:
    """What has been logged by a trainer that is `entered`."""
    [recorder] = trainer.tracker.loggers
    assert isinstance(recorder, Recorder)
    return recorder


def save_now(trainer: DiLoCoTrainer, state: Any, step: int) -> None:
    """Saves `state` as the trainer's checkpointer does at `step`, and waits for it."""
    assert trainer._checkpointer is not None
    trainer._checkpointer.on_step(tree=state.saveable_state, step=step, force=True)
    trainer._checkpointer.wait_until_finished()


def cache_sizes(*compiled: Any) -> list[int]:  # Any: jitted functions, whose type hides it
    """How many programs each jitted function has compiled."""
    return [function._cache_size() for function in compiled]


def numbers(tree: Any) -> Any:
    """A copy of every array on the host; the next step donates the originals."""
    return jax.tree.map(lambda x: np.array(x), eqx.filter(tree, eqx.is_array))


@dataclass
class Step:
    """What one step left behind."""

    loss: float
    state: Any
    """`DiLoCoState` of numpy arrays."""

    metrics: dict[str, Any]
    """All that was logged for this step, by name."""


def run(
    config: DiLoCoTrainerConfig,
    optimizer: optax.GradientTransformation,
    model: Any,
    batches: Iterable[Any],
    loss: Any = toy_loss,
    *,
    is_trainable: Any = True,
) -> list[Step]:
    """Trains from `model` (or from the run's checkpoint) through the trainer and returns each step."""
    steps: list[Step] = []
    with entered(config, optimizer, loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=model, is_trainable=is_trainable)

        def note(info: Any) -> None:
            steps.append(Step(info.loss, numbers(info.state), {}))

        trainer.add_hook(note, every=1)
        start = int(state.step)
        trainer.train(state, list(batches)[start:])
        for i, step in enumerate(steps):
            step.metrics = recorder_of(trainer).steps.get(start + i, {})
    return steps[:-1]  # the host runs all hooks once more at the end
