import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmix.parallel import gather_axis, make_mesh


class TestMakeMesh:
    def test_axes_keep_their_order_and_size(self):
        mesh = make_mesh(data=2, sequence=4)
        assert mesh.axis_names == ("data", "sequence")
        assert mesh.devices.shape == (2, 4)

    def test_a_mesh_may_use_fewer_devices_than_there_are(self):
        assert list(make_mesh(data=3).devices) == jax.devices()[:3]

    @pytest.mark.parametrize("axes", [{}, {"data": 0}, {"data": 2, "sequence": -1}], ids=str)
    def test_sizes_must_be_positive(self, axes):
        with pytest.raises(ValueError, match="positive"):
            make_mesh(**axes)

    def test_too_few_devices(self):
        with pytest.raises(ValueError, match=r"(?s)at most 8.*needs 18"):
            make_mesh(data=3, sequence=6)

    def test_jit_takes_arrays_placed_on_it(self):
        mesh = make_mesh(data=4)
        x = jax.device_put(np.arange(8.0, dtype=np.float32), jax.NamedSharding(mesh, P("data")))
        assert np.array_equal(jax.jit(lambda x: 2 * x)(x), 2 * np.arange(8.0))


class TestGatherAxis:
    def gathered(self, tree, check=lambda x: x):
        mesh = make_mesh(sequence=4)

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=P("sequence"), out_specs=P())
        def run(tree):
            return check(gather_axis(tree, "sequence"))

        return run(tree)

    def test_pieces_are_stacked_in_device_order_on_every_device(self):
        pieces = {"x": np.arange(12.0, dtype=np.float32).reshape(4, 3), "flag": np.array([True, False, False, True])}
        gathered = self.gathered(pieces)
        assert np.array_equal(gathered["x"], pieces["x"][:, None])
        assert gathered["flag"].dtype == bool
        assert np.array_equal(gathered["flag"], pieces["flag"][:, None])

    def test_a_broken_piece_does_not_spoil_the_others(self):
        pieces = np.array([1.0, np.nan, 3.0, np.inf], np.float32)
        assert np.array_equal(self.gathered(pieces), pieces[:, None], equal_nan=True)

    def test_gradients_return_to_the_device_they_belong_to(self):
        weights = np.array([1.0, 10.0, 100.0, 1000.0], np.float32)
        mesh = make_mesh(sequence=4)

        @jax.shard_map(mesh=mesh, in_specs=P("sequence"), out_specs=P())
        def total(pieces):
            return (gather_axis(pieces, "sequence")[:, 0] * weights).sum()

        assert np.array_equal(jax.jit(jax.grad(total))(np.ones(4, np.float32)), weights)

    def test_an_axis_that_is_not_mapped(self):
        with pytest.raises(ValueError, match=r"(?s)sequence_axis.*shard_map.*tokens"):
            gather_axis(np.ones(3), "tokens")
