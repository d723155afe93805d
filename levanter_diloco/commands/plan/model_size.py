"""Parameters of the host's llama-like models, counted from the options of a YAML, without the host."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BadInput

Options = Mapping[str, Any]  # Any: whatever a YAML block holds

LLAMA = {
    "hidden_dim": 4096,
    "intermediate_dim": 11008,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 32,
    "head_dim": None,
    "tie_word_embeddings": False,
    "hybrid_norm": False,
    "use_qk_norm": False,
    "input_embedding_norm": False,
    "use_bias": False,
    "use_layer_norm_weight": True,
}

MODELS: dict[str, dict[str, Any]] = {  # Any: the options' own types
    "llama": LLAMA,
    "mistral": {**LLAMA, "intermediate_dim": 14336, "num_kv_heads": 8},
    "qwen": LLAMA,
    "qwen3": LLAMA,
    "apertus": {**LLAMA, "use_qk_norm": True},
    "qwen3_moe": {
        **LLAMA,
        "hidden_dim": 2048,
        "intermediate_dim": 6144,
        "num_layers": 48,
        "num_kv_heads": 4,
        "head_dim": 128,
        "use_qk_norm": True,
        "moe_intermediate_dim": 768,
        "num_experts": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""The models that are counted, and the host's defaults for the options that count."""

PLAIN_ATTENTION = ("mistral", "qwen")
"""Models of the host whose attention takes no notice of `head_dim` and `use_qk_norm`."""

COUNTED_ONLY_AS = {"use_bias": False, "use_layer_norm_weight": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Options with a single value that is counted."""

LARGEST = 100_000
"""Of a width or a depth; the planner goes through the layers one by one."""

VOCAB_SIZES = {
    "gpt2": 50257,
    "EleutherAI/gpt-neox-20b": 50277,
    "marin-community/marin-tokenizer": 128256,
    "meta-llama/Llama-2-7b-hf": 32000,
    "meta-llama/Llama-3.1-8B": 128256,
    "meta-llama/Meta-Llama-3-8B": 128256,
    "mistralai/Mistral-7B-v0.1": 32000,
    "NousResearch/Llama-2-7b-hf": 32000,
    "stanford-crfm/marin-tokenizer": 128256,
}
"""`len(tokenizer)` of tokenizers that are named by a hub id."""

BY_HAND = "give --params (say 1.2e9) and --layers (say 24)"


@dataclass(frozen=True)
class ModelSize:
    """Trainable parameters, as fragments see them."""

    num_layers: int
    per_layer: float
    """Parameters of one layer of the stack."""

    rest: float
    """Parameters outside the stack: embedding, final norm, head."""

    @property
    def total(self) -> float:
        return self.num_layers * self.per_layer + self.rest


def size_of(config: Options, vocab_size: int | None) -> ModelSize:
    """Counts the model of a training YAML.

    Args:
        config: The whole YAML.
        vocab_size: Entries of the vocabulary; None looks the tokenizer up.

    Raises:
        BadInput: If the model or its vocabulary cannot be known from the YAML.
    """
    _refuse_other_trainables(config)
    model = _block(config, "model")
    kind = model.get("type", "llama" if not model else None)
    if str(kind) not in MODELS:
        raise BadInput(f"model.type ({kind}) is counted for {', '.join(MODELS)} only; {BY_HAND}.")
    options = {name: model.get(name, default) for name, default in MODELS[kind].items()}
    for name, value in options.items():
        if name in COUNTED_ONLY_AS:
            if value != COUNTED_ONLY_AS[name]:
                raise BadInput(f"model.{name} ({value}) is not counted, only {COUNTED_ONLY_AS[name]}; {BY_HAND}.")
        elif not _is_of_kind(value, name):
            raise BadInput(f"model.{name} ({value}) must be {_kind(name)}; {MODELS[kind][name]} works.")
        elif value is not None and not isinstance(value, bool) and not 1 <= value <= LARGEST:
            raise BadInput(
                f"model.{name} ({value}) must be at least 1 and at most {LARGEST}; {MODELS[kind][name]} works."
            )
    if vocab_size is None:
        vocab_size = vocab_size_of(config)
    hidden = options["hidden_dim"]
    tied = options["tie_word_embeddings"] and kind != "mistral"  # whose head is its own whatever the option says
    embeddings = vocab_size * hidden * (1 if tied else 2)
    norms = hidden * (2 if options["input_embedding_norm"] else 1)
    return ModelSize(options["num_layers"], _layer(kind, options), embeddings + norms)


def _layer(kind: str, options: Options) -> int:
    """Parameters of one layer: attention, feed-forward and norms."""
    hidden = options["hidden_dim"]
    head = options["head_dim"] or hidden // options["num_heads"]
    if kind in PLAIN_ATTENTION:
        head = hidden // options["num_heads"]
    queries, keys = options["num_heads"] * head, options["num_kv_heads"] * head
    attention = hidden * (2 * queries + 2 * keys)
    if kind == "qwen":
        attention += queries + 2 * keys  # biases
    if kind == "qwen3" or (options["use_qk_norm"] and kind not in PLAIN_ATTENTION):
        attention += 2 * head
    if kind == "qwen3_moe":
        experts = options["num_experts"]
        feed_forward = experts * (3 * hidden * options["moe_intermediate_dim"] + hidden)  # and the router
    elif kind == "apertus":
        feed_forward = 2 * hidden * options["intermediate_dim"] + 4  # no gate; four numbers shape its activation
    else:
        feed_forward = 3 * hidden * options["intermediate_dim"]
    extra_norms = options["hybrid_norm"] and kind in ("llama", "mistral", "qwen3")
    return attention + feed_forward + hidden * (4 if extra_norms else 2)


def _is_of_kind(value: object, name: str) -> bool:
    if value is None:
        return name in LLAMA and LLAMA[name] is None
    return isinstance(value, int) and isinstance(value, bool) == isinstance(LLAMA.get(name), bool)


def _kind(name: str) -> str:
    return "true or false" if isinstance(LLAMA.get(name), bool) else "a whole number"


def _refuse_other_trainables(config: Options) -> None:
    adapter = _block(config, "adapter").get("type", "none")
    if adapter != "none":
        raise BadInput(f"adapter.type ({adapter}) trains parameters that are not counted; {BY_HAND}.")
    if config.get("use_hf_model_config"):
        raise BadInput(f"use_hf_model_config (true) takes the model from a checkpoint; {BY_HAND}.")


def vocab_size_of(config: Options) -> int:
    """Entries of the tokenizer that `data.tokenizer` names.

    Raises:
        BadInput: If it is neither in a local folder nor one whose size is known.
    """
    tokenizer = _block(config, "data").get("tokenizer")
    if str(tokenizer) in VOCAB_SIZES:
        return VOCAB_SIZES[str(tokenizer)]
    for path in (Path(str(tokenizer)) / "tokenizer.json", Path(str(tokenizer))):
        if path.is_file():
            try:
                return _entries(json.loads(path.read_text(encoding="utf-8")))
            except (KeyError, TypeError, ValueError):
                break
    raise BadInput(f"data.tokenizer ({tokenizer}) is not one whose size is known; give --vocab_size, say 128256.")


def _entries(tokenizer: dict[str, Any]) -> int:  # Any: JSON
    """`len(tokenizer)` of a `tokenizer.json`: its model's vocabulary and the tokens added to it."""
    vocab = tokenizer["model"]["vocab"]
    known = set(vocab) if isinstance(vocab, dict) else {token for token, _ in vocab}
    return len(known | {token["content"] for token in tokenizer.get("added_tokens", [])})


def _block(config: Options, name: str) -> Options:
    block = config.get(name) or {}
    if not isinstance(block, Mapping):
        raise BadInput(f"{name} ({block}) must be a block of options; {{}} works.")
    return block
