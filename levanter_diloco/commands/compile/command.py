"""Command `levanter-diloco compile`: compiles a run's step programs for devices that are not here, and audits them."""

import dataclasses
import re
import sys
from typing import TYPE_CHECKING

from ...errors import PATH, BadInput, ModelError, OptionError, SliceError
from ...options.plugins import load_plugins
from ..flags import Parser, count
from ..plan.model_size import vocab_size_of
from .slices import Slice

if TYPE_CHECKING:
    import jax

    from ...main.train_lm import TrainDiLoCoLmConfig


def main(args: list[str]) -> None:
    """Prints the audit that `args` ask for; exits with 2 and one line on bad input, with 1 if a program is too big."""
    parser = _parser()
    flags, options = parser.parse_known_args(args)
    try:
        load_plugins()
        slice_size, tpu = read_topology(flags.topology)
        # Only now: --help and a wrong topology answer at once, the host takes 15 seconds to import.
        from ...main.train_lm import TrainDiLoCoLmConfig
        from ...options.reading import read
        from .aot import abstract_run
        from .report import CompileReport

        config = read(TrainDiLoCoLmConfig, options)
        _check(config)
        devices = _devices(slice_size, tpu, flags.num_slices)
        if tpu is None:
            _stand_in_for_slices(config, flags.num_slices)
        config.trainer._initialize_jax_config()
        vocab_size = flags.vocab_size or vocab_size_of(config.data.tokenizer)
        with abstract_run(devices, config, vocab_size) as run:
            report = CompileReport.of(run, flags.topology, flags.num_slices, tpu.generation.hbm_gib if tpu else None)
    except (BadInput, OptionError, ModelError) as error:
        parser.error(str(error))
    report.show(flags.json)
    if report.too_big:
        sys.exit(1)


def read_topology(name: str) -> tuple[int, Slice | None]:
    """Devices of a slice and the slice, which is None for the CPU's `cpu:N`.

    Raises:
        BadInput: If there is no such topology.
    """
    if match := re.fullmatch(r"cpu:([1-9][0-9]*)", name):
        return int(match[1]), None
    try:
        tpu = Slice.of(name)
    except SliceError as error:
        raise BadInput(f"--topology ({name}) {error}, and cpu:8 for a check on this machine.") from error
    return tpu.devices, tpu


def _parser() -> Parser:
    parser = Parser(
        prog="levanter-diloco compile",
        usage="%(prog)s --config_path X.yaml --topology v5p-128 [--num_slices N] [--any.option value ...]",
        description="Compiles every step program of a YAML for TPU slices that are not here and prints what each one "
        "takes of a device and sends between islands. Needs no accelerator. All other options are those of train_lm.",
        allow_abbrev=False,
    )
    parser.add_argument("--topology", required=True, metavar="v5p-128", help="type of a slice; cpu:8 stays here")
    parser.add_argument("--num_slices", type=count, default=1, metavar="N", help="slices (1)")
    parser.add_argument(
        "--vocab_size", type=count, metavar="N", help="entries of the tokenizer, if it is not in a local folder"
    )
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    return parser


def _check(config: "TrainDiLoCoLmConfig") -> None:
    if not config.trainer.diloco.enabled:
        raise OptionError(f"{PATH} is missing or not enabled, so there are no islands to compile for; {{}} works.")
    if config.use_hf_model_config:
        raise OptionError("use_hf_model_config (true) takes the model from a checkpoint; write its sizes into model:.")


def _devices(slice_size: int, tpu: Slice | None, num_slices: int) -> "list[jax.Device]":
    import jax

    from .aot import tpu_devices

    jax.config.update("jax_platforms", "cpu")
    if tpu is not None:
        return tpu_devices(tpu, num_slices)
    jax.config.update("jax_num_cpu_devices", slice_size * num_slices)
    return jax.devices("cpu")


def _stand_in_for_slices(config: "TrainDiLoCoLmConfig", num_slices: int) -> None:
    """Lets islands on one CPU stand for those of `num_slices` slices."""
    diloco = config.trainer.diloco
    if num_slices > 1:
        config.trainer.diloco = dataclasses.replace(diloco, ici_islands=num_slices * (diloco.ici_islands or 1))
