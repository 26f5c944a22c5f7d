import json

import pytest

from jaxmix.cli import main
from jaxmix.cli.report import verdict
from jaxmix.cli.train import parse
from jaxmix.evaluation import BitsPerByte, Yardsticks
from jaxmix.train import TrainConfig, get_train_preset
from tests.train.runs import small_run, write_corpus


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli")
    (directory / "corpus").mkdir()
    config = small_run(write_corpus(directory / "corpus"), steps=4, eval_every=2)
    config.save(directory / "small.json")
    return directory / "small.json"


@pytest.fixture(scope="module")
def finished(config_file):
    """A run made by the command, with its report."""
    directory = config_file.parent / "run"
    assert main(["train", "--config", str(config_file), "--directory", str(directory)]) == 0
    return directory


def test_a_preset_alone_is_the_preset():
    assert parse(["quickstart"]).run == get_train_preset("quickstart")


def test_flags_win_over_a_preset():
    run = parse(["quickstart", "--steps", "7", "--data.length", "32", "--optimizer.learning-rate", "0.5"]).run
    assert (run.steps, run.data.length, run.optimizer.learning_rate) == (7, 32, 0.5)
    assert run.data.tokenizer == get_train_preset("quickstart").data.tokenizer


def test_a_file_wins_over_a_preset_and_flags_over_both(tmp_path):
    file = tmp_path / "part.json"
    file.write_text(json.dumps({"steps": 11, "data": {"length": 48, "batch_size": 3}}))
    run = parse(["quickstart", "--config", str(file), "--data.batch-size", "5"]).run
    assert (run.steps, run.data.length, run.data.batch_size) == (11, 48, 5)
    assert run.model == get_train_preset("quickstart").model


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]], ids=["two words", "one word"])
def test_a_file_alone_is_the_file(config_file, form):
    assert parse([word.format(config_file) for word in form]).run == TrainConfig.load(config_file)


def test_a_model_can_be_named_or_read_from_a_file(tmp_path):
    decoder = get_train_preset("quickstart").decoder
    (tmp_path / "decoder.json").write_text(json.dumps(decoder.to_dict()))
    assert parse(["quickstart", "--model", "hla3-tiny"]).run.model == "hla3-tiny"
    assert parse(["quickstart", "--model", str(tmp_path / "decoder.json")]).run.model == decoder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a preset (quickstart) or --config FILE, got neither"),
        (["--steps", "5"], "got neither"),
        (["slowstart"], "preset: expected one of ['quickstart'], got 'slowstart'"),
        (["--config", "absent.json"], "config: expected a JSON file, got 'absent.json', which does not exist"),
        (["quickstart", "--data.corpus", "absent"], "or an existing file or directory, got 'absent'"),
        (["quickstart", "--model", "absent"], "preset: expected one of"),
        (["quickstart", "--optimizer.warmup-steps", "1400"], "warmup_steps: expected fewer than steps=1400, got 1400"),
    ],
)
def test_what_cannot_be_is_one_message(capsys, tmp_path, words, message):
    assert main(["train", *words, *(["--directory", str(tmp_path / "run")] if words else [])]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("jaxmix: ")
    assert error.count("\n") == 1


def test_the_report_leaves_its_files(finished):
    evaluation = json.loads((finished / "evaluation.json").read_text())
    assert evaluation["text_bytes"] == sum(
        len((finished.parent / "corpus" / name).read_bytes()) for name in evaluation["by_document"]
    )
    assert evaluation["bits_per_byte"] == pytest.approx(evaluation["bits"] / evaluation["text_bytes"])
    assert json.loads((finished / "yardsticks.json").read_text())["text_bytes"] == evaluation["text_bytes"]
    assert (finished / "loss.png").stat().st_size > 5000


def test_a_finished_run_says_so_and_reports_again(finished, config_file, capsys):
    before = (finished / "metrics.jsonl").read_text()
    assert main(["train", "--config", str(config_file), "--directory", str(finished)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "is finished: all 4 updates were made. Nothing is trained again." in out
    for part in ("this model", "xz -9e", "byte model of order", "A sample", "loss.png", "jaxmix generate"):
        assert part in out
    assert (finished / "metrics.jsonl").read_text() == before


def test_a_changed_configuration_names_the_field(finished, config_file, capsys):
    assert main(["train", "--config", str(config_file), "--directory", str(finished), "--seed", "5"]) == 2
    assert "seed: 0 -> 5" in capsys.readouterr().err


def test_generate_continues_a_prompt(finished, capsys):
    words = ["generate", str(finished), "--prompt", "the cat", "--max-tokens", "12", "--seed", "3"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat")
    assert main(words) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "directory: expected a training run with a config.json, got 'absent'"),
        (["{run}", "--max-tokens", "0"], "max_tokens: expected at least 1, got 0"),
        (["{run}", "--top-p", "2"], r"top_p: expected a number in (0, 1] or None, got 2.0"),
    ],
    ids=["no run", "no tokens", "top_p"],
)
def test_generate_names_what_is_wrong(finished, capsys, words, message):
    assert main(["generate", *(word.format(run=finished) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_info_knows_the_run(finished, capsys):
    assert main(["info", str(finished), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["vocab_size"] == 258
    assert facts["layers"][0]["mixer"] == "linear_attention"


def _result(bits):
    return BitsPerByte(bits=bits * 10, text_bytes=10, text_tokens=5, context="", by_document={})


def test_the_verdict_claims_what_is_so():
    found = Yardsticks(byte_model={0: 4.0, 1: 2.0}, xz_alone=3.0, xz_after_training=1.9, text_bytes=10)
    assert verdict(_result(1.5), found) == (
        "The model beats xz after the training text by 21 %, the byte model by 25 %, xz alone by 50 %."
    )
    assert verdict(_result(1.96), found) == (
        "The model beats the byte model by 2 %, xz alone by 35 % and does not beat xz after the training text."
    )
    assert verdict(_result(5.0), found) == (
        "The model does not beat xz after the training text, the byte model, xz alone."
    )
