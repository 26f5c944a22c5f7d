"""`jaxmix import` and `jaxmix export`, and what else reads a run that was imported."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxmix.cli import main
from jaxmix.data.tokenizers import ByteTokenizer, train_bpe
from jaxmix.models import Decoder, DecoderConfig
from jaxmix.models.weights import load_decoder, save_decoder
from jaxmix.nn import SoftmaxAttentionConfig
from jaxmix.train import load_run
from tests.tolerances import assert_same_bits
from tests.train.runs import small_run, write_corpus

VOCAB = 300
TEXTS = ["the cat sat on the mat, and the rat ran. " * 20]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A published Llama with a tokenizer of fewer ids than the model has."""
    directory = tmp_path_factory.mktemp("source")
    layer = SoftmaxAttentionConfig(heads=2, kv_heads=1, capacity=128)
    config = DecoderConfig(vocab_size=VOCAB, d_model=8, layers=(layer, layer), hidden=12, tie_embeddings=True)
    save_decoder(Decoder(config, rngs=nnx.Rngs(0)), directory, extra={"bos_token_id": 1, "eos_token_id": [0, 9]})
    tokenizer = train_bpe(TEXTS, vocab_size=270)
    assert tokenizer.vocab_size < VOCAB
    tokenizer.save(directory)
    (directory / "tokenizer_config.json").unlink()
    return directory


@pytest.fixture(scope="module")
def imported(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("imported") / "run"
    assert main(["import", str(source), str(directory)]) == 0
    return directory


def tensors(directory):
    return load_file(directory / "model.safetensors")


def test_an_imported_model_is_a_run(source, imported):
    model, tokenizer, config = load_run(imported)
    assert model.config == config.model == load_decoder(source).config
    assert_same_bits(*(jax.device_get(nnx.to_pure_dict(nnx.state(m))) for m in (model, load_decoder(source))))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 0)  # of config.json, since no file of the tokenizer says
    assert (imported / "tokenizer/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((imported / "imported.json").read_text()) == {
        "source": str(source.resolve()),
        "architecture": "LlamaForCausalLM",
    }


def test_the_command_says_what_there_is_now(source, tmp_path, capsys):
    assert main(["import", str(source), str(tmp_path / "run"), "--param-dtype", "bfloat16", "--capacity", "16"]) == 0
    out = capsys.readouterr().out
    assert "parameters in bfloat16, 2 layers" in out
    assert f"jaxmix generate {tmp_path / 'run'} --prompt TEXT" in out
    assert load_run(tmp_path / "run")[0].config.layers[0].capacity == 16


def test_an_imported_model_writes(imported, capsys):
    words = ["generate", str(imported), "--prompt", "the cat", "--max-tokens", "4", "--temperature", "0"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("the cat")


def test_import_and_export_give_the_same_files(source, imported, tmp_path, capsys):
    assert main(["export", str(imported), str(tmp_path / "out")]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert_same_bits(tensors(tmp_path / "out"), tensors(source))
    before, after = (json.loads((at / "config.json").read_text()) for at in (source, tmp_path / "out"))
    assert after == before | {"eos_token_id": 0}
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|end|>",
        "eos_token": "<|begin|>",
    }


def test_what_a_tokenizer_says_of_itself_is_kept(source, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(source, published)
    said = {"bos_token": None, "eos_token": {"content": "<|end|>"}, "tokenizer_class": "Special", "chat_template": "x"}
    (published / "tokenizer_config.json").write_text(json.dumps(said))
    (published / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["import", str(published), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text()) == said | {"bos_token": "<|end|>"}
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"


def test_training_goes_on_from_imported_parameters(source, tmp_path, capsys):
    run, corpus = tmp_path / "run", tmp_path / "corpus"
    corpus.mkdir()
    assert main(["import", str(source), str(run)]) == 0
    words = ["train", "--config", str(run / "config.json"), "--directory", str(run), "--no-report", "--seed", "5"]
    words += ["--data.corpus", str(write_corpus(corpus)), "--data.length", "16", "--data.batch-size", "2"]
    words += ["--steps", "2", "--optimizer.warmup-steps", "1", "--optimizer.learning-rate", "1e-6"]
    assert main(words) == 0
    model, _, config = load_run(run)
    assert (config.steps, model.config.vocab_size) == (2, VOCAB)
    assert main(["export", str(run), str(tmp_path / "trained")]) == 0
    before, after = tensors(source), tensors(tmp_path / "trained")
    moved = [np.max(np.abs(after[name] - before[name])) for name in before]
    assert 0 < max(moved) < 1e-4
    assert main(["export", str(run / "checkpoints" / "2"), str(tmp_path / "same")]) == 0
    assert_same_bits(tensors(tmp_path / "same"), after)
    assert main(["export", str(run / "checkpoints" / "7"), str(tmp_path / "none")]) == 2
    assert "step: expected one of the checkpoints [0, 2], got 7" in capsys.readouterr().err
    assert main([*words, "--seed", "6"]) == 2
    assert "seed: 5 -> 6" in capsys.readouterr().err


def test_another_decoder_is_not_trained_from_imported_parameters(imported, tmp_path, capsys):
    small_run(tmp_path).save(tmp_path / "other.json")
    assert main(["train", "--config", str(tmp_path / "other.json"), "--directory", str(imported)]) == 2
    error = capsys.readouterr().err
    assert "holds a run with another configuration" in error
    assert "model.hidden: 12 -> 8" in error
    assert "data." not in error


def test_a_run_of_bytes_is_exported(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    layer = SoftmaxAttentionConfig(heads=2, capacity=64)
    config = DecoderConfig(vocab_size=258, d_model=8, layers=(layer,), hidden=8)
    save_decoder(Decoder(config, rngs=nnx.Rngs(0)), tmp_path / "source")
    (tmp_path / "bytes").mkdir()
    ByteTokenizer().save(tmp_path / "bytes")
    assert main(["import", str(tmp_path / "source"), str(run), "--tokenizer", str(tmp_path / "bytes")]) == 0
    assert main(["export", str(run), str(out), "--dtype", "bfloat16"]) == 0
    fields = json.loads((out / "config.json").read_text())
    assert (fields["bos_token_id"], fields["eos_token_id"], fields["dtype"]) == (256, 257, "bfloat16")
    assert {x.dtype.name for x in tensors(out).values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "{source}", "{run}"], "run_directory: expected a path where nothing is yet, or an empty directory"),
        (["import", "{run}", "{new}"], "config.json: architectures: expected a list of one class, got None"),
        (["import", "{source}", "{new}", "--tokenizer", "{new}"], "tokenizer: expected "),
        (["import", "{source}", "{new}", "--dtype", "int8"], "dtype: expected one of bfloat16, float32, float64"),
        (["export", "{new}", "{other}"], "directory: expected a training run with a config.json"),
        (["export", "{run}", "{source}"], "target: expected a path where nothing is yet, or an empty directory"),
        (["export", "{run}", "{new}", "--dtype", "int8"], "dtype: expected one of bfloat16, float32, float64"),
    ],
)
def test_what_cannot_be_is_one_message_and_writes_nothing(source, imported, tmp_path, capsys, words, message):
    places = {"source": source, "run": imported, "new": tmp_path / "new", "other": tmp_path / "other"}
    assert main([word.format(**places) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jaxmix: {message}")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_architecture_that_is_not_known_is_one_message(source, tmp_path, capsys):
    published = tmp_path / "published"
    shutil.copytree(source, published)
    fields = json.loads((published / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (published / "config.json").write_text(json.dumps(fields))
    assert main(["import", str(published), str(tmp_path / "run")]) == 2
    assert "architectures: expected one of LlamaForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_too_many_ids_is_refused(source, tmp_path, capsys):
    published = tmp_path / "published"
    shutil.copytree(source, published)
    fields = json.loads((published / "config.json").read_text()) | {"vocab_size": 260}
    (published / "config.json").write_text(json.dumps(fields))
    embedding = {"model.embed_tokens.weight": tensors(source)["model.embed_tokens.weight"][:260]}
    save_file(tensors(source) | embedding, published / "model.safetensors")
    assert main(["import", str(published), str(tmp_path / "run")]) == 2
    assert "tokenizer: expected at most the 260 ids of the model, got " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
