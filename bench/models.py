#!/usr/bin/env python3
"""Computes features of models from their published architectures, without a framework.

Writes profiles/models.jsonl, which the utilisation predictor reads:

    python3 bench/models.py > profiles/models.jsonl

Each model is built layer by layer from the shapes in its paper; a layer adds its operations (2 per
multiply-add), its parameters and its output elements, all for one sample, forward only. Choices
that the papers leave open (sizes of our NCF, of a reinforcement learner's frames) are documented in
place.
"""

import json

BYTES = 2  # of an activation: half precision


class Net:
    """Counts the cost of one sample through the network."""

    def __init__(self, *shape):
        self.shape = shape
        self.flops = self.params = self.act = 0
        self.counts = dict.fromkeys(
            ("conv", "linear", "attention", "norm", "embedding", "recurrent"), 0
        )
        self.ops = self.depth = 0
        self.input = size(shape)
        self.seq = 1

    def emit(self, shape, flops=0, params=0, kind=None, deep=True):
        self.shape = shape
        self.flops += flops
        self.params += params
        self.act += size(shape) * BYTES
        self.ops += 1
        if kind:
            self.counts[kind] += 1
            self.depth += deep and kind != "norm"
        return self

    def conv(self, out, kernel, stride=1, pad=None, groups=1, bias=False, dilation=1, deep=True):
        kh, kw = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        ph, pw = pad if isinstance(pad, tuple) else (pad, pad)
        ph = dilation * (kh - 1) // 2 if ph is None else ph
        pw = dilation * (kw - 1) // 2 if pw is None else pw
        c, h, w = self.shape
        h = (h + 2 * ph - dilation * (kh - 1) - 1) // stride + 1
        w = (w + 2 * pw - dilation * (kw - 1) - 1) // stride + 1
        weights = kh * kw * (c // groups) * out
        return self.emit((out, h, w), 2 * weights * h * w, weights + bias * out, "conv", deep)

    def up(self, out, kernel=4):
        """A transposed convolution that doubles the picture."""
        c, h, w = self.shape
        weights = kernel * kernel * c * out
        return self.emit((out, 2 * h, 2 * w), 2 * weights * h * w, weights, "conv")

    def norm(self):
        return self.emit(self.shape, 4 * size(self.shape), 2 * self.shape[0], "norm")

    def layer_norm(self):
        return self.emit(self.shape, 8 * size(self.shape), 2 * self.shape[-1], "norm")

    def act_(self, ops=1):
        """An elementwise function; in place or not, the step has to run it."""
        return self.emit(self.shape, ops * size(self.shape))

    def cbr(self, out, kernel, stride=1, **more):
        return self.conv(out, kernel, stride, **more).norm().act_()

    def pool(self, kernel, stride=None, pad=0, ceil=False):
        stride = stride or kernel
        c, *hw = self.shape
        out = [
            -(-(x + 2 * pad - kernel) // stride) + 1
            if ceil
            else (x + 2 * pad - kernel) // stride + 1
            for x in hw
        ]
        return self.emit((c, *out), kernel * kernel * size((c, *out)))

    def squash(self, to=1):
        """Average pooling to a fixed size."""
        flops = size(self.shape)
        return self.emit((self.shape[0], to, to), flops)

    def flat(self):
        self.shape = (size(self.shape),)
        return self

    def linear(self, out, bias=True):
        *rest, last = self.shape
        weights = last * out
        return self.emit((*rest, out), 2 * weights * size(rest), weights + bias * out, "linear")

    def attention(self, heads):
        """Self-attention of a sequence: projections, scores, weighted sum."""
        n, d = self.shape
        self.linear(3 * d)
        self.emit((n, d), 4 * n * n * d + 5 * heads * n * n, 0, "attention")
        return self.linear(d)

    def block(self, heads, hidden):
        n, d = self.shape
        self.layer_norm().attention(heads).act_()
        return self.layer_norm().linear(hidden).act_(8).linear(d).act_()

    def loss(self):
        """Cross-entropy over a vocabulary, which frameworks compute in single precision: the
        scores, the logarithms of their probabilities, and the gradient of each.
        """
        self.act += 4 * 4 * size(self.shape)
        self.ops += 1
        return self.act_(5)

    def embed(self, rows, dim, tokens):
        return self.emit((tokens, dim), 0, rows * dim, "embedding")

    def lstm(self, hidden, layers, steps, both_ways=False):
        d = self.shape[-1]
        for _ in range(layers):
            for _ in range(1 + both_ways):
                weights = 4 * hidden * (d + hidden)
                self.emit(
                    (steps, hidden),
                    2 * weights * steps + 9 * hidden * steps,
                    weights + 8 * hidden,
                    "recurrent",
                )
                self.act += 4 * hidden * steps * BYTES
                self.ops += steps - 1
            d = hidden * (1 + both_ways)
            self.shape = (steps, d)
        return self


def size(shape):
    n = 1
    for x in shape:
        n *= x
    return n


def branches(net, *paths):
    """Runs each path from the same input and stacks the channels."""
    start, depth = net.shape, net.depth
    out, deepest = 0, depth
    for path in paths:
        net.shape, net.depth = start, depth
        path(net)
        out += net.shape[0]
        deepest = max(deepest, net.depth)
    net.shape = (out, *net.shape[1:])
    net.depth = deepest
    net.act += size(net.shape) * BYTES
    net.ops += 1
    return net


def alexnet():
    net = Net(3, 224, 224)
    net.conv(64, 11, 4, 2, bias=True).act_().pool(3, 2)
    net.conv(192, 5, bias=True).act_().pool(3, 2)
    for out in (384, 256, 256):
        net.conv(out, 3, bias=True).act_()
    return net.pool(3, 2).flat().linear(4096).act_().linear(4096).act_().linear(1000)


def vgg(plan, side):
    net = Net(3, side, side)
    for layer in plan:
        net.pool(2) if layer == "M" else net.conv(layer, 3, bias=True).act_()
    return net.squash(7).flat().linear(4096).act_(2).linear(4096).act_(2).linear(1000)


def vgg_plan(*repeats):
    widths = (64, 128, 256, 512, 512)
    return [x for width, n in zip(widths, repeats) for x in [width] * n + ["M"]]


def resnet(blocks, bottleneck, side):
    net = Net(3, side, side).cbr(64, 7, 2).pool(3, 2, 1)
    for stage, n in enumerate(blocks):
        width = 64 << stage
        for i in range(n):
            stride = 2 if i == 0 and stage > 0 else 1
            out = width * (4 if bottleneck else 1)
            start = net.shape
            if bottleneck:
                net.cbr(width, 1).cbr(width, 3, stride).conv(out, 1).norm()
            else:
                net.cbr(width, 3, stride).conv(width, 3).norm()
            if start[0] != out or stride > 1:
                end, net.shape = net.shape, start
                net.conv(out, 1, stride, deep=False).norm()
                net.shape = end
            net.act_(2)
    return net.squash().flat().linear(1000)


def squeezenet(side):
    """SqueezeNet 1.1."""
    net = Net(3, side, side).conv(64, 3, 2, 0, bias=True).act_().pool(3, 2, ceil=True)
    for i, (squeeze, expand) in enumerate(
        [(16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256)]
    ):
        net.conv(squeeze, 1, bias=True).act_()
        branches(
            net,
            lambda n, e=expand: n.conv(e, 1, bias=True).act_(),
            lambda n, e=expand: n.conv(e, 3, bias=True).act_(),
        )
        if i in (1, 3):
            net.pool(3, 2, ceil=True)
    return net.conv(1000, 1, bias=True).act_().squash().flat()


def gate(net, inner):
    """Squeeze and excitation."""
    c, h, w = net.shape
    net.squash().conv(inner, 1, bias=True, deep=False).act_().conv(
        c, 1, bias=True, deep=False
    ).act_(2)
    net.shape = (c, h, w)
    return net.act_()


# Kernel, expanded width, output width, squeeze and excitation, stride: MobileNetV3-Large, table 1.
MOBILE_V3 = [
    (3, 16, 16, 0, 1), (3, 64, 24, 0, 2), (3, 72, 24, 0, 1), (5, 72, 40, 24, 2),
    (5, 120, 40, 32, 1),
    (5, 120, 40, 32, 1), (3, 240, 80, 0, 2), (3, 200, 80, 0, 1), (3, 184, 80, 0, 1),
    (3, 184, 80, 0, 1),
    (3, 480, 112, 120, 1), (3, 672, 112, 168, 1), (5, 672, 160, 168, 2), (5, 960, 160, 240, 1),
    (5, 960, 160, 240, 1),
]  # fmt: skip


def mobile_v3(side, dilated=False):
    net = Net(3, side, side).cbr(16, 3, 2)
    for i, (kernel, wide, out, inner, stride) in enumerate(MOBILE_V3):
        # As the backbone of DeepLab the last stage keeps its resolution and uses dilation instead.
        late = dilated and i >= 12
        same = net.shape[0] == out and stride == 1
        if wide != net.shape[0]:
            net.cbr(wide, 1)
        net.cbr(wide, kernel, 1 if late else stride, groups=wide, dilation=2 if late else 1)
        if inner:
            gate(net, inner)
        net.conv(out, 1).norm()
        if same:
            net.act_()
    return net.cbr(960, 1)


def mobile_v3_large():
    return mobile_v3(224).squash().flat().linear(1280).act_().linear(1000)


def deeplab():
    """DeepLabV3 with atrous pyramid pooling on MobileNetV3-Large."""
    net = mobile_v3(256, dilated=True)
    far = [lambda n, d=d: n.cbr(256, 3, dilation=d) for d in (12, 24, 36)]
    side = net.shape[1]

    def whole(n):
        n.squash().cbr(256, 1)
        n.shape = (256, side, side)
        n.act_()

    branches(net, lambda n: n.cbr(256, 1), *far, whole)
    net.cbr(256, 1).act_().cbr(256, 3).conv(21, 1, bias=True)
    return net.emit((21, 256, 256), 8 * 21 * 256 * 256)


def mobile_v2():
    net = Net(3, 224, 224).cbr(32, 3, 2)
    for t, out, n, stride in [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]:
        for i in range(n):
            wide = net.shape[0] * t
            if t > 1:
                net.cbr(wide, 1)
            net.cbr(wide, 3, stride if i == 0 else 1, groups=wide).conv(out, 1).norm()
    return net.cbr(1280, 1).squash().flat().linear(1000)


def shufflenet_v2():
    net = Net(3, 224, 224).cbr(24, 3, 2).pool(3, 2, 1)
    for out, n in ((116, 4), (232, 8), (464, 4)):
        half = out // 2
        branches(
            net,
            lambda x: x.conv(x.shape[0], 3, 2, groups=x.shape[0]).norm().cbr(half, 1),
            lambda x: x.cbr(half, 1).conv(half, 3, 2, groups=half).norm().cbr(half, 1),
        )
        for _ in range(n - 1):
            net.shape = (half, *net.shape[1:])
            net.cbr(half, 1).conv(half, 3, groups=half).norm().cbr(half, 1)
            net.shape = (out, *net.shape[1:])
            net.act_()  # the shuffle copies everything
    return net.cbr(1024, 1).squash().flat().linear(1000)


def googlenet():
    net = Net(3, 224, 224).cbr(64, 7, 2).pool(3, 2, 1).cbr(64, 1).cbr(192, 3).pool(3, 2, 1)
    table = [
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    ]  # fmt: skip
    for i, (a, b1, b, c1, c, d) in enumerate(table):
        branches(
            net,
            lambda n: n.cbr(a, 1),
            lambda n: n.cbr(b1, 1).cbr(b, 3),
            lambda n: n.cbr(c1, 1).cbr(c, 3),
            lambda n: n.pool(3, 1, 1).cbr(d, 1),
        )
        if i in (1, 6):
            net.pool(3, 2, 1)
    return net.squash().flat().linear(1000)


def inception_v3():
    net = Net(3, 299, 299).cbr(32, 3, 2, pad=0).cbr(32, 3, pad=0).cbr(64, 3).pool(3, 2)
    net.cbr(80, 1).cbr(192, 3, pad=0).pool(3, 2)
    for pooled in (32, 64, 64):
        branches(
            net,
            lambda n: n.cbr(64, 1),
            lambda n: n.cbr(48, 1).cbr(64, 5),
            lambda n: n.cbr(64, 1).cbr(96, 3).cbr(96, 3),
            lambda n, p=pooled: n.pool(3, 1, 1).cbr(p, 1),
        )
    branches(
        net,
        lambda n: n.cbr(384, 3, 2, pad=0),
        lambda n: n.cbr(64, 1).cbr(96, 3).cbr(96, 3, 2, pad=0),
        lambda n: n.pool(3, 2),
    )
    for mid in (128, 160, 160, 192):
        branches(
            net,
            lambda n: n.cbr(192, 1),
            lambda n, m=mid: n.cbr(m, 1).cbr(m, (1, 7)).cbr(192, (7, 1)),
            lambda n, m=mid: (
                n.cbr(m, 1).cbr(m, (7, 1)).cbr(m, (1, 7)).cbr(m, (7, 1)).cbr(192, (1, 7))
            ),
            lambda n: n.pool(3, 1, 1).cbr(192, 1),
        )
    branches(
        net,
        lambda n: n.cbr(192, 1).cbr(320, 3, 2, pad=0),
        lambda n: n.cbr(192, 1).cbr(192, (1, 7)).cbr(192, (7, 1)).cbr(192, 3, 2, pad=0),
        lambda n: n.pool(3, 2),
    )
    for _ in range(2):
        fork = (lambda n: n.cbr(384, (1, 3)), lambda n: n.cbr(384, (3, 1)))
        branches(
            net,
            lambda n: n.cbr(320, 1),
            lambda n: branches(n.cbr(384, 1), *fork),
            lambda n: branches(n.cbr(448, 1).cbr(384, 3), *fork),
            lambda n: n.pool(3, 1, 1).cbr(192, 1),
        )
    return net.squash().flat().linear(1000)


def inception_v4():
    net = Net(3, 299, 299).cbr(32, 3, 2, pad=0).cbr(32, 3, pad=0).cbr(64, 3)
    branches(net, lambda n: n.pool(3, 2), lambda n: n.cbr(96, 3, 2, pad=0))
    branches(
        net,
        lambda n: n.cbr(64, 1).cbr(96, 3, pad=0),
        lambda n: n.cbr(64, 1).cbr(64, (7, 1)).cbr(64, (1, 7)).cbr(96, 3, pad=0),
    )
    branches(net, lambda n: n.cbr(192, 3, 2, pad=0), lambda n: n.pool(3, 2))
    for _ in range(4):
        branches(
            net,
            lambda n: n.pool(3, 1, 1).cbr(96, 1),
            lambda n: n.cbr(96, 1),
            lambda n: n.cbr(64, 1).cbr(96, 3),
            lambda n: n.cbr(64, 1).cbr(96, 3).cbr(96, 3),
        )
    branches(
        net,
        lambda n: n.pool(3, 2),
        lambda n: n.cbr(384, 3, 2, pad=0),
        lambda n: n.cbr(192, 1).cbr(224, 3).cbr(256, 3, 2, pad=0),
    )
    for _ in range(7):
        branches(
            net,
            lambda n: n.pool(3, 1, 1).cbr(128, 1),
            lambda n: n.cbr(384, 1),
            lambda n: n.cbr(192, 1).cbr(224, (1, 7)).cbr(256, (7, 1)),
            lambda n: (
                n.cbr(192, 1).cbr(192, (1, 7)).cbr(224, (7, 1)).cbr(224, (1, 7)).cbr(256, (7, 1))
            ),
        )
    branches(
        net,
        lambda n: n.pool(3, 2),
        lambda n: n.cbr(192, 1).cbr(192, 3, 2, pad=0),
        lambda n: n.cbr(256, 1).cbr(256, (1, 7)).cbr(320, (7, 1)).cbr(320, 3, 2, pad=0),
    )
    for _ in range(3):
        fork = (lambda n: n.cbr(256, (1, 3)), lambda n: n.cbr(256, (3, 1)))
        branches(
            net,
            lambda n: n.pool(3, 1, 1).cbr(256, 1),
            lambda n: n.cbr(256, 1),
            lambda n: branches(n.cbr(384, 1), *fork),
            lambda n: branches(n.cbr(384, 1).cbr(448, (1, 3)).cbr(512, (3, 1)), *fork),
        )
    return net.squash().flat().linear(1000)


def vit_b16():
    net = Net(3, 224, 224).conv(768, 16, 16, 0, bias=True)
    net.params += 768 * 198
    net.shape = (197, 768)
    net.seq = 197
    for _ in range(12):
        net.block(12, 3072)
    net.layer_norm()
    net.shape = (768,)
    return net.linear(1000)


def yolos_tiny():
    """A vision transformer (DeiT-tiny) over 16 x 16 patches of 512 x 512 and 100 detection tokens.
    """
    net = Net(3, 512, 512).conv(192, 16, 16, 0, bias=True)
    net.shape = (1 + 1024 + 100, 192)
    net.seq = 1125
    net.params += 1125 * 192
    for _ in range(12):
        net.block(3, 768)
    net.layer_norm()
    for outs in ((192, 192, 92), (192, 192, 4)):
        net.shape = (100, 192)
        for out in outs:
            net.linear(out).act_()
    return net


def text(vocabulary, seq, head, positions=512, d=768, layers=12):
    net = Net(seq)
    net.seq = seq
    net.embed(vocabulary, d, seq).embed(positions, d, seq).act_().layer_norm()
    for _ in range(layers):
        net.block(d // 64, 4 * d)
    net.layer_norm()
    if head == "span":
        return net.linear(2)
    if head == "words":
        net.linear(vocabulary, bias=False)
        net.params -= vocabulary * d  # shared with the embedding
        return net.loss()
    net.shape = (d,)
    return net.linear(d).act_().linear(2)


def translator():
    """The base Transformer: six layers each way, 37,000 word pieces, sentences of 50."""
    net = Net(50)
    net.seq = 50
    net.embed(37_000, 512, 50)
    for _ in range(6):
        net.block(8, 2048)
    for _ in range(6):
        net.layer_norm().attention(8).act_().block(8, 2048)
    net.linear(37_000, bias=False)
    net.params -= 37_000 * 512
    return net.loss()


def lstm_words():
    """Two layers of 650, unrolled over 35 words of WikiText-2."""
    net = Net(35)
    net.seq = 35
    net.embed(33_278, 650, 35).act_().lstm(650, 2, 35)
    return net.act_().linear(33_278).loss()


def ncf():
    """Neural collaborative filtering on the users and films of ML-20M: 32 factors each for the
    product and for the perceptron 64-32-16, our choice.
    """
    net = Net(2)
    for rows in (138_493, 26_744):
        net.embed(rows, 32, 1).embed(rows, 32, 1)
    net.shape = (64,)
    net.linear(64).act_().linear(32).act_().linear(16).act_()
    net.shape = (48,)
    return net.linear(1).act_(4)


def recommendation():
    """The autoencoder of ML-20M: films to 600 to 200 and back."""
    net = Net(20_108)
    for out in (600, 200, 600, 20_108):
        net.linear(out).act_()
    return net


def deepspeech2():
    """Two convolutions and five two-way recurrent layers of 800 over 10 s of sound."""
    net = Net(1, 161, 1000).cbr(32, (41, 11), 2).cbr(32, (21, 11), 2)
    c, h, w = net.shape
    net.shape = (w, c * h)
    net.seq = w
    net.lstm(800, 5, w, both_ways=True)
    return net.layer_norm().linear(29)


def cyclegan():
    """Two generators of nine residual blocks and two patch discriminators on 256 x 256."""
    net = Net(3, 256, 256)
    for _ in range(2):
        net.shape = (3, 256, 256)
        net.cbr(64, 7).cbr(128, 3, 2).cbr(256, 3, 2)
        for _ in range(9):
            net.cbr(256, 3).conv(256, 3).norm().act_()
        net.up(128, 3).norm().act_().up(64, 3).norm().act_().conv(3, 7).act_()
        net.conv(64, 4, 2, 1).act_().cbr(128, 4, 2, pad=1).cbr(256, 4, 2, pad=1).cbr(
            512, 4, 1, pad=1
        ).conv(1, 4, 1, 1)
    return net


def atari():
    """The network of the 2015 DQN paper, also of the usual A2C and A3C: four frames of 84 x 84."""
    net = Net(4, 84, 84)
    net.conv(32, 8, 4, 0, bias=True).act_().conv(64, 4, 2, 0, bias=True).act_().conv(
        64, 3, 1, 0, bias=True
    ).act_()
    return net.flat().linear(512).act_().linear(7)


# Name, kind of task, other names, network. A trace that names only the model means the training
# task on the usual data set.
MODELS = [
    ("vgg16-cifar", "train", [], lambda: vgg(vgg_plan(2, 2, 3, 3, 3), 32)),
    ("squeezenet-cifar", "train", ["squeezenet"], lambda: squeezenet(32)),
    ("resnet50-cifar", "train", [], lambda: resnet((3, 4, 6, 3), True, 32)),
    ("ncf-ml20m", "train", ["ncf", "neumf"], ncf),
    ("lstm-wikitext", "train", ["lstm", "lm"], lstm_words),
    ("bert-squad", "train", ["bert", "bert_base"], lambda: text(30_522, 384, "span")),
    ("deeplab-mbv3", "train", ["deeplab", "deeplabv3"], deeplab),
    ("resnet18-imagenet", "train", ["resnet18"], lambda: resnet((2, 2, 2, 2), False, 224)),
    ("resnet50-imagenet", "train", ["resnet50"], lambda: resnet((3, 4, 6, 3), True, 224)),
    ("vit-b16-imagenet", "train", ["vit", "vit_b16"], vit_b16),
    ("mobilenetv3l-imagenet", "train", ["mobilenetv3", "mobilenet_v3_large"], mobile_v3_large),
    ("gpt2-lm", "train", ["gpt2"], lambda: text(50_257, 512, "words", 1024)),
    ("resnet50", "serve", [], lambda: resnet((3, 4, 6, 3), True, 224)),
    ("inception_v3", "serve", [], inception_v3),
    ("gpt2", "serve", [], lambda: text(50_257, 128, "words", 1024)),
    ("bert", "serve", [], lambda: text(30_522, 128, "class")),
    ("roberta", "serve", [], lambda: text(50_265, 128, "class", 514)),
    ("yolos-tiny", "serve", [], yolos_tiny),
    ("alexnet", "train", [], alexnet),
    ("vgg11", "train", [], lambda: vgg(vgg_plan(1, 1, 2, 2, 2), 224)),
    ("vgg16", "train", [], lambda: vgg(vgg_plan(2, 2, 3, 3, 3), 224)),
    ("vgg19", "train", [], lambda: vgg(vgg_plan(2, 2, 4, 4, 4), 224)),
    ("resnet101", "train", [], lambda: resnet((3, 4, 23, 3), True, 224)),
    ("resnet152", "train", [], lambda: resnet((3, 8, 36, 3), True, 224)),
    ("googlenet", "train", [], googlenet),
    ("inception3", "train", ["inception_v3"], inception_v3),
    ("inception4", "train", ["inception_v4"], inception_v4),
    ("mobilenet_v2", "train", [], mobile_v2),
    ("shufflenet_v2_x1_0", "train", ["shufflenet", "shufflenet_v2"], shufflenet_v2),
    ("transformer", "train", [], translator),
    ("recommendation", "train", [], recommendation),
    ("deepspeech2", "train", ["deepspeech"], deepspeech2),
    ("cyclegan", "train", [], cyclegan),
    ("a2c", "train", ["a3c"], atari),
    ("dqn", "train", [], atari),
]


def row(name, kind, aliases, build):
    net = build()
    features = {"flops": net.flops, "params": net.params, "act_bytes": net.act, **net.counts}
    shape = {"ops": net.ops, "depth": net.depth, "input": net.input, "seq": net.seq}
    return {"name": name, "kind": kind, "aliases": aliases, **features, **shape}


if __name__ == "__main__":
    for model in MODELS:
        print(json.dumps(row(*model)))
