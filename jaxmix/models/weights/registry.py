"""Every family by architecture."""

from typing import Any

from jaxmix.arrays import fail
from jaxmix.models.config import DecoderConfig
from jaxmix.models.weights.family import Family
from jaxmix.models.weights.llama import Llama
from jaxmix.models.weights.mamba2 import Mamba2
from jaxmix.models.weights.qwen3_next import Qwen3Next

FAMILIES: dict[str, Family] = {family.architecture: family for family in (Llama(), Mamba2(), Qwen3Next())}


def family_of_published(fields: dict[str, Any]) -> Family:
    """The family that a config.json names in `architectures`.

    Raises:
        NotImplementedError: if it is none of `FAMILIES`.
    """
    named = fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        fail("config.json: architectures", "a list of one class", repr(named))
    if named[0] not in FAMILIES:
        raise NotImplementedError(
            f"config.json: architectures: expected one of {', '.join(sorted(FAMILIES))}, got {named[0]!r}"
        )
    return FAMILIES[named[0]]


def family_of_decoder(config: DecoderConfig) -> Family:
    """The first family that can hold a decoder.

    Raises:
        NotImplementedError: if none can; the message says why not for each.
    """
    reasons = []
    for family in FAMILIES.values():
        try:
            family.write_config(config)
        except NotImplementedError as error:
            reasons.append(str(error))
        else:
            return family
    raise NotImplementedError("no published architecture holds this model: " + "; ".join(reasons))
