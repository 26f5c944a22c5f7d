import json

import numpy as np
import pytest

from jaxmix.data import ByteTokenizer, Tokenizer, build_tokenizer, load_tokenizer
from jaxmix.data.tokenizers import train_bpe

TEXTS = ["the cat sat on the mat\n\nthe end  ", "naïve café — 日本語 🙂\ttabs", "  leading and trailing  ", "x"]


@pytest.fixture(scope="module", params=["bytes", "bpe-300"])
def tokenizer(request):
    return build_tokenizer(request.param, TEXTS * 3)


def test_text_survives_the_round_trip(tokenizer):
    unseen = [*TEXTS, "words that were never seen: Zürich, \x00\x7f, \r\n"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(unseen)] == unseen


def test_it_serves_the_protocol(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    assert len({tokenizer.bos_id, tokenizer.eos_id}) == 2
    for ids in tokenizer.encode_batch(TEXTS):
        assert ids.dtype == np.int32
        assert 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())


def test_special_ids_leave_no_text(tokenizer):
    (ids,) = tokenizer.encode_batch(["cat"])
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == "cat"


def test_it_is_read_back_as_it_was_saved(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (
        tokenizer.vocab_size,
        tokenizer.bos_id,
        tokenizer.eos_id,
    )
    for ours, theirs in zip(tokenizer.encode_batch(TEXTS), loaded.encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_bytes_are_their_own_ids():
    (ids,) = ByteTokenizer().encode_batch(["aé"])
    assert ids.tolist() == [0x61, 0xC3, 0xA9]


def test_an_incomplete_character_becomes_a_replacement():
    assert ByteTokenizer().decode([0x61, 0xC3]) == "a\ufffd"


def test_bpe_shortens_what_it_was_trained_on():
    tokenizer = build_tokenizer("bpe-300", ["the cat sat on the mat. "] * 50)
    (ids,) = tokenizer.encode_batch(["the cat sat on the mat. "])
    assert len(ids) <= 24 / 3


def test_text_that_spells_a_special_token_stays_text():
    tokenizer = build_tokenizer("bpe-300", TEXTS)
    (ids,) = tokenizer.encode_batch(["a<|end|>b"])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a<|end|>b"


def _published(directory, tokens):
    """A tokenizer.json as other projects publish them: other names of special tokens, nothing of ours beside it."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate([*tokens, "[UNK]", "hello", "world"])}
    rust = RustTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


@pytest.mark.parametrize("by", ["file", "directory"])
def test_a_local_tokenizer_json_is_accepted(tmp_path, by):
    file = _published(tmp_path, ["<s>", "</s>"])
    tokenizer = build_tokenizer(str(file if by == "file" else tmp_path), [])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 5)
    assert tokenizer.encode_batch(["hello world"])[0].tolist() == [3, 4]


def test_the_special_tokens_can_be_declared_or_given(tmp_path):
    file = _published(tmp_path, ["<s>", "</s>", "<one>", "<two>"])
    declared = {"bos_token": {"content": "<one>", "lstrip": False}, "eos_token": "<two>", "model_max_length": 1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared), "utf-8")
    assert (load_tokenizer(file).bos_id, load_tokenizer(file).eos_id) == (2, 3)
    assert load_tokenizer(file, eos="</s>").eos_id == 1


def test_missing_special_tokens_are_named(tmp_path):
    file = _published(tmp_path, ["<s>"])
    with pytest.raises(ValueError, match="eos: the vocabulary has none of the usual names"):
        load_tokenizer(file)
    with pytest.raises(ValueError, match="eos: expected a token of the vocabulary, got '<absent>'"):
        load_tokenizer(file, eos="<absent>")


def test_a_malformed_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match=r"expected a Hugging Face tokenizer.json in .*tokenizer.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("bpe-many", r"expected 'bpe-N' with a number N, got 'bpe-many'"),
        ("bpe-100", r"vocab_size: expected at least 258 .* got 100"),
        ("absent.json", r"expected 'bytes', 'bpe-N' or the path of a tokenizer.json, got 'absent.json'"),
    ],
)
def test_a_wrong_specification_is_refused(specification, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(specification, TEXTS)


def test_training_sees_only_what_it_is_given():
    ours, theirs = (train_bpe(texts, vocab_size=270) for texts in (["aaaa bbbb"] * 9, ["cccc dddd"] * 9))
    (with_merges,), (without,) = (t.encode_batch(["aaaa"]) for t in (ours, theirs))
    assert len(with_merges) < len(without) == 4
