"""`levanter-diloco export` and `inspect`, and the way back from Orbax: bit for bit."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jmp
import numpy as np
import optax
import pytest
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import Mesh
from levanter.adaptor import LoraAdaptorConfig
from levanter.checkpoint import load_checkpoint, save_checkpoint
from levanter.models.llama import LlamaLMHeadModel
from levanter.trainer_state import trainables_only
from levanter.utils.mesh import MeshConfig
from safetensors.numpy import load_file

from helpers.command_runs import Workplace, arrays, assert_same
from helpers.host_runs import LLAMA, text_loss
from helpers.toy_model import entered, numbers, save_now, trainer_config
from levanter_diloco.cli import main
from levanter_diloco.errors import OptionError
from levanter_diloco.main.train_lm import TrainDiLoCoLmConfig, check_source
from levanter_diloco.options.reading import read
from levanter_diloco.training.trainer import DiLoCoTrainer

SGD = optax.sgd(0.1)
Vocab = Axis("vocab", 64)
NAMES = {
    "model.embed_tokens.weight": (64, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (64, 32),
    **{f"model.layers.{n}.self_attn.{name}_proj.weight": (32, 32) for n in range(4) for name in "qo"},
    **{f"model.layers.{n}.self_attn.{name}_proj.weight": (16, 32) for n in range(4) for name in "kv"},
    **{f"model.layers.{n}.mlp.{name}_proj.weight": (64, 32) for n in range(4) for name in ("gate", "up")},
    **{f"model.layers.{n}.mlp.down_proj.weight": (32, 64) for n in range(4)},
    **{f"model.layers.{n}.{name}_layernorm.weight": (32,) for n in range(4) for name in ("input", "post_attention")},
}
"""What `LlamaForCausalLM` of transformers calls its parameters, and PyTorch's shapes of them: out x in."""


def config(path: Path, block: dict, **options: Any) -> Any:
    """Parameters are split over `data` and `model` in an island."""
    mesh = MeshConfig(axes={"data": 2, "model": -1})
    return trainer_config(path, {"ici_islands": 2, **block}, mesh=mesh, **options)


def save(trainer: DiLoCoTrainer, state: Any) -> None:
    save_now(trainer, state, step=0)


@pytest.fixture(scope="module")
def model(workplace: Workplace) -> LlamaLMHeadModel:
    options = dataclasses.replace(LLAMA, tokenizer=str(workplace.root / "text" / "tokenizer"))
    return hax.named_jit(LlamaLMHeadModel.init)(Vocab, options, key=jax.random.PRNGKey(1))


@pytest.fixture(scope="module")
def run(model: LlamaLMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run whose outer model is not what its islands hold."""
    path = tmp_path_factory.mktemp("run")
    with entered(config(path, {"sync_period": 2, "overlap_steps": 1}), SGD, text_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=model)
        away = jax.tree.map(lambda x: 1.3 * x, eqx.filter(state.islands.params, eqx.is_array))
        save(trainer, dataclasses.replace(state, islands=dataclasses.replace(state.islands, params=away)))
    return path / "checkpoints" / "toy"


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("exported")
    for form in ("levanter", "hf", "orbax"):
        main(["export", "--checkpoint", str(run), "--format", form, "--to", str(path / form)])
    return {form: path / form for form in ("levanter", "hf", "orbax")}


def shapes(model: LlamaLMHeadModel) -> Any:
    return eqx.filter_eval_shape(lambda: model)


def assert_bit_equal(left: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(numbers(left)), jax.tree.leaves(numbers(right)), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.slow
def test_levanter_checkpoint_is_stock(exported: dict[str, Path], run: Path, model: LlamaLMHeadModel) -> None:
    assert_same(arrays(exported["levanter"]), {f"model/{k}": v for k, v in arrays(run / "step-0", "model/").items()})
    with set_mesh(Mesh(np.array(jax.devices()[:4]), ("data",))):
        where = {"axis_mapping": {"embed": "data"}, "subpath": "model"}
        assert_bit_equal(load_checkpoint(shapes(model), exported["levanter"], **where), model)


@pytest.mark.slow
def test_hugging_face_folder_is_what_transformers_expects(exported: dict[str, Path], model: LlamaLMHeadModel) -> None:
    from transformers import AutoConfig, AutoTokenizer

    weights = load_file(exported["hf"] / "model.safetensors")
    assert {name: value.shape for name, value in weights.items()} == NAMES
    assert {str(value.dtype) for value in weights.values()} == {"float32"}
    head = model.lm_head
    assert head is not None
    np.testing.assert_array_equal(weights["lm_head.weight"], head.weight.array)
    found = AutoConfig.from_pretrained(exported["hf"])
    assert found.architectures == ["LlamaForCausalLM"]
    assert (found.hidden_size, found.num_hidden_layers, found.num_key_value_heads) == (32, 4, 2)
    assert (found.vocab_size, found.rope_parameters["rope_theta"]) == (64, 10000)
    tokenizer = AutoTokenizer.from_pretrained(exported["hf"])
    assert tokenizer is not None and len(tokenizer) == 1024


@pytest.mark.slow
def test_hugging_face_folder_comes_back_through_the_host(exported: dict[str, Path], model: LlamaLMHeadModel) -> None:
    converter = model.config.hf_checkpoint_converter()
    with set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        # pyrefly: ignore[bad-argument-type]  the host's own models do not fit its type
        back = converter.load_pretrained(LlamaLMHeadModel, str(exported["hf"]), config=model.config, axis_mapping={})
        assert_bit_equal(back, model)


PLAIN_ORBAX = """
import sys
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(sys.argv[1])
assert not {"levanter", "levanter_diloco", "haliax"} & set(sys.modules)
np.savez(sys.argv[2], **flatten_dict(tree, sep="."))
"""


@pytest.mark.slow
def test_orbax_checkpoint_is_read_by_plain_orbax(exported: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "read.npz"
    subprocess.run([sys.executable, "-c", PLAIN_ORBAX, exported["orbax"], out], check=True)
    assert_same(dict(np.load(out)), load_file(exported["hf"] / "model.safetensors"))


@pytest.mark.slow
def test_run_starts_from_orbax(exported: dict[str, Path], model: LlamaLMHeadModel, tmp_path: Path) -> None:
    policy = jmp.get_policy("p=bf16,c=bf16")
    block = {"ici_islands": 4, "initialize_from_orbax": str(exported["orbax"])}
    other = jax.tree.map(lambda x: 2 * x, model)
    options = trainer_config(tmp_path, block, mesh=MeshConfig(axes={"data": -1}), mp=policy)
    with entered(options, SGD, text_loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=other)
        assert_bit_equal(state.model, model)  # f32, whatever the islands compute in
        own = jax.tree.map(lambda x: x[2], eqx.filter(state.islands.params, eqx.is_array))
        assert_bit_equal(own, jax.tree.map(lambda x: x.astype(policy.param_dtype), model))
        save(trainer, dataclasses.replace(state, step=state.step + 5))
    # A run that resumes has its own outer model.
    away = dict(block, initialize_from_orbax=str(tmp_path / "gone"))
    options = trainer_config(tmp_path, away, mesh=MeshConfig(axes={"data": -1}), mp=policy)
    with entered(options, SGD, text_loss) as trainer:
        assert int(trainer.initial_state(jax.random.PRNGKey(0), model=other).step) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_layers": 2}, r"has model\.layers\.2\.input_layernorm\.weight, .* and \d+ more besides"),
        ({"num_layers": 5}, r"lacks model\.layers\.4\.input_layernorm\.weight"),
        (
            {"intermediate_dim": 96},
            r"has model\.layers\.0\.mlp\.down_proj\.weight of shape \(32, 64\) instead of \(32, 96\)",
        ),
    ],
)
def test_orbax_of_another_model_is_refused_by_name(
    change: dict, fault: str, exported: dict[str, Path], tmp_path: Path
) -> None:
    other = eqx.filter_eval_shape(
        LlamaLMHeadModel.init, Vocab, dataclasses.replace(LLAMA, **change), key=jax.random.PRNGKey(0)
    )
    from levanter_diloco.checkpoint.orbax import check

    with pytest.raises(OptionError, match=rf"trainer\.diloco\.initialize_from_orbax .*{fault}"):
        check(str(exported["orbax"]), other)


def test_no_orbax_checkpoint_is_refused(tmp_path: Path) -> None:
    from levanter_diloco.checkpoint.orbax import check

    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(OptionError, match=r"initialize_from_orbax \(.*\) must be an Orbax checkpoint"):
            check(str(path), None)


def test_orbax_is_the_only_source(workplace: Workplace) -> None:
    path = workplace.config("sources", {"initialize_from_orbax": "x"})
    whole = read(TrainDiLoCoLmConfig, ["--config_path", str(path)])
    check_source(whole)

    def refused(**changes: Any) -> str:
        with pytest.raises(OptionError) as error:
            check_source(dataclasses.replace(whole, **changes))
        return str(error.value)

    assert "and initialize_from_hf is set too; one of them works" in refused(initialize_from_hf="x")
    assert "initialize_model_from_checkpoint_path" in refused(initialize_model_from_checkpoint_path="x")
    assert "initialize_from_checkpoint_path" in refused(initialize_from_checkpoint_path="x")
    assert "trainer.initialize_from" in refused(trainer=dataclasses.replace(whole.trainer, initialize_from="x"))
    assert "adapter" in refused(adapter=LoraAdaptorConfig())


@pytest.mark.slow
def test_dtype_and_yaml(workplace: Workplace, run: Path, model: LlamaLMHeadModel, tmp_path: Path) -> None:
    options = {f"model__{name}": getattr(LLAMA, name) for name in ("max_seq_len", "hidden_dim", "num_layers")}
    path = workplace.config("yaml", {}, **options)
    flags = ["--checkpoint", str(run), "--format", "hf", "--to", str(tmp_path / "hf"), "--dtype", "bfloat16"]
    main(["export", *flags, "--config_path", str(path)])
    header = (tmp_path / "hf" / "model.safetensors").read_bytes()[:400]
    assert b'"dtype":"BF16"' in header and b'"dtype":"F32"' not in header


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(list(args))
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_export_refuses_in_one_line(
    run: Path, model: LlamaLMHeadModel, workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(checkpoint: Path, *more: str, form: str = "hf", to: Path = tmp_path / "to") -> str:
        flags = ["--checkpoint", str(checkpoint), "--format", form, "--to", str(to), *more]
        return refusal(capsys, "export", *flags)

    assert f"--to ({run}) must not exist yet" in export(run, to=run)
    assert "must have a metadata.json, or folders that do" in export(tmp_path)
    assert "--dtype (bfloat16) goes with --format hf alone" in export(run, "--dtype", "bfloat16", form="orbax")
    assert "unrecognized arguments: --tpo" in export(run, "--tpo", "x")
    save_checkpoint({"model": {"embed": np.ones(3, np.float32)}}, 1, tmp_path / "stock")
    assert "it is one of stock Levanter" in export(tmp_path / "stock")
    other = workplace.config("other", {}, model__num_layers=3)
    assert "is of another model, where model/transformer/layers/" in export(run, "--config_path", str(other))


@pytest.mark.slow
def test_export_of_an_adapter_is_refused(
    model: LlamaLMHeadModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = LoraAdaptorConfig(r=2)
    with set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",))):
        with_lora = adapter.apply(model, key=jax.random.PRNGKey(0), axis_mapping={})
    own = trainables_only(with_lora, adapter.trainable_filter(with_lora))
    save_checkpoint({"model": own, "layout": {"islands": 2}}, 1, tmp_path / "lora")
    flags = ["--checkpoint", str(tmp_path / "lora"), "--format", "levanter", "--to", str(tmp_path / "x")]
    assert "it holds LoRA's parameters alone" in refusal(capsys, "export", *flags)


def test_inspect_says_what_a_checkpoint_holds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(run)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"{run}/step-0: 0 steps of a llama model"
    assert "islands      K=2\nschedule     H=2 (2 in effect), P=1, V=1, layers, wire f32\n" in printed
    assert "in flight    nothing" in printed
    main(["inspect", str(run / "step-0"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["parts"]["model"]["bytes"] == 4 * sum(math.prod(shape) for shape in NAMES.values())
    assert report["parts"]["islands"]["bytes"] >= 2 * report["parts"]["model"]["bytes"]
    assert report["whole"] is True
