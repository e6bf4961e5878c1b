"""What a checkpoint holds of a training: the model, the optimiser and the script's own objects, of whole and of divided
models.

A model is divided over processes in one of two ways. `fully_shard` (FSDP2) *shards* it: each process has a share of
each parameter. With `gpus_per_replica` it is *split*: each process has a part of the layers, such as the stage of a
pipeline. Of a divided model, each process writes its own piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from penstock_executor.checkpoint import Checkpoint, Checkpoints
from penstock_executor.training.processes import Group
from penstock_executor.training.saving import copied, from_bytes, read_part, read_shards, set_random_states


class TrainingState:
    """Collects the state of a training for a checkpoint, and restores it.

    Args:
        group: all processes of the run.
        model: not wrapped by DDP.
        optimizer: of its parameters.
        named: name -> another object with `state_dict` and `load_state_dict`; entries of None are left out.
        sharded: whether `fully_shard` has sharded the model.
    """

    def __init__(
        self,
        group: Group,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, Any],
        *,
        sharded: bool,
    ) -> None:
        self._group, self._model, self._optimizer = group, model, optimizer
        self._named = {name: each for name, each in named.items() if each is not None}
        self._sharded, self._split = sharded, group.gpus_per_replica > 1
        self._random: Any = None

    @property
    def writes(self) -> bool:
        """Whether this process writes to the checkpoints: rank 0, and those with a piece of the model of their own.

        Of several replicas of a split model, only the first writes.
        """
        return self._group.rank == 0 or self._sharded or (self._split and self._group.replica == 0)

    def check(self) -> None:
        """Raise CannotSave if the state of the optimiser or of the script's own objects could not be loaded again.

        At the start, the script's author is still there. Later the run would lose everything at its next move.
        """
        copied(self._optimizer.state_dict()["param_groups"], "optimizer.param_groups")
        for name, each in self._named.items():
            copied(each.state_dict(), name)

    def collect(self, random_states: list[Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Copies of the state that rank 0 writes, and of this process's piece of a divided model (None if it is whole).

        The script's own objects belong to the piece if the model is split.

        Args:
            random_states: of each rank, from `saving.random_states`.
        """
        more = {f"more.{name}": copied(each.state_dict(), name) for name, each in self._named.items()}
        if self._sharded:
            return more | {"random": random_states}, dict(copied(self._shards()))
        model, optimizer = copied(self._model.state_dict(), "model"), copied(self._optimizer.state_dict(), "optimizer")
        whole = {"model": model, "optimizer": optimizer} | more
        if self._split:
            return {"random": random_states}, whole
        return whole | {"random": random_states}, None

    def restore(self, found: Checkpoint, shard_group: dist.ProcessGroup | None) -> None:
        """Load a checkpoint; all processes call it.

        Args:
            found: the checkpoint.
            shard_group: the processes that read a sharded model together.

        Raises:
            RuntimeError: the model was divided in another way.
        """
        self._check_division(found)
        assert isinstance(found.state, bytes)
        state = from_bytes(found.state)
        if found.shards is not None and self._split:
            part = read_part(found.shards.folder, self._group.place)
            self._model.load_state_dict(part["model"])
            self._optimizer.load_state_dict(part["optimizer"])
            state |= part
        elif found.shards is not None:
            from torch.distributed.checkpoint.state_dict import set_state_dict

            into = self._shards()
            read_shards(found.shards.folder, into, shard_group)
            parts = {"model_state_dict": into["model"], "optim_state_dict": into["optimizer"]}
            set_state_dict(self._model, self._optimizer, **parts)
        else:
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        for name, each in self._named.items():
            if f"more.{name}" in state:
                each.load_state_dict(state[f"more.{name}"])
        if len(state["random"]) == self._group.world:
            self._random = state["random"][self._group.rank]
        self.restore_random()

    def restore_random(self) -> None:
        """Set the random generators to their states in the checkpoint, if it had as many processes.

        Call it again before the first step: what the script did in between may have drawn from them.
        """
        if self._random is not None:
            set_random_states(self._random)

    def _check_division(self, found: Checkpoint) -> None:
        before, now = found.meta.get("gpus_per_replica", 1), self._group.gpus_per_replica
        if before != now:
            raise RuntimeError(
                f"the checkpoint holds a model split over {before} processes, and now there are {now}: if GPU types"
                " need different numbers (--scale-unit by type), keep the job to one of them with --gpu-types"
            )
        if (self._sharded or self._split) != (found.shards is not None):
            raise RuntimeError("fully_shard sharded either the checkpoint's model or this one, but not both")

    def _shards(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def newest_checkpoint(group: Group, checkpoints: Checkpoints) -> Checkpoint | None:
    """The newest checkpoint that is whole, the same on all processes; None if there is none.

    Rank 0 chooses it. Shards are read by all processes, each its share.

    Raises:
        RuntimeError: a process does not see rank 0's checkpoint.
    """
    candidates = checkpoints.candidates() if group.rank == 0 else iter(())
    while True:
        first = next(candidates, None)
        which = group.from_first((first.epoch, first.step) if first else None)
        if which is None:
            return None
        found = first if first is not None else checkpoints.find(*which)
        damage = (
            found.shards.damage(group.rank, group.world) if found is not None and found.shards is not None else None
        )
        answers = group.gather((found is not None, damage))
        if not all(seen for seen, _ in answers):
            raise RuntimeError(
                f"not all processes see checkpoint {which} of rank 0: put the checkpoints on a shared file system"
            )
        damages = [each for _, each in answers if each is not None]
        if not damages:
            return found
        if first is not None:
            checkpoints.skip(first, damages[0])
