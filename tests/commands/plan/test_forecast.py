"""The forecast: what each way to train makes of a link, by hand, and what is recommended."""

import dataclasses
from typing import Any

import pytest

from levanter_diloco.algorithm.schedule import Schedule
from levanter_diloco.algorithm.wire import wire_names
from levanter_diloco.commands.plan.forecast import (
    AddedMemory,
    Setting,
    carried_bits,
    forecast,
    outer_learning_rate,
    recommended_num_fragments,
    valid_num_fragments,
)
from levanter_diloco.commands.plan.model_size import ModelSize


def test_valid_fragment_counts_are_the_tutorials():
    assert valid_num_fragments(36) == [1, 2, 3, 4, 5, 7, 10, 13, 19, 37]
    assert valid_num_fragments(48) == [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 49]
    assert valid_num_fragments(32) == [1, 2, 3, 5, 9, 17, 33]


def test_recommended_fragments_are_of_three_layers_and_fit_in_a_period():
    assert recommended_num_fragments(48, 100) == 17
    assert recommended_num_fragments(32, 100) == 17  # 2 and 4 layers are as near; the smaller bursts win
    assert recommended_num_fragments(108, 30) == 28  # 37 do not fit
    assert recommended_num_fragments(48, 1) == 1


def test_outer_learning_rate_is_that_of_the_nearest_fewer_islands():
    assert [outer_learning_rate(islands, 1e9) for islands in (1, 2, 3, 4, 8, 64)] == [0.4, 0.6, 0.6, 0.6, 0.8, 0.8]
    assert [outer_learning_rate(islands, 90e6) for islands in (1, 2, 4, 8)] == [0.6, 0.6, 0.8, 1.0]


def setting(**changes: Any) -> Setting:
    schedule = Schedule(100, 17, 1)
    base = Setting(ModelSize(48, 2e8, 4e8), 2, 0.8, 10e9, schedule, gradient_bits=32)
    return dataclasses.replace(base, **changes)


def test_every_wire_is_planned_with_the_blocks_of_the_run():
    # an f32 scale for each block of 8 adds 4 bits to an element
    rows = {row.wire: row.largest_transfer_bytes for row in forecast(setting(wire_block=8)).methods[3:]}
    assert list(rows) == [*wire_names()]
    assert [rows[name] / rows["f32"] for name in ("bf16", "int8", "int4", "e3m0")] == [
        16 / 32,
        12 / 32,
        8 / 32,
        8 / 32,
    ]


def test_wires_are_gathered_from_few_islands_and_scattered_from_many():
    # int8 with scales is 8.125 bits: of 3 others 24.4; of 8 islands 7/8 * (8.125 + 32) = 35.1, not 7 * 8.125 = 56.9.
    assert carried_bits("int8", 256, 4) == pytest.approx(3 * 8.125)
    assert carried_bits("int8", 256, 8) == pytest.approx(7 / 8 * 40.125)
    assert carried_bits("f32", 256, 4) == 2 * 3 / 4 * 32


def test_figures_by_hand():
    plan = forecast(setting())
    assert plan.fragment_bytes == (1.6e9, *[3 * 2e8 * 4] * 16)
    assert plan.memory_added_per_island == AddedMemory(40e9, 40e9, captured_with_overlap=1.6e9 + 2.4e9)
    diloco = plan.methods[1]
    assert diloco.largest_transfer_seconds == pytest.approx(32.0)  # 40 GB at 10 Gbit/s, two islands
    assert diloco.utilization == pytest.approx(80 / 112)
    assert diloco.required_rate["50%"] == pytest.approx(4e9, rel=1e-5)
    four = forecast(setting(num_islands=4)).methods[1]
    assert four.largest_transfer_bytes == pytest.approx(60e9)  # a ring of four: 3/2 of the payload


def test_recommended_period_follows_the_link():
    def period(rate: float | None) -> int:
        return forecast(setting(rate=rate)).recommended.sync_period

    assert [period(rate) for rate in (1e12, 20e9, 5e9, 1e6, None)] == [30, 100, 500, 500, 100]
