"""A callback for the ``Trainer`` of Hugging Face transformers.

    callback = RoommateCallback(min=4, max=64)
    args = TrainingArguments(output_dir=callback.folder(), ...)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.checkpoint())
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ..session import LATER, Stopped
from ..steps import Rule
from .loop import Loop, Rates, Sizes, samples_in

FOLDER = "ROOMMATE_CHECKPOINT"

DONE = "roommate.json"
"""In the folder of a checkpoint: the work that it has."""


class RoommateCallback(TrainerCallback):  # type: ignore[misc]
    """Reports steps to the daemon and follows its batch size, pace, suspensions and checkpoints.

    ``min`` and ``max`` are the batch sizes (of each device) that the daemon may choose from; without
    them it stays as it is. ``lr`` is the rule by which the learning rate follows, as in
    ``roommate.steps``. The Trainer saves checkpoints into its ``output_dir``.
    """

    def __init__(
        self, *, min: int | None = None, max: int | None = None, lr: str | Rule = "linear"
    ) -> None:
        self._range, self._lr = (min, max), lr
        self._loop: Loop | None = None
        self._samples = 0
        self._wants_save = False
        self._stops = False

    @staticmethod
    def folder(otherwise: str = "checkpoints") -> str:
        """The folder that the daemon keeps for the job's checkpoints."""
        return os.environ.get(FOLDER) or otherwise

    def checkpoint(self) -> str | None:
        """The last checkpoint of an earlier attempt, for ``train``; None at the first."""
        folder = self.folder()
        return get_last_checkpoint(folder) if os.path.isdir(folder) else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        parts["model"].register_forward_pre_hook(self._count, with_kwargs=True)
        low, high = self._range
        self._loop = Loop(
            Sizes([parts["train_dataloader"]]),
            Rates([parts["optimizer"]], [parts["lr_scheduler"]]),
            min=low,
            max=high,
            lr=self._lr,
            done=_done_in(args, state) if state.global_step else None,
            save=self._save_later,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._loop is not None:
            self._samples = 0
            self._loop.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._loop is None:
            return
        try:
            self._loop.end_step(self._samples // args.gradient_accumulation_steps)
        except Stopped:
            self._stops = self._wants_save = True
        if self._wants_save:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._loop is None:
            return
        if state.is_world_process_zero:
            (_folder(args, state) / DONE).write_text(json.dumps({"done": self._loop.done}))
        if self._wants_save:
            self._wants_save = False
            self._loop.saved()
        if self._stops:
            raise Stopped

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._loop is not None:
            self._loop.close()

    def _save_later(self) -> object:
        """The Trainer saves after the step, on all processes."""
        self._wants_save = True
        return LATER

    def _count(self, model: Any, positional: Any, named: Any) -> None:
        if model.training:
            self._samples += samples_in(named) or samples_in(positional) or 0


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _done_in(args: Any, state: Any) -> float:
    try:
        return float(json.loads((_folder(args, state) / DONE).read_text())["done"])
    except FileNotFoundError:
        return float(state.global_step)
