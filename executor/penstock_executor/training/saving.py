"""A run's whole state as one checkpoint, copied in a moment and written in the background."""

from __future__ import annotations

import io
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from penstock_executor.checkpoint import Checkpoints, Fenced, NotSaved

log = logging.getLogger(__name__)


def copied(value: Any) -> Any:
    """`value` with each tensor in it copied to the host's memory, so that training may go on."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.clone() if value.device.type == "cpu" else value.cpu()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(each) for each in value)
    return value


def random_states() -> dict[str, Any]:
    """Of this process: torch's, CUDA's, Python's and NumPy's generators."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(words), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def set_random_states(state: Mapping[str, Any]) -> None:
    """Undo what came after `random_states`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """As `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(state: bytes) -> Any:
    """As `torch.load` reads it, on the CPU. Only tensors and plain values: a checkpoint cannot run code."""
    return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)


class Saver:
    """Writes one checkpoint at a time, in a thread of its own."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.fenced = False
        """A later run has begun: this one must stop."""
        self.failure: NotSaved | None = None
        """Why the last one was not written; None if it was."""
        self._thread: threading.Thread | None = None

    def save(
        self, state: Mapping[str, Any], step: int, meta: Mapping[str, Any], saved: Callable[[float], None]
    ) -> None:
        """Write `state`, which nobody changes any more, after the one before; `saved(seconds)` when it is on disk."""
        self.wait()
        self._thread = threading.Thread(target=self._save, args=(state, step, meta, saved), name="penstock-saver")
        self._thread.start()

    def wait(self) -> None:
        """Until the one that is being written is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def _save(
        self, state: Mapping[str, Any], step: int, meta: Mapping[str, Any], saved: Callable[[float], None]
    ) -> None:
        began = time.monotonic()
        try:
            self.checkpoints.save(to_bytes(state), step, meta)
        except Fenced as error:
            log.warning("step=%d %s", step, error)
            self.fenced = True
        except NotSaved as error:
            log.error("step=%d %s", step, error)
            self.failure = error
        else:
            self.failure = None
            saved(time.monotonic() - began)
