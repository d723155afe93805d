"""`levanter.main.train_lm` with the block `trainer.diloco`."""

import dataclasses
import sys
from dataclasses import dataclass, field

import equinox as eqx
import jax
import levanter.main.train_lm as host
from haliax import Axis
from jaxtyping import PyTree
from levanter.adaptor import NoAdaptorConfig
from levanter.checkpoint import discover_checkpoint_candidates
from levanter.trainer_state import trainables_only

from ..axes import Params
from ..checkpoint.codec import holds_islands
from ..console import end
from ..errors import PATH, OptionError, option_error
from ..fragments.build import build_partition
from ..network.link import shaped
from ..training.binding import islands_in
from ..training.config import DiLoCoTrainerConfig
from ..training.island_data import dealt
from .program import run


@dataclass
class TrainDiLoCoLmConfig(host.TrainLmConfig):
    """The host's `TrainLmConfig`; its `trainer` may hold a block `diloco`."""

    # pyrefly: ignore[bad-override-mutable-attribute]  a narrower block; the host never puts another one there
    trainer: DiLoCoTrainerConfig = field(default_factory=DiLoCoTrainerConfig)


def main(config: TrainDiLoCoLmConfig) -> None:
    """Trains as the host's `main` does; with `trainer.diloco`, on islands."""
    with shaped(config.trainer.diloco.link):  # data parallelism too, to compare with
        if not config.trainer.diloco.enabled:
            check_stock(config)
            host.main(config)
            return
        check_source(config)
        check_model(config)
        config = dataclasses.replace(config, data=dealt(config.data, config.trainer))
        with islands_in(host):
            host.main(config)


def check_stock(config: TrainDiLoCoLmConfig) -> None:
    """Refuses to go on without islands from a checkpoint that has them: the host would miss its arrays one by one."""
    trainer = config.trainer
    if trainer.load_checkpoint is False or (trainer.id is None and trainer.load_checkpoint_path is None):
        return
    found = discover_checkpoint_candidates(*trainer.checkpoint_search_paths(trainer.id or ""))
    if found and holds_islands(found[-1].path):
        raise OptionError(
            f"{PATH}.enabled (false) must be true to go on from {found[-1].path}, a checkpoint of a DiLoCo run; "
            "another trainer.id starts anew, and `levanter-diloco export --format levanter` gives Levanter the model."
        )


def check_source(config: TrainDiLoCoLmConfig) -> None:
    """Refuses a second source of the model beside Orbax, and an adapter on it."""
    if (path := config.trainer.diloco.initialize_from_orbax) is None:
        return
    others = {
        "initialize_from_hf": config.initialize_from_hf,
        "initialize_from_checkpoint_path": config.initialize_from_checkpoint_path,
        "initialize_model_from_checkpoint_path": config.initialize_model_from_checkpoint_path,
        "trainer.initialize_from": config.trainer.initialize_from,
        "use_hf_model_config": config.use_hf_model_config,
    }
    if named := [name for name, value in others.items() if value]:
        rule = f"be the only source of the model, and {' and '.join(named)} is set too"
        raise option_error("initialize_from_orbax", path, rule, "one of them")
    if not isinstance(config.adapter, NoAdaptorConfig):
        rule = "be left out with an adapter, which trains on weights of Hugging Face or Levanter"
        raise option_error("initialize_from_orbax", path, rule, "initialize_from_hf")


def check_model(config: TrainDiLoCoLmConfig) -> None:
    """Refuses, from shapes alone, a model that the fragments cannot cut.

    A model config that comes from a Hugging Face checkpoint is known only later, and checked then.
    """
    if config.use_hf_model_config:
        return

    partition = build_partition(config.trainer.diloco, sharding={})
    partition.check(trainable_shapes(config, 8))  # the vocabulary does not matter to the layers


def trainable_shapes(config: TrainDiLoCoLmConfig, vocab_size: int) -> Params:
    """The shapes of the trainable parameters of `config.model`, its adapter applied; nothing is computed."""

    def build() -> PyTree:
        key = jax.random.PRNGKey(0)
        return config.adapter.apply(config.model.build(Axis("vocab", vocab_size), key=key), key=key)

    model = eqx.filter_eval_shape(build)
    return trainables_only(model, config.adapter.trainable_filter(model))


if __name__ == "__main__":
    end(lambda: run("levanter_diloco.main.train_lm", sys.argv[1:]))
