"""The suite that every mixer inherits: subclass `MixerContract`, name the class `Test...` and set `spec`."""

from tests.contract.agreement import Agreement
from tests.contract.errors import Errors, QueryKeyValueErrors
from tests.contract.packing import Packing
from tests.contract.sharding import Sharding
from tests.contract.spec import MixerSpec, Shape, Variant
from tests.contract.streaming import Streaming
from tests.contract.transforms import Transforms

__all__ = ["MixerContract", "MixerSpec", "QueryKeyValueErrors", "Shape", "Variant"]


class MixerContract(Agreement, Streaming, Packing, Transforms, Sharding, Errors):
    """The eight points of the mixer contract, as statements about `spec`.

    Tests that take `variant` run for every variant of the spec; the others run for the main one.
    """

    spec: MixerSpec

    def pytest_generate_tests(self, metafunc):
        """Runs a test once per variant that it asks for."""
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", self.spec.variants.values(), ids=self.spec.variants.keys())
        if "sharded_variant" in metafunc.fixturenames:
            chosen = {name: self.spec.variants[name] for name in self.spec.sharded_variants}
            metafunc.parametrize("sharded_variant", chosen.values(), ids=chosen.keys())
