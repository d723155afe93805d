"""Floating-point operations of compiled programs, by hand."""

import pytest

from helpers.hlo_texts import TWO_SLICES
from levanter_diloco.commands.compile.flops import Flops
from levanter_diloco.commands.compile.hlo import Program


def test_flops_count_a_loop_as_often_as_it_runs() -> None:
    program = Program.of(TWO_SLICES.replace("%b)", "%a)"))
    of_entry = Flops(program).of_entry
    assert of_entry[4] == 3 * 2 * 8 * 4 * 4
    assert of_entry[7] == 2 * 8 * 8 * 4
    assert sum(of_entry) == of_entry[4] + of_entry[7]


@pytest.mark.parametrize(
    ("left", "right", "out", "attributes", "flops"),
    [
        # 3 places of a kernel of 3 on 4 inputs padded by 1: 2 + 3 + 3 + 2 products fall on an input.
        ("4,1,5", "3,5,7", "4,1,7", "window={size=3 pad=1_1}, dim_labels=0bf_0io->0bf", 2 * 10 * 5 * 7),
        # A batch of 6 products as a dilated kernel: each output meets one input.
        (
            "6,2,5",
            "6,5,7",
            "6,2,7",
            "window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf",
            6 * 2 * 2 * 5 * 7,
        ),
    ],
)
def test_convolution_counts_what_meets_an_input(left: str, right: str, out: str, attributes: str, flops: int) -> None:
    lines = [
        "ENTRY %main (a: f32[1]) -> f32[1] {",
        f"  %a = f32[{left}]{{2,1,0}} parameter(0)",
        f"  %b = f32[{right}]{{2,1,0}} parameter(1)",
        f"  ROOT %c = f32[{out}]{{2,1,0}} convolution(%a, %b), {attributes}",
        "}",
    ]
    assert Flops(Program.of("\n".join(lines))).of_entry == [0, 0, flops]
