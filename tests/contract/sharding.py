"""Split over devices, a mixer computes the same, and no device ever gathers the sequence."""

import functools

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmix.parallel import make_mesh
from tests.contract.agreement import F64
from tests.contract.programs import largest_collective
from tests.contract.spec import BATCH, SERIAL, Evaluation, Form, draw_case, evaluate, is_per_token, precision
from tests.contract.suite import Suite
from tests.tolerances import FORMS, assert_close

TOKENS, CHUNK, DEVICES = 512, 32, 8
LAYOUTS = {
    "one document": [[1] * TOKENS] * BATCH,
    "documents across borders": [[1] * 40 + [2] * 200 + [3] * 272, [7] * 511 + [8]],
    "documents at borders, with padding": [
        [1] * 64 + [0] * 64 + [2] * 70 + [0] * 314,
        [0] * 100 + [1] * 300 + [0] * 10 + [1] * 102,
    ],
    "devices that see nothing but padding": [[0] * TOKENS, [0] * 300 + [1] * 3 + [0] * 209],
}


def sharded(spec, variant, mesh, per_token, per_head, form, **options):
    """The evaluation of a case inside shard_map; the specs say how tokens and heads are split."""
    inputs = {name: per_token if is_per_token(x) else P(*per_head[1:]) for name, x in draw_names(spec, variant).items()}
    state = jax.tree.map(lambda _: per_head, spec.init_state(variant, BATCH, np.float32))
    segments = P(*per_token[:2])

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(inputs, segments, state), out_specs=(per_token, state), check_vma=True
    )
    def mixer(inputs, segment_ids, state):
        return spec.call(variant, form, inputs, segment_ids, state, **options)

    def run(case):
        (out, final), pull_back = jax.vjp(
            lambda inputs, state: mixer(inputs, case.segment_ids, state), case.inputs, case.state
        )
        return Evaluation(out, final, *pull_back((case.out_cotangent, case.state_cotangent)))

    return jax.jit(run)


def draw_names(spec, variant):
    """Inputs of the variant, for their names and ranks."""
    return spec.draw(np.random.default_rng(0), BATCH, 1, variant)


class Sharding(Suite):
    """shard_map over batch, heads and tokens."""

    def test_batch_heads_and_tokens_over_devices(self):
        spec, variant = self.spec, self.spec.main
        mesh = make_mesh(batch=2, heads=2, sequence=2)
        form, options = Form("scan", 5), {"sequence_axis": "sequence"}
        run = sharded(spec, variant, mesh, P("batch", "sequence", "heads"), P("batch", "heads"), form, **options)
        case = draw_case(spec, variant, segment_ids=[[1] * 9 + [2] * 15, [0] * 3 + [3] * 20 + [1]])
        with precision():
            actual = jax.device_get(run(spec.cast(case, np.float64)))
        assert_close(actual, evaluate(spec, variant, case, SERIAL), FORMS[F64])

    def test_tokens_over_devices_without_a_gather_of_the_sequence(self, sharded_variant):
        spec = self.spec
        mesh = make_mesh(sequence=DEVICES)
        form, options = Form("scan", CHUNK), {"sequence_axis": "sequence"}
        run = sharded(spec, sharded_variant, mesh, P(None, "sequence"), P(), form, **options)
        cases = {name: draw_case(spec, sharded_variant, TOKENS, segment_ids=layout) for name, layout in LAYOUTS.items()}
        some = cases["one document"]
        with precision():
            program = run.lower(spec.cast(some, np.float64)).compile()
        smallest = min(x.size for x in some.inputs.values() if np.ndim(x) == 4)
        assert 0 < largest_collective(program.as_text()) < smallest
        for name, case in cases.items():
            with precision():
                actual = jax.device_get(program(spec.cast(case, np.float64)))
            assert_close(actual, evaluate(spec, sharded_variant, case, SERIAL), FORMS[F64], name)
