"""What the compiled step programs say to the network, and how many there are."""

import gc
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis
from haliax.nn import ScanCheckpointPolicy, Stacked
from levanter.utils.mesh import MeshConfig

from helpers.host_runs import llama, text_batch, text_loss
from helpers.toy_model import Block, Toy, cache_sizes, entered, toy_batch, toy_loss, trainer_config
from levanter_diloco.algorithm.schedule import Crossing
from levanter_diloco.commands.compile.hlo import Collective, Program, collectives
from levanter_diloco.islands.programs import Programs


def toy() -> Toy:
    return Toy.of(np.ones(3), np.ones((2, 4)))


def rows(count: int = 8) -> dict:
    rng = np.random.default_rng(0)
    return toy_batch(rng.normal(size=(count, 3)), rng.normal(size=(count, 2, 4)))


@contextmanager
def built(
    tmp_path: Path, block: dict, axes: dict, model: Any, batch: Any, loss: Any, **options: Any
) -> Iterator[tuple[Programs, Any, Any]]:
    """The programs of a trainer that has taken one step, with a state and a batch for them."""
    mesh = options.pop("mesh", MeshConfig(axes=axes))
    config = trainer_config(tmp_path, {"ici_islands": 2, **block}, mesh=mesh, **options)
    with entered(config, optax.adam(1e-2), loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=model)
        state = trainer.train_step(state, batch).state
        yield trainer.programs_for(state), state, ((batch,), {})


def text_of(programs: Programs, state: Any, batch: Any, reduce: int | None) -> str:
    crossing = None if reduce is None else Crossing(reduce, 0, last=True)
    lowered = programs.trace_step(state, batch, crossing=crossing).lower()
    # The machine code is not looked at, so it may be made quickly.
    text = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).as_text()
    assert text
    return text


def crossing(text: str, island_size: int) -> list[Collective]:
    return [one for one in collectives(Program.of(text)) if one.crosses(island_size)]


def sent_by_an_island(text: str, island_size: int, num_islands: int = 2) -> int:
    """Bytes of the fragment that the devices of one island hand to collectives with other islands.

    Beside it each device sends a place for the weight of every island.
    """
    return sum(one.nbytes * island_size for one in crossing(text, island_size)) - 4 * num_islands * island_size


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("axes", [{"data": 1, "model": 4}, {"data": 4, "model": 1}], ids=["model", "data"])
def test_toy_programs_send_their_fragment_alone(overlap: int, axes: dict, tmp_path: Path) -> None:
    # 4 devices an island, all leaves replicated: each sends its share, padded to a multiple of 4 numbers.
    block = {"sync_period": 3, "num_fragments": 3, "overlap_steps": overlap}
    mesh = MeshConfig(axes=axes, param_mapping={})
    with built(tmp_path, block, axes, toy(), rows(), toy_loss, mesh=mesh) as (programs, state, batch):
        inner, rest, layers = (text_of(programs, state, batch, reduce) for reduce in (None, 0, 2))
    assert crossing(inner, 4) == []
    assert sent_by_an_island(rest, 4) == 16  # 3 numbers of the embedding in 4 shares
    assert sent_by_an_island(layers, 4) == 16  # 2 of 4 layers with 2 numbers each
    assert "conditional" not in inner + rest + layers


def test_toy_vanilla_sends_everything_once(tmp_path: Path) -> None:
    axes = {"data": 1, "model": 4}
    with built(tmp_path, {"sync_period": 3}, axes, toy(), rows(), toy_loss) as (programs, state, batch):
        assert sent_by_an_island(text_of(programs, state, batch, 0), 4) == 12 * 4  # 11 numbers in 4 shares of 3
        assert crossing(text_of(programs, state, batch, None), 4) == []


def test_islands_on_one_slot_send_once(tmp_path: Path) -> None:
    axes = {"data": 1, "model": 4}
    block = {"sync_period": 3, "islands_per_slot": 2}
    with built(tmp_path, block, axes, toy(), rows(), toy_loss) as (programs, state, batch):
        assert sent_by_an_island(text_of(programs, state, batch, 0), 4, num_islands=4) == 12 * 4
        assert crossing(text_of(programs, state, batch, None), 4) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "overlap"),
    [({"data": 4, "model": 1}, 0), ({"data": 4, "model": 1}, 1), ({"data": 1, "model": 4}, 1)],
    ids=["fsdp", "fsdp_V1", "tensor_V1"],
)
def test_llama_programs_send_their_fragment_alone(axes: dict, overlap: int, tmp_path: Path) -> None:
    block = {"sync_period": 3, "num_fragments": 3, "overlap_steps": overlap}
    batch = text_batch(0, 8)
    with built(tmp_path, block, axes, llama(), batch, text_loss) as (programs, state, batch):
        inner, rest, layers = (text_of(programs, state, batch, reduce) for reduce in (None, 0, 1))
    in_layers = sum(x.size for x in jax.tree.leaves(llama().transformer.layers))
    everything = sum(x.size for x in jax.tree.leaves(llama()))
    assert len(collectives(Program.of(inner))) > 5
    assert crossing(inner, 4) == []
    assert sent_by_an_island(rest, 4) == 4 * (everything - in_layers)
    assert sent_by_an_island(layers, 4) == 4 * in_layers // 2
    branches = [len(re.findall(r" conditional\(", text)) for text in (inner, rest, layers)]
    assert branches == [branches[0]] * 3  # the host's loss has its own; the schedule adds none


Deep = Axis("layer", 8)


def deep_toy() -> Toy:
    stack = Stacked(Block(hax.ones((Axis("entry", 2), Deep))), Deep, ScanCheckpointPolicy.from_bool_or_str(False))
    return Toy(hax.ones(Axis("embed", 3)), stack)


def deep_rows() -> dict:
    rng = np.random.default_rng(0)
    shape = {"embed": (Axis("batch", 8), Axis("embed", 3)), "layers": (Axis("batch", 8), Axis("entry", 2), Deep)}
    arrays = {name: np.float32(rng.normal(size=[axis.size for axis in axes])) for name, axes in shape.items()}
    return {name: hax.named(jax.numpy.asarray(arrays[name]), axes) for name, axes in shape.items()}


def deep_loss(model: Toy, batch: dict, *, key: Any = None) -> Any:
    embed = hax.sum(hax.square(model.embed - batch["embed"]), "embed")
    return hax.mean(embed + hax.sum(hax.square(model.layers.stacked.weight - batch["layers"]), ("entry", Deep)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partition", "overlap", "num_programs"),
    [("layers", 0, 3), ("layers", 1, 3), ("layers", 2, 5), ("balanced", 0, 2), ("balanced", 2, 3)],
)
@pytest.mark.parametrize("num_fragments", [2, 9])
def test_number_of_step_programs_does_not_grow_with_the_fragments(
    num_fragments: int, partition: str, overlap: int, num_programs: int, tmp_path: Path
) -> None:
    # The inner step, and one with an exchange for each part; where fragments cross in pieces another for the last.
    block: dict[str, Any] = {"sync_period": 2 * num_fragments, "num_fragments": num_fragments}
    block |= {"overlap_steps": overlap, "partition": partition}
    mesh = MeshConfig(axes={"data": 1, "model": 4})
    steps = 4 * num_fragments + 1
    config = trainer_config(tmp_path, {"ici_islands": 2, **block}, mesh=mesh, num_train_steps=steps)
    with entered(config, optax.adam(1e-2), deep_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=deep_toy())
        info = trainer.train(state, [deep_rows()] * steps)
        assert min(info.state.outer_steps.tolist()) >= 2
        programs: Any = trainer.programs_for(info.state)  # Any: its caches are looked at
        parts = trainer.partition.parts
        assert programs._step_program.cache_info().misses == num_programs
        lasts = (False, True) if overlap > 1 else (True,)
        keys = [(None, True), *((part, last) for part in parts for last in lasts)]
        assert [programs._step_program(*key, False)._cache_size() for key in keys] == [1] * num_programs
        for verb in ("capture", "merge") if overlap else ("sync",):
            for part in parts:
                assert programs._verb_program(verb, part)._cache_size() == 1


def test_programs_die_with_their_trainer(tmp_path: Path) -> None:
    with built(tmp_path, {"sync_period": 1}, {"model": 4}, toy(), rows(), toy_loss) as (programs, _, _):
        there = weakref.ref(programs)
        del programs
    gc.collect()
    assert there() is None


def test_second_step_does_not_compile(tmp_path: Path) -> None:
    block = {"sync_period": 9, "ici_islands": 2}
    config = trainer_config(tmp_path, block, mesh=MeshConfig(axes={"data": 1, "model": 4}))
    with entered(config, optax.adam(1e-2), toy_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=toy())
        state = trainer.train_step(state, rows()).state
        jnp.array([False, False])  # the host's checkpointer compiles this in its second step, if nobody did before
        compiles: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, seconds, **_: compiles.append(name) if "backend_compile" in name else None  # pyrefly: ignore[bad-argument-type]  annotated nowhere
        )
        try:
            for _ in range(3):
                state = trainer.train_step(state, rows()).state
            assert cache_sizes(trainer.programs_for(state)._step_program(None, True, False)) == [1]
        finally:
            jax.monitoring.clear_event_listeners()
    assert compiles == []


@pytest.mark.parametrize(("overlap", "verb"), [(0, "sync"), (1, "reduce"), (1, "merge"), (1, "capture")])
def test_layer_fragment_is_updated_in_place(overlap: int, verb: str, tmp_path: Path) -> None:
    # Reading a slice after it is overwritten would make XLA copy the whole stack: a fragment is 1 of its 32 layers.
    Deep = Axis("layer", 32)
    weight = hax.ones((Deep, Axis("entry", 64), Axis("embed", 64)))
    stack = Stacked(Block(weight), Deep, ScanCheckpointPolicy.from_bool_or_str(False))
    model = Toy(hax.ones(Axis("embed", 64)), stack)

    def loss(model: Toy, batch: dict, *, key: Any = None) -> Any:
        return hax.mean(hax.square(model.layers.stacked.weight)) + hax.mean(model.embed * hax.mean(batch["layers"]))

    block = {"sync_period": 33, "num_fragments": 33, "overlap_steps": overlap}
    with built(tmp_path, block, {"data": 4}, model, rows(), loss) as (programs, state, _):
        zero, leaves = jnp.int32(0), programs._leaves(state)
        if verb == "reduce":
            lowered = programs._reduce_program("layers", True).lower(leaves, zero, zero)
        else:
            lowered = programs._verb_program(verb, "layers").lower(leaves, zero, jnp.ones(2))
        memory: Any = lowered.compile().memory_analysis()  # Any: each backend's own class
    assert memory.temp_size_in_bytes < weight.array.nbytes / 4 / 4  # a device holds a quarter of the stack
