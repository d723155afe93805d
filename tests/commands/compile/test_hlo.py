"""What is read from the text of a compiled program."""

import pytest

from levanter_diloco.commands.compile.flops import Flops
from levanter_diloco.commands.compile.hlo import Program, collectives, nbytes, transfers


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        ("%a = f32[4]{0} all-reduce(%x), replica_groups={{0,4},{1,5}}, to_apply=%add", ((0, 4), (1, 5))),
        ("%a = f32[4]{0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add", ((0, 1), (2, 3))),
        ("%a = f32[4]{0} all-reduce(%x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add", ((0, 2), (1, 3))),
        (
            "%a = f32[4]{0} all-reduce(%x), replica_groups=mesh['diloco'=2,'data'=2,'model'=1] {'diloco'}, "
            "use_global_device_ids=true, to_apply=%add",
            ((0, 2), (1, 3)),
        ),
        (
            "%a = f32[4]{0} all-reduce(%x), replica_groups=mesh['diloco'=2,'data'=2,'model'=2] {'data','model'}, "
            "use_global_device_ids=true, to_apply=%add",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        ("%a = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("%a = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add", ()),
    ],
)
def test_collectives_read_groups(line: str, groups: tuple) -> None:
    [one] = collectives(Program.of(line))
    assert one.groups == groups
    assert one.nbytes == 16


def test_parser_counts_tuples_and_knows_islands() -> None:
    line = "%a = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce(%x, %y), replica_groups={{0,2},{1,3}}, to_apply=%s"
    [one] = collectives(Program.of(line))
    assert one.nbytes == 16 + 12
    assert one.crosses(2)
    assert not one.crosses(4)


def test_gather_sends_its_own_share() -> None:
    [one] = collectives(Program.of("%a = u8[2,4]{1,0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}"))
    assert (one.nbytes, one.sent) == (8, 4)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *(("pred", 10), ("s8", 10), ("u16", 20), ("s16", 20), ("bf16", 20), ("f32", 40), ("f64", 80), ("s64", 80)),
        *(("c64", 80), ("c128", 160), ("f8e4m3fn", 10), ("f8e5m2", 10), ("f8e8m0fnu", 10), ("f4e2m1fn", 5)),
        *(("s4", 5), ("u4", 5), ("s2", 3), ("u2", 3), ("token", 0)),  # 10 of 2 bits: two bytes and a half
    ],
)
def test_bytes_of_ten_elements(dtype: str, expected: int) -> None:
    [one] = collectives(Program.of(f"%a = {dtype}[2,5]{{1,0}} all-reduce(%x), replica_groups={{}}, to_apply=%s"))
    assert one.nbytes == expected


def test_element_type_of_unknown_size_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"holds f6e2m3fn\[2,5\], and the bytes of an element of f6e2m3fn are not known"
    ):
        nbytes((("f32", (3,)), ("f6e2m3fn", (2, 5))))


HANDLER = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"'
RENDEZVOUS = HANDLER + ',_xla_host_transfer_rendezvous="psum.1_0",_xla_megascale_transfer_type="ALL_REDUCE"}'

TWO_SLICES = f"""HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %p = (s32[], f32[8,4]{{1,0:T(8,128)}}) parameter(0)
  %x = f32[8,4]{{1,0}} get-tuple-element(%p), index=1
  %w = f32[4,4]{{1,0}} constant({{...}})
  %y = f32[8,4]{{1,0}} convolution(%x, %w), dim_labels=bf_io->bf
  ROOT %t = (s32[], f32[8,4]{{1,0}}) tuple(%i, %y)
}}

%condition (p.1: (s32[], f32[8,4])) -> pred[] {{
  %p.1 = (s32[], f32[8,4]{{1,0}}) parameter(0)
  %bound = s32[] constant(3)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%i.1, %bound), direction=LT
}}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {{
  %a = f32[8,4]{{1,0}} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[2,8,128]{{2,1,0:T(8,128)}}, u32[]{{:S(2)}}, token[]) send(%a, %after-all), channel_id=2, {RENDEZVOUS}
  %recv = (f32[2,8,128]{{2,1,0:T(8,128)}}, u32[]{{:S(2)}}, token[]) recv(%after-all), channel_id=1, {RENDEZVOUS}
  %loop = (s32[], f32[8,4]{{1,0}}) while(%init), condition=%condition, body=%body
  %send-done = token[] send-done(%send), channel_id=2, {HANDLER}}}
  %recv-done = (f32[2,8,128]{{2,1,0:T(8,128)}}, token[]) recv-done(%recv), channel_id=1, {HANDLER}}}
  ROOT %late = f32[8,8]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}
"""


def test_transfer_between_slices_has_its_place_in_the_schedule() -> None:
    [one] = transfers(Program.of(TWO_SLICES))
    assert (one.kind, one.name, one.nbytes) == ("all-reduce", "psum.1_0", 2 * 8 * 128 * 4)
    assert (one.start, one.done) == (2, 6)


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
