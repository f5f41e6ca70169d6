"""Programs of one process, each of which calls modules in another way: what they leave in ``found`` is compared.

With each stands what becomes of the calls: ``divided``, or words of the reason why they are whole, or nothing, where
versions of torch differ.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

import torch

from ddp_patch import autopatch

HEAD = """
    import copy, math
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    x = torch.randn(53, 8)
    y = (x.sum(1) > 0).long()
    found = []


    def batches(size=10):
        for at in range(0, 53, size):
            yield x[at : at + size], y[at : at + size]


    def net(out=2):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, out))


    def fit(model, loss_of, optimizer=None, size=10):
        optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-2)
        for a, b in batches(size):
            optimizer.zero_grad()
            loss = loss_of(a, b)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        found.extend(p.detach() for p in model.parameters())
"""

PROGRAMS: Mapping[str, tuple[str, str]] = {
    "class weights, pairs of samples, clipping, accuracy, running averages": (
        "divided",
        """
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        total = count = hits = 0
        for epoch in range(2):
            for a, b in batches():
                out = model(a)
                loss = F.cross_entropy(out, b, weight=torch.tensor([1.0, 3.0])) + 0.1 * torch.cdist(out, out).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                total += loss.item() * a.size(0)
                count += a.size(0)
                hits += (out.argmax(1) == b).sum().item()
        found = [*(p.detach() for p in model.parameters()), total / count, hits / count]
        """,
    ),
    "a gradient penalty of inputs, derived twice": (
        "divided",
        """
        G, D = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)), net(1)
        of_g, of_d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
        for real, _ in batches():
            n = len(real)
            fake, mix = G(torch.randn(n, 4)), torch.rand(n, 1)
            between = (mix * real + (1 - mix) * fake.detach()).requires_grad_(True)
            (slope,) = torch.autograd.grad(D(between).sum(), between, create_graph=True)
            loss = D(fake.detach()).mean() - D(real).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()
            of_d.zero_grad()
            loss.backward()
            of_d.step()
            of_g.zero_grad()
            (-D(G(torch.randn(n, 4))).mean()).backward()
            of_g.step()
        found = [p.detach() for p in (*G.parameters(), *D.parameters())]
        """,
    ),
    "a gradient penalty of parameters, and a step of meta learning by hand": (
        "divided",
        """
        model = net()
        def loss_of(a, b):
            loss = F.cross_entropy(model(a), b)
            slopes = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
            return loss + sum((slope**2).sum() for slope in slopes)
        fit(model, loss_of)
        fast = net()
        for a, b in batches():
            slopes = torch.autograd.grad(F.cross_entropy(fast(a), b), [*fast.parameters()])
            with torch.no_grad():
                for p, slope in zip(fast.parameters(), slopes):
                    p -= 0.1 * slope
        found += [p.detach() for p in fast.parameters()]
        """,
    ),
    "batch normalisation, momentum None, one without buffers, in a convolution": (
        "divided",
        """
        model = nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 4, 2), nn.BatchNorm2d(4, momentum=None),
            nn.BatchNorm2d(4, affine=False, track_running_stats=False),
            nn.Flatten(), nn.Linear(16, 2), nn.BatchNorm1d(2),
        )
        fit(model, lambda a, b: F.cross_entropy(model(a), b), torch.optim.SGD(model.parameters(), 0.1))
        model.eval()
        found += [model(x), *model.buffers()]
        """,
    ),
    "batch normalisation, derived twice": (
        "divided",
        """
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        def loss_of(a, b):
            a = a.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(a).sum(), a, create_graph=True)
            return (slope.norm(2, 1) - 1).square().mean() + model(a).square().mean()
        fit(model, loss_of, torch.optim.SGD(model.parameters(), 0.01))
        """,
    ),
    "recurrent layers, batches first": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.head = nn.LSTM(2, 8, batch_first=True, bidirectional=True), nn.Linear(16, 2)

            def forward(self, a, state=None):
                return self.head(self.rnn(a.view(-1, 4, 2), state)[0][:, -1])

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        fit(model, lambda a, b: F.cross_entropy(model(a, (torch.zeros(2, len(a), 8), torch.zeros(2, len(a), 8))), b))
        copy.deepcopy(model)
        """,
    ),
    "sequences first, a state that is handed on, rows that are flattened": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.rnn, self.head = nn.Embedding(9, 6), nn.GRU(6, 6, 2), nn.Linear(6, 9)

            def forward(self, words, state):
                out, state = self.rnn(self.embed(words), state)
                return F.log_softmax(self.head(out).view(-1, 9), 1), state

        model, state = Net(), torch.zeros(2, 11, 6)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        words = torch.randint(0, 9, (61, 11))
        for at in range(0, 60, 7):
            size = min(7, 60 - at)
            out, state = model(words[at : at + size], state.detach())
            loss = F.nll_loss(out, words[at + 1 : at + 1 + size].view(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        found += [state.detach(), *(p.detach() for p in model.parameters())]
        """,
    ),
    "a transformer, sequences first": (
        "divided",
        """
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        model = nn.TransformerEncoder(layer, 2)
        words, mask = torch.randn(5, 11, 8), nn.Transformer.generate_square_subsequent_mask(5)
        fit(model, lambda a, b: model(words * a.mean(), mask=mask, is_causal=True).square().mean())
        model.eval()
        with torch.no_grad():
            found.append(model(words, mask=mask))
        """,
    ),
    "a model that returns its loss": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, a, b=None):
                out = self.inner(a)
                return out, None if b is None else F.cross_entropy(out, b)

        model = Net()
        fit(model, lambda a, b: model(a, b)[1])
        """,
    ),
    "a model that returns its loss, averaged over tokens that count": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

            def forward(self, words, labels):
                out = self.head(self.embed(words))
                return {"loss": F.cross_entropy(out.view(-1, 9), labels.view(-1), ignore_index=-1), "logits": out}

        model, words = Net(), torch.randint(0, 9, (53, 6))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for step, at in enumerate(range(0, 50, 7)):
            some = words[at : at + 7]
            labels = some.roll(1)
            if step > 4:  # padding comes later
                labels = torch.where(torch.arange(6) < torch.arange(len(some))[:, None] + 1, labels, -1)
            loss = model(some, labels=labels)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        """,
    ),
    "a model that returns its loss and much more, which is read at times": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 20000)

            def forward(self, a, b):
                out = self.inner(a)
                return F.cross_entropy(out, b), out

        model, step = Net(), 0
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for a, b in batches():
            loss, out = model(a, b)
            step += 1
            found.append(torch.tensor([*out.shape, len(out), out.size(1), out.dim()]))
            if step % 2:
                loss = loss + 0.1 * out.square().mean() + out[:, 0].sum()
                with torch.no_grad():
                    found += [(out.argmax(1) == b).sum().item(), out.max(), isinstance(out, torch.Tensor)]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        found.append(sum(p.detach().square().sum() for p in model.parameters()))
        """,
    ),
    "complex numbers": (
        "divided",
        """
        model = nn.Linear(8, 3, dtype=torch.complex128)
        fit(model, lambda a, b: (model(a.to(torch.complex128)).abs().square().mean() - b.double().mean()).square())
        """,
    ),
    "many classes, of which a loss outside of the model reads each rank's rows": (
        "divided",
        """
        model = nn.Linear(8, 20000)
        weight = 1 + torch.arange(20000.0) % 3
        aims = torch.randint(0, 20000, (53,))
        aims[::5] = -100
        chances = torch.rand(53, 20000).softmax(1)
        losses = [
            lambda out, aim, chance: F.cross_entropy(out, aim, weight),
            lambda out, aim, chance: nn.CrossEntropyLoss(label_smoothing=0.1)(out, aim),
            lambda out, aim, chance: F.cross_entropy(out, chance),
            lambda out, aim, chance: F.cross_entropy(out, aim, reduction="sum") / 10,
            lambda out, aim, chance: F.nll_loss(out.log_softmax(1), aim.clamp(min=0)),
            lambda out, aim, chance: F.cross_entropy(out, aim) + (out.argmax(1) == aim).sum() + out.square().mean(),
            lambda out, aim, chance: F.cross_entropy(out[:, :30], aim.clamp(0, 29)),
        ]
        for loss_of in losses:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for at in range(0, 53, 9):
                loss = loss_of(model(x[at : at + 9]), aims[at : at + 9], chances[at : at + 9])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
        found += [p.detach().square().sum() for p in model.parameters()]
        """,
    ),
    "much that is returned, and read in every way": (
        "divided",
        """
        import io, pickle

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, rows):
                return rows * 2

            @staticmethod
            def backward(ctx, slopes):
                return slopes * 2

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 9000)

            def forward(self, a):
                return self.inner(a), {"more": self.inner(a).tanh() * 2}

        def reloaded(out):
            file = io.BytesIO()
            torch.save(out.detach(), file)
            file.seek(0)
            return torch.load(file)

        def changed(out):
            out[:, 0] = 0
            return out.mul_(2).mean()

        model, after, cut = Net(), nn.Linear(9000, 2), torch.compile(lambda out: out.square().mean(), backend="eager")
        reads = [
            lambda out: Double.apply(out).mean(),
            lambda out: after(out).square().mean(),
            lambda out: out.mean() * float(out.detach().numpy().mean() + sum(out[0].tolist())),
            lambda out: torch.cat([out, out]).mean() + out.data.sum() + len(pickle.dumps(out.data)),
            lambda out: out.mean() + reloaded(out).sum() + out.cpu().detach().numpy().sum(),
            lambda out: torch.autograd.grad([out], [model.inner.weight], [out], retain_graph=True)[0].sum() + out.sum(),
            lambda out: (out.retain_grad(), out.sum().backward(retain_graph=True), out.grad.sum() + out.mean())[2],
            lambda out: changed(out),
            lambda out: cut(out),
            lambda out: sum(row.mean() for row in out) / len(out),
            lambda out: out.view(-1).square().mean() + torch.tensor(out.tolist()).sum() + len(repr(out)[:9]),
        ]
        for read in reads:
            for a, b in batches():
                out, more = model(a)
                found.append(torch.tensor([*out.shape, len(more["more"])]))
                loss = read(out) + 0.1 * read(more["more"])
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for p in (*model.parameters(), *after.parameters()):
                        p -= 1e-3 * (0 if p.grad is None else p.grad)
                found.append(loss.detach())
            found.append(sum(p.detach().square().sum() for p in model.parameters()))
        with torch.no_grad():
            outs = [model(a)[0] for a, b in batches()]
        found.append(torch.cat(outs).sum())
        """,
    ),
    "a model that averages its loss over a mask by itself": (
        "a mean by a number",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, a, mask):
                return (self.inner(a).square().sum(1) * mask).sum() / mask.sum()

        model, step = Net(), [0]
        def loss_of(a, b):
            step[0] += 1
            return model(a, (torch.arange(len(a)) % 3 < (3 if step[0] < 3 else 1)).double())
        fit(model, loss_of)
        """,
    ),
    "a part that is not used has no gradient, and a head that is used at times": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.never, self.other = net(), nn.Linear(2, 2), net()

            def forward(self, a):
                return self.inner(a), self.other(a)

        model, step = Net(), [0]
        def loss_of(a, b):
            step[0] += 1
            out, other = model(a)
            return F.cross_entropy(out, b) + (other.mean() if step[0] % 2 else 0)
        fit(model, loss_of, torch.optim.AdamW(model.parameters(), 0.1, weight_decay=1.0))
        found += [p.grad is None for p in model.parameters()]
        """,
    ),
    "experts that some rows choose": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

            def forward(self, a):
                weights = self.gate(a).softmax(1)
                chosen, out = weights.argmax(1), a.new_zeros(len(a), 2)
                for at, expert in enumerate(self.experts):
                    if (chosen == at).any():
                        out[chosen == at] = expert(a[chosen == at]) * weights[chosen == at][:, [at]]
                return out

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b), torch.optim.AdamW(model.parameters(), 0.1), size=4)
        """,
    ),
    "weights in the loss": (
        "divided",
        """
        model = net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b) + 0.1 * sum(p.norm() for p in model.parameters()))
        """,
    ),
    "one embedding for words and for classes": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, words):
                return self.head(self.embed(words).tanh())

        model, words = Net(), torch.randint(0, 9, (53, 6))
        fit(model, lambda a, b: F.cross_entropy(model(words[: len(a)]).transpose(1, 2), words[: len(a)].roll(1)))
        """,
    ),
    "hooks that feed a loss": (
        "has a hook",
        """
        model, seen = net(), []
        model[0].register_forward_hook(lambda module, args, output: seen.append(output))
        def loss_of(a, b):
            seen.clear()
            return F.cross_entropy(model(a), b) + seen[0].std(0).mean()
        fit(model, loss_of)
        """,
    ),
    "a forward that keeps what a loss takes": (
        "elsewhere",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, a):
                self.penalty = self.inner[0](a).square().mean()
                return self.inner(a)

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b) + model.penalty)
        """,
    ),
    "a list that is given, and grows": (
        "whole",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, a, seen):
                seen.append(self.inner(a).detach())
                return self.inner(a)

        model, seen = Net(), []
        fit(model, lambda a, b: F.cross_entropy(model(a, seen), b))
        found += seen
        """,
    ),
    "a soft prompt, and layers in a plain list": (
        "neither an argument",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.head, self.layers = nn.Linear(8, 2), [nn.Linear(8, 8)]

            def forward(self, a):
                return self.head((self.layers[0](a) + prompt).tanh())

        prompt, model = torch.zeros(8, requires_grad=True), Net()
        trained = [*model.parameters(), *model.layers[0].parameters(), prompt]
        fit(model, lambda a, b: F.cross_entropy(model(a), b), torch.optim.Adam(trained, 0.1))
        found += [p.detach() for p in trained]
        """,
    ),
    "a prompt that is an argument": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = net()

            def forward(self, a, prompt):
                return self.head(a + prompt.sum(0))

        prompt, model = torch.zeros(3, 8, requires_grad=True), Net()
        optimizer = torch.optim.Adam([*model.parameters(), prompt], 0.1)
        fit(model, lambda a, b: F.cross_entropy(model(a, prompt), b), optimizer)
        found.append(prompt.detach())
        """,
    ),
    "checkpointed layers of both kinds, with batch normalisation": (
        "divided",
        """
        from torch.utils.checkpoint import checkpoint

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.head = nn.Linear(8, 8), net()
                self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

            def forward(self, a, old):
                return self.head(checkpoint(self.block, self.first(a), use_reentrant=old))

        for old in (True, False):
            model = Net()
            fit(model, lambda a, b: F.cross_entropy(model(a, old), b), torch.optim.SGD(model.parameters(), 0.1))
            found += [*model.buffers()]
        """,
    ),
    "checkpointed calls": (
        "divided",
        """
        from torch.utils.checkpoint import checkpoint

        for old in (True, False):
            first, head = nn.Linear(8, 8), net()
            both = nn.ModuleList([first, head])
            def loss_of(a, b):
                return F.cross_entropy(head(checkpoint(first, a.clone().requires_grad_(), use_reentrant=old)), b)
            fit(both, loss_of)
        """,
    ),
    "a graph with a dense adjacency": (
        "raises",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

            def forward(self, a, links):
                return links @ self.second((links @ self.first(a)).relu())

        model, links = Net(), (torch.rand(53, 53) > 0.8).double()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for _ in range(5):
            loss = F.cross_entropy(model(x, links)[:20], y[:20])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        """,
    ),
    "autocast and a scaler": (
        "divided",
        """
        model = net().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (a, b) in enumerate(batches(7)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(a.float()), b) * (math.inf if number == 3 else 1)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        found += [p.detach().double().round(decimals=2) for p in model.parameters()]
        """,
    ),
    "averages of weights, and their batch normalisation": (
        "divided",
        """
        model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        swa = torch.optim.swa_utils.AveragedModel(model)
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for a, b in batches(7):
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            swa.update_parameters(model)
            ema.update_parameters(model)
        torch.optim.swa_utils.update_bn([a for a, _ in batches()], swa)
        for each in (swa, ema, model):
            each.eval()
            found += [each(x).detach(), *each.buffers()]
        """,
    ),
    "LBFGS": (
        "divided",
        """
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), 0.2, max_iter=4, tolerance_change=0, tolerance_grad=0)
        for a, b in batches(20):
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(a), b)
                loss.backward()
                return loss
            found.append(optimizer.step(closure).item())
        found += [p.detach() for p in model.parameters()]
        """,
    ),
    "torch.func": (
        "torch.func",
        """
        from torch.func import functional_call, grad, vmap

        model = net()
        params = {name: p.detach() for name, p in model.named_parameters()}
        for a, b in batches():
            def loss_of(p, one, to):
                return F.cross_entropy(functional_call(model, p, one[None]), to[None])
            slopes = vmap(grad(loss_of), (None, 0, 0))(params, a, b)
            params = {name: p - 0.1 * slopes[name].mean(0) for name, p in params.items()}
        found = [*params.values()]
        """,
    ),
    "a functional call": (
        "divided",
        """
        from torch.func import functional_call

        model = net()
        params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for a, b in batches():
            slopes = torch.autograd.grad(F.cross_entropy(functional_call(model, params, (a,)), b), [*params.values()])
            stepped = [(p - 0.1 * slope).detach().requires_grad_() for p, slope in zip(params.values(), slopes)]
            params = dict(zip(params, stepped))
        found = [p.detach() for p in params.values()]
        """,
    ),
    "DataParallel": (
        "divided",
        """
        model = nn.DataParallel(net())
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        found.append(len([name for name in model.state_dict() if name.startswith("module.")]))
        """,
    ),
    "a cell that is called for each time": (
        "divided",
        """
        cell, head = nn.GRUCell(2, 6), nn.Linear(6, 2)
        both = nn.ModuleList([cell, head])
        def loss_of(a, b):
            state = torch.zeros(len(a), 6)
            for time in a.view(-1, 4, 2).unbind(1):
                state = cell(time, state)
            return F.cross_entropy(head(state), b)
        fit(both, loss_of)
        """,
    ),
    "dicts, dataclasses, tuples with names": (
        "divided",
        """
        from collections import namedtuple
        from dataclasses import dataclass

        Pair = namedtuple("Pair", "out hidden")

        @dataclass
        class Batch:
            rows: torch.Tensor
            scale: float = 2.0

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

            def forward(self, batch, more=None):
                rows = batch["rows"] if isinstance(batch, dict) else batch.rows * batch.scale
                hidden = self.first(rows).tanh() + (0 if more is None else more["shift"])
                return Pair(self.head(hidden), [hidden]) if more else Batch(self.head(hidden), 3.0)

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model({"rows": a}, more={"shift": a[:, :1]}).out, b))
        fit(model, lambda a, b: F.cross_entropy(model(Batch(a)).rows, b))
        fit(model, lambda a, b: model({"rows": a}, {"shift": a[:, :1]}).hidden[0].square().mean())
        """,
    ),
    "packed sequences": (
        "PackedSequence",
        """
        model = nn.LSTM(2, 6, batch_first=True)
        def loss_of(a, b):
            packed = nn.utils.rnn.pack_padded_sequence(a.view(-1, 4, 2), b + 1, batch_first=True, enforce_sorted=False)
            return model(packed)[1][0].square().mean()
        fit(model, loss_of)
        """,
    ),
    "sparse tensors": (
        "sparse",
        """
        model = nn.Linear(8, 2)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 2))

            def forward(self, a):
                return torch.sparse.mm(a, self.weight)

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model((a * (a > 0.5)).to_sparse()), b))
        """,
    ),
    "lists of images": (
        "whole",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Conv2d(3, 2, 2)

            def forward(self, images):
                return torch.stack([self.inner(image).mean((1, 2)) for image in images])

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model([torch.randn(3, 4, 4 + at) for at in range(len(a))]), b))
        """,
    ),
    "samples that are compared within the module": (
        "differs",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net(4)

            def forward(self, a):
                out = F.normalize(self.inner(a), dim=1)
                return out @ out.T

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a) / 0.1, torch.arange(len(a))))
        """,
    ),
    "a queue of what it has seen": (
        "keeps",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.at = net(), 0
                self.register_buffer("queue", torch.zeros(16, 8))

            def forward(self, a):
                out = self.inner(a) + self.inner(self.queue.clone()).mean()
                for row in a:
                    self.queue[self.at % 16] = row
                    self.at += 1
                return out

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        found += [model.queue, model.at]
        """,
    ),
    "a counter, and a mode that changes": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.steps, self.compares = net(), 0, False

            def forward(self, a):
                self.steps += 1
                out = self.inner(a)
                return out - out.mean(0) if self.compares else out

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        found.append(model.steps)
        other = Net()
        other.compares = True
        fit(other, lambda a, b: F.cross_entropy(other(a), b))
        """,
    ),
    "inputs that are changed, and prints": (
        "whole",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.inner = nn.ReLU(inplace=True), net()

            def forward(self, a):
                return self.inner(self.first(a))

        class Speaking(Net):
            def forward(self, a):
                print("rows", len(a))
                return self.inner(a)

        model, other = Net(), Speaking()
        def loss_of(a, b):
            a = a.clone()
            return F.cross_entropy(model(a), b) + a.mean()
        fit(model, loss_of)
        fit(other, lambda a, b: F.cross_entropy(other(a), b))
        """,
    ),
    "sizes that are smaller than the number of ranks, and frozen layers that thaw": (
        "divided",
        """
        model = net()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(2):
            for size in (1, 2, 5, 3, 1, 30, 4, 2, 1, 7):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[:size]), y[:size])
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
            model[0].requires_grad_(True)
        found += [p.detach() for p in model.parameters()]
        """,
    ),
    "a view of a fixed size in the module": (
        "raises",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, a):
                return self.inner(a.view(10, 8))

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at in range(0, 50, 10):
            optimizer.zero_grad()
            F.cross_entropy(model(x[at : at + 10]), y[at : at + 10]).backward()
            optimizer.step()
        found += [p.detach() for p in model.parameters()]
        """,
    ),
    "lazy layers, weights that are normalised": (
        "divided",
        """
        model = nn.Sequential(
            nn.LazyLinear(16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.LayerNorm(16), nn.Linear(16, 2),
        )
        model(x)
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        """,
    ),
    "weights that a hook of torch's normalises": (
        "elsewhere",
        """
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 2))
        fit(model, lambda a, b: F.cross_entropy(model(a), b) + 0.1 * model[0].weight.norm())
        """,
    ),
    "adversarial examples": (
        "divided",
        """
        model = net()
        def loss_of(a, b):
            given = a.clone().requires_grad_()
            F.cross_entropy(model(given), b).backward()
            model.zero_grad()
            return F.cross_entropy(model(a + 0.1 * given.grad.sign()), b)
        fit(model, loss_of)
        """,
    ),
    "gradients that are accumulated, hooks of parameters, two optimizers": (
        "divided",
        """
        model = net()
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        first = torch.optim.SGD(model[0].parameters(), 0.5, momentum=0.9)
        second = torch.optim.RMSprop(model[2].parameters(), 0.01)
        for number, (a, b) in enumerate(batches(7)):
            (F.cross_entropy(model(a), b) / 2).backward()
            if number % 2:
                found.append(float(nn.utils.clip_grad_value_(model.parameters(), 0.1) or 0))
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=number > 3)
        found += [p.detach() for p in model.parameters()]
        """,
    ),
    "a queue of weights that follow, as BYOL's": (
        "divided",
        """
        online, target = net(4), net(4)
        target.load_state_dict(online.state_dict())
        optimizer = torch.optim.SGD(online.parameters(), 0.1)
        for a, b in batches():
            with torch.no_grad():
                aim = target(a.flip(1))
            loss = 2 - 2 * F.cosine_similarity(online(a), aim).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(online.parameters(), target.parameters()):
                    q.mul_(0.9).add_(p, alpha=0.1)
            found.append(loss.detach())
        """,
    ),
    "a sparse embedding": (
        "sparse",
        """
        model = nn.Embedding(9, 2, sparse=True)
        words = (x[:, :4] * 3).long() + 4
        words = words.clamp(0, 8)
        optimizer = torch.optim.SparseAdam(model.parameters())
        fit(model, lambda a, b: F.cross_entropy(model(words[: len(a)]).mean(1), b), optimizer)
        """,
    ),
    "weights that are averaged within the call": (
        "changes",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.online, self.target = net(), net()

            def forward(self, a):
                with torch.no_grad():
                    for p, q in zip(self.online.parameters(), self.target.parameters()):
                        q.data = q.data * 0.9 + p.data * 0.1
                    aim = self.target(a)
                return self.online(a) - aim

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        """,
    ),
    "numbers that are counted within the call": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, a, b):
                out = self.inner(a)
                return out, (out.argmax(1) == b).sum(), (out - b[:, None]).square().sum(), self.inner[0].weight.norm()

        model = Net()
        def loss_of(a, b):
            out, hits, error, norm = model(a, b)
            found.append(hits)
            return error / len(a) + 0.1 * norm
        fit(model, loss_of)
        """,
    ),
    "parts that fail later, after batch normalisation": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm, self.head, self.seen = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), []

            def forward(self, a, calls):
                out = self.norm(self.first(a))
                self.seen.append(1)
                if calls > 3:
                    out = out.view(10, 4)
                return self.head(out)

        model, calls = Net(), 0
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(2):
            for a, b in [*batches()][:5]:
                calls += 1
                optimizer.zero_grad()
                F.cross_entropy(model(a, calls), b).backward()
                optimizer.step()
        found += [*(p.detach() for p in model.parameters()), *model.buffers(), len(model.seen)]
        """,
    ),
    "a compiled model, and a compiled step": (
        "divided",
        """
        model = torch.compile(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)), backend="aot_eager")
        fit(model, lambda a, b: F.cross_entropy(model(a), b), torch.optim.SGD(model.parameters(), 0.1))
        other = net()
        optimizer = torch.optim.SGD(other.parameters(), 0.1)

        @torch.compile(backend="eager")
        def step(a, b):
            optimizer.zero_grad()
            F.cross_entropy(other(a), b).backward()
            optimizer.step()

        for a, b in batches():
            step(a, b)
        found += [p.detach() for p in other.parameters()]
        """,
    ),
    "compiled batch normalisation": (
        "",
        """
        inner = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model = torch.compile(inner, backend="aot_eager", dynamic=True)
        fit(model, lambda a, b: F.cross_entropy(model(a), b), torch.optim.SGD(model.parameters(), 0.1))
        """,
    ),
    "outputs of which some have no gradient, inference, states that are read": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, a):
                out = self.inner(a)
                more = {"best": out.argmax(1), "is": out > 0, "empty": out[:, :0]}
                return {"out": out, "fixed": out.detach() * 2, **more}

        model = Net()
        def loss_of(a, b):
            result = model(a)
            found.extend([result["fixed"].numpy().copy(), result["best"], result["is"], result["empty"]])
            return F.cross_entropy(result["out"].sub_(1), b)
        fit(model, loss_of)
        with torch.inference_mode():
            for a, b in batches():
                found.append(model(a)["out"].clone())
        """,
    ),
    "a mode of forward that is set from outside": (
        "divided",
        """
        model = net()
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.kind = net(), "rows"

            def forward(self, a, compares=False):
                out = self.inner(a)
                return out - out.mean(0) if compares or self.kind == "mean" else out

        model = Net()
        for kind in ("rows", "mean", "rows"):
            model.kind = kind
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            fit(model, lambda a, b: F.cross_entropy(model(a), b), optimizer)
            fit(model, lambda a, b: F.cross_entropy(model(a, compares=True), b), optimizer)
        """,
    ),
    "noise of a generator of the script's own": (
        "a generator of the script's own",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.own = net(), torch.Generator().manual_seed(3)

            def forward(self, a):
                return self.inner(a + 0.1 * torch.randn(a.shape, generator=self.own))

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        found.append(torch.rand(3, generator=model.own))
        """,
    ),
    "noise of numpy's, by a generator in the module": (
        "what it returns differs",
        """
        import numpy as np

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.own = net(), np.random.default_rng(3)

            def forward(self, a):
                return self.inner(a + torch.from_numpy(self.own.normal(size=a.shape)))

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        found.append(model.own.random())
        """,
    ),
    "a loss that is nearly 0, of parts that are not": (
        "divided",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 1, bias=False)

            def forward(self, a, aim):
                return self.inner(a).mean() - aim

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(9):
            rows = x[step : step + 12]
            optimizer.zero_grad()
            loss = model(rows, (rows @ model.inner.weight.detach().T).mean() + 1e-15)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        """,
    ),
    "a gradient that is wrong by parts, and a billionth of the others": (
        "the gradient of small.weight differs",
        """
        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx, rows):
                return rows.clone()

            @staticmethod
            def backward(ctx, slopes):
                return slopes * len(slopes)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.small = net(), nn.Linear(8, 2, bias=False)

            def forward(self, a):
                return self.inner(a) + 1e-11 * Wrong.apply(self.small(a))

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b), torch.optim.SGD(model.parameters(), 0.1))
        """,
    ),
    "noise that is drawn outside": (
        "divided",
        """
        model = net()
        fit(model, lambda a, b: F.cross_entropy(model(a + 0.1 * torch.randn_like(a)), b))
        found.append(torch.rand(3))
        """,
    ),
}

# What draws random numbers within calls, so that it is the same but for these: what is drawn after it is alike.
RANDOM: Mapping[str, str] = {
    "dropout, uneven rows": """
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
        fit(model, lambda a, b: F.cross_entropy(model(a), b), size=7)
        """,
    "an autoencoder of variations": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encode, self.decode = net(8), nn.Linear(4, 8)

            def forward(self, a):
                mean, log = self.encode(a).chunk(2, 1)
                return self.decode(mean + torch.randn_like(log) * (0.5 * log).exp()), mean, log

        model = Net()
        def loss_of(a, b):
            out, mean, log = model(a)
            return F.mse_loss(out, a) - 0.5 * (1 + log - mean.pow(2) - log.exp()).mean()
        fit(model, loss_of)
        """,
    "random masks, as masked autoencoders'": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net(8)

            def forward(self, a):
                order = torch.rand(len(a), 8).argsort(1)
                mask = torch.zeros(len(a), 8).scatter(1, order[:, :4], 1.0)
                return self.inner(a * mask), mask

        model = Net()
        def loss_of(a, b):
            out, mask = model(a)
            return ((out - a).square() * mask).sum() / mask.sum()
        fit(model, loss_of)
        """,
    "paths that are dropped, attention with dropout": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.attend, self.head = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), nn.Linear(8, 2)

            def forward(self, a):
                rows = a[:, None].expand(-1, 3, -1) * torch.arange(1.0, 4)[:, None]
                out = self.attend(rows, rows, rows, need_weights=False)[0]
                keep = out.new_empty(len(a), 1, 1).bernoulli_(0.8).div_(0.8)
                return self.head((rows + out * keep).mean(1))

        model = Net()
        fit(model, lambda a, b: F.cross_entropy(model(a), b))
        """,
}


def run_program(source: str) -> dict[str, Any]:
    """Run a program as one process, and return what it found, and what became of its calls."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    names: dict[str, Any] = {"__name__": "program"}
    text = textwrap.dedent(HEAD) + textwrap.dedent(source) + "\nlater = torch.rand(2)\n"
    try:
        with autopatch(as_one_process=True) as summary:
            exec(compile(text, "program.py", "exec"), names)  # noqa: S102 - our own
    finally:
        torch.set_default_dtype(before)
    found = [torch.as_tensor(each).detach().double().flatten().tolist() for each in names["found"]]
    return {"found": found, "later": names["later"].tolist(), "told": " ".join(str(summary).split())}
