"""The report on compiled programs by hand: its words, its JSON, and a program that is too big for its device."""

from levanter_diloco.commands.compile.audit import Exchange, Memory
from levanter_diloco.commands.compile.report import NOTES, CompileReport, ProgramReport

GIB = 2**30

INNER = ProgramReport("inner", 5, 1.0, 20.04, Memory(2**20, 2**10, 3 * 2**20, 0), 10**9, 0, 0, (), None)
EXCHANGES = (
    Exchange("all-reduce", "psum.1", 3 * 2**20, True, 0.99),
    Exchange("all-reduce", "psum.2", 2**20, False, 0.25),
    Exchange("all-gather", "codes", 0, True, 0.75),
)
SYNC = ProgramReport("inner + reduce rest", 1, 1.0, 2.0, Memory(GIB, 0, 0, 0), 10**9, 2**22, 2**21, EXCHANGES, None)
TOO_BIG = ProgramReport("inner + reduce layers", 1, 1.0, 2.0, None, None, None, 2**21, (), "out of memory")


def report(*programs: ProgramReport, hbm_bytes: int | None = 4 * GIB) -> CompileReport:
    return CompileReport("v5p-8", 2, 8, 2, hbm_bytes, 7, 6, 3, 1, "int8", programs, 2**22, 2**21)


def test_lines_give_the_tables():
    lines = list(report(INNER, SYNC).lines())
    assert lines[0] == "2 x v5p-8: 2 island(s), 8 devices; each fragment every 6 steps, P=3, V=1"
    assert (
        " ".join(lines[2].split()) == "on one device a period compile arguments temporaries outputs code total of HBM"
    )
    assert " ".join(lines[3].split()) == "inner 5 x 20.0 s 1 MiB 3 MiB 1 KiB 0 bytes 4 MiB 0.1%"
    assert " ".join(lines[4].split()) == "inner + reduce rest 1 x 2.0 s 1 GiB 0 bytes 0 bytes 0 bytes 1 GiB 25.0%"
    # The inner program sends nothing and has no row.
    assert " ".join(lines[7].split()) == "inner + reduce rest 4 MiB 2 MiB 1 all-gather, 2 all-reduce 2 of 3 25%"
    assert lines[8] == "an island sends 4 MiB a period, by count of parameters 2 MiB"
    assert tuple(lines[10:]) == NOTES


def test_columns_are_as_wide_as_their_widest_cell():
    _, _, head, inner, sync, *_ = report(INNER, SYNC).lines()
    assert len(head) == len(inner) == len(sync)


def test_unknown_memory_and_schedule_are_dashes():
    # On CPUs: no HBM, and exchanges that have no place in a schedule.
    sync = ProgramReport("sync", 1, 1.0, 2.0, SYNC.memory_bytes, 1, 4, 4, (Exchange("all-reduce", "a", 4),), None)
    lines = list(report(sync, hbm_bytes=None).lines())
    assert lines[3].endswith(" -")
    assert lines[6].split()[-2:] == ["-", "-"]


def test_program_too_big_for_its_device_is_said():
    found = report(INNER, TOO_BIG)
    assert found.too_big and not report(INNER, SYNC).too_big
    lines = list(found.lines())
    assert "inner + reduce layers does not compile: out of memory" in lines
    assert not [line for line in lines[:6] if line.startswith("inner + reduce layers")]


def test_json_names_the_period_asked_for_and_the_one_in_effect():
    found = report(SYNC, TOO_BIG).to_json()
    assert (found["sync_period"], found["effective_period"], found["wire"]) == (7, 6, "int8")
    sync, too_big = found["programs"]
    assert sync["memory_bytes"] == {"arguments": GIB, "outputs": 0, "temporaries": 0, "code": 0, "total": GIB}
    assert sync["exchanges"][1] == {
        "kind": "all-reduce",
        "name": "psum.2",
        "sent_bytes": 2**20,
        "overlapped": False,
        "flops_meanwhile": 0.25,
    }
    assert too_big["memory_bytes"] is None and too_big["error"] == "out of memory"
