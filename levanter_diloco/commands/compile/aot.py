"""Ahead-of-time compilation of a run for devices that are not here: the host and `jax.jit` need their description."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
from haliax import Axis, NamedArray
from haliax.partitioning import pspec_for_axis, round_axis_for_partitioning
from haliax.util import is_named_array
from jax import ShapeDtypeStruct
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jaxtyping import PyTree
from levanter.data.text.examples import GrugLmExample, named_lm_example_from_grug
from levanter.main.train_lm import TrainLmConfig
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.tracker.tracker import NoopTracker
from levanter.trainer_state import trainables_only

from ...errors import OptionError
from ...host.devices import as_if_here
from ...islands.programs import StepProgram
from ...islands.state import DiLoCoState
from ...training.config import DiLoCoTrainerConfig
from ...training.summary import Traffic
from ...training.trainer import DiLoCoTrainer
from .slices import Slice

LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks Google Cloud's metadata server for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no process keeps a TPU from another here
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""What libtpu reads from the environment when it loads, so that it looks for no TPU and says nothing of it."""


def tpu_devices(tpu: Slice, num_slices: int) -> list[jax.Device]:
    """Describes the devices of `num_slices` slices. They compile programs and run none.

    Raises:
        OptionError: If libtpu, which compiles for them, is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise OptionError("compiling for TPU needs libtpu: pip install 'levanter-diloco[aot]'")
    for name, value in LIBTPU.items():
        os.environ.setdefault(name, value)
    # A side that is a whole number of cubes, or 16 chips of a flat slice, closes into a ring.
    rings = tuple(side % 4 == 0 if tpu.generation.torus else side == 16 for side in tpu.shape)
    options: dict[str, Any] = {"chip_config_name": "megacore"} if tpu.generation.megacore else {}  # Any: libtpu's
    described = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{tpu.generation.compiler_name}:{'x'.join(map(str, tpu.shape))}",
        chips_per_host_bounds=tpu.host_shape,
        num_slices=num_slices,
        wrap=rings if min(tpu.shape) >= 4 or not tpu.generation.torus else (False, False, False),
        **options,
    )
    return list(described.devices)


@dataclass(frozen=True)
class AbstractRun:
    """A run of shapes: its programs can be traced and compiled, and nothing in it can run."""

    trainer: DiLoCoTrainer
    state: DiLoCoState
    """Shapes with their shardings, like the batch."""

    programs: list[StepProgram]
    traffic: Traffic


@contextlib.contextmanager
def abstract_run(devices: Sequence[jax.Device], config: TrainLmConfig, vocab_size: int) -> Generator[AbstractRun]:
    """The run of `config` on `devices`. Within the context the host takes them for those of this process.

    Args:
        devices: All devices of the run, here or not.
        config: Options with the block `trainer.diloco`; they are validated for `devices`.
        vocab_size: Entries of the tokenizer.
    """
    options = config.trainer
    assert isinstance(options, DiLoCoTrainerConfig)
    with as_if_here(devices):
        options._validate_and_set_defaults()
        optimizer = config.optimizer.build(options.num_train_steps)

        def loss(model: LmHeadModel, example: LmExample, *, key: Any = None) -> Any:  # Any: as in the host's train_lm
            return model.compute_next_token_loss(example, key=key, logsumexp_weight=config.z_loss_weight)

        with levanter.tracker.current_tracker(NoopTracker()):
            # pyrefly: ignore[bad-argument-type]  the host's own call of its Trainer does not fit that protocol either
            trainer = DiLoCoTrainer(options, optimizer, loss, add_default_hooks=False)
        # The mesh without its devices: JAX computes constants while it traces, on the devices of a concrete mesh.
        mesh = trainer.device_mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh), hax.axis_mapping(trainer.parameter_axis_mapping):
            model_init, is_trainable = _model(config, trainer, vocab_size)
            trainer.partition.check(trainables_only(eqx.filter_eval_shape(model_init), is_trainable))
            state = trainer.loader.shapes(model_init, is_trainable)
            batch = ((_batch(config, trainer),), {})
            programs = list(trainer.programs_for(state).all_steps(state, batch, trainer.schedule))
            yield AbstractRun(trainer, state, programs, Traffic.of(state, trainer.sync))


def _model(config: TrainLmConfig, trainer: DiLoCoTrainer, vocab_size: int) -> tuple[Callable[[], PyTree], PyTree]:
    """What builds the model, and which of its leaves train."""

    def build() -> PyTree:
        Vocab = round_axis_for_partitioning(Axis("vocab", vocab_size), trainer.parameter_axis_mapping)
        key = jax.random.PRNGKey(0)
        return config.adapter.apply(config.model.build(Vocab, key=key), key=key)

    return build, config.adapter.trainable_filter(eqx.filter_eval_shape(build))


def _batch(config: TrainLmConfig, trainer: DiLoCoTrainer) -> LmExample:
    """Shapes of the host's first batch of text, split over islands and their data axes."""
    options = trainer.config
    Pos = config.model.max_Pos.resize(config.train_seq_len or config.model.max_seq_len)
    Batch = Axis(str(options.batch_axis_name), options.batch_schedule.batch_size_at_step(0))
    block = config.data.block_cross_document_attention

    def example(tokens: NamedArray) -> LmExample:
        made = GrugLmExample.causal(tokens.array, eos_id=0, block_cross_document_attention=block)
        return named_lm_example_from_grug(made, Pos)

    def placed(x: NamedArray) -> NamedArray:
        where = NamedSharding(options.device_mesh, pspec_for_axis(x.axis_names, trainer.compute_axis_mapping))
        return jax.tree.map(lambda array: ShapeDtypeStruct(array.shape, array.dtype, sharding=where), x)

    examples = eqx.filter_eval_shape(lambda: hax.vmap(example, Batch)(hax.zeros((Batch, Pos), dtype=jnp.int32)))
    return jax.tree.map(placed, examples, is_leaf=is_named_array)
