"""What can be checked of a TPU kernel without a TPU: races, reads of unwritten memory, and lowering."""

import contextlib

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def races_forbidden():
    """An `interpret` for kernels: two cores share the parallel axes, unwritten memory is NaN, races are errors."""
    try:
        yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
        jax.effects_barrier()
        assert interpreter.races is not None, "the kernel was not interpreted"
        assert not interpreter.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def lower(function, *args, **kwargs) -> str:
    """The program for a TPU, which must hold a kernel."""
    text = jax.jit(function).trace(*args, **kwargs).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    return text
