"""Small training jobs with Lightning, with transformers and with DDP; also run as a script:

jobs.py lightning|transformers|ddp FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, RATE = 96, 4, 0.5


class Points(Dataset[Any]):
    """Points of a line."""

    def __init__(self, keys: bool) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.tensor([index / SAMPLES])
        return {"x": x, "labels": 2 * x} if self.keys else (x, 2 * x)


class Net(nn.Module):
    """A line; each step it notes the size of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.line(x)
        if labels is None:
            return out
        self.sizes.append(len(x))
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


def lightning(folder: str, epochs: int, devices: int = 1, **options: Any) -> Any:
    """Trains with Lightning; returns the trainer, the network and the callback."""
    import lightning as L

    from roommate.integrations.lightning import RoommateCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    callback = RoommateCallback(folder=folder, **options)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        callbacks=[callback],
        enable_checkpointing=False,
        **quiet,
    )
    module = Module()
    loader = DataLoader(Points(False), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=callback.checkpoint())
    return trainer, module.net, callback


def transformers(folder: str, epochs: int, **options: Any) -> Any:
    """Trains with the Trainer of transformers; returns it and the network."""
    from transformers import Trainer, TrainingArguments

    from roommate.integrations.transformers import RoommateCallback

    callback = RoommateCallback(**options)
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        num_train_epochs=epochs,
        learning_rate=RATE,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    net = Net()
    trainer = Trainer(net, args, train_dataset=Points(True), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.checkpoint())
    return trainer, net, callback


def ddp(folder: str, epochs: int, **options: Any) -> Net:
    """Trains with a loop of its own in several processes."""
    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    from roommate.integrations import ddp as roommate_ddp

    distributed.init_process_group("gloo")
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    data, kept, begin, done = Points(False), Path(folder) / "net.pt", 0, None
    if kept.exists():
        state = torch.load(kept)
        net.load_state_dict(state["net"])
        begin, done = state["epoch"], state["done"]
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    epoch = begin

    def save() -> None:
        if distributed.get_rank() == 0:
            kept.parent.mkdir(exist_ok=True)
            torch.save({"net": net.state_dict(), "epoch": epoch, "done": batches.done}, kept)
        distributed.barrier()

    batches = roommate_ddp.steps(loader, optimizer=optimizer, done=done, save=save, **options)
    for epoch in range(begin, epochs):  # noqa: B007 (a checkpoint reads it)
        for x, y in batches:
            optimizer.zero_grad()
            model(x, y)["loss"].backward()
            optimizer.step()
    distributed.destroy_process_group()
    return net


if __name__ == "__main__":
    kind, folder = sys.argv[1:]
    options = {"min": BATCH, "max": 4 * BATCH}
    if kind == "lightning":
        _, net, _ = lightning(folder, 40, devices=2, **options)
    elif kind == "ddp":
        net = ddp(folder, 40, **options)
    else:
        _, net, _ = transformers(folder, 40, **options)
    print(f"trained {len(net.sizes)} steps", flush=True)
