"""Keeps numerical libraries to one thread while Penstock decides.

The fits and the policies work on small arrays. More threads than one make no part of them faster, and cost half as much
processor time again: measured over a window of 160 jobs, on two cores.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which BLAS uses one thread. Without threadpoolctl, BLAS uses as many as it does by itself.

    The environment stays as it is, because the jobs and programs that Penstock starts inherit it.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:  # decisions are the same, and take more processor time
        return nullcontext()
    import scipy.linalg  # noqa: F401  # limits apply to libraries that are loaded, and SciPy has a BLAS of its own

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
