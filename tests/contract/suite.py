"""The base of every part of the suite: which variants its tests run for."""

from tests.contract.spec import MixerSpec


class Suite:
    """Tests about `spec`. A test may ask for the following; one that asks for none is about the main variant.

    any_variant: the whole catalogue of options. Only for tests whose compiled functions all others share.
    variant: the representatives, for tests that compile functions of their own.
    sharded_variant: the representatives that are split over devices.
    own_length: the short lengths that this mixer asks for.
    """

    spec: MixerSpec

    def pytest_generate_tests(self, metafunc):
        """Runs a test once per variant that it asks for."""
        names = {
            "any_variant": tuple(self.spec.variants),
            "variant": self.spec.representatives or tuple(self.spec.variants),
            "sharded_variant": self.spec.sharded_variants,
        }
        for argument in names.keys() & set(metafunc.fixturenames):
            chosen = {name: self.spec.variants[name] for name in names[argument]}
            metafunc.parametrize(argument, chosen.values(), ids=chosen.keys())
        if "own_length" in metafunc.fixturenames:
            metafunc.parametrize("own_length", self.spec.lengths)
