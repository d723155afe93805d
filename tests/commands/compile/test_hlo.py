"""What is read from the text of a compiled program."""

import pytest

from helpers.hlo_texts import TWO_SLICES
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


def test_transfer_between_slices_has_its_place_in_the_schedule() -> None:
    [one] = transfers(Program.of(TWO_SLICES))
    assert (one.kind, one.name, one.nbytes) == ("all-reduce", "psum.1_0", 2 * 8 * 128 * 4)
    assert (one.start, one.done) == (2, 6)
