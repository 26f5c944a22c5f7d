import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.models import Decoder
from jaxmix.train import Watcher, fit, load_run, read_metrics
from jaxmix.train.loop import sharing_devices
from jaxmix.train.run import Metrics, RunDirectory
from tests.train.runs import small_run, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A run that nothing interrupted."""
    directory = tmp_path_factory.mktemp("whole")
    result = fit(small_run(corpus), directory, devices=1)
    assert (result.status, result.step) == ("finished", 9)
    return directory


def _losses(directory):
    return [
        (record["step"], record.get("loss"), record.get("grad_norm"), record.get("validation_loss"))
        for record in read_metrics(directory / "metrics.jsonl")
    ]


class _Interrupting(Watcher):
    """Sends this process a signal after an update."""

    def __init__(self, step, number=signal.SIGINT):
        self._step, self._number = step, number

    def stepped(self, step, loss, tokens):
        if step == self._step:
            os.kill(os.getpid(), self._number)


def test_every_update_and_every_look_is_recorded(whole):
    losses = _losses(whole)
    assert [step for step, loss, _, _ in losses if loss is not None] == list(range(1, 10))
    assert [step for step, _, _, validation in losses if validation is not None] == [4, 8, 9]
    first = next(record for record in read_metrics(whole / "metrics.jsonl"))
    assert first["loss"] == pytest.approx(np.log(258), rel=0.02)
    assert first["learning_rate"] == 0.0


def test_training_lowers_the_loss(whole):
    losses = [loss for _, loss, _, _ in _losses(whole) if loss is not None]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_an_interrupted_run_goes_on_to_the_bit(corpus, whole, tmp_path, number):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    config = small_run(corpus)
    stopped = fit(config, tmp_path, devices=1, watcher=_Interrupting(4, number))
    assert stopped.status == "interrupted"
    assert 4 <= stopped.step < 9
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert fit(config, tmp_path, devices=1).status == "finished"
    assert _losses(tmp_path) == _losses(whole)
    for ours, theirs in zip(*(jax.tree.leaves(_params(d)) for d in (tmp_path, whole)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _params(directory):
    from jaxmix.train.step import split_model

    return split_model(load_run(directory)[0])[1]


class _Crash(Exception):
    pass


class _Crashing(Watcher):
    def stepped(self, step, loss, tokens):
        if step == 8:
            raise _Crash


def test_a_crash_goes_back_to_the_last_checkpoint_and_forgets_later_lines(corpus, whole, tmp_path):
    with pytest.raises(_Crash):
        fit(small_run(corpus), tmp_path, devices=1, watcher=_Crashing())
    assert max(step for step, *_ in _losses(tmp_path)) == 8
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 9, "lo')  # the line that was being written
    assert fit(small_run(corpus), tmp_path, devices=1).status == "finished"
    assert _losses(tmp_path) == _losses(whole)


def test_a_finished_run_is_not_trained_again(corpus, whole):
    before = (whole / "metrics.jsonl").read_text()
    result = fit(small_run(corpus), whole, devices=1)
    assert (result.status, result.step) == ("already finished", 9)
    assert (whole / "metrics.jsonl").read_text() == before


def test_another_configuration_is_refused_and_the_fields_are_named(corpus, whole):
    before = {file: file.read_bytes() for file in whole.glob("*.json*")}
    changed = small_run(corpus, steps=10, data={"tokenizer": "bpe-300"}, optimizer={"beta2": 0.9})
    with pytest.raises(ValueError, match="another configuration") as caught:
        fit(changed, whole, devices=1)
    lines = str(caught.value).splitlines()[1:-1]
    assert [line.strip() for line in lines] == [
        "data.tokenizer: 'bytes' -> 'bpe-300'",
        "optimizer.beta2: 0.95 -> 0.9",
        "steps: 9 -> 10",
    ]
    assert {file: file.read_bytes() for file in whole.glob("*.json*")} == before


def test_the_resolved_configuration_lies_beside_the_checkpoint(whole):
    config = json.loads((whole / "config.json").read_text())
    assert config["model"]["vocab_size"] == 258
    assert config["model"]["layers"][0]["mixer"] == "linear_attention"
    assert config["data"]["batch_size"] == 2


def test_a_run_is_read_back(whole):
    model, tokenizer, config = load_run(whole)
    assert isinstance(model, Decoder)
    assert (tokenizer.vocab_size, config.steps) == (258, 9)
    logits, _ = model(jnp.array([[256, 104, 105]]))
    assert logits.shape == (1, 3, 258)


def test_only_the_newest_documents_train_where_that_is_asked_for(corpus, tmp_path):
    fit(small_run(corpus, steps=3, data={"newest": 2}), tmp_path, devices=1)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["splits"]["train"]["documents"] == 2


def test_devices_share_a_batch(corpus, whole, tmp_path):
    fit(small_run(corpus), tmp_path, devices=2)
    ours, theirs = (np.array([loss for _, loss, _, _ in _losses(d) if loss is not None]) for d in (tmp_path, whole))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "available", "shared"), [(4, 1, 1), (4, 2, 2), (4, 3, 2), (6, 8, 6), (7, 4, 1), (8, 64, 8)]
)
def test_a_batch_is_shared_by_as_many_devices_as_divide_it(batch, available, shared):
    assert sharing_devices(batch, available) == shared


def test_a_loss_that_is_not_finite_ends_the_run(corpus, tmp_path):
    config = small_run(corpus, steps=20, optimizer={"learning_rate": 1e30, "warmup_steps": 1})
    with pytest.raises(FloatingPointError, match=r"update \d+: loss .* the last checkpoint is that of step"):
        fit(config, tmp_path, devices=1)


def test_a_schedule_that_cannot_be_is_refused_before_anything_is_written(corpus, tmp_path):
    with pytest.raises(ValueError, match="warmup_steps"):
        fit(small_run(corpus, optimizer={"warmup_steps": 9}), tmp_path / "run", devices=1)
    assert not (tmp_path / "run").exists()


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"directory: expected a training run with a config.json, got"):
        load_run(tmp_path)
    small_run(tmp_path).save(tmp_path / "config.json")
    with pytest.raises(ValueError, match="directory: expected a run with a checkpoint, found none"):
        load_run(tmp_path)


def test_metrics_after_the_checkpoint_are_dropped(tmp_path):
    file = RunDirectory(tmp_path).metrics
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    metrics = Metrics(file, resume_after=2)
    metrics.write({"step": 3, "loss": 1.0})
    metrics.close()
    assert read_metrics(file) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": 1.0}]
