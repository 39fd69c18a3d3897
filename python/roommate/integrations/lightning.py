"""A callback for PyTorch Lightning.

    callback = RoommateCallback(min=16, max=256)
    trainer = Trainer(callbacks=[callback], max_epochs=10)
    trainer.fit(model, loader, ckpt_path=callback.checkpoint())
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..steps import Rule
from .loop import Loop, Rates, Sizes, samples_in

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback

FOLDER = "ROOMMATE_CHECKPOINT"


class RoommateCallback(Callback):  # type: ignore[misc]
    """Reports steps to the daemon and follows its batch size, pace, suspensions and checkpoints.

    ``min`` and ``max`` are the batch sizes (of each process) that the daemon may choose from; without
    them it stays as it is. ``lr`` is the rule by which the learning rate follows, as in
    ``roommate.steps``. Checkpoints are saved into ``folder``, by default ``$ROOMMATE_CHECKPOINT``.
    """

    def __init__(
        self,
        *,
        min: int | None = None,
        max: int | None = None,
        lr: str | Rule = "linear",
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        given = folder or os.environ.get(FOLDER)
        self._path = Path(given) / "roommate.ckpt" if given else None
        self._range, self._lr = (min, max), lr
        self._loop: Loop | None = None
        self._restored: float | None = None

    def checkpoint(self) -> str | None:
        """The last checkpoint of an earlier attempt, for ``fit(ckpt_path=…)``; None at the first."""
        return str(self._path) if self._path is not None and self._path.exists() else None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._loop is None else {"done": self._loop.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state.get("done")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        low, high = self._range
        self._loop = Loop(
            Sizes(_loaders(trainer)),
            Rates(trainer.optimizers, schedulers),
            min=low,
            max=high,
            lr=self._lr,
            done=self._restored,
            save=lambda: self._save(trainer),
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._loop is not None:
            self._loop.begin_step()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._loop is not None:
            self._loop.end_step(samples_in(batch) or self._loop.batch_size)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._loop is not None:
            self._loop.close()

    def _save(self, trainer: Any) -> None:
        if self._path is None:
            return
        # All processes take part; whole or not at all.
        new = self._path.with_suffix(".new")
        trainer.save_checkpoint(new)
        if trainer.is_global_zero:
            new.replace(self._path)


def _loaders(trainer: Any) -> list[Any]:
    loaders = trainer.train_dataloader
    if hasattr(loaders, "values"):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
