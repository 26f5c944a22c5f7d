"""Makes every file of tests/oracles/vectors and tests/oracles/checkpoints: `make oracles`.

Runs in an environment of its own (requirements.txt); README.md says what the files hold.
"""

import os
import shutil
import sys

ACCELERATED = ("fla", "mamba_ssm", "causal_conv1d", "kernels")


def report(name: str, difference: float) -> None:
    """Prints how far a float32 run is from what is stored."""
    print(f"{name:<40} float32 run differs by {difference:.1e} (relative RMS)", flush=True)


def main() -> None:
    """Writes all files anew."""
    # Before the imports: transformers must take its torch paths, and nothing from a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.modules.update(dict.fromkeys(ACCELERATED))
    import torch
    from transformers.utils import logging

    from tests.oracles import networks, operators
    from tests.oracles.precision import SEED
    from tests.oracles.record import FOLDER, write_npz, write_record

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for part in ("vectors", "checkpoints"):
        shutil.rmtree(FOLDER / part, ignore_errors=True)
    inputs = operators.draw_inputs()
    write_npz(FOLDER / "vectors" / "inputs.npz", inputs)
    outputs = {}
    for name in operators.REFERENCES:
        outputs[name], difference = operators.operator_vectors(name, inputs)
        write_npz(FOLDER / "vectors" / f"{name}.npz", outputs[name])
        report(name, difference)
    operators.require_same_rule(outputs["fla_gated_delta_rule"], outputs["transformers_gated_delta_rule"])
    for name in networks.LAYERS:
        arrays, difference = networks.layer_vectors(name)
        write_npz(FOLDER / "vectors" / f"{name}.npz", arrays)
        report(name, difference)
    for name in networks.MODELS:
        folder = FOLDER / "checkpoints" / name
        arrays, difference = networks.write_checkpoint(name, folder)
        write_npz(folder / "logits.npz", arrays)
        report(name, difference)
        print(f"{'':<40} standard deviation of the logits {arrays['logits'].std():.2f}", flush=True)
    write_record(SEED)


if __name__ == "__main__":
    main()
