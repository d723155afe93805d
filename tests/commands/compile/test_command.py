"""`levanter-diloco compile`: its report, its words and its refusals; the programs are the run's own."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from levanter.data.dataset import ListAsyncDataset
from levanter.data.text.datasets import CausalLmDataset, NamedLmDataset

from helpers.aot_config import VOCAB_SIZE, config, write
from helpers.host_runs import text_loss
from helpers.toy_model import entered
from levanter_diloco.cli import main
from levanter_diloco.commands.compile.aot import abstract_run, tpu_devices
from levanter_diloco.commands.compile.command import read_topology
from levanter_diloco.commands.compile.report import CompileReport
from levanter_diloco.commands.compile.slices import Slice
from levanter_diloco.errors import BadInput, OptionError
from levanter_diloco.islands.programs import StepProgram

SMALL = {"hidden_dim": 32, "intermediate_dim": 32, "max_seq_len": 16}

KEYS = {
    *("topology", "num_slices", "devices", "islands", "hbm_bytes", "wire"),
    *("sync_period", "effective_period", "num_fragments", "overlap_steps"),
    *("programs", "sent_bytes_per_period", "analytic_bytes_per_period"),
}
PROGRAM_KEYS = {
    *("name", "runs_per_period", "trace_seconds", "compile_seconds", "memory_bytes", "flops"),
    *("sent_bytes", "analytic_bytes", "exchanges", "error"),
}
MEMORY_KEYS = {"arguments", "outputs", "temporaries", "code", "total"}
EXCHANGE_KEYS = {"kind", "name", "sent_bytes", "overlapped", "flops_meanwhile"}


def check_keys(report: dict[str, Any]) -> None:
    assert set(report) == KEYS
    for program in report["programs"]:
        assert set(program) == PROGRAM_KEYS
        assert set(program["memory_bytes"]) == MEMORY_KEYS
        assert all(set(exchange) == EXCHANGE_KEYS for exchange in program["exchanges"])


@pytest.mark.slow
def test_report_of_two_islands_on_cpu(tmp_path: Path) -> None:
    options = config(tmp_path, {"ici_islands": 2, "num_fragments": 1}, **SMALL)
    with abstract_run(jax.devices(), options, VOCAB_SIZE) as run:
        found = CompileReport.of(run, "cpu:8", 1, None)
    report = found.to_json()
    check_keys(report)
    assert (report["devices"], report["islands"], report["sync_period"]) == (8, 2, 6)
    inner, reduce = report["programs"]
    assert (inner["name"], inner["runs_per_period"], inner["exchanges"]) == ("inner", 5, ())
    assert (reduce["name"], reduce["runs_per_period"]) == ("inner + reduce rest", 1)
    assert {exchange["kind"] for exchange in reduce["exchanges"]} == {"all-reduce"}
    weights = 2 * 4 * 4  # of two islands, from each of the four devices of one
    assert reduce["sent_bytes"] - weights == reduce["analytic_bytes"] == report["analytic_bytes_per_period"] > 0
    assert report["sent_bytes_per_period"] == report["analytic_bytes_per_period"] + weights
    text = "\n".join(found.lines())
    assert text.startswith("1 x cpu:8: 2 island(s), 8 devices; each fragment every 6 steps, P=1, V=0")
    assert "1 all-reduce" in text


SYNCS = [("inner + reduce rest", 1), ("inner + reduce layers", 2)]
PIECES = [
    (f"inner + {name} {part}", runs)
    for part, runs in (("rest", 1), ("layers", 2))
    for name in ("piece of", "last piece of")
]
OVERLAPPED = [(f"{kind} {part}", runs) for part, runs in (("rest", 1), ("layers", 2)) for kind in ("merge", "capture")]


@pytest.mark.parametrize(
    ("period", "overlap", "expected"),
    [
        (6, 0, [("inner", 3), *SYNCS]),
        (3, 0, SYNCS),  # every step syncs
        (6, 1, [("inner", 3), *SYNCS, *OVERLAPPED]),
        (3, 1, [("inner", 0), *SYNCS, *OVERLAPPED]),  # before the first reduce
        (12, 2, [("inner", 6), *PIECES, *OVERLAPPED]),
    ],
)
def test_programs_run_as_often_as_the_schedule_says(period: int, overlap: int, expected: list, tmp_path: Path) -> None:
    options = config(tmp_path, {"sync_period": period, "ici_islands": 2, "overlap_steps": overlap}, **SMALL)
    with abstract_run(jax.devices(), options, VOCAB_SIZE) as run:
        assert sorted((program.name, program.runs) for program in run.programs) == sorted(expected)


def text_of(programs: list[StepProgram]) -> dict[str, list[str]]:
    """The lines of each program, without the numbers of values and without constraints that leave all open.

    The host writes such a constraint on a constant only where the mesh has its devices.
    """
    open_constraint = re.compile(r"sdy\.sharding_constraint \S+ <@mesh, \[[{}?, ]*\]>")
    texts = {program.name: program.trace().lower().as_text() for program in programs}
    return {
        name: [re.sub(r"%\w+", "%", line) for line in text.splitlines() if not open_constraint.search(line)]
        for name, text in texts.items()
    }


@pytest.mark.slow
def test_programs_are_those_of_the_run(tmp_path: Path) -> None:
    block = {"ici_islands": 2, "overlap_steps": 1}
    with abstract_run(jax.devices(), config(tmp_path, block, **SMALL), VOCAB_SIZE) as run:
        abstract = text_of(run.programs)
    here = config(tmp_path, block, **SMALL)
    Vocab, Pos = hax.Axis("vocab", VOCAB_SIZE), here.model.max_Pos
    with entered(here.trainer, here.optimizer.build(12), text_loss) as trainer:
        key = jax.random.PRNGKey(0)
        state = trainer.initial_state(key, model_init=lambda: here.model.build(Vocab, key=key))
        rows = ListAsyncDataset([{"input_ids": np.zeros(Pos.size, np.int32)}] * 8)
        text = NamedLmDataset(CausalLmDataset(rows, Pos, eos_id=0), Pos)
        batch = next(iter(trainer.data_loader(text)))
        assert abstract == text_of(
            list(trainer.programs_for(state).all_steps(state, ((batch,), {}), trainer.schedule))
        )


@pytest.mark.parametrize("name", ["v5p-100", "v9-8", "cpu", "cpu:0"])
def test_unknown_topology_is_refused_with_one_that_works(name: str) -> None:
    with pytest.raises(BadInput, match=rf"--topology \({name}\) must .* works, and cpu:8 for a check"):
        read_topology(name)


def test_topologies_have_their_devices() -> None:
    assert read_topology("cpu:8") == (8, None)
    assert read_topology("v5p-128") == (64, Slice.of("v5p-128"))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--topology"),
        (["--topology", "v5p-8", "--num_slices", "none"], "(none) must be a whole number of at least 1; 2 works"),
        (["--topology", "v5p-9"], "--topology (v5p-9) must have a size that v5p has"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags: list, complaint: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["compile", *flags])
    assert exit.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_missing_libtpu_is_said_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"needs libtpu: pip install 'levanter-diloco\[aot\]'"):
        tpu_devices(Slice.of("v5p-8"), 2)


@pytest.mark.slow
@pytest.mark.entry
def test_command_prints_json(tmp_path: Path) -> None:
    path = write(tmp_path, {"num_fragments": 1}, **SMALL)
    flags = ["--config_path", str(path), "--topology", "cpu:4", "--num_slices", "2", "--json"]
    flags += ["--vocab_size", "512", "--trainer.diloco.sync_period", "1"]
    command = [sys.executable, "-c", "from levanter_diloco.cli import command; command()", "compile", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    check_keys(report)
    assert (report["topology"], report["num_slices"], report["islands"]) == ("cpu:4", 2, 2)
    assert [program["name"] for program in report["programs"]] == ["inner + reduce rest"]
