"""The suite that every mixer inherits: subclass `MixerContract`, name the class `Test...` and set `spec`."""

from tests.contract.agreement import Agreement
from tests.contract.errors import Errors, QueryKeyValueErrors
from tests.contract.packing import Packing
from tests.contract.sharding import Sharding
from tests.contract.spec import MixerSpec, Shape, Variant
from tests.contract.streaming import Streaming
from tests.contract.transforms import Transforms

__all__ = ["MixerContract", "MixerSpec", "QueryKeyValueErrors", "Shape", "SingleDeviceContract", "Variant"]


class SingleDeviceContract(Agreement, Streaming, Packing, Transforms, Errors):
    """The mixer contract without devices, for a mixer whose sharding is another mixer's code."""


class MixerContract(SingleDeviceContract, Sharding):
    """The eight points of the mixer contract, as statements about `spec`."""
