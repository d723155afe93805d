"""Every YAML of `configs/`: it parses, its model can be cut, periods and batch come out even, its size is right."""

import re
from math import prod

import equinox as eqx
import jax
import pytest
from haliax import Axis
from haliax.util import is_named_array
from levanter.tracker.wandb import WandbConfig
from levanter.utils.mesh import DEFAULT_ICI_AXIS_SPEC

from helpers.paths import ROOT
from levanter_diloco.commands.compile.slices import Slice
from levanter_diloco.islands.mesh import resolve_islands
from levanter_diloco.main.train_lm import TrainDiLoCoLmConfig, check_model
from levanter_diloco.options.reading import read
from levanter_diloco.plugin import register

register()  # as the command does: the local configs name its tracker

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
LOCAL = {"quickstart", "vanilla", "lookahead", "one_device", "slow_link"}
PRODUCTION = sorted(set(CONFIGS) - LOCAL)


def load(name: str) -> TrainDiLoCoLmConfig:
    return read(TrainDiLoCoLmConfig, ["--config_path", str(ROOT / "configs" / f"{name}.yaml")])


def devices(name: str) -> tuple[int, int]:
    """Slices, and devices of each, as the comment at the head of the file names them."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    found = re.search(r"^# Devices: (\d+) x (\S+) \((\d+) devices each\)", text, re.MULTILINE)
    assert found, name
    assert Slice.of(found[2]).devices == int(found[3])
    return int(found[1]), int(found[3])


@pytest.mark.parametrize("name", CONFIGS)
def test_config_parses_and_its_model_fits_its_partition(name: str):
    config = load(name)
    assert config.trainer.diloco.enabled
    check_model(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_sync_period_is_kept_to_the_step(name: str):
    schedule = load(name).trainer.diloco.schedule
    assert schedule.effective_period == schedule.sync_period


@pytest.mark.parametrize("name", CONFIGS)
def test_evaluation_checkpoints_and_the_end_fall_on_whole_periods(name: str):
    trainer = load(name).trainer
    period = trainer.diloco.sync_period
    assert trainer.num_train_steps % period == 0
    assert trainer.steps_per_eval % period == 0
    keep = [interval["every"] for interval in trainer.checkpointer.keep or []]
    assert all(every % period == 0 for every in keep)
    assert max(keep) < trainer.num_train_steps


@pytest.mark.parametrize("name", PRODUCTION)
def test_batch_divides_over_the_islands_and_their_devices(name: str):
    trainer = load(name).trainer
    slices, per_slice = devices(name)
    layout = resolve_islands(trainer.diloco, trainer.mesh, slices * per_slice, slices)
    assert layout.num_islands == slices
    assert prod(size for axis, size in {**DEFAULT_ICI_AXIS_SPEC, **trainer.mesh.axes}.items() if axis != "data") == 1
    assert isinstance(trainer.train_batch_size, int)
    assert trainer.train_batch_size % (layout.num_islands * per_slice) == 0


@pytest.mark.parametrize("name", PRODUCTION)
def test_file_names_no_bucket_project_or_person(name: str):
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert not re.search(r"(gs|s3)://[\w{]", text)
    config = load(name)
    assert config.trainer.id is None
    tracker = config.trainer.tracker
    assert isinstance(tracker, WandbConfig)
    assert tracker.entity is None
    assert tracker.project == "levanter"  # the host's default


QWEN3_VOCAB, PAPER_VOCAB = 151_936, 32_000

PUBLISHED = {
    "qwen3_8b_vanilla": (8_190_735_360, QWEN3_VOCAB),  # the checkpoint on the hub
    "qwen3_8b_streaming": (8_190_735_360, QWEN3_VOCAB),
    "qwen3_30b_a3b_streaming": (30_532_122_624, QWEN3_VOCAB),  # the checkpoint on the hub
    # By the published widths: vocabulary * width + layers * (4 * width * heads * K/V size + 8 * width^2).
    "diloco_60m": (PAPER_VOCAB * 896 + 3 * (4 * 896 * 16 * 64 + 8 * 896**2), PAPER_VOCAB),
    "diloco_150m": (PAPER_VOCAB * 896 + 12 * (4 * 896 * 16 * 64 + 8 * 896**2), PAPER_VOCAB),
    "diloco_400m": (PAPER_VOCAB * 1536 + 12 * (4 * 1536 * 12 * 128 + 8 * 1536**2), PAPER_VOCAB),
    # The scaling laws of the same models name them by their size: 35M 90M 180M 335M 550M 1.3B 4B.
    **{
        f"streaming_{name}": (PAPER_VOCAB * 64 * heads + layers * 12 * (64 * heads) ** 2, PAPER_VOCAB)
        for name, layers, heads in (
            ("35m", 6, 8),
            ("100m", 9, 12),
            ("200m", 12, 16),
            ("300m", 15, 20),
            ("500m", 18, 24),
            ("1b", 24, 32),
            ("4b", 36, 48),
        )
    },
}


def parameter_count(name: str, vocab: int) -> int:
    model = eqx.filter_eval_shape(lambda: load(name).model.build(Axis("vocab", vocab), key=jax.random.PRNGKey(0)))
    leaves = jax.tree.leaves(model, is_leaf=is_named_array)
    return sum(prod(leaf.array.shape) for leaf in leaves if is_named_array(leaf))


@pytest.mark.parametrize("name", PRODUCTION)
def test_parameter_count_is_the_published_one(name: str):
    published, vocab = PUBLISHED[name]
    assert parameter_count(name, vocab) == pytest.approx(published, rel=0.001)


def test_sizes_are_those_that_the_papers_name():
    named = {"diloco_60m": 60e6, "diloco_150m": 150e6, "diloco_400m": 400e6, "streaming_35m": 35e6}
    named |= {"streaming_100m": 90e6, "streaming_200m": 180e6, "streaming_300m": 335e6, "streaming_500m": 550e6}
    named |= {"streaming_1b": 1.3e9}  # [Streaming] rounds 90M, 180M, 335M, 550M and 1.3B
    for name, size in named.items():
        assert PUBLISHED[name][0] == pytest.approx(size, rel=0.03), name


def test_every_production_config_has_a_published_size():
    assert sorted(PUBLISHED) == PRODUCTION
