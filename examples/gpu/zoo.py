"""Training tasks and services with synthetic data generated on the GPU, for these examples and
bench/gpu.

Needs PyTorch; torchvision and transformers only for the tasks that use them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

#: Batch sizes of training tasks, the usual one first.
TRAIN = {
    "vgg16-cifar": (512, 64, 128, 256, 1024, 2048),
    "squeezenet-cifar": (512, 64, 128, 256, 1024, 2048),
    "resnet50-cifar": (1024, 128, 256, 512, 2048),
    "ncf-ml20m": (8192, 1024, 2048, 4096, 16384, 65536),
    "lstm-wikitext": (256, 32, 64, 128, 512, 1024),
    "bert-squad": (16, 4, 8, 32, 64),
    "deeplab-mbv3": (16, 4, 8, 32, 64),
    "resnet18-imagenet": (128, 16, 32, 64, 256, 512),
    "resnet50-imagenet": (64, 8, 16, 32, 128, 256),
    "vit-b16-imagenet": (64, 8, 16, 32, 128),
    "mobilenetv3l-imagenet": (128, 16, 32, 64, 256, 512),
    "gpt2-lm": (8, 2, 4, 16, 32),
    # Modules of our own, of which `profiles/` knows nothing.
    "unet-own": (16, 4, 8, 32),
    "recommender-own": (8192, 2048, 4096, 16384),
    "transformer-own": (16, 4, 8, 32),
}
SERVE = ("resnet50", "inception_v3", "gpt2", "bert", "roberta", "yolos-tiny")

#: Side length and number of classes of a task's pictures.
PICTURES = {
    "vgg16-cifar": (32, 10),
    "squeezenet-cifar": (32, 10),
    "resnet50-cifar": (32, 100),
    "resnet18-imagenet": (224, 1000),
    "resnet50-imagenet": (224, 1000),
    "vit-b16-imagenet": (224, 1000),
    "mobilenetv3l-imagenet": (224, 1000),
}

Make = Callable[[int], tuple[Any, Any]]


def build(kind: str, name: str) -> tuple[Any, Make]:
    """A model on the CPU, and a function from a batch size to inputs and targets on the GPU."""
    built = training(name) if kind == "train" else serving(name)
    if built is None:
        known = ", ".join(TRAIN if kind == "train" else SERVE)
        raise SystemExit(f"unknown task {name!r}: there are {known}")
    return built


def training(name: str) -> tuple[Any, Make] | None:
    import torch

    if name in PICTURES:
        import torchvision.models as tv

        side, classes = PICTURES[name]
        make = {
            "vgg16": tv.vgg16,
            "squeezenet": tv.squeezenet1_1,
            "resnet18": tv.resnet18,
            "resnet50": tv.resnet50,
            "vit": tv.vit_b_16,
            "mobilenetv3l": tv.mobilenet_v3_large,
        }[name.split("-")[0]]
        return make(num_classes=classes), pictures(side, classes)
    if name == "deeplab-mbv3":
        from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

        def dense(batch: int) -> tuple[Any, Any]:
            x = torch.randn(batch, 3, 256, 256, device="cuda")
            return x, torch.randint(0, 21, (batch, 256, 256), device="cuda")

        return deeplabv3_mobilenet_v3_large(weights_backbone=None), dense
    if name == "bert-squad":
        from transformers import BertConfig, BertForQuestionAnswering

        return BertForQuestionAnswering(BertConfig()), tokens(384, 30000)
    if name == "gpt2-lm":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config()), tokens(512, 50000)
    if name == "lstm-wikitext":
        return recurrent(), tokens(35, 33278)
    if name == "ncf-ml20m":

        def pairs(batch: int) -> tuple[Any, Any]:
            users = torch.randint(0, 138493, (batch,), device="cuda")
            items = torch.randint(0, 26744, (batch,), device="cuda")
            return torch.stack([users, items], 1), torch.rand(batch, device="cuda").round()

        return collaborative(), pairs
    if name == "unet-own":

        def scans(batch: int) -> tuple[Any, Any]:
            x = torch.randn(batch, 3, 256, 256, device="cuda")
            return x, torch.rand(batch, 1, 256, 256, device="cuda").round()

        return u_shaped(), scans
    if name == "recommender-own":

        def clicks(batch: int) -> tuple[Any, Any]:
            ids = torch.randint(0, ROWS, (batch, TABLES), device="cuda")
            return ids, torch.rand(batch, device="cuda").round()

        return recommending(), clicks
    if name == "transformer-own":
        return causal(), tokens(256, WORDS)
    return None


def serving(name: str) -> tuple[Any, Make] | None:
    if name in ("resnet50", "inception_v3"):
        import torchvision.models as tv

        if name == "resnet50":
            return tv.resnet50(), pictures(224, 1000)
        return tv.inception_v3(weights=None, init_weights=False), pictures(299, 1000)
    if name not in SERVE:
        return None
    import transformers as tf

    if name == "gpt2":
        return tf.GPT2Model(tf.GPT2Config()), tokens(128, 50000)
    if name == "bert":
        return tf.BertModel(tf.BertConfig()), tokens(128, 30000)
    if name == "roberta":
        return tf.RobertaModel(tf.RobertaConfig()), tokens(128, 50000)
    config = tf.YolosConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768,
        image_size=[512, 512], num_detection_tokens=100,
    )
    return tf.YolosModel(config), pictures(512, 1000)


def loss(name: str, out: Any, y: Any) -> Any:
    """The loss function of a training task, of the model's output and the targets."""
    from torch.nn import functional

    if name == "bert-squad":
        return functional.cross_entropy(out.start_logits, y[:, 0] % 384)
    if name == "gpt2-lm":
        return functional.cross_entropy(out.logits.flatten(0, 1), y.flatten())
    if name in ("lstm-wikitext", "transformer-own"):
        return functional.cross_entropy(out.flatten(0, 1), y.flatten())
    if name == "deeplab-mbv3":
        return functional.cross_entropy(out["out"], y)
    if name in ("ncf-ml20m", "unet-own", "recommender-own"):
        return functional.mse_loss(out, y.to(out.dtype))
    return functional.cross_entropy(out, y)


def pictures(side: int, classes: int) -> Make:
    import torch

    def make(batch: int) -> tuple[Any, Any]:
        x = torch.randn(batch, 3, side, side, device="cuda")
        return x, torch.randint(0, classes, (batch,), device="cuda")

    return make


def tokens(length: int, vocabulary: int) -> Make:
    import torch

    def make(batch: int) -> tuple[Any, Any]:
        ids = torch.randint(0, vocabulary, (batch, length), device="cuda")
        return ids, ids

    return make


def recurrent() -> Any:
    from torch import nn

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(33278, 650)
            self.rnn = nn.LSTM(650, 650, 2, batch_first=True)
            self.out = nn.Linear(650, 33278)

        def forward(self, ids: Any) -> Any:
            return self.out(self.rnn(self.embed(ids))[0])

    return Lstm()


def collaborative() -> Any:
    import torch
    from torch import nn

    class Ncf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = nn.ModuleList([nn.Embedding(138493, 64), nn.Embedding(138493, 128)])
            self.items = nn.ModuleList([nn.Embedding(26744, 64), nn.Embedding(26744, 128)])
            sizes = ((256, 256), (256, 128), (128, 64))
            self.mlp = nn.Sequential(*itertools.chain(*[(nn.Linear(a, b), nn.ReLU()) for a,
                                                        b in sizes]))
            self.out = nn.Linear(128, 1)

        def forward(self, pairs: Any) -> Any:
            u, i = pairs[:, 0], pairs[:, 1]
            product = self.users[0](u) * self.items[0](i)
            deep = self.mlp(torch.cat([self.users[1](u), self.items[1](i)], -1))
            return self.out(torch.cat([product, deep], -1)).squeeze(-1)

    return Ncf()


def u_shaped() -> Any:
    import torch
    from torch import nn

    def double(a: int, b: int) -> Any:
        layers = [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    class Unet(nn.Module):
        def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
            super().__init__()
            pairs = list(itertools.pairwise(widths))
            self.first = double(3, widths[0])
            self.down = nn.ModuleList([double(a, b) for a, b in pairs])
            self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs)])
            self.join = nn.ModuleList([double(2 * a, a) for a, _ in reversed(pairs)])
            self.out = nn.Conv2d(widths[0], 1, 1)

        def forward(self, x: Any) -> Any:
            kept = [self.first(x)]
            for down in self.down:
                kept.append(down(nn.functional.max_pool2d(kept[-1], 2)))
            x = kept.pop()
            for up, join in zip(self.up, self.join, strict=True):
                x = join(torch.cat([up(x), kept.pop()], 1))
            return self.out(x)

    return Unet()


#: Embedding tables of the recommender and their rows; words of the transformer.
TABLES, ROWS, WORDS = 16, 100_000, 16_000


def recommending() -> Any:
    import torch
    from torch import nn

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(ROWS, 64) for _ in range(TABLES)])
            inputs = TABLES * 64 + TABLES * TABLES
            self.mlp = nn.Sequential(nn.Linear(inputs, 512), nn.ReLU(), nn.Linear(512, 256),
                                     nn.ReLU(), nn.Linear(256, 1))

        def forward(self, ids: Any) -> Any:
            found = [table(ids[:, n]) for n, table in enumerate(self.tables)]
            each = torch.stack(found, 1)
            products = torch.bmm(each, each.transpose(1, 2))
            return self.mlp(torch.cat([each.flatten(1), products.flatten(1)], 1)).squeeze(-1)

    return Recommender()


def causal() -> Any:
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self, width: int = 512, layers: int = 8) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, width)
            layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, batch_first=True,
                                               norm_first=True)
            self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.out = nn.Linear(width, WORDS)

        def forward(self, ids: Any) -> Any:
            length = ids.shape[1]
            ahead = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
            return self.out(self.body(self.embed(ids), mask=ahead))

    return Transformer()
