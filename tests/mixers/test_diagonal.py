"""The two ways to carry states from chunk to chunk, of which a machine takes one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.diagonal import DiagonalChunks
from jaxmix.mixers.modes import discretize
from jaxmix.mixers.s4d import s4d_poles
from jaxmix.mixers.segments import find_segments
from tests.contract.agreement import F64
from tests.contract.spec import precision
from tests.tolerances import FORMS, assert_close

MODES, SIZE = 3, 4


@pytest.mark.parametrize("documents", [False, True])
def test_the_states_of_chunks_are_the_same_from_chunk_to_chunk_and_by_an_associative_scan(monkeypatch, documents):
    rng = np.random.default_rng(0)
    ids = np.repeat([[1, 1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2, 3]], 3, axis=1)[:, :-1]
    with precision():
        modes = discretize(jnp.asarray(s4d_poles(MODES)[None]), jnp.asarray([0.3]), "zoh")
        segments = find_segments(jnp.asarray(ids, jnp.int32)) if documents else None
        chunks = DiagonalChunks.cut(modes, segments, ids.shape[1], SIZE, None)
        outer = jnp.asarray(rng.normal(size=(2, -(-ids.shape[1] // SIZE), 1, 2, MODES, 5)))
        initial = jnp.asarray(rng.normal(size=(2, 1, 2, MODES, 5)))
        results = []
        for backend in ("cpu", "gpu"):
            monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
            result, transposed = jax.vjp(chunks.carry, outer, initial)
            results.append((result, transposed(jax.tree.map(jnp.cos, result))))
        assert_close(results[0], results[1], FORMS[F64])
