"""One of two processes that train the toy, an island each: `guard_process.py PROCESS PORT FOLDER`.

Island 1 meets NaN in step 2, and both in step 7. Prints a line for each step, and then the error that ends it.
"""

import sys
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import optax
from levanter.utils.mesh import MeshConfig

from helpers.toy_model import Toy, entered, toy_batch, toy_loss, trainer_config
from levanter_diloco.errors import RunError
from levanter_diloco.options.outer import SgdConfig


def main(process: int, port: str, folder: Path) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    block = {"ici_islands": 2, "sync_period": 4, "overlap_steps": 1, "outer": SgdConfig(learning_rate=0.5)}
    options = {"train_batch_size": 2, "num_train_steps": 12, "mesh": MeshConfig(axes={"data": 1})}
    with entered(trainer_config(folder, block, **options), optax.sgd(0.1), toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=Toy.of(np.ones(3), np.ones((2, 4))))
        for step in range(1, 13):
            rows = toy_batch(np.full((2, 3), step), np.zeros((2, 2, 4)))
            spoiled = {2: [1], 7: [0, 1]}.get(step, [])
            rows["embed"] = hax.named(
                rows["embed"].array.at[np.array(spoiled, int), 0].set(np.nan), rows["embed"].axes
            )
            try:
                state = trainer.train_step(state, rows).state
            except RunError as error:
                print(f"RunError {error}")
                return
            (own,) = [np.asarray(x.data)[0] for x in state.islands.params.embed.array.addressable_shards]
            theta = np.asarray(state.model.embed.array.addressable_shards[0].data)
            print(step, own.tobytes().hex(), theta.tobytes().hex(), np.isfinite(own).all(), np.isfinite(theta).all())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
