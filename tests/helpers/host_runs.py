"""Stock Levanter runs to compare islands with, and a small llama."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
import optax
from haliax import Axis
from jax.sharding import Mesh
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmExample
from levanter.tracker.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from helpers.toy_model import Recorder, Step, numbers, toy_loss

LLAMA = LlamaConfig(
    max_seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    gradient_checkpointing=False,
)
Vocab = Axis("vocab", 64)


@dataclass
class StockConfig(TrainerConfig):
    """A host trainer's options on the first few devices, as many as one island has."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Mesh axes of more than one device."""

    @cached_property
    def device_mesh(self) -> Mesh:
        names = ("replica_dcn", "replica", "data", "model")
        shape = [self.sizes.get(name, 1) for name in names]
        return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)

    @cached_property
    def _mesh_axis_totals(self) -> dict[str, int]:
        return dict(self.device_mesh.shape)


def stock_config(tmp_path: Any, sizes: Mapping[str, int] | None = None, **options: Any) -> StockConfig:
    defaults: dict[str, Any] = {
        "id": "stock",
        "tracker": NoopConfig(),
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "log_dir": tmp_path / "logs",
        "require_accelerator": False,
        "num_train_steps": 14,
        "load_checkpoint": False,
        "sizes": sizes or {},
    }
    return StockConfig(**(defaults | options))


def stock_runs(
    config: StockConfig,
    optimizer: optax.GradientTransformation,
    model: Any,
    streams: Sequence[Iterable[Any]],
    loss: Any = toy_loss,
    *,
    keys: Iterable[jax.Array] | None = None,
    is_trainable: Any = True,
) -> list[list[Step]]:
    """One run of the host's own trainer for each stream of batches; the step compiles once for all of them."""
    config._validate_and_set_defaults()
    runs = []
    keys = [jax.random.PRNGKey(0)] * len(streams) if keys is None else keys
    recorder = Recorder()
    with (
        levanter.tracker.current_tracker(recorder),
        Trainer(config, optimizer, loss, add_default_hooks=False) as trainer,
    ):
        for stream, key in zip(streams, keys, strict=True):
            own = jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, model)
            state = trainer.initial_state(jnp.array(key), model=own, is_trainable=is_trainable)
            state = hax.shard(state, trainer.parameter_axis_mapping)  # as after a step, or step 2 compiles again
            steps = []
            for batch in stream:
                info = trainer.train_step(state, batch)
                state = info.state
                steps.append(Step(info.loss, numbers(state), {}))
            runs.append(steps)
    return runs


@cache
def llama() -> LlamaLMHeadModel:
    return hax.named_jit(LlamaLMHeadModel.init)(Vocab, LLAMA, key=jax.random.PRNGKey(1))


@cache
def _example(rows: int) -> LmExample:
    Batch = Axis("batch", rows)
    return hax.vmap(LmExample.causal, Batch)(hax.zeros((Batch, LLAMA.max_Pos), dtype=jnp.int32))


def text_batch(seed: int, rows: int) -> LmExample:
    """`rows` sequences of random tokens."""
    example = _example(rows)
    tokens = np.random.default_rng(seed).integers(0, Vocab.size, (rows, LLAMA.max_seq_len), np.int32)
    return dataclasses.replace(example, tokens=hax.named(jnp.asarray(tokens), example.tokens.axes))


def text_loss(model: Any, example: LmExample, *, key: Any = None, z_loss_weight: float = 0.0) -> Any:
    """The loss of `levanter.main.train_lm`."""
    return model.compute_next_token_loss(example, key=key, logsumexp_weight=z_loss_weight)


z_loss = partial(text_loss, z_loss_weight=1e-2)


def joined(batches: Sequence[Any]) -> Any:
    """One batch of the rows of all, in order."""
    return jax.tree.map(lambda *xs: hax.concatenate("batch", xs), *batches, is_leaf=hax.util.is_named_array)
