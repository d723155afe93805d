"""The quickstart's corpus."""

import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from make_corpus import (
    END_OF_TEXT,
    VOCAB_SIZE,
    PreparedText,
    drop_repeats,
    load_topics,
    main,
    prepare,
    split,
    train_tokenizer,
    unigram_perplexity,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> PreparedText:
    return prepare(tmp_path_factory.mktemp("text"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def documents(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_unigram_perplexity_matches_hand_computation():
    # Counts 1 of token 0, 2 of token 1, and one added to each of three entries: probabilities 2/6, 3/6, 1/6.
    perplexity = unigram_perplexity(Counter([0, 1, 1]), Counter([0, 2]), vocab_size=3)
    assert perplexity == pytest.approx(math.sqrt(3 * 6))


def test_drop_repeats_keeps_the_larger_topic():
    section, other = "word " * 50, "other " * 50
    topics = {"alone": section, "chapter": f"{other}\n\n  {section}", "short": "word"}
    assert drop_repeats(topics).keys() == {"chapter", "short"}


def test_split_is_disjoint_complete_and_keeps_sides():
    topics = drop_repeats(load_topics())
    train, validation = split(topics)
    assert sorted(train + validation) == sorted(topics.values())
    assert 0.05 < len("".join(validation)) / len("".join(topics.values())) < 0.12

    fewer = dict(list(topics.items())[::2])
    assert set(split(fewer)[1]) == set(validation) & set(fewer.values())


def test_validation_shares_no_long_paragraph_with_train(text: PreparedText):
    def paragraphs(path: Path) -> set[str]:
        return {p for document in documents(path) for p in document.split("\n\n") if len(p) >= 250}

    assert paragraphs(text.train).isdisjoint(paragraphs(text.validation))


def test_prepare_is_deterministic_and_leaves_only_its_files(text: PreparedText, tmp_path: Path):
    again = prepare(tmp_path / "new" / "folder")
    assert contents(again.train.parent) == contents(text.train.parent)
    assert contents(again.train.parent).keys() == {
        "train.jsonl",
        "validation.jsonl",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    }


def test_prepare_writes_nothing_the_second_time(text: PreparedText):
    folder = text.train.parent
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    assert prepare(folder) == text
    assert {path.stat().st_mtime for path in folder.rglob("*")} == {1}


def test_prepare_repairs_a_damaged_file(text: PreparedText, tmp_path: Path):
    prepare(tmp_path)
    (tmp_path / "train.jsonl").write_text("half a li")
    prepare(tmp_path)
    assert contents(tmp_path) == contents(text.train.parent)


def test_sizes_match_the_files(text: PreparedText):
    tokenizer = Tokenizer.from_file(str(text.tokenizer / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == text.vocab_size == VOCAB_SIZE
    for path, size in ((text.train, text.train_size), (text.validation, text.validation_size)):
        texts = documents(path)
        assert size.documents == len(texts)
        assert size.text_bytes == sum(len(document.encode()) for document in texts)
        assert size.tokens == sum(len(tokenizer.encode(document).ids) + 1 for document in texts)
    assert 1 < text.unigram_perplexity < VOCAB_SIZE


TOKENIZER = train_tokenizer(["a few words, a few more words"])


@settings(deadline=None)
@given(st.text())
def test_tokenizer_round_trips_any_text(string: str):
    assert TOKENIZER.decode(TOKENIZER.encode(string).ids, skip_special_tokens=False) == string


def test_tokenizer_marks_the_end_of_text(text: PreparedText):
    tokenizer = Tokenizer.from_file(str(text.tokenizer / "tokenizer.json"))
    config = json.loads((text.tokenizer / "tokenizer_config.json").read_text())
    assert config["eos_token"] == END_OF_TEXT
    assert tokenizer.encode(END_OF_TEXT).ids == [tokenizer.token_to_id(END_OF_TEXT)]


def test_main_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'train.jsonl'}: " in printed
    assert "unigram perplexity" in printed


def test_missing_topics_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ModuleNotFoundError, match="python3-full"):
        load_topics()
