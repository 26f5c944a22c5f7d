import dataclasses
import json

import pytest

from jaxmix.cli import main
from jaxmix.models import DecoderConfig
from jaxmix.nn import NAtSLConfig
from jaxmix.train import fit, read_metrics
from jaxmix.train.plots import plot_losses
from tests.train.runs import TEXT, small_run, write_corpus

ROUTED = NAtSLConfig(heads=2, chunk_size=4, capacity=64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a model with routers, and a text."""
    home = tmp_path_factory.mktemp("router")
    (home / "corpus").mkdir()
    config = small_run(write_corpus(home / "corpus"), steps=4, eval_every=2, checkpoint_every=2)
    model = DecoderConfig(vocab_size=8, d_model=8, layers=(ROUTED, ROUTED), hidden=8, tie_embeddings=True)
    fit(dataclasses.replace(config, model=model), home / "run", devices=2)
    (home / "text.txt").write_text(TEXT[:150], "utf-8")
    return home


def test_training_records_what_routers_choose(trained):
    looks = [record for record in read_metrics(trained / "run" / "metrics.jsonl") if "validation_loss" in record]
    assert [look["step"] for look in looks] == [2, 4]
    for look in looks:
        assert list(look["softmax_fraction"]) == ["0", "1"]
        for heads in look["softmax_fraction"].values():
            assert len(heads) == 2
            # Two windows of four chunks.
            assert all(0 <= share <= 1 and share * 8 == pytest.approx(round(share * 8), abs=1e-4) for share in heads)


def test_the_loss_curve_shows_them(trained, tmp_path):
    records = read_metrics(trained / "run" / "metrics.jsonl")
    plain = [{name: value for name, value in record.items() if name != "softmax_fraction"} for record in records]
    sizes = []
    for index, shown in enumerate((plain, records)):
        file = tmp_path / f"{index}.png"
        plot_losses(shown, file, bytes_per_token={"train": 1.0, "validation": 1.0}, yardsticks={}, title="")
        sizes.append(file.stat().st_size)
    assert 5000 < sizes[0] < sizes[1]


def test_pictures_and_numbers(trained, capsys):
    words = ["router", str(trained / "run"), "--text", str(trained / "text.txt"), "--length", "41", "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == 40
    assert [layer["layer"] for layer in facts["layers"]] == [0, 1]
    for layer in facts["layers"]:
        routes = layer["softmax"]
        assert [len(head) for head in routes] == [10, 10]
        assert layer["softmax_fraction_by_head"] == [pytest.approx(sum(head) / 10) for head in routes]
        assert layer["pages"][-1] == sum(map(sum, routes))
    assert facts["cache"]["tokens"] == list(range(0, 41, 4))
    assert facts["cache"]["kept_bytes"][-1] <= facts["cache"]["full_softmax_bytes"][-1]
    assert facts["pictures"] == [str(trained / "run" / "router" / f"router_{name}.png") for name in ("map", "cache")]
    for name in ("map", "cache"):
        assert (trained / "run" / "router" / f"router_{name}.png").stat().st_size > 5000


def test_a_checkpoint_and_another_directory(trained, tmp_path, capsys):
    checkpoint = trained / "run" / "checkpoints" / "2"
    words = ["router", str(checkpoint), "--text", str(trained / "text.txt"), "--out", str(tmp_path / "here")]
    assert main([*words, "--length", "20"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Fraction of the chunks kept by softmax attention" in out
    assert "These pages take" in out
    assert {file.name for file in (tmp_path / "here").iterdir()} == {"router_map.png", "router_cache.png"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "--text", "absent.txt"], "text: expected a file, got 'absent.txt'"),
        (["{run}", "--text", "{text}", "--length", "0"], "length: expected"),
        (
            ["{run}", "--text", "{text}", "--length", "3"],
            "tokens: expected ids [T] of at least one chunk of 4, got [3]",
        ),
        (["{run}/absent", "--text", "{text}"], "directory: expected a training run with a config.json"),
        (["{run}/checkpoints/7", "--text", "{text}"], "step: expected one of the checkpoints [2, 4], got 7"),
    ],
    ids=["text", "no tokens", "few tokens", "no run", "no checkpoint"],
)
def test_what_cannot_be_is_one_message(trained, capsys, words, message):
    places = {"run": trained / "run", "text": trained / "text.txt"}
    assert main(["router", *(word.format(**places) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_routers_is_one_message(trained, tmp_path, capsys):
    fit(small_run(trained / "corpus", steps=3, eval_every=0, checkpoint_every=0), tmp_path / "run", devices=1)
    assert all("softmax_fraction" not in record for record in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert main(["router", str(tmp_path / "run"), "--text", str(trained / "text.txt")]) == 2
    assert "model: expected a decoder with NAtS-L layers" in capsys.readouterr().err
