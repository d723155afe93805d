"""Sizes of models: trainable parameters in the layer stack and outside of it, counted on the host's own shapes."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import BadInput
from ...options.plugins import load_plugins

if TYPE_CHECKING:
    from ...main.train_lm import TrainDiLoCoLmConfig

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


def size_of(config: "TrainDiLoCoLmConfig", vocab_size: int | None) -> ModelSize:
    """Counts the model of a training YAML, of any type that the host can build.

    Args:
        config: The options of the run.
        vocab_size: Entries of the vocabulary; None looks the tokenizer up.

    Raises:
        BadInput: If the model or its vocabulary cannot be known from the YAML, or if it has no layer stack.
    """
    # Here: a plan of --params does without the host.
    import jax
    from haliax.nn import Stacked

    from ...main.train_lm import trainable_shapes

    if config.use_hf_model_config:
        raise BadInput(f"use_hf_model_config (true) takes the model from a checkpoint; {BY_HAND}.")
    vocab_size = vocab_size or vocab_size_of(config.data.tokenizer)
    kind = type(config.model).__name__
    try:
        model = trainable_shapes(config, vocab_size)
    except Exception as error:  # whatever the host raises of options that do not fit each other
        raise BadInput(f"model ({kind}) cannot be built from its options: {error}; {BY_HAND}.") from error
    nodes = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, Stacked))
    stacks = [node for node in nodes if isinstance(node, Stacked)]
    depths = {stack.Block.size for stack in stacks if jax.tree.leaves(stack)}
    if len(depths) != 1:
        raise BadInput(f"model ({kind}) has no one stack of layers (haliax.nn.Stacked) to count; {BY_HAND}.")
    [num_layers] = depths
    stacked, total = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (stacks, model))
    return ModelSize(num_layers, stacked / num_layers, total - stacked)


def read_config(args: list[str]) -> "TrainDiLoCoLmConfig":
    """Reads the options of a run as `train_lm` does."""
    if "levanter" not in sys.modules:
        print("levanter-diloco: importing Levanter to count the model; --params needs none of it", file=sys.stderr)
    from ...main.train_lm import TrainDiLoCoLmConfig
    from ...options.reading import read

    load_plugins()
    return read(TrainDiLoCoLmConfig, args)


def vocab_size_of(tokenizer: str) -> int:
    """Entries of the tokenizer that `data.tokenizer` names.

    Raises:
        BadInput: If it is neither in a local folder nor one whose size is known.
    """
    if tokenizer in VOCAB_SIZES:
        return VOCAB_SIZES[tokenizer]
    for path in (Path(tokenizer) / "tokenizer.json", Path(tokenizer)):
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
