from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from helpers.refusals import read_or_refuse
from levanter_diloco.network.link import LinkConfig
from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.options.outer import AdamConfig, AverageConfig, NesterovConfig, OuterOptimizerConfig, SgdConfig
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


def rates(config: OuterOptimizerConfig, outer_steps: int, at: list[int]) -> list[float]:
    schedule = config.schedule(outer_steps)
    return [float(schedule(step)) for step in at]


def positions(optimizer: optax.GradientTransformation, start: float, gradients: list[float]) -> list[float]:
    """Where a scalar stands after each gradient."""
    theta, found = jnp.float32(start), []
    state = optimizer.init(theta)
    for gradient in gradients:
        updates, state = optimizer.update(jnp.float32(gradient), state, theta)
        theta = optax.apply_updates(theta, updates)
        found.append(float(jnp.asarray(theta)))
    return found


def test_nesterov_first_two_steps_by_hand():
    # eta .5, beta .9, Theta 1, Delta .2 then -.1:
    # m = .2;               Theta = 1 - .5*(.2 + .9*.2) = .81
    # m = .9*.2 - .1 = .08; Theta = .81 - .5*(-.1 + .9*.08) = .824
    optimizer = NesterovConfig(learning_rate=0.5, momentum=0.9).build(10)
    assert positions(optimizer, 1.0, [0.2, -0.1]) == pytest.approx([0.81, 0.824], abs=1e-7)


def test_heavy_ball_first_two_steps_by_hand():
    # m = .2; Theta = 1 - .5*.2 = .9;  m = .08; Theta = .9 - .5*.08 = .86
    optimizer = SgdConfig(learning_rate=0.5, momentum=0.9).build(10)
    assert positions(optimizer, 1.0, [0.2, -0.1]) == pytest.approx([0.9, 0.86], abs=1e-7)


def test_plain_sgd_keeps_no_momentum():
    optimizer = SgdConfig(learning_rate=0.5).build(10)
    assert positions(optimizer, 1.0, [0.5, 0.25]) == [0.75, 0.625]


def test_average_moves_all_the_way():
    # Theta 3, mean of the islands 1.75: Delta 1.25, and Theta becomes the mean.
    assert positions(AverageConfig().build(10), 3.0, [1.25]) == [1.75]


def test_adam_first_step_by_hand():
    # m-hat = Delta and v-hat = Delta^2 in the first step: Theta = 1 - .3*.2/(.2 + .1) = .8
    assert positions(AdamConfig().build(10), 1.0, [0.2]) == pytest.approx([0.8], abs=1e-6)


def test_defaults_are_those_of_the_paper():
    assert DiLoCoConfig() == DiLoCoConfig(
        enabled=True,
        sync_period=100,
        num_fragments=1,
        layer_order="interleaved",
        overlap_steps=0,
        mixing_alpha=0.0,
        outer=NesterovConfig(learning_rate=0.7, momentum=0.9, nesterov=True),
        final_sync=True,
    )


def test_constant_rate_stays():
    assert rates(SgdConfig(learning_rate=0.5), 10, [0, 5, 10, 100]) == [0.5] * 4


def test_linear_rate_falls_to_its_floor():
    # From .8 to .25*.8 = .2 over 10 outer steps, and no further.
    config = SgdConfig(learning_rate=0.8, lr_schedule="linear", min_lr_ratio=0.25)
    assert rates(config, 10, [0, 5, 10, 20]) == pytest.approx([0.8, 0.5, 0.2, 0.2], abs=1e-7)


def test_cosine_rate_falls_to_its_floor():
    # .2 + .6*(1 + cos(pi*t/8))/2: at t = 0, 4, 8 the cosine is 1, 0, -1.
    config = SgdConfig(learning_rate=0.8, lr_schedule="cosine", min_lr_ratio=0.25)
    assert rates(config, 8, [0, 4, 8, 16]) == pytest.approx([0.8, 0.5, 0.2, 0.2], abs=1e-7)


def test_warmup_rises_then_the_rest_of_the_run_decays():
    # From .8/5 in 4 steps up to .8, then in 6 of the 10 outer steps from .8 to 0.
    config = SgdConfig(learning_rate=0.8, lr_schedule="linear", warmup=4)
    assert rates(config, 10, [0, 1, 2, 4, 7, 10]) == pytest.approx([0.16, 0.32, 0.48, 0.8, 0.4, 0.0], abs=1e-7)


def test_warmup_longer_than_the_run_still_rises():
    # From .9/9 in 8 steps up to .9: halfway at .5.
    assert rates(SgdConfig(learning_rate=0.9, lr_schedule="cosine", warmup=8), 2, [0, 4]) == pytest.approx([0.1, 0.5])


def test_outer_rate_counts_outer_steps():
    # Linear to 0 over 2 steps: rates 1, .5, 0 for the three gradients.
    optimizer = SgdConfig(learning_rate=1.0, lr_schedule="linear").build(2)
    assert positions(optimizer, 4.0, [1.0, 1.0, 1.0]) == [3.0, 2.5, 2.5]


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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync_period": 0}, "sync_period (0) must be at least 1; 100 works."),
        ({"sync_period": -5}, "sync_period (-5) must be at least 1; 100 works."),
        ({"num_fragments": 0}, "num_fragments (0) must be at least 1 (vanilla); 1 works."),
        ({"mixing_alpha": -0.1}, "mixing_alpha (-0.1) must lie in [0, 1]; 0.5 works."),
        ({"mixing_alpha": 1.5}, "mixing_alpha (1.5) must lie in [0, 1]; 0.5 works."),
        ({"mixing_alpha": float("nan")}, "mixing_alpha (nan) must lie in [0, 1]; 0.5 works."),
        ({"partition": "rows"}, "partition (rows) must be one of layers, balanced; layers works."),
        ({"wire": "fp8"}, "wire (fp8) must be one of f32, bf16, int8, int4, e3m0; f32 works."),
        ({"wire_block": 7}, "wire_block (7) must be even and at least 2; 256 works."),
        ({"wire_block": 0}, "wire_block (0) must be even and at least 2; 256 works."),
        ({"wire_rounding": "up"}, "wire_rounding (up) must be one of nearest, stochastic; nearest works."),
        ({"error_feedback": True}, "error_feedback (True) must be false with wire f32; wire: int4 works."),
        ({"island_data": "split"}, "island_data (split) must be one of shared, sharded; shared works."),
        (
            {"island_data": [{"web": 1.0}, {"web": 0.0}]},
            "island_data ([{'web': 1.0}, {'web': 0.0}]) must give each island weights that are finite numbers of at "
            "least 0, not all 0; [{'web': 1.0}, {'code': 1.0}] works.",
        ),
        (
            {"island_data": [{"web": float("nan"), "code": 1.0}]},
            "island_data ([{'web': nan, 'code': 1.0}]) must give each island weights that are finite numbers of at "
            "least 0, not all 0; [{'web': 1.0}, {'code': 1.0}] works.",
        ),
        (
            {"island_data": []},
            "island_data ([]) must give each island weights that are finite numbers of at least 0, not all 0; "
            "[{'web': 1.0}, {'code': 1.0}] works.",
        ),
        ({"drop_rate": 1.5}, "drop_rate (1.5) must lie in [0, 1]; 0.1 works."),
        ({"drop_rate": float("nan")}, "drop_rate (nan) must lie in [0, 1]; 0.1 works."),
        ({"join_moments": "old"}, "join_moments (old) must be one of fresh, copied; fresh works."),
        ({"weights": "equal"}, "weights (equal) must be one of uniform, tokens; uniform works."),
        ({"weights": []}, "weights ([]) must be finite numbers of at least 0, not all 0; [1.0, 2.0] works."),
        (
            {"weights": [0.0, 0.0]},
            "weights ([0.0, 0.0]) must be finite numbers of at least 0, not all 0; [1.0, 2.0] works.",
        ),
        (
            {"weights": [1.0, float("inf")]},
            "weights ([1.0, inf]) must be finite numbers of at least 0, not all 0; [1.0, 2.0] works.",
        ),
        *(
            (
                {"schedule_islands": counts},
                f"schedule_islands ({counts}) must be [step, count] pairs from step 0 on, the steps rising, the "
                "counts at least 1; [[0, 1], [100, 2]] works.",
            )
            for counts in ([], [[1, 2]], [[0, 2], [0, 3]], [[0, 2], [5, 0]], [[0, 2, 3]], [[0, 1], [9, 2], [5, 1]])
        ),
        ({"guard_factor": 1.0}, "guard_factor (1.0) must be finite and above 1; 10 works."),
        ({"guard_factor": float("nan")}, "guard_factor (nan) must be finite and above 1; 10 works."),
        (
            {"guard": False, "guard_factor": 10.0},
            "guard_factor (10.0) must be left out while guard is false; guard: true works.",
        ),
        ({"islands_per_slot": 0}, "islands_per_slot (0) must be at least 1; 2 works."),
        ({"ici_islands": 0}, "ici_islands (0) must be at least 1, or -1 to infer it; 2 works."),
        ({"ici_islands": -2}, "ici_islands (-2) must be at least 1, or -1 to infer it; 2 works."),
        ({"dcn_islands": 0}, "dcn_islands (0) must be at least 1, or -1 to infer it; 2 works."),
        (
            {"sync_period": 10, "overlap_steps": 10},
            "overlap_steps (10) must be at least 0 and below the effective period (10 steps); 9 works.",
        ),
        (
            {"overlap_steps": -1},
            "overlap_steps (-1) must be at least 0 and below the effective period (100 steps); 99 works.",
        ),
        (
            # The effective period counts: 37*round(100/37) = 111, not 100.
            {"num_fragments": 37, "overlap_steps": 111},
            "overlap_steps (111) must be at least 0 and below the effective period (111 steps); 110 works.",
        ),
    ],
)
def test_rule_broken_names_option_value_rule_and_a_value_that_works(options: dict, sentence: str):
    with pytest.raises(ValueError) as error:
        DiLoCoConfig(**options)
    assert str(error.value) == f"trainer.diloco.{sentence}"


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (NesterovConfig, {"learning_rate": -0.1}, "learning_rate (-0.1) must be at least 0; 0.7 works."),
        (AdamConfig, {"learning_rate": float("nan")}, "learning_rate (nan) must be at least 0; 0.7 works."),
        (AverageConfig, {"warmup": -1}, "warmup (-1) must be at least 0; 0 works."),
        (SgdConfig, {"min_lr_ratio": 1.1}, "min_lr_ratio (1.1) must lie in [0, 1]; 0.1 works."),
        (SgdConfig, {"min_lr_ratio": -0.1}, "min_lr_ratio (-0.1) must lie in [0, 1]; 0.1 works."),
        (NesterovConfig, {"momentum": 1.0}, "momentum (1.0) must lie in [0, 1); 0.9 works."),
        (SgdConfig, {"momentum": -0.5}, "momentum (-0.5) must lie in [0, 1); 0.9 works."),
    ],
)
def test_outer_rule_broken_names_option_value_rule_and_a_value_that_works(config: Any, options: dict, sentence: str):
    with pytest.raises(ValueError) as error:
        config(**options)
    assert str(error.value) == f"trainer.diloco.outer.{sentence}"


@pytest.mark.parametrize(
    ("option", "value"), [("beta1", 1.0), ("beta1", -0.1), ("beta2", 1.0), ("beta2", -0.1), ("epsilon", -1.0)]
)
def test_adam_refuses_moments_that_diverge(option: str, value: float):
    with pytest.raises(ValueError, match=rf"trainer\.diloco\.outer\.{option} \({value}\) must "):
        AdamConfig(**dict[str, Any]({option: value}))


@pytest.mark.parametrize(
    "options",
    [
        {"sync_period": 1},
        {"sync_period": 1, "num_fragments": 5, "overlap_steps": 4},
        {"mixing_alpha": 0},
        {"mixing_alpha": 1},
        {"ici_islands": -1},
        {"drop_rate": 1, "weights": [0.0, 1.0], "schedule_islands": [[0, 1]], "guard_factor": 1.5},
        {"outer": SgdConfig(learning_rate=0.0, momentum=0.0)},
    ],
)
def test_edges_of_the_legal_range_work(options: dict):
    DiLoCoConfig(**options)


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
