"""What a checkpoint holds of a training: the model, the optimiser and the script's own objects, of whole and of divided
models.

A model is divided over processes in one of two ways. `fully_shard` (FSDP2) *shards* it: each process has a share of
each parameter. With `gpus_per_replica` it is *split*: each process has a part of the layers, such as the stage of a
pipeline. Of a divided model, each process writes its own piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from penstock_executor.checkpoint import Checkpoint, Checkpoints, Unreadable
from penstock_executor.training.processes import Group
from penstock_executor.training.saving import copied, load, read_part, read_shards, set_random_states

log = logging.getLogger(__name__)


class TrainingState:
    """Collects the state of a training for a checkpoint, and restores it.

    Args:
        group: all processes of the run.
        named: name -> an object with `state_dict` and `load_state_dict`; entries of None are left out.
        model: not wrapped by DDP; None if all models are in `named`.
        optimizer: of the model's parameters.
        sharded: whether `fully_shard` has sharded the model.
    """

    def __init__(
        self,
        group: Group,
        named: Mapping[str, Any],
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        sharded: bool = False,
    ) -> None:
        own = {"model": model, "optimizer": optimizer}
        self._group, self._own = group, {name: each for name, each in own.items() if each is not None}
        self._named = {name: each for name, each in named.items() if each is not None}
        self._sharded, self._split = sharded, group.gpus_per_replica > 1
        self._random: Any = None
        self._frozen: dict[str, list[str]] = {}
        """Of the checkpoint: name of a model -> its parameters that were not trained."""

    @property
    def writes(self) -> bool:
        """Whether this process writes to the checkpoints: rank 0, and those with a piece of the model of their own.

        Of several replicas of a split model, only the first writes.
        """
        return self._group.rank == 0 or self._sharded or (self._split and self._group.replica == 0)

    @property
    def divided(self) -> bool:
        """Whether several processes write pieces of the model."""
        return self._sharded or self._split

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of the models and the optimisers: all that a suspended run moves."""
        for each in (*self._own.values(), *self._named.values()):
            if isinstance(each, torch.nn.Module):
                yield from each.buffers()
                for parameter in each.parameters():
                    yield parameter
                    if parameter.grad is not None:
                        yield parameter.grad
            elif isinstance(each, torch.optim.Optimizer):
                for state in each.state.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def check(self) -> None:
        """Raise CannotSave if the state of the optimiser or of the script's own objects could not be loaded again.

        At the start, the script's author is still there. Later the run would lose everything at its next move.
        """
        if "optimizer" in self._own:
            copied(self._own["optimizer"].state_dict()["param_groups"], "optimizer.param_groups")
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
        whole = {name: copied(each.state_dict(), name) for name, each in self._own.items()} | more
        if self._split:
            return {"random": random_states}, whole
        return whole | {"random": random_states, "frozen": self._frozen_now()}, None

    def restore(self, found: Checkpoint, shard_group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Load a checkpoint; all processes call it.

        Rank 0 reads a whole model, and sends it to the others piece by piece: the job's nodes read its file once, and
        hold it once.

        Args:
            found: the checkpoint. Without shards, only rank 0's has a state.
            shard_group: the processes that read a sharded model together.
            device: of this process.

        Raises:
            RuntimeError: the model was divided in another way, or the checkpoint lacks an object that `keep` named.
        """
        self._check_division(found)
        state = {}
        if self._group.rank == 0 or found.shards is not None:
            with found.open() as file:
                state = load(file)
        if found.shards is not None and self._split:
            state |= read_part(found.shards.folder, self._group.place)
        elif found.shards is not None:
            from torch.distributed.checkpoint.state_dict import set_state_dict

            into = self._shards()
            read_shards(found.shards.folder, into, shard_group)
            parts = {"model_state_dict": into["model"], "optim_state_dict": into["optimizer"]}
            set_state_dict(self._own["model"], self._own["optimizer"], **parts)
        spread = found.shards is None
        names = self._group.from_first(list(state)) if spread else list(state)
        own = {} if self._sharded else self._own
        objects = own | {f"more.{name}": each for name, each in self._named.items()}
        missing = sorted(name.removeprefix("more.") for name in objects.keys() - set(names))
        if missing and not self._own:
            raise RuntimeError(
                f"the checkpoint of step {found.step} lacks {', '.join(missing)}, which would begin anew beside the rest;"
                " give run.keep the names that saved it, or start in another folder"
            )
        if missing:
            log.warning("step=%d the checkpoint lacks %s, which begins anew", found.step, ", ".join(missing))
        for name in names:
            piece = state.pop(name, None)
            if spread:
                piece = self._group.tree_from_first(piece, device if name in own else torch.device("cpu"))
            if name in objects:
                objects[name].load_state_dict(piece)
            else:
                self._take(name, piece)
        self._restore_generators()
        self._restore_frozen(self._own)  # before DDP wraps it

    def _take(self, name: str, piece: Any) -> None:
        """Keep a piece of a checkpoint that is no object's."""
        if name == "frozen":
            self._frozen = piece
        elif name == "random" and len(piece) == self._group.world:
            self._random = piece[self._group.rank]

    def _restore_generators(self) -> None:
        if self._random is not None:
            set_random_states(self._random)

    def restore_random(self) -> None:
        """Set the random generators to their states in the checkpoint, if it had as many processes, and freeze what was frozen.

        Call it again before the first step: what the script did in between may have drawn from them.
        """
        self._restore_generators()
        self._restore_frozen(self._frozen)

    @property
    def objects(self) -> dict[str, Any]:
        """All that a checkpoint holds the state of, by its name there."""
        return self._own | {f"more.{name}": each for name, each in self._named.items()}

    @property
    def _models(self) -> dict[str, torch.nn.Module]:
        return {name: each for name, each in self.objects.items() if isinstance(each, torch.nn.Module)}

    def _restore_frozen(self, names: Iterable[str]) -> None:
        models = self._models
        for name in (name for name in names if name in self._frozen and name in models):
            for parameter_name, parameter in models[name].named_parameters():
                parameter.requires_grad_(parameter_name not in self._frozen[name])

    def _frozen_now(self) -> dict[str, list[str]]:
        """A script may freeze layers in a later pass, in code that a run after that pass does not reach."""
        return {
            name: [parameter for parameter, each in model.named_parameters() if not each.requires_grad]
            for name, model in self._models.items()
        }

    def _check_division(self, found: Checkpoint) -> None:
        before, now = found.meta.get("gpus_per_replica", 1), self._group.gpus_per_replica
        if before != now:
            raise RuntimeError(
                f"the checkpoint holds a model split over {before} processes, and now there are {now}: if GPU types"
                " need different numbers (--scale-unit by type), keep the job to one of them with --gpu-types"
            )
        if (self._sharded or self._split) != (found.shards is not None):
            raise RuntimeError("fully_shard sharded either the checkpoint's model or this one, but not both")
        kinds = {name: [kind.__name__ for kind in type(each).__mro__] for name, each in self._named.items()}
        loaders = [name for name in kinds if "StatefulDataLoader" in kinds[name]]
        world = found.meta.get("gpus", [None, None, self._group.world])[2]
        if loaders and world != self._group.world and found.meta.get("epoch_steps"):
            raise RuntimeError(
                f"{', '.join(loaders)} is torchdata's StatefulDataLoader, which cannot go on in mid-epoch on another number of"
                f" processes ({world} before, {self._group.world} now): samples would be lost or repeated. Let run.loader give"
                " the batches, or keep the job to one number of GPUs"
            )

    def _shards(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._own["model"], self._own["optimizer"])
        return {"model": model, "optimizer": optimizer}


def newest_checkpoint(group: Group, checkpoints: Checkpoints) -> Checkpoint | None:
    """The newest checkpoint that is whole, the same on all processes; None if there is none.

    Rank 0 chooses it, and is the only one to read its file, unless it has shards. Then all processes read the file, and
    each its share of the shards.

    Raises:
        Unreadable: there are checkpoints, and none is whole, or one cannot be read. All processes raise it.
        RuntimeError: a process does not see the shards of rank 0's checkpoint.
    """
    candidates = checkpoints.candidates(in_file=True) if group.rank == 0 else iter(())
    while True:
        first, told = _chosen(group, checkpoints, candidates)
        if told is None:
            return None
        epoch, step, meta, has_shards = told
        if not has_shards:
            return first if first is not None else Checkpoint(epoch, step, b"", meta)
        found, damage, failure = first, None, None
        try:
            found = first if first is not None else checkpoints.find(epoch, step)
            if found is not None and found.shards is not None:
                damage = found.shards.damage(group.rank, group.world)
        except Unreadable as error:
            failure = error
        answers = group.gather((found is not None, damage, failure))
        for *_, failure in answers:
            if failure is not None:
                raise failure
        if not all(seen for seen, *_ in answers):
            raise RuntimeError(
                f"not all processes see the checkpoint of epoch {epoch}, step {step} of rank 0: put the checkpoints on"
                " a shared file system"
            )
        damages = [damage for _, damage, _ in answers if damage is not None]
        if not damages:
            return found
        if first is not None:
            checkpoints.skip(first, damages[0])


def _chosen(
    group: Group, checkpoints: Checkpoints, candidates: Iterator[Checkpoint]
) -> tuple[Checkpoint | None, tuple[int, int, dict[str, Any], bool] | None]:
    """Rank 0's next candidate, on rank 0, and on all processes its epoch, step, meta and whether it has shards.

    Both are None if there is no checkpoint. Raises Unreadable on all processes.
    """
    first, failure = None, None
    try:
        first = next(candidates, None)
        if first is None and group.rank == 0:
            checkpoints.refuse_to_begin_anew()
    except Unreadable as error:
        failure = error
    told = (first.epoch, first.step, first.meta, first.shards is not None) if first is not None else None
    told, failure = group.from_first((told, failure))
    if failure is not None:
        raise failure
    return first, told
