import math

import pytest
from PIL import Image

from jaxmix.train.plots import plot_losses

SIZES = {"train": 4.0, "validation": 3.5}


def test_a_picture_is_drawn(tmp_path):
    records = [{"step": step, "loss": 8.0 / math.sqrt(step)} for step in range(1, 101)]
    records += [{"step": step, "validation_loss": 9.0 / math.sqrt(step)} for step in range(20, 101, 20)]
    file = tmp_path / "loss.png"
    plot_losses(records, file, bytes_per_token=SIZES, yardsticks={"xz": 1.9, "byte model": 2.0}, title="a run")
    with Image.open(file) as image:
        assert image.size == (1040, 624)
        assert len(image.convert("RGB").getcolors(100_000)) > 50


@pytest.mark.parametrize("records", [[{"step": 1, "loss": 5.0}], [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 5.0}]])
def test_the_shortest_curves_are_drawn_too(tmp_path, records):
    plot_losses(records, tmp_path / "loss.png", bytes_per_token=SIZES, yardsticks={}, title="")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_no_curve_is_refused(tmp_path):
    with pytest.raises(ValueError, match="records: expected at least one with a loss"):
        plot_losses([{"step": 1}], tmp_path / "loss.png", bytes_per_token=SIZES, yardsticks={}, title="")
