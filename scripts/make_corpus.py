"""A small English corpus and its tokenizer, made offline from what Python itself ships.

The text is `pydoc_data.topics`: the language reference that `help()` shows, about 0.4 MB once repeated
topics are gone. It differs a little between Python versions. Needs no device, jax or levanter.
"""

import argparse
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 1024
"""256 bytes, END_OF_TEXT and merges: a third of the tokens of plain bytes, and still a small embedding."""
VALIDATION_ONE_IN = 10
"""One topic in so many is validation, by a hash of its name; about 9 % of the bytes."""


@dataclass(frozen=True)
class SplitSize:
    """How much text one split holds."""

    documents: int
    text_bytes: int
    """UTF-8, without the JSON around it."""
    tokens: int
    """With one END_OF_TEXT per document, as the host appends."""


@dataclass(frozen=True)
class PreparedText:
    """Where the corpus lies, how large it is and what a trained model has to beat."""

    train: Path
    validation: Path
    tokenizer: Path
    train_size: SplitSize
    validation_size: SplitSize
    vocab_size: int
    unigram_perplexity: float
    """Per validation token, under the training tokens' frequencies with one added to each count."""


def prepare(output_dir: str | Path) -> PreparedText:
    """Writes `train.jsonl`, `validation.jsonl` and `tokenizer/` into `output_dir`.

    A file is replaced atomically, and only if its content changes: a second call writes nothing, so the
    host's cache of the data stays good.

    Raises:
        ModuleNotFoundError: If this Python came without `pydoc_data`.
    """
    out = Path(output_dir)
    train, validation = split(drop_repeats(load_topics()))
    tokenizer = train_tokenizer(train)
    for name, documents in (("train.jsonl", train), ("validation.jsonl", validation)):
        _write(out / name, "".join(json.dumps({"text": text}) + "\n" for text in documents))
    # Last, because the tokenizer depends on the training split: a folder with a tokenizer is complete.
    _write(out / "tokenizer" / "tokenizer_config.json", json.dumps(_TOKENIZER_CONFIG, indent=2) + "\n")
    _write(out / "tokenizer" / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")

    train_counts, validation_counts = count_tokens(tokenizer, train), count_tokens(tokenizer, validation)
    return PreparedText(
        train=out / "train.jsonl",
        validation=out / "validation.jsonl",
        tokenizer=out / "tokenizer",
        train_size=_size(train, train_counts),
        validation_size=_size(validation, validation_counts),
        vocab_size=tokenizer.get_vocab_size(),
        unigram_perplexity=unigram_perplexity(train_counts, validation_counts, tokenizer.get_vocab_size()),
    )


def load_topics() -> dict[str, str]:
    """Topic name to text, as Python's own `help()` has them."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this Python has no pydoc_data.topics, the text to prepare; install its whole standard library "
            "(on Debian and Ubuntu: python3-full), or use another Python"
        ) from error
    return topics


def drop_repeats(topics: dict[str, str]) -> dict[str, str]:
    """Topics without those that repeat a long paragraph (200 characters or more) of a larger one.

    `help()` shows some sections both alone and inside a chapter: validation text would be trained on.
    """
    kept: dict[str, str] = {}
    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = {" ".join(paragraph.split()) for paragraph in topics[name].split("\n\n")}
        long = {paragraph for paragraph in paragraphs if len(paragraph) >= 200}
        if long.isdisjoint(seen):
            kept[name] = topics[name]
            seen |= long
    return kept


def split(topics: dict[str, str]) -> tuple[list[str], list[str]]:
    """Training and validation documents, in the order of their topics' names.

    A topic is validation if VALIDATION_ONE_IN divides the SHA-256 of its name: a topic keeps its side
    when others come and go.
    """
    train: list[str] = []
    validation: list[str] = []
    for name in sorted(topics):
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest())
        (validation if digest % VALIDATION_ONE_IN == 0 else train).append(topics[name])
    return train, validation


def train_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of at most VOCAB_SIZE entries: every text has an encoding, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def count_tokens(tokenizer: Tokenizer, documents: Sequence[str]) -> Counter[int]:
    """How often each token occurs, with one END_OF_TEXT per document."""
    counts = Counter({tokenizer.token_to_id(END_OF_TEXT): len(documents)})
    for encoding in tokenizer.encode_batch(list(documents)):
        counts.update(encoding.ids)
    return counts


def unigram_perplexity(train: Counter[int], validation: Counter[int], vocab_size: int) -> float:
    """exp of the mean negative log-likelihood of `validation` under the add-one frequencies of `train`."""
    total = train.total() + vocab_size
    nll = -sum(count * math.log((train[token] + 1) / total) for token, count in validation.items())
    return math.exp(nll / validation.total())


_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_TEXT,
    "model_max_length": 1_000_000,
    "clean_up_tokenization_spaces": False,
}


def _size(documents: Sequence[str], counts: Counter[int]) -> SplitSize:
    return SplitSize(len(documents), sum(len(text.encode()) for text in documents), counts.total())


def _write(path: Path, content: str) -> None:
    """Replaces `path` with `content` in one step, or leaves it alone if it holds that already."""
    data = content.encode()
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: prepares the corpus and prints what it is."""
    parser = argparse.ArgumentParser(prog="make_corpus.py", description=prepare.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    text = prepare(parser.parse_args(argv).output)
    for path, size in ((text.train, text.train_size), (text.validation, text.validation_size)):
        print(f"{path}: {size.documents} documents, {size.text_bytes} bytes, {size.tokens} tokens")
    print(f"{text.tokenizer}: {text.vocab_size} entries")
    loss = math.log(text.unigram_perplexity)
    print(f"unigram perplexity on the validation split: {text.unigram_perplexity:.1f} (loss {loss:.3f})")


if __name__ == "__main__":
    main()
