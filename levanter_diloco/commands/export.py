"""`levanter-diloco export`: writes the outer model of a checkpoint for others to read."""

from typing import TYPE_CHECKING, NamedTuple

from ..console import show
from ..errors import ModelError, OptionError
from ..options.plugins import load_plugins
from .flags import Parser

if TYPE_CHECKING:
    from levanter.compat.hf_checkpoints import LmWithHfSerializationMixin
    from levanter.models.lm_model import LmConfig
    from levanter.tokenizers import MarinTokenizer

FORMATS = ("levanter", "hf", "orbax")
DTYPES = ("float32", "bfloat16", "float16")


class Described(NamedTuple):
    """A language model, as the checkpoint or a YAML describes it."""

    model: "LmConfig"
    vocab_size: int
    tokenizer: "MarinTokenizer | None"
    """None leaves it to the model's options."""


def main(args: list[str]) -> None:
    """Exports as `args` ask for; exits with 2 and one line on bad input."""
    parser = _parser()
    flags, options = parser.parse_known_args(args)
    if flags.dtype is not None and flags.format != "hf":
        parser.error(f"--dtype ({flags.dtype}) goes with --format hf alone; others keep f32")
    if options and "--config_path" not in options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    try:
        load_plugins()
        _export(flags.checkpoint, flags.format, flags.to, flags.dtype, options)
    except (OptionError, ModelError) as error:
        parser.error(str(error))
    show(f"wrote {flags.to}")


def _parser() -> Parser:
    parser = Parser(
        prog="levanter-diloco export",
        usage="%(prog)s --checkpoint D --format levanter|hf|orbax --to PATH [--config_path X.yaml]",
        description="Writes the outer model of a DiLoCo checkpoint as a stock Levanter checkpoint, as Hugging Face "
        "safetensors or as an Orbax checkpoint. Bit for bit, unless --dtype rounds it.",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", required=True, metavar="D", help="a step-N, or a folder of them: the latest")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--to", required=True, metavar="PATH", help="where to; must not exist")
    parser.add_argument("--dtype", choices=DTYPES, help="of Hugging Face weights (float32)")
    parser.epilog = "--config_path X.yaml gives the model and the tokenizer, where the checkpoint's own do not do."
    return parser


def _export(checkpoint: str, form: str, to: str, dtype: str | None, options: list[str]) -> None:
    # Only now: --help and a wrong flag answer at once, the host takes 15 seconds to import.
    import jax
    import numpy as np
    from haliax.partitioning import set_mesh
    from jax.sharding import Mesh
    from rigging.filesystem.storage_path import StoragePath

    from ..checkpoint.integrity import check, stored_arrays
    from ..checkpoint.recovery import latest

    jax.config.update("jax_platforms", "cpu")
    path = latest(checkpoint)
    if StoragePath(to).exists():
        raise OptionError(f"--to ({to}) must not exist yet; {to}-1 works.")
    check(path)
    if any("/lora_A/" in name for name in stored_arrays(path)):
        raise OptionError(
            f"--checkpoint ({checkpoint}) must hold a whole model, and it holds LoRA's parameters alone; "
            "peft_save_path or merged_hf_save_path of the run's YAML writes what it trains."
        )
    if form == "levanter":
        _to_levanter(path, to)
        return
    described = _described(path, options)
    with set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        model = _load(path, described)
        if form == "orbax":
            from ..checkpoint.orbax import write

            write(model, to)
        else:
            _to_hugging_face(model, described, to, dtype)


def _to_levanter(path: str, to: str) -> None:
    """Theta goes by the names it has in the checkpoint, so nothing need be known of the model."""
    from flax.traverse_util import unflatten_dict
    from levanter.checkpoint import save_checkpoint

    from ..checkpoint.integrity import read_array, stored_arrays

    model = {name: read_array(path, name) for name in stored_arrays(path) if name.startswith("model/")}
    step = int(read_array(path, "step")) - 1  # the host counts steps from 0
    save_checkpoint(unflatten_dict(model, sep="/"), step, to, is_temporary=False)


def _to_hugging_face(model: "LmWithHfSerializationMixin", described: Described, to: str, dtype: str | None) -> None:
    import jax.numpy as jnp
    from levanter.compat.hf_checkpoints import HFCompatConfig

    if not isinstance(described.model, HFCompatConfig):
        raise OptionError(f"--format (hf) does not work: Levanter has no converter for {type(described.model)}.")
    converter = described.model.hf_checkpoint_converter()
    if described.tokenizer is not None:
        # pyrefly: ignore[bad-argument-type]  the host's main does the same
        converter = converter.replaced(tokenizer=described.tokenizer)
    converter.save_pretrained(model, to, dtype=None if dtype is None else jnp.dtype(dtype))


def _described(path: str, options: list[str]) -> Described:
    import draccus
    from levanter.models.lm_model import LmConfig

    from ..checkpoint.label import Label
    from ..main.train_lm import TrainDiLoCoLmConfig
    from ..options.reading import read

    label = Label.read(path)
    vocab_size = label.vocab_size if label is not None else None
    if options:
        config = read(TrainDiLoCoLmConfig, options)
        tokenizer = config.data.the_tokenizer
        return Described(config.model, vocab_size or len(tokenizer), tokenizer)
    if label is None or label.model is None or vocab_size is None:
        raise OptionError(
            f"--checkpoint ({path}) does not say what its model is; --config_path with the run's YAML works."
        )
    return Described(draccus.decode(LmConfig, label.model), vocab_size, None)


def _load(path: str, described: Described) -> "LmWithHfSerializationMixin":
    import equinox as eqx
    import jax
    from haliax import Axis
    from levanter.checkpoint import load_checkpoint

    from ..checkpoint.compatibility import check_model

    Vocab = Axis("vocab", described.vocab_size)
    shapes = eqx.filter_eval_shape(described.model.build, Vocab, key=jax.random.PRNGKey(0))
    check_model(path, shapes)
    return load_checkpoint(shapes, path, subpath="model", axis_mapping={})
