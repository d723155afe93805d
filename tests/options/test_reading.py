"""Reading: what a YAML and flags become, and what is said of those that do not fit."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optax
import pytest

from helpers.refusals import read_or_refuse
from helpers.scalars import positions
from levanter_diloco.network.link import LinkConfig
from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.options.outer import AdamConfig, AverageConfig, NesterovConfig, OuterOptimizerConfig
from levanter_diloco.training.config import DiLoCoTrainerConfig


@dataclass
class RunConfig:
    """What a program of the host reads, less the parts that are not ours."""

    trainer: DiLoCoTrainerConfig = field(default_factory=DiLoCoTrainerConfig)


@pytest.fixture
def decode(tmp_path: Path) -> Any:
    def decode(text: str, *flags: str) -> DiLoCoConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return read_or_refuse(RunConfig, ["--config_path", str(path), *flags]).trainer.diloco

    return decode


@pytest.fixture
def refusal(decode: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """The one line on stderr of a YAML that is refused."""

    def refusal(text: str, *flags: str) -> str:
        with pytest.raises(SystemExit) as exit:
            decode(text, *flags)
        assert exit.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return refusal


def test_registered_optimizer_builds_any_optax_transformation(decode: Any):
    @OuterOptimizerConfig.register_subclass("clipped_lion")
    @dataclass(frozen=True)
    class ClippedLionConfig(OuterOptimizerConfig):
        max_norm: float = 1.0

        def build(self, outer_steps: int) -> optax.GradientTransformation:
            lion = optax.lion(self.schedule(outer_steps), weight_decay=0.0)
            return optax.chain(optax.clip_by_global_norm(self.max_norm), lion)

    config = decode("trainer: {diloco: {outer: {type: clipped_lion, learning_rate: 0.25, max_norm: 0.5}}}")
    assert config.outer == ClippedLionConfig(learning_rate=0.25, max_norm=0.5)
    # Lion moves by its rate against the sign.
    assert positions(config.outer.build(4), 1.0, [3.0, 2.0]) == [0.75, 0.5]


def test_missing_block_disables(decode: Any):
    assert decode("trainer: {}").enabled is False


def test_empty_block_enables(decode: Any):
    assert decode("trainer: {diloco: {}}") == DiLoCoConfig()


def test_block_can_be_switched_off(decode: Any):
    assert decode("trainer: {diloco: {enabled: false, sync_period: 5}}") == DiLoCoConfig(enabled=False, sync_period=5)


def test_flag_alone_makes_a_block(decode: Any):
    assert decode("trainer: {}", "--trainer.diloco.sync_period", "5") == DiLoCoConfig(sync_period=5)


def test_flags_win_over_yaml(decode: Any):
    yaml = "trainer: {diloco: {sync_period: 5, num_fragments: 3, outer: {momentum: 0.5}}}"
    flags = ["--trainer.diloco.sync_period", "7", "--trainer.diloco.outer.learning_rate", "0.1"]
    expected = DiLoCoConfig(sync_period=7, num_fragments=3, outer=NesterovConfig(momentum=0.5, learning_rate=0.1))
    assert decode(yaml, *flags) == expected


def test_outer_type_defaults_to_nesterov_and_can_be_chosen(decode: Any):
    assert decode("trainer: {diloco: {outer: {learning_rate: 0.5}}}").outer == NesterovConfig(learning_rate=0.5)
    assert decode("trainer: {diloco: {outer: {type: average}}}").outer == AverageConfig()
    assert (
        decode("trainer: {diloco: {outer: {type: sgd}}}", "--trainer.diloco.outer.type", "adam").outer == AdamConfig()
    )


def test_island_data_is_a_word_or_a_list_of_mixtures(decode: Any):
    assert decode("trainer: {diloco: {}}").island_data == "shared"
    assert decode("trainer: {diloco: {island_data: sharded}}").island_data == "sharded"
    mixtures = [{"web": 1.0, "code": 0.5}, {"code": 2.0}]
    assert decode("trainer: {diloco: {island_data: [{web: 1, code: 0.5}, {code: 2}]}}").island_data == mixtures
    assert decode("trainer: {diloco: {}}", "--trainer.diloco.island_data", "sharded").island_data == "sharded"
    flag = ["--trainer.diloco.island_data", "[{web: 1, code: 0.5}, {code: 2}]"]
    assert decode("trainer: {diloco: {}}", *flag).island_data == mixtures


def test_unknown_option_lists_the_known_ones(refusal: Any):
    line = refusal("trainer: {diloco: {sync_perod: 5}}")
    assert "trainer.diloco" in line and "sync_perod" in line
    assert "the options are enabled, sync_period, num_fragments, layer_order, partition, overlap_steps" in line


def test_unknown_option_of_outer_lists_the_known_ones(refusal: Any):
    line = refusal("trainer: {diloco: {outer: {type: sgd, lr: 1}}}")
    assert "trainer.diloco.outer" in line and "lr" in line
    assert "the options are learning_rate, lr_schedule, warmup, min_lr_ratio, momentum, nesterov" in line


def test_unknown_flag_lists_the_known_ones(refusal: Any):
    line = refusal("trainer: {}", "--trainer.diloco.sync_perod", "5")
    assert "--trainer.diloco.sync_perod" in line and "--trainer.diloco.sync_period" in line


def test_unknown_outer_type_lists_the_known_types(refusal: Any):
    line = refusal("trainer: {diloco: {outer: {type: nestrov}}}")
    assert "trainer.diloco.outer" in line and "'nestrov'" in line
    assert all(name in line.split("the options are ")[1] for name in ("adam", "average", "nesterov", "sgd"))


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ("{sync_period: 0}", "trainer.diloco.sync_period (0) must be at least 1; 100 works."),
        ("{outer: {momentum: 1}}", "trainer.diloco.outer.momentum (1.0) must lie in [0, 1); 0.9 works."),
    ],
)
def test_rule_broken_in_yaml_is_the_same_sentence(refusal: Any, block: str, sentence: str):
    assert refusal(f"trainer: {{diloco: {block}}}").endswith(sentence)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("{sync_period: abc}", ["trainer.diloco.sync_period", "'abc'"]),
        ("{sync_period: 1.5}", ["trainer.diloco.sync_period", "'1.5'"]),
        ("{island_data: split}", ["trainer.diloco.island_data", "split", "shared"]),
        ("{island_data: [{web: much}]}", ["trainer.diloco.island_data", "much"]),
        ("{layer_order: sideways}", ["trainer.diloco.layer_order (sideways)", "interleaved, sequential"]),
        ("{outer: {lr_schedule: steep}}", ["trainer.diloco.outer.lr_schedule (steep)", "constant, linear, cosine"]),
    ],
)
def test_value_of_another_kind_names_the_option_and_the_value(refusal: Any, block: str, words: list[str]):
    line = refusal(f"trainer: {{diloco: {block}}}")
    assert all(word in line for word in words)


@pytest.mark.parametrize("block", ["", "true", "{outer: nesterov}", "{outer: }", "{outer: {type: [a]}}"])
def test_block_that_is_no_mapping_is_refused_in_words(refusal: Any, block: str):
    line = refusal(f"trainer: {{diloco: {block}}}")
    assert "trainer.diloco" in line
    assert "AttributeError" not in line and "TypeError" not in line and "<class" not in line


def test_link_is_off_by_default_and_read_from_yaml_and_flags(decode: Any):
    assert decode("trainer: {diloco: {}}").link is None
    assert decode("trainer: {diloco: {link: null}}").link is None
    assert decode("trainer: {diloco: {link: {rate: 50mbit}}}").link == LinkConfig("50mbit")
    assert decode("trainer: {diloco: {}}", "--trainer.diloco.link.rate", "1gbit").link == LinkConfig("1gbit")
    mixed = decode("trainer: {diloco: {link: {rate: 1gbit, burst: 1mb}}}", "--trainer.diloco.link.rate", "50mbit")
    assert mixed.link == LinkConfig("50mbit", burst="1mb")


def test_link_refusals_name_the_option_and_what_works(refusal: Any):
    slow = "trainer: {diloco: {link: {rate: 50mbits}}}"
    assert "trainer.diloco.link.rate (50mbits) must be at least 8kbit" in refusal(slow)
    assert "trainer.diloco.link.rate () must be at least 8kbit" in refusal("trainer: {diloco: {link: {burst: 1mb}}}")
    typo = refusal("trainer: {diloco: {link: {rates: 50mbit}}}")
    assert "`rates`" in typo and typo.endswith("; the options are rate, burst, latency, interface")
    flag = refusal("trainer: {diloco: {}}", "--trainer.diloco.link.rates", "50mbit")
    assert "--trainer.diloco.link.rates" in flag and "the options are --trainer.diloco.link.rate " in flag
    assert "trainer.diloco.link must be a block of options" in refusal("trainer: {diloco: {link: 50mbit}}")


def test_wrong_choice_is_answered_with_the_choices_alone(refusal: Any):
    line = refusal("trainer: {diloco: {}}", "--trainer.diloco.outer_memory", "disk")
    assert "'disk' (choose from 'device', 'pinned_host', 'sharded')" in line and "the options are" not in line
