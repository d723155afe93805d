"""Outer optimizers: their steps, rates and rules, by hand."""

from typing import Any

import pytest

from helpers.scalars import positions
from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.options.outer import AdamConfig, AverageConfig, NesterovConfig, OuterOptimizerConfig, SgdConfig


def rates(config: OuterOptimizerConfig, outer_steps: int, at: list[int]) -> list[float]:
    schedule = config.schedule(outer_steps)
    return [float(schedule(step)) for step in at]


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
