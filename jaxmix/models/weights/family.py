"""What a family of published models says of itself."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxmix.arrays import fail
from jaxmix.models.config import DecoderConfig
from jaxmix.models.weights.names import Entry
from jaxmix.nn import MixerConfig

NEUTRAL = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "is_decoder",
        "model_type",
        "pad_token_id",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a config.json that change nothing in the numbers of a model."""


class Family:
    """Models that share a layout of config.json and of tensor names.

    A subclass reads and writes the configuration and lists its table; `jaxmix.models.weights` does the rest. What the
    decoder has not, `read_config` refuses; what the family has not, `write_config`.
    """

    architecture: ClassVar[str]
    """The class in `architectures` of config.json."""

    def read_config(self, published: "PublishedConfig") -> DecoderConfig:
        """Our configuration of a published one, in float32.

        Raises:
            ValueError: for a missing or bad value.
            NotImplementedError: for what the decoder has not.
        """
        raise NotImplementedError

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The published form of our configuration, without dtype and token ids.

        Raises:
            NotImplementedError: for what the family has not; the message names it.
        """
        raise NotImplementedError

    def entries(self, config: DecoderConfig) -> Sequence[Entry]:
        """The table of names, for all layers."""
        raise NotImplementedError

    def copies(self, config: DecoderConfig) -> Mapping[str, str]:
        """Tensors that a checkpoint may hold beside those of the table, each equal to the one it is given with."""
        return {}

    def is_derived(self, name: str) -> bool:
        """Whether a tensor outside the table follows from the configuration and may be left aside."""
        return False


class PublishedConfig:
    """A config.json, read key by key; what is never asked for is refused.

    Args:
        fields: the JSON object.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        self._read: set[str] = set(NEUTRAL)

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """The value of a key.

        Args:
            key: its name.
            kind: bool, int, float (which takes an int too), str, list or dict.
            default: what stands for a key that is missing or null; without it, such a key is refused.

        Raises:
            ValueError: for a missing key or a value of another kind.
        """
        self._read.add(key)
        value = self._fields.get(key)
        if value is None:
            if default is ...:
                fail(f"config.json: {key}", kind.__name__, "null" if key in self._fields else "no such key")
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            fail(f"config.json: {key}", kind.__name__, repr(value))
        return value

    def require(self, key: str, value: Any, what: str, default: Any = None) -> None:
        """Refuses every value of `key` but one.

        Args:
            key: its name.
            value: the one that the decoder serves; a missing key and null mean `default`.
            what: what another value would need, for the message.
            default: see `value`.

        Raises:
            NotImplementedError: for another value.
        """
        self._read.add(key)
        came = self._fields.get(key)
        if (default if came is None else came) != value:
            raise NotImplementedError(f"config.json: {key} = {came!r} needs {what}, which the decoder has not")

    def ignore(self, *keys: str) -> None:
        """Says of keys that they change nothing."""
        self._read |= set(keys)

    def check_all_read(self) -> None:
        """Refuses keys that nobody asked for, since they may change the model.

        Raises:
            NotImplementedError: names them.
        """
        if unknown := sorted(key for key, value in self._fields.items() if key not in self._read and value is not None):
            known = ", ".join(f"{key} = {self._fields[key]!r}" for key in unknown)
            raise NotImplementedError(f"config.json: the import does not know what {known} changes in the model")


def check_equal_layers[Config: MixerConfig](architecture: str, config: DecoderConfig, kind: type[Config]) -> Config:
    """The configuration of all layers, which must be one and of one kind.

    Raises:
        NotImplementedError: says which layers differ.
    """
    first = config.layers[0]
    if not isinstance(first, kind):
        raise NotImplementedError(f"layers: {architecture} has {kind.name} only, this model {first.name}")
    if other := [i for i, layer in enumerate(config.layers) if layer != first]:
        raise NotImplementedError(f"layers: {architecture} has equal layers, here {other} differ from the first")
    return first


def check_options(architecture: str, options: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse a model with options that an architecture has not.

    Args:
        architecture: its name.
        options: by name, what the model has and what the architecture has.

    Raises:
        NotImplementedError: names those that differ.
    """
    if wrong := [f"{name} = {has!r}" for name, (has, theirs) in options.items() if has != theirs]:
        raise NotImplementedError(f"layers: {architecture} has no layers with {', '.join(wrong)}")
