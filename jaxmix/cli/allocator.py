"""How the C library hands out memory to XLA on a CPU."""

import ctypes
import os

# Options of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory(*, one_pool: bool = False) -> bool:
    """Lets this process keep the memory that it frees.

    XLA on a CPU allocates the buffers of a computation and frees them at every call. glibc gives buffers of that size
    back to the kernel at once, which has to clear them again for the next call: a quarter of the time of a training
    step. The process stays as large as it once was.

    Args:
        one_pool: all threads share what was freed. Timings depend least on the calls before them, but programs are
            compiled more slowly, because the threads of the compiler wait for each other.

    Returns:
        Whether it was done; False where the C library is not glibc, and where the user has set it up through
        GLIBC_TUNABLES or a variable of the MALLOC_ family.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, Windows
        return False
    options = [(_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20), (_MMAP_MAX, 0)]
    if one_pool:
        options.append((_ARENA_MAX, 1))
    return all(set_option(option, value) == 1 for option, value in options)
