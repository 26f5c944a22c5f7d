"""Times transformers' chunked gated delta rule; run by run.py in the environment that `make oracles` makes.

Prints one JSON object: milliseconds of every repeat, forward and forward+backward, and versions.
"""

import argparse
import importlib
import json
import platform
import sys
import time

# transformers would call compiled kernels of these if they could be imported.
KERNELS = ("fla", "mamba_ssm", "causal_conv1d", "kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", type=int, nargs=4)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    chosen = parser.parse_args()
    for package in KERNELS:
        sys.modules.update({package: None})
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    rule = modeling.torch_chunk_gated_delta_rule
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    batch, length, heads, size = chosen.shape
    q, k, v = (torch.randn(batch, length, heads, size) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    g, beta = -0.05 * torch.rand(batch, length, heads), torch.rand(batch, length, heads)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]

    def forward() -> None:
        with torch.no_grad():
            rule(q, k, v, g=g, beta=beta)

    def both() -> None:
        torch.autograd.grad(rule(*inputs[:3], g=inputs[3], beta=inputs[4])[0].sum(), inputs)

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    for name, run in (("forward", forward), ("forward+backward", both)):
        for _ in range(2):
            run()
        times = []
        for _ in range(chosen.repeats):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        found[name] = times
    print(json.dumps(found))


if __name__ == "__main__":
    main()
