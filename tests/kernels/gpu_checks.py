"""What can be checked of a Hopper kernel without a GPU: races, reads of unwritten memory, and lowering."""

import contextlib

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def races_forbidden():
    """An `interpret` for kernels: unwritten memory is NaN, and races are errors."""
    try:
        yield plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
        jax.effects_barrier()
        assert not interpreter.get_races().races_found
    finally:
        interpreter.reset_gpu_interpret_mode_state()


def lower(function, *args, **kwargs) -> str:
    """The program for a GPU, which must hold a kernel; too much shared memory is an error."""
    text = jax.jit(function).trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text
