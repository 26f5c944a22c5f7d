"""`jaxmix generate`: continue a prompt with a trained model, one token at a time, in constant memory."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from jaxmix.data.tokenizers import Tokenizer
from jaxmix.generate import Sampling, stream
from jaxmix.models import Decoder
from jaxmix.train.run import load_run

# Tokens decoded together with a new one; no character is made of more.
_CONTEXT_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Arguments of `jaxmix generate`.

    Attributes:
        directory: of a training run.
        prompt: text to continue; nothing begins a new document.
        max_tokens: the most tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw from the k most likely tokens only.
        top_p: draw from the fewest most likely tokens whose probabilities add up to p only.
        seed: of the draws.
    """

    directory: Annotated[Path, tyro.conf.Positional] = Path("runs/quickstart")
    prompt: str = ""
    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = 0.95
    seed: int = 0


def run(arguments: Sequence[str]) -> int:
    """Prints the prompt and its continuation as it is drawn."""
    chosen = tyro.cli(GenerateArguments, prog="jaxmix generate", args=arguments, description=__doc__)
    sampling = Sampling(temperature=chosen.temperature, top_k=chosen.top_k, top_p=chosen.top_p)
    model, tokenizer, _ = load_run(chosen.directory)
    sys.stdout.write(chosen.prompt)
    pieces = continuation(
        model, tokenizer, chosen.prompt, max_tokens=chosen.max_tokens, sampling=sampling, seed=chosen.seed
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0


def continuation(
    model: Decoder, tokenizer: Tokenizer, prompt: str, *, max_tokens: int, sampling: Sampling, seed: int
) -> Iterator[str]:
    """The text that continues a prompt, in pieces as it becomes certain.

    Yields:
        Text. A token that ends inside a character is held back until the character is whole.

    Raises:
        ValueError: if `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    ids = np.concatenate([[tokenizer.bos_id], *tokenizer.encode_batch([prompt])]).astype(np.int32)
    # Decoding from some tokens back keeps the space or character that the first new token goes on with.
    recent = ids[1:].tolist()
    shown = len(tokenizer.decode(recent))
    for count, (token,) in enumerate(stream(model, [ids], sampling=sampling, seed=seed), start=1):
        if token == tokenizer.eos_id:
            break
        recent.append(int(token))
        text = tokenizer.decode(recent)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            recent = recent[-_CONTEXT_TOKENS:]
            shown = len(tokenizer.decode(recent))
        if count == max_tokens:
            break
    yield tokenizer.decode(recent)[shown:]
