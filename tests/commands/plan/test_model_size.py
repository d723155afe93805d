"""Sizes of models, against published ones and a hand count."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from levanter_diloco.commands.plan.model_size import ModelSize, read_config, size_of
from levanter_diloco.errors import BadInput

TINY = {"hidden_dim": 64, "intermediate_dim": 96, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}


def size(folder: Path, model: dict[str, Any], vocab_size: int | None = None, **more: Any) -> ModelSize:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"model": model, **more}))
    return size_of(read_config(["--config_path", str(path)]), vocab_size)


def test_small_llama_by_hand(tmp_path: Path) -> None:
    # a layer: queries and output 2 x 64 x 64, keys and values 2 x 64 x 32, three of 64 x 96, two norms
    found = size(tmp_path, {"type": "llama", **TINY}, 100)
    assert found == ModelSize(4, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64, 2 * 100 * 64 + 64)


def test_known_models_have_their_known_sizes(tmp_path: Path) -> None:
    llama = {"type": "llama", "hidden_dim": 4096, "intermediate_dim": 11008, "num_layers": 32}
    llama |= {"num_heads": 32, "num_kv_heads": 32}
    assert size(tmp_path, llama, data={"tokenizer": "NousResearch/Llama-2-7b-hf"}).total == 6_738_415_616
    qwen3 = {"type": "qwen3", "hidden_dim": 4096, "intermediate_dim": 12288, "num_layers": 36, "num_heads": 32}
    assert size(tmp_path, {**qwen3, "num_kv_heads": 8, "head_dim": 128}, 151936).total == 8_190_735_360
    assert size(tmp_path, {"type": "qwen3_moe"}, 151936).total == 30_532_122_624


def test_any_model_of_the_host_is_counted(tmp_path: Path) -> None:
    # GPT-2 with its 1024 positions, and a vocabulary of 50257
    assert size(tmp_path, {"type": "gpt2"}, 50257).total == 124_439_808


def test_adapter_is_counted_alone(tmp_path: Path) -> None:
    whole = size(tmp_path, {"type": "llama", **TINY}, 100)
    lora = size(tmp_path, {"type": "llama", **TINY}, 100, adapter={"type": "lora", "r": 2})
    assert lora.num_layers == 4 and lora.total < whole.total / 5


def test_vocabulary_is_read_from_a_tokenizer_on_disk(tmp_path: Path) -> None:
    tokenizer = {
        "model": {"vocab": {"a": 0, "b": 1, "<s>": 2}},
        "added_tokens": [{"content": "<s>"}, {"content": "+"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = {"type": "llama", **TINY}
    assert size(tmp_path, model, data={"tokenizer": str(tmp_path)}) == size(tmp_path, model, 4)


@pytest.mark.parametrize(
    ("model", "more", "parts"),
    [
        ({"type": "llama", **TINY}, {"use_hf_model_config": True}, ["use_hf_model_config", "(true)", "--params"]),
        (
            {"type": "llama", **TINY},
            {"data": {"tokenizer": "no/such"}},
            ["data.tokenizer", "(no/such)", "--vocab_size"],
        ),
        ({"type": "llama", **TINY, "scan_layers": False}, {}, ["layers (haliax.nn.Stacked)", "--params"]),
    ],
)
def test_model_that_cannot_be_counted_names_the_flag(
    model: dict[str, Any], more: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(BadInput) as error:
        size(tmp_path, model, None if "data" in more else 100, **more)
    for part in parts:
        assert part in str(error.value)
