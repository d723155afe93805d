"""Wrong YAMLs by the hundred: each is refused in one line that names what is wrong, before any device is looked at."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.command_runs import COMMAND, Workplace
from helpers.refusals import NO_TEXT, VANILLA, assert_says, read_or_refuse, refusal
from levanter_diloco import cli
from levanter_diloco.console import LONGEST_LINE
from levanter_diloco.options.config import DiLoCoConfig

pytestmark = pytest.mark.entry


@dataclass
class Trainer:
    """The block, and an option like the host's own."""

    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)
    steps_per_eval: int = 1000
    id: str = ""


@dataclass
class RunConfig:
    """What a program of the host reads, less the parts that are not ours: those have a thousand flags."""

    trainer: Trainer = field(default_factory=Trainer)


HUGE, DATE = 10**40, "!!timestamp 2001-01-01"
NO_BLOCK = ["null", "true", "3", "1.5", "often", "''", "[]", "[1]", "[{}]", "☃"]
NO_TRUTH = ["null", "0", "1", "1.5", "maybe", "''", "[]", "[true]", "{}", ".nan", "'True'", "☃"]
NO_NUMBER = [
    "null",
    "true",
    "false",
    "often",
    "''",
    "[]",
    "[1]",
    "{}",
    "{a: 1}",
    ".nan",
    "☃",
    "'1 2'",
    DATE,
    f"{HUGE}",
]
NO_COUNT = [*NO_NUMBER, "1.5", "2.0", ".inf", "1e3", "-.inf", f"-{HUGE}", f"'{HUGE}'", "0x", "'0x10'"]
NO_CHOICE = ["null", "true", "0", "''", "[]", "[a]", "{}", "☃", '"\\e[31m"', "other", "' '", '"a\\nb"', DATE]
NO_TEXT_VALUE = ["null", "true", "[]", "[a]", "{}", "''", "☃", "'50 50'", "1e999", ".nan", "-1", "0"]
NO_PAIRS = ["true", "3", "often", "[]", "{}", "[0, 1]", "[[0]]", "[[0, 1, 2]]", "[[0, true]]", "[[null, 1]]"]
NO_PAIRS += ["[[0, 0]]", "[[1, 2]]", "[[0, 1], [0, 2]]", "[[0, 1.5]]", f"[[0, {HUGE}]]", "[[[0, 1]]]", "[[0, a]]"]
NO_SHARES = ["null", "true", "3", "often", "[]", "{}", "[a]", "[null]", "[true, true]", "[-1, 2]", "[0, 0]", "[.nan]"]
NO_SHARES += ["[.inf, 1]", "[[1]]", f"[{HUGE}]", "[1.0e-60]", "'[1, 2]'"]
NO_MIXTURES = ["null", "true", "3", "often", "[]", "{}", "{web: 1}", "[web]", "[[web]]", "[{web: a}]", "[{web: null}]"]
NO_MIXTURES += ["[{}]", "[{web: 0}]", "[{web: -1}]", "[{web: .nan}]", "[{web: true}]", "[null]", "[{web: {a: 1}}]"]

BLOCK = {
    "enabled": NO_TRUTH,
    "sync_period": [*NO_COUNT, "0", "-5"],
    "num_fragments": [*NO_COUNT, "0", "-1"],
    "layer_order": NO_CHOICE,
    "partition": NO_CHOICE,
    "overlap_steps": [*NO_COUNT, "-1", "6", "2147483647"],
    "mixing_alpha": [*NO_NUMBER, "-0.1", "1.5", ".inf", "1.0e+999"],
    "ici_islands": [*NO_COUNT[1:], "0", "-2"],
    "dcn_islands": [*NO_COUNT[1:], "0", "-2"],
    "islands_per_slot": [*NO_COUNT, "0", "-1"],
    "outer_memory": NO_CHOICE,
    "final_sync": NO_TRUTH,
    "wire": [*NO_CHOICE, "INT8", "int8\u200b", "f16"],
    "wire_block": [*NO_COUNT, "0", "-2", "7", "1073741824"],
    "wire_rounding": NO_CHOICE,
    "error_feedback": [*NO_TRUTH, "true"],  # which contradicts the wire f32
    "drop_rate": [*NO_NUMBER, "-0.1", "1.5", ".inf"],
    "schedule_islands": NO_PAIRS,
    "join_moments": NO_CHOICE,
    "weights": NO_SHARES,
    "island_data": NO_MIXTURES,
    "guard": NO_TRUTH,
    "guard_factor": [*NO_NUMBER[1:], "1", "0.5", "-3", ".inf"],
    "outer": [*NO_BLOCK, "{type: lion}", "{type: null}", "{type: [sgd]}", "{type: {}}", "{type: 3}"],
    "link": [*NO_BLOCK[1:], "{}", "{burst: 1mb}"],
}
OUTER = {
    "learning_rate": [*NO_NUMBER, "-1", ".inf", "1.0e+300"],
    "lr_schedule": NO_CHOICE,
    "warmup": [*NO_COUNT, "-1"],
    "min_lr_ratio": [*NO_NUMBER, "-0.1", "1.5"],
    "momentum": [*NO_NUMBER, "1", "-0.1", ".inf"],
    "nesterov": NO_TRUTH,
}
ADAM = {name: [*NO_NUMBER, "-0.1", ".inf"] for name in ("beta1", "beta2", "epsilon")}
LINK = {"rate": NO_TEXT_VALUE, "burst": NO_TEXT_VALUE[1:], "latency": NO_TEXT_VALUE, "interface": ["true", "[]", "{}"]}

SOUND = ["num_fragments: 3", "mixing_alpha: 0.5", "final_sync: false", "drop_rate: 0.5", "outer_memory: sharded"]
SOUND += ["partition: balanced", "wire_rounding: stochastic", "join_moments: copied", "islands_per_slot: 2"]


def wrong_values(seed: int, count: int) -> list[tuple[str, str]]:
    """`count` different blocks with one wrong value among sound ones, and the path of that."""
    draw = random.Random(seed)
    blocks = [(name, value, "{}", f"trainer.diloco.{name}") for name, values in BLOCK.items() for value in values]
    for place, options, around in (
        ("outer", OUTER, "outer: {{{}}}"),
        ("outer", ADAM, "outer: {{type: adam, {}}}"),
        ("link", {"rate": LINK["rate"]}, "link: {{{}}}"),
        ("link", {name: LINK[name] for name in LINK if name != "rate"}, "link: {{rate: 50mbit, {}}}"),
    ):
        inside = [(name, value) for name, values in options.items() for value in values]
        blocks += [(name, value, around, f"trainer.diloco.{place}.{name}") for name, value in inside]
    drawn = []
    for name, value, around, path in draw.sample(blocks, count):
        entry = around.format(f"{name}: {value}")
        others = [line for line in draw.sample(SOUND, draw.randint(0, 3)) if not line.startswith(f"{name}:")]
        lines = [entry, *others, *(["sync_period: 6"] if name != "sync_period" else [])]
        draw.shuffle(lines)
        drawn.append(("trainer:\n  diloco:\n" + "".join(f"    {line}\n" for line in lines), path))
    return drawn


def complaint(text: str | bytes, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that a YAML is refused with."""
    path = folder / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        parsed = read_or_refuse(RunConfig, ["--config_path", str(path), *flags])
        pytest.fail(f"taken as {parsed.trainer.diloco}: {text!r} {flags}")
    printed = capsys.readouterr()
    assert exit.value.code == 2 and printed.out == ""
    assert printed.err.startswith("levanter-diloco: ") and printed.err.count("\n") == 1, printed.err
    line = printed.err.strip()
    assert line.isprintable() and len(line) < LONGEST_LINE + 100
    assert "Traceback" not in line and "NoneType" not in line and "decode_" not in line, line
    return line


@pytest.mark.slow
def test_wrong_value_anywhere_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, path in wrong_values(seed=0, count=200):
        assert path in complaint(text, tmp_path, capsys), text


@pytest.mark.parametrize("name", ["sync_period ", "Sync_period", "☃", "1", ""])
@pytest.mark.parametrize("around", ["{}", "outer: {{{}}}"])
def test_unknown_option_is_named_with_the_known_ones(
    name: str, around: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint(f"trainer: {{diloco: {{{around.format(f"'{name}': 3")}}}}}", tmp_path, capsys)
    assert_says(line, "trainer.diloco", f"`{name}`", "the options are")


def test_line_about_a_value_of_any_length_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(f"trainer: {{diloco: {{? {'x' * 99999} : 3}}}}", tmp_path, capsys)
    assert_says(line, "trainer.diloco", "xxx ... ", "the options are")


@pytest.mark.parametrize(
    "text",
    [
        *("trainer: {diloco: {sync_period: 5}", "trainer: [", "\ttrainer: {}", "trainer: *x", "trainer: !foo 3", "\0"),
        *(
            "trainer: \a",
            b"\xff\xfe\x00t",
            b"trainer: \xc3\x28",
            "%YAML 9.9\n---\n{}",
            "trainer: {}\n---\ntrainer: {}",
        ),
        *("trainer: !!python/object/apply:os.system [exit]", "trainer: !include /nowhere.yaml", "[" * 1200),
        *("trainer: {diloco: {? [a] : b}}", "trainer: {diloco: {sync_period: 2001-13-41}}", "<<: 3", "{{a: 1}: 2}"),
        "trainer: {diloco: {sync_period: " + "9" * 10000 + "}}",
    ],
    ids=lambda text: repr(text[:30]),
)
def test_text_that_is_no_yaml_is_named(text: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path / 'run.yaml'} is no YAML: " in complaint(text, tmp_path, capsys)


@pytest.mark.parametrize(
    "text", ["", "null", "3", "[]", "- trainer", "trainer", "trainer: []", "trainer:", "trainer: 3"]
)
def test_yaml_that_is_no_block_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_says(complaint(text, tmp_path, capsys), "must be a block of options, found ", "works")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: {diloco: {sync_period: 5, wire: int8, sync_period: 6}}", "sync_period stands twice"),
        ("trainer:\n  diloco: {}\ntrainer:\n  id: a\n", "trainer stands twice in one block, in lines 1 and 3"),
        ("trainer: {diloco: {outer: {type: sgd, type: adam}}}", "type stands twice"),
        ("trainer: {diloco: {schedule_islands: [{a: 1, a: 2}]}}", "a stands twice"),
    ],
)
def test_option_that_stands_twice_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(text, tmp_path, capsys)


def test_anchors_and_merges_are_no_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {diloco: {outer: {<<: &a {momentum: 0.5, learning_rate: 0.1}, momentum: 0.25}}}")
    outer = read_or_refuse(RunConfig, ["--config_path", str(path)]).trainer.diloco.outer
    assert (outer.momentum, outer.learning_rate) == (0.25, 0.1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["sync_period", "[1"], ["--trainer.diloco.sync_period ([1) is no YAML"]),
        (["sync_period", "*a"], ["--trainer.diloco.sync_period (*a) is no YAML"]),
        (["sync_period", "\0"], ["--trainer.diloco.sync_period (\\x00) is no YAML"]),
        (["sync_period=[1"], ["--trainer.diloco.sync_period ([1) is no YAML"]),
        (["sync_period", "9" * 5000], ["--trainer.diloco.sync_period (99", "is no YAML"]),
        (["sync_period", "[" * 1200], ["--trainer.diloco.sync_period ([[", "is no YAML"]),
        (["sync_period", "null"], ["trainer.diloco.sync_period (null) must be a whole number", "100 works"]),
        (["sync_period", "true"], ["trainer.diloco.sync_period (true) must be a whole number", "100 works"]),
        (["sync_period", ""], ["trainer.diloco.sync_period"]),
        (["weights", "[1, x]"], ["trainer.diloco.weights", "'x'"]),
        (["weights", "[1, true]"], ["trainer.diloco.weights[1] (true) must be a finite number"]),
        (["outer", "3"], ["trainer.diloco.outer must be a block of options, found 3"]),
        (["outer", "3", "--trainer.diloco.outer.momentum", "0.5"], ["--trainer.diloco.outer and", "contradict"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_wrong_flag_is_named(
    flags: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *values = flags
    assert_says(complaint("trainer: {diloco: {}}", tmp_path, capsys, f"--trainer.diloco.{name}", *values), *words)


@pytest.mark.parametrize(
    "flags", [["--config_path"], ["--config_path", "a", "--configs", "b"], ["--config_path", "\0"]]
)
def test_wrong_path_of_the_yaml_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        read_or_refuse(RunConfig, flags)
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# One case a hole that the fuzz has found, named after it.


@pytest.mark.parametrize("option", ["enabled", "final_sync", "error_feedback", "guard", "outer: {nesterov"])
def test_null_does_not_count_as_false(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # `enabled:` with nothing behind it ran stock Levanter without a word.
    line = complaint(f"trainer: {{diloco: {{{option}: null{'}' * ('{' in option)}}}}}", tmp_path, capsys)
    assert_says(line, "(null) must be true or false")


@pytest.mark.parametrize("option", ["sync_period", "mixing_alpha", "drop_rate", "ici_islands", "schedule_islands"])
def test_true_does_not_count_as_one(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = "[[0, true]]" if option == "schedule_islands" else "true"
    line = complaint(f"trainer: {{diloco: {{{option}: {value}}}}}", tmp_path, capsys)
    assert_says(line, f"trainer.diloco.{option}", "(true) must be a ")


@pytest.mark.parametrize("value", ["[1]", "{a: 1}", "2001-01-01"])
def test_list_for_a_number_is_not_asked_to_be_a_block(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint(f"trainer: {{diloco: {{sync_period: {value}}}}}", tmp_path, capsys)
    assert "must be a whole number" in line and "block" not in line
    line = complaint(f"trainer: {{steps_per_eval: {value}}}", tmp_path, capsys)  # an option of the host's
    assert_says(line, "trainer.steps_per_eval")
    assert "into a int" in line and "block" not in line


@pytest.mark.parametrize(
    "option", ["sync_period: {}, overlap_steps: 3", "outer: {{warmup: {}}}", "islands_per_slot: {}"]
)
def test_number_beyond_the_step_counter_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A period of 10**40 with as long an overlap made the schedule loop for ever.
    line = complaint(f"trainer: {{diloco: {{{option.format(2**31)}}}}}", tmp_path, capsys)
    assert_says(line, "(2147483648) must be a whole number that fits 32 bits")


def test_weights_that_vanish_in_f32_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Relative to the largest of them they would be 0 / 0.
    line = complaint("trainer: {diloco: {weights: [1.0e-60, 1.0e-60]}}", tmp_path, capsys)
    assert_says(line, "trainer.diloco.weights", "must be finite numbers of at least 0, not all 0")


def test_control_characters_of_a_value_are_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert r"(\x1b[31mint8)" in complaint('trainer: {diloco: {wire: "\\e[31mint8"}}', tmp_path, capsys)


@pytest.mark.parametrize(
    ("diloco", "changes", "parts"),
    [
        ({}, {"train_batch_size": -8}, ["trainer.train_batch_size (-8)", "; 8 works"]),
        ({}, {"train_batch_size": 0}, ["trainer.train_batch_size (0)", "; 8 works"]),
        ({}, {"train_batch_size": None}, ["trainer.train_batch_size (None)", "8 works"]),
        ({}, {"train_batch_size": []}, ["trainer.train_batch_size ([])", "8 works"]),
        ({}, {"train_batch_size": [{"start": 5, "value": 8}]}, ["trainer.train_batch_size", "step 0", "8 works"]),
        ({}, {"per_device_parallelism": 0}, ["trainer.per_device_parallelism (0)", "-1 works"]),
        ({}, {"per_device_parallelism": -2}, ["trainer.per_device_parallelism (-2)", "-1 works"]),
        ({}, {"num_train_steps": 0}, ["trainer.num_train_steps (0)", "1000 works"]),
        ({}, {"mesh__axes": {"data": None}}, ["trainer.mesh.axes.data (None)", "2 works"]),
        ({"ici_islands": None}, {"mesh__axes": {"diloco": None}}, ["trainer.mesh.axes.diloco (None)", "2 works"]),
        ({}, {"mesh__dcn_axes": {"data": 0}}, ["trainer.mesh.dcn_axes.data (0)", "2 works"]),
        ({}, {"mesh__axes": {"data": -1, "model": -1}}, ["trainer.mesh.axes", "{data: -1} works"]),
        ({"islands_per_slot": 2**31 - 1}, {}, ["trainer.train_batch_size (8)", "4294967294 islands"]),
        ({"ici_islands": 2**31 - 1}, {}, ["trainer.diloco.ici_islands", "divide the 8 devices"]),
        ({"num_fragments": 2**31 - 1, "partition": "balanced"}, {}, ["num_fragments", "leaves fragment 0 empty"]),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_options_of_mesh_and_batch_that_contradict_islands_are_refused(
    diloco: dict[str, Any],
    changes: dict[str, Any],
    parts: list[str],
    workplace: Workplace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = {f"trainer__{name}": value for name, value in changes.items()}
    config = workplace.config("refused", {**VANILLA, **diloco}, **NO_TEXT, **trainer)
    assert_says(refusal(capsys, "--config_path", str(config)), *parts)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("{type: [llama]}", "model must be a block of options, found '{'type': ['llama']}'"),
        ("{type: llama, hidden_dim: null}", "model (LlamaConfig) cannot be built from its options"),
        ("{type: llama, num_layers: null}", "model (LlamaConfig) cannot be built from its options"),
        (f"{{type: llama, num_layers: {10**6}}}", "the layers (1000000) must be at most 100000"),
        ("{type: llama}\ndata: {tokenizer: [a]}", "data.tokenizer"),
        ("[" * 1200, "must be a YAML file"),
    ],
)
def test_plan_refuses_a_model_it_cannot_count(
    model: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{diloco: {{}}}}\nmodel: {model}\n")
    vocabulary = [] if "data" in model else ["--vocab_size", "1000"]
    with pytest.raises(SystemExit) as exit:
        flags = ["--step_seconds", "1", "--rate", "1gbit", "--islands", "2", *vocabulary]
        cli.main(["plan", "--config_path", str(path), *flags])
    assert exit.value.code == 2
    assert_says(capsys.readouterr().err, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("diloco", "words"),
    [
        ({"enabled": None}, "trainer.diloco.enabled (null) must be true or false; true works."),
        ({"sync_period": True}, "trainer.diloco.sync_period (true) must be a whole number"),
        ({"weights": [float("nan"), 1]}, "trainer.diloco.weights[0] (nan) must be a finite number"),
        ({"☃": 3}, "The fields `☃` are not valid for DiLoCoConfig"),
    ],
)
def test_command_refuses_before_it_looks_for_devices(diloco: dict, words: str, workplace: Workplace) -> None:
    config = workplace.config("refused", {**VANILLA, **diloco}, **NO_TEXT)
    done = workplace.run(COMMAND, config, JAX_PLATFORMS="nowhere")  # any look at a device would raise
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("levanter-diloco: ") and done.stderr.count("\n") == 1
    assert words in done.stderr
