"""Published checkpoints into the decoder and back: config.json and safetensors in the layout of Hugging Face.

Needs the extra `weights`. Every family of models is one file with a reading of config.json and a table of tensor names;
`FAMILIES` has them by architecture.
"""

from jaxmix.models.weights.convert import load_decoder, save_decoder
from jaxmix.models.weights.family import Family
from jaxmix.models.weights.names import Entry, same, transposed
from jaxmix.models.weights.registry import FAMILIES

__all__ = ["FAMILIES", "Entry", "Family", "load_decoder", "same", "save_decoder", "transposed"]
