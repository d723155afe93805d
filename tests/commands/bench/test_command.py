"""`levanter-diloco bench`: its arguments and its table by hand, and one small measurement between real processes."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.command_runs import Workplace
from helpers.namespaces import host_network, needs_namespaces
from helpers.paths import ROOT
from levanter_diloco.commands.bench import command as bench
from levanter_diloco.commands.bench.command import main
from levanter_diloco.commands.bench.methods import METHODS
from levanter_diloco.options.config import DiLoCoConfig

CONFIG = str(ROOT / "configs" / "slow_link.yaml")

PARAMETER_BYTES = 4 * 102_688
"""Of the tiny model: 2 x 1024 x 32 in embedding and head, 4 layers of 9280, and the last norm's 32."""


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "the following arguments are required: --config_path"),
        (["--config_path", "absent.yaml"], "--config_path (absent.yaml) must be a file to read: No such file"),
        (["--rates", "none,fast"], "argument --rates: (fast) must be none or at least 8kbit, in bit kbit mbit"),
        (["--rates", "1kbit"], "argument --rates: (1kbit) must be none or at least 8kbit"),
        (["--periods", "0"], "argument --periods: (0) must be a whole number of at least 1; 2 works."),
        (["--processes", "two"], "argument --processes: (two) must be a whole number of at least 1; 2 works."),
        (["--methods", "vanilla,magic"], "argument --methods: (magic) must be of data_parallel,vanilla,streaming"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as refused:
        main([*(["--config_path", CONFIG] if args and "--config_path" not in args else []), *args])
    (line,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and line.startswith(f"levanter-diloco: {complaint}")


def test_machine_without_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("levanter_diloco.network.namespaces.os.geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as refused:
        main(["--config_path", CONFIG])
    (line,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2
    assert line == (
        "levanter-diloco: bench makes a network for each process, and cannot here: "
        "network namespaces need root; sudo gives that."
    )


def test_methods_set_options_that_there_are():
    options = {field.name for field in dataclasses.fields(DiLoCoConfig)}
    planned = DiLoCoConfig(sync_period=8, num_fragments=4, overlap_steps=3)
    settled = {name: dataclasses.replace(planned, **change(planned)) for name, change in METHODS.items()}
    assert all(change(planned).keys() <= options for change in METHODS.values())
    assert not settled["data_parallel"].enabled
    assert settled["vanilla"].schedule.effective_period == 8 and settled["vanilla"].num_fragments == 1
    assert (settled["streaming"].num_fragments, settled["streaming"].overlap_steps) == (4, 0)
    assert settled["overlap"].overlap_steps == 3
    assert METHODS["overlap"](DiLoCoConfig())["overlap_steps"] == 1


@pytest.mark.parametrize(
    ("diloco", "more", "streams"),
    [
        ({"num_fragments": 5}, [], True),
        ({}, [], False),
        (None, [], False),
        ({"num_fragments": 5}, ["--trainer.diloco.num_fragments", "1"], False),
        ({}, ["--trainer.diloco.num_fragments=3"], True),
    ],
)
def test_one_fragment_does_not_stream(diloco: dict[str, int] | None, more: list[str], streams: bool):
    assert ("streaming" in bench._methods({"trainer": {"diloco": diloco}}, more)) == streams


def record(seconds: list[float], bytes_per_step: float, slow: float) -> dict[str, Any]:
    options = {"enabled": True, "num_fragments": 1, "overlap_steps": 0, "sync_period": 6, "effective_period": 5}
    rates = {"none": 1.0, "50mbit": slow}
    segments = [
        {"rate": rate, "seconds_per_step": [scale * x for x in seconds], "bytes_per_step": bytes_per_step}
        for rate, scale in rates.items()
    ]
    return {**options, "segments": segments}


def test_rows_take_the_slowest_process_and_the_median_period():
    # periods: max(1, 2), max(4, 3), max(3, 3) -> 2, 4, 3 -> 3
    records = [record([1.0, 4.0, 3.0], 1000, slow=2), record([2.0, 3.0, 3.0], 3250, slow=2)]
    open_link, slow = bench.rows_of("vanilla", records)
    assert (open_link.rate, open_link.seconds_per_step, open_link.times_unshaped) == ("none", 3.0, 1.0)
    assert (slow.rate, slow.seconds_per_step, slow.times_unshaped) == ("50mbit", 6.0, 2.0)
    head, _, line, _ = bench.BenchReport((open_link, slow)).lines()
    assert head.split() == ["method", "H", "P", "V", "link", "s/step", "x", "none", "sent/step"]
    assert line.split() == ["vanilla", "5", "1", "0", "50mbit", "6.000", "2.00", "3.25", "KB"]


def test_rows_without_an_open_link_have_no_ratio():
    records = [record([1.0], 10, slow=2)]
    del records[0]["segments"][0]
    (row,) = bench.rows_of("vanilla", records)
    assert row.times_unshaped is None
    assert list(bench.BenchReport((row,)).lines())[1].split() == [
        "vanilla",
        "5",
        "1",
        "0",
        "50mbit",
        "2.000",
        "10",
        "bytes",
    ]


def run_bench(workplace: Workplace, *args: str) -> subprocess.CompletedProcess[str]:
    config = workplace.config("bench", {"sync_period": 3, "num_fragments": 3})
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from levanter_diloco.cli import main; main()",
            "bench",
            "--config_path",
            config,
            *args,
        ],
        env=workplace.environment({"TMPDIR": str(config.parent)}, devices=1),
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


@needs_namespaces
@pytest.mark.slow
@pytest.mark.entry
def test_real_bytes_are_the_payload_and_the_rate_holds(workplace: Workplace):
    before = host_network()
    rates = ("--rates", "none,4mbit", "--periods", "2", "--methods", "data_parallel,streaming")
    done = run_bench(workplace, *rates, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["method"], row["rate"]) for row in rows] == [
        (method, rate) for method in ("data_parallel", "streaming") for rate in ("none", "4mbit")
    ]
    for row in rows:
        # Two islands, so a ring carries 2 (2 - 1) / 2 of the payload. With a model as small as this, what goes with
        # each of some dozen collectives, TCP's headers and the coordinator add up to a quarter.
        payload = PARAMETER_BYTES / (1 if row["method"] == "data_parallel" else 3)
        assert payload <= row["bytes_per_step"] <= 1.25 * payload, row
    for row in rows[1::2]:
        # In six steps a link of 500 kB a second lets that and its burst through, however slow the machine.
        assert 6 * row["bytes_per_step"] <= 1.05 * 500_000 * 6 * row["seconds_per_step"] + 2 * 73_728, row
    assert host_network() == before
    assert not list(Path(workplace.root / "bench").glob("levanter-diloco-bench-*"))


@needs_namespaces
@pytest.mark.slow
@pytest.mark.entry
def test_real_refusal_of_the_training_is_passed_on(workplace: Workplace):
    done = run_bench(workplace, "--methods", "streaming", "--trainer.diloco.num_fragments", "4")
    assert done.returncode == 2
    progress, line = done.stderr.splitlines()
    assert progress == "levanter-diloco: streaming: training 2 processes"
    assert re.match(r"levanter-diloco: trainer\.diloco\.num_fragments \(4\) must .*; 1, 2, 3, 5 work", line)
