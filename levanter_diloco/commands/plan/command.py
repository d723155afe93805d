"""`levanter-diloco plan`: what a run would make of a slow link, told without devices."""

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ...console import show
from ...errors import PATH, BadInput, ModelError, OptionError
from ...network.link import RATE_UNITS, quantity
from ...options.config import DiLoCoConfig
from ...options.plugins import load_plugins
from ...options.reading import read_block, refuse_duplicates
from ..flags import Parser
from .forecast import Setting, forecast, valid_num_fragments
from .model_size import BY_HAND, ModelSize, read_config, size_of
from .report import draw, lines

GRADIENT_BITS = {"f32": 32, "float32": 32, "full": 32, "bf16": 16, "bfloat16": 16, "f16": 16, "float16": 16}


class PlanParser(Parser):
    """Names a value that works for a flag without one, and the flags for one that is not known."""

    def error(self, message: str) -> NoReturn:
        expected = re.fullmatch(r"argument (--\w+)\S*: expected one argument", message)
        if expected:
            message = f"{expected[1]} () must be followed by a value; {expected[1]} {EXAMPLES[expected[1]]} works"
        elif message.startswith("unrecognized"):
            message += f"; the flags are {' '.join(EXAMPLES)} --json"
        super().error(message)


EXAMPLES = {
    "--config_path": "run.yaml",
    "--params": "10e9",
    "--layers": "48",
    "--rest_params": "0.5e9",
    "--step_seconds": "0.8",
    "--islands": "2",
    "--rate": "1gbit",
    "--vocab_size": "128256",
    "--sync_period": "100",
    "--num_fragments": "5",
    "--partition": "layers",
    "--overlap_steps": "1",
    "--plot": "plan.png",
}
"""The flags that take a value, each with one that works."""


def main(args: list[str]) -> None:
    """Prints the plan that `args` ask for; exits with 2 and one line on bad input."""
    parser = _parser()
    try:
        flags = parser.parse_args(args)
        setting, notes = settle(flags)
        plan = forecast(setting, notes)
        if flags.plot:
            draw(setting, flags.plot)
    except (BadInput, OptionError, ModelError) as error:
        parser.error(str(error))
    show(json.dumps(asdict(plan), indent=2) if flags.json else "\n".join(lines(plan)))


def _parser() -> PlanParser:
    parser = PlanParser(
        prog="levanter-diloco plan",
        description="Traffic, utilization and recommended options of a DiLoCo run over a slow link. Needs no devices.",
        allow_abbrev=False,
    )

    def add(flag: str, convert: Callable[[str], Any], text: str) -> None:
        parser.add_argument(flag, type=convert, metavar=EXAMPLES[flag], help=text)

    add("--config_path", str, "training YAML; the flags below override it")
    add("--params", _number("--params", 1), "trainable parameters, in place of the YAML's model")
    add("--layers", _count("--layers", 1), "layers of that model")
    add("--rest_params", _number("--rest_params", 0), "of its parameters, those outside the layer stack (0)")
    add("--step_seconds", _number("--step_seconds"), "seconds of one inner step, as a short run on one island logs it")
    add("--islands", _count("--islands", 1), "K (from the YAML, else 2)")
    add("--rate", lambda text: parse_rate("--rate", text), "an island's link: bit/s, or with kbit, mbit, gbit, tbit")
    add("--vocab_size", _count("--vocab_size", 1), "entries of the vocabulary, for a tokenizer that is not known")
    add("--sync_period", _count("--sync_period", 1), "H (from the YAML, else 100)")
    add("--num_fragments", _count("--num_fragments", 1), "P (from the YAML, else 1)")
    add("--overlap_steps", _count("--overlap_steps", 0), "V (from the YAML, else 0)")
    add("--partition", str, "layers or balanced (from the YAML, else layers)")
    add("--plot", str, "file for a plot of utilization against bandwidth; needs the extra levanter-diloco[plot]")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    return parser


def settle(flags: argparse.Namespace) -> tuple[Setting, list[str]]:
    """Puts flags and YAML together, and checks what needs both; returns notes on what was taken for granted."""
    config = load(flags.config_path) if flags.config_path is not None else {}
    trainer = _block(config, "trainer", "trainer")
    diloco = _options(flags, trainer)
    size, notes = _size(flags)
    if flags.islands is None and flags.config_path is None:
        notes.append("Islands: 2, as --islands is not given.")
    islands = flags.islands or (_islands(trainer, diloco) if flags.config_path is not None else 2)
    rate = flags.rate or (None if diloco.link is None else float(diloco.link.bits_per_second))
    balanced = diloco.partition == "balanced"
    if size.num_layers > LARGEST:
        raise BadInput(f"the layers ({size.num_layers}) must be at most {LARGEST}; 48 works.")
    if not balanced:
        _check_fragments(flags, diloco.num_fragments, size.num_layers)
    setting = Setting(
        size=size,
        num_islands=islands,
        step_seconds=flags.step_seconds,
        rate=rate,
        schedule=diloco.schedule,
        gradient_bits=_gradient_bits(trainer),
        wire_block=diloco.wire_block,
        balanced=balanced,
    )
    return setting, notes


LARGEST = 100_000
"""Layers; the planner goes through them one by one."""

OF_THE_BLOCK = ("sync_period", "num_fragments", "overlap_steps", "partition")
"""Flags that override options of `trainer.diloco`."""


def _options(flags: argparse.Namespace, trainer: Mapping[str, Any]) -> DiLoCoConfig:  # Any: a YAML
    """The block `trainer.diloco` with the flags over it, checked as a run checks it."""
    block = trainer.get("diloco", {})
    given = {name: value for name in OF_THE_BLOCK if (value := getattr(flags, name)) is not None}
    # A wire format or an outer optimizer may be somebody else's; ours are known, and would import the host.
    load_plugins(others_only=True)
    try:
        return read_block({**block, **given} if isinstance(block, Mapping) else block)
    except OptionError as error:
        sentence = str(error)
        for name in given:
            sentence = sentence.replace(f"{PATH}.{name} (", f"--{name} (")
        raise OptionError(sentence) from error


def load(path: str) -> Mapping[str, Any]:  # Any: a YAML
    """Reads a YAML file of options."""
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        refuse_duplicates(Path(path))
    except OptionError:
        raise
    except OSError as error:
        raise BadInput(f"--config_path ({path}) must be a file to read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"--config_path ({path}) must be a YAML file: {error}.") from error
    if not isinstance(config, Mapping):
        raise BadInput(
            f"--config_path ({path}) must hold a YAML of options; {{trainer: {{...}}, model: {{...}}}} works."
        )
    return config


def parse_rate(name: str, text: str) -> float:
    """Reads a rate as `tc` writes it, in bit/s."""
    rate = quantity(text, RATE_UNITS)
    if math.isnan(rate):
        raise BadInput(f"{name} ({text}) must be a rate above 0, in {' '.join(RATE_UNITS)} a second; 1gbit works.")
    return rate


def _number(flag: str, least: float | None = None) -> Callable[[str], float]:
    rule = "be a number above 0" if least is None else f"be a number of at least {least:g}"

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < (least or 0) or (least is None and value == 0):
            raise BadInput(f"{flag} ({text}) must {rule}; {EXAMPLES[flag]} works.")
        return value

    return convert


def _count(name: str, least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text) or int(text) < least:
            works = EXAMPLES.get(name, EXAMPLES.get(f"--{name.rpartition('.')[2]}", max(least, 1)))
            raise BadInput(f"{name} ({text}) must be a whole number of at least {least}; {works} works.")
        return int(text)

    return convert


def _size(flags: argparse.Namespace) -> tuple[ModelSize, list[str]]:
    by_hand = [name for name in ("params", "layers", "rest_params") if getattr(flags, name) is not None]
    if not by_hand and flags.config_path is None:
        raise BadInput("--config_path or --params is missing; --params 10e9 --layers 48 --step_seconds 0.8 works.")
    if not by_hand:
        _check_step_seconds(flags)  # before the host is imported
        return size_of(read_config(["--config_path", flags.config_path]), flags.vocab_size), []
    for name in ("params", "layers"):
        if name not in by_hand:
            raise BadInput(f"--{name} is missing, which --{by_hand[0]} needs: {BY_HAND}.")
    rest = flags.rest_params or 0.0
    if rest >= flags.params:
        raise BadInput(
            f"--rest_params ({rest:g}) must be below --params ({flags.params:g}); {flags.params / 10:g} works."
        )
    _check_step_seconds(flags)
    notes = []
    if not rest:
        notes.append("All parameters are taken to lie in layers, so that fragment 0 is empty; see --rest_params.")
    return ModelSize(flags.layers, (flags.params - rest) / flags.layers, rest), notes


def _check_step_seconds(flags: argparse.Namespace) -> None:
    if flags.step_seconds is None:
        raise BadInput("--step_seconds is missing: seconds of one inner step; --step_seconds 0.8 works.")


def _check_fragments(flags: argparse.Namespace, num_fragments: int, num_layers: int) -> None:
    """Refuses fragments of layers that do not fit the layers."""
    valid = valid_num_fragments(num_layers)
    if num_fragments not in valid:
        name = "--num_fragments" if flags.num_fragments is not None else f"{PATH}.num_fragments"
        raise BadInput(
            f"{name} ({num_fragments}) must be 1 more than a divisor of the {num_layers} layers; "
            f"{', '.join(map(str, valid))} work."
        )


def _islands(trainer: Mapping[str, Any], diloco: DiLoCoConfig) -> int:  # Any: a YAML
    """K, where the YAML tells it without a look at the devices."""
    mesh = _block(trainer, "mesh", "trainer.mesh")
    counts = []
    for option, axes, default in (("ici_islands", "axes", 1), ("dcn_islands", "dcn_axes", -1)):
        count = getattr(diloco, option)
        if count is None:
            count = _block(mesh, axes, f"trainer.mesh.{axes}").get("diloco", default)
        if not isinstance(count, int) or count < 1:
            here = "devices" if option == "ici_islands" else "slices"
            raise BadInput(f"{PATH}.{option} ({count}) is only known from the {here}; give --islands, say 2.")
        counts.append(count)
    return math.prod(counts) * diloco.islands_per_slot


def _gradient_bits(trainer: Mapping[str, Any]) -> int:  # Any: a YAML
    """Of a gradient in the dtype of the parameters, as `trainer.mp` gives it."""
    policy = str(trainer.get("mp", "f32"))
    found = re.search(r"\b(?:p|params)\s*=\s*(\w+)", policy)
    dtype = found[1] if found else policy
    if dtype not in GRADIENT_BITS:
        raise BadInput(f"trainer.mp ({policy}) must name a parameter dtype of {' '.join(GRADIENT_BITS)}; p=f32 works.")
    return GRADIENT_BITS[dtype]


def _block(config: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:  # Any: a YAML
    block = config.get(name) or {}
    if not isinstance(block, Mapping):
        raise BadInput(f"{path} ({block}) must be a block of options; {{}} works.")
    return block
