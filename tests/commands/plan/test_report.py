"""The plan in words."""

import pytest

from levanter_diloco.algorithm.schedule import Schedule
from levanter_diloco.commands.plan.forecast import Setting, forecast
from levanter_diloco.commands.plan.model_size import ModelSize
from levanter_diloco.commands.plan.report import _si, lines


def said(rate: float | None, num_fragments: int = 5, balanced: bool = False) -> list[str]:
    schedule = Schedule(100, num_fragments, 1 if num_fragments > 1 else 0)
    setting = Setting(ModelSize(8, 1e6, 2e6), 2, 0.5, rate, schedule, gradient_bits=32, balanced=balanced)
    return list(lines(forecast(setting, ["a note"])))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 "), (0.0015, "1.5 m"), (1, "1 "), (999.4, "999 "), (1.5e9, "1.5 G"), (2e15, "2000 T")]
)
def test_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert _si(value) == text


def test_first_lines_say_what_is_planned_and_the_last_what_was_taken_for_granted() -> None:
    first, second, *_, last = said(1e9)
    assert first == "10 M parameters: 8 layers of 1 M, 2 M outside; 2 island(s), 0.5 s a step, link 1 Gbit/s"
    assert second == "fragments: P=5, one every 20 step(s), each every 100 (H=100); V=1"
    assert last == "a note"


def test_without_a_rate_no_column_is_of_it() -> None:
    assert any("busy" in line for line in said(1e9)) and not any("busy" in line for line in said(None))
    assert "no --rate given" in said(None)[0]


def test_fragments_are_said_by_what_they_hold() -> None:
    assert "  1-4: 2 layer(s) each, 8 MB in f32" in said(1e9)
    assert "  0: everything, 40 MB in f32" in said(1e9, num_fragments=1)
    assert "  0-4: equal shares of everything, 8 MB in f32 each" in said(1e9, balanced=True)
