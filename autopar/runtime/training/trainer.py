"""Parallel models under transformers' Trainer.

    class Trainer(autopar.ParallelTrainer, transformers.Trainer):
        pass

    Trainer(model=par, args=args, train_dataset=rows).train()

Trainer would wrap a model in DistributedDataParallel, deal the rows out to the ranks and save what
rank 0 holds. Here the graph sends what is to be sent; every rank reads the same global batch, of
`per_device_train_batch_size` rows for each rank, and saves with the others. Nothing of transformers
or of Accelerate is imported before a Trainer is made.
"""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from autopar.errors import InputError
from autopar.runtime.training.adapters import prepare, require_parallel
from autopar.runtime.training.checkpoint import Checkpoints

if TYPE_CHECKING:
    from typing import Any as _Trainer  # what is behind a mixin's super()
else:
    _Trainer = object

_FOLDER = "autopar"  # within a checkpoint of Trainer's: what training goes on from
_ARGUMENTS = "training_args.bin"  # as Trainer names it

AnyPath = str | os.PathLike[str]


class ParallelTrainer(_Trainer):
    """A mixin that makes transformers' Trainer, or a subclass of it, train a parallel model.

    >>> import autopar, transformers
    >>> class Trainer(autopar.ParallelTrainer, transformers.Trainer):
    ...     pass
    >>> rows = 8 * dist.get_world_size()  # doctest: +SKIP
    >>> batch = collate([dataset[i] for i in range(rows)])  # doctest: +SKIP
    >>> par = autopar.parallelize(model, inputs=batch)  # doctest: +SKIP
    >>> args = TrainingArguments("out", per_device_train_batch_size=8)  # doctest: +SKIP
    >>> Trainer(model=par, args=args, train_dataset=dataset).train()  # doctest: +SKIP

    Batches, steps and losses are those that Trainer has on one device with the global batch:
    `per_device_train_batch_size` times the number of ranks. Every rank reads all of its rows, as
    collators look at a whole batch. Clipping, accumulation, schedules, evaluation and callbacks are
    Trainer's. `save_model` writes what `from_pretrained` reads; a checkpoint has besides an
    autopar.Checkpoints of the model, the optimizer and the schedule, from which any layout on any
    number of ranks goes on by `train(resume_from_checkpoint=...)`. All ranks make every call.

    Raises InputError for a model that is not parallel, and for one in stages.
    """

    args: Any  # transformers.TrainingArguments

    def __init__(self, *args: Any, **options: Any) -> None:
        if not hasattr(self, "train"):
            raise InputError(
                "autopar.ParallelTrainer is a mixin: make your own, class Trainer("
                "autopar.ParallelTrainer, transformers.Trainer), and call that"
            )
        super().__init__(*args, **options)
        require_parallel(self.model, "Trainer")
        # no rank counts its own tokens: all have those of the global batch
        self.args = copy.copy(self.args)
        self.args.average_tokens_across_devices = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        own_class: Any = type(self.accelerator)
        self.accelerator.__class__ = _accelerator_class(own_class)

    # -- rows --------------------------------------------------------------------------------------
    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *rest: Any, **options: Any
    ) -> Any:
        """Return the loader of the global batch, which draws the same random numbers everywhere."""
        rows = batch_size * self.args.world_size
        loader = super()._get_dataloader(dataset, description, rows, *rest, **options)
        start = getattr(loader, "worker_init_fn", None)
        if isinstance(start, functools.partial) and "rank" in start.keywords:
            loader.worker_init_fn = functools.partial(start, rank=0)
        return loader

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Return the loss once for each rank: Trainer repeats it for the rows of one rank, and a
        batch has those of all.
        """
        loss, *others = super().prediction_step(*args, **options)
        if loss is not None:
            loss = loss.expand(self.args.world_size)
        return loss, *others

    # -- files -------------------------------------------------------------------------------------
    def _save(self, output_dir: AnyPath | None = None, state_dict: Any = None) -> None:
        place = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(place)
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        torch.save(self.args, place / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: AnyPath) -> None:
        self._checkpoints(output_dir).save(self.state.global_step)

    def _load_from_checkpoint(self, checkpoint: AnyPath, model: Any = None) -> None:
        self.model.load_weights(checkpoint)

    def _load_best_model(self) -> None:
        self.model.load_weights(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: AnyPath | None) -> None:
        if checkpoint is not None:
            self._checkpoints(checkpoint).load()

    def _checkpoints(self, folder: AnyPath) -> Checkpoints:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps
        return Checkpoints(
            Path(folder) / _FOLDER,
            model=self.model,
            optimizer=optimizer,
            most=1,
            schedule=self.lr_scheduler,
        )


@functools.cache
def _accelerator_class(base: Any) -> type:
    """Return a subclass of accelerate.Accelerator under which every rank passes whole batches and
    has whole results.
    """
    from accelerate import data_loader

    class FullBatches(base):
        def prepare(self, *objects: Any, **_: Any) -> Any:
            prepared = tuple(
                self.prepare_data_loader(entry)
                if isinstance(entry, DataLoader)
                else prepare(self, entry)
                for entry in objects
            )
            return prepared if len(prepared) != 1 else prepared[0]

        def prepare_data_loader(self, loader: Any, *_: Any, **__: Any) -> Any:
            wanted = {
                "put_on_device": self.device_placement,
                "rng_types": list(self.rng_types or ()),
                "use_seedable_sampler": self.use_seedable_sampler,
                "data_seed": self.dataloader_config.data_seed,
                "non_blocking": self.non_blocking,
            }
            prepared = data_loader.prepare_data_loader(
                loader, self.device, num_processes=1, process_index=0, **wanted
            )
            self._dataloaders.append(prepared)
            return prepared

        def prepare_model(self, model: Any, *_: Any, **__: Any) -> Any:
            # "evaluation" leaves out DistributedDataParallel
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)

        def gather(self, tensor: Any) -> Any:
            return tensor

    return FullBatches
