"""Scripts of one process, as users write them: what they leave in ``model`` and ``history`` is compared."""

import runpy
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

HEAD = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
    from torch.utils.data import get_worker_info, random_split

    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    x = torch.randn(119, 6)
    y = (x @ torch.randn(6, 1)).tanh() + 0.1 * torch.randn(119, 1)
    data = TensorDataset(x, y)
    history = []


    def net():
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


    def fit(loader):
        for a, b in loader:
            optimizer.zero_grad()
            F.mse_loss(model(a), b).backward()
            optimizer.step()
"""

SCRIPTS: Mapping[str, str] = {
    "validation and the best checkpoint": """
        train_data, val_data = random_split(data, [90, 29])
        train, val = DataLoader(train_data, 8, shuffle=True), DataLoader(val_data, 8)
        model, best = net(), float("inf")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(3):
            fit(train)
            with torch.no_grad():
                loss = sum(F.mse_loss(model(a), b, reduction="sum").item() for a, b in val) / len(val_data)
            history.append(loss)
            if loss < best:
                best = loss
                torch.save(model.state_dict(), FOLDER + "/best.pt")
            else:
                break
        model.load_state_dict(torch.load(FOLDER + "/best.pt"))
    """,
    "accumulation with a remainder, clipping, AdamW, a schedule, workers": """
        loader = DataLoader(data, 10, shuffle=True, num_workers=2, persistent_workers=True)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=-(-len(loader) // 5))
        for epoch in range(2):
            for number, (a, b) in enumerate(loader):
                (F.mse_loss(model(a), b) / 5).backward()
                if number % 5 == 4 or number == len(loader) - 1:
                    history.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=epoch == 0)
                    schedule.step()
    """,
    "two models, two optimizers, a head that some batches do not reach": """
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.trunk, self.often, self.seldom = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(5, 1)

            def forward(self, a):
                hidden = self.trunk(a).tanh()
                above = hidden[:, :1] > 0.4
                if above.any():
                    return torch.where(above, self.seldom(hidden), self.often(hidden))
                return self.often(hidden)

        model, other = Two(), net()
        first = torch.optim.Adam(model.parameters(), lr=0.02)
        second = torch.optim.RMSprop(other.parameters(), lr=0.01)
        for epoch in range(2):
            for a, b in DataLoader(data, 6, shuffle=True):
                first.zero_grad()
                F.mse_loss(model(a), b + other(a).detach()).backward()
                first.step()
                second.zero_grad()
                F.l1_loss(other(a), model(a).detach()).backward()
                second.step()
        history += [p.sum().item() for p in other.parameters()]
    """,
    "LBFGS": """
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, tolerance_change=0, tolerance_grad=0)
        for a, b in DataLoader(data, 40):
            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(model(a), b)
                loss.backward()
                return loss

            optimizer.step(closure)
    """,
    "a scaler on the CPU": """
        loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(3))
        model = net()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for epoch in range(2):
            for number, (a, b) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.mse_loss(model(a), b) * (float("inf") if number == 3 else 1.0)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                history.append(scaler.get_scale())
    """,
    "an iterable dataset with two workers": """
        class Stream(IterableDataset):
            def __iter__(self):
                worker = get_worker_info()
                for number in range(worker.id, 119, worker.num_workers):
                    yield x[number], y[number]

        for epoch in range(2):
            fit(DataLoader(Stream(), 7, num_workers=2))
        with torch.no_grad():
            history += [F.mse_loss(model(a), b).item() for a, b in DataLoader(Stream(), 7, num_workers=2)]
    """,
    "unequal batches, some smaller than the number of ranks": """
        class Unequal(torch.utils.data.Sampler):
            def __iter__(self):
                order, at = torch.randperm(119).tolist(), 0
                for size in (1, 2, 5, 3, 1, 30, 4, 2, 1, 7):
                    yield order[at : at + size]
                    at += size

            def __len__(self):
                return 10

        loader = DataLoader(data, batch_sampler=Unequal())
        for epoch in range(2):
            fit(loader)
        with torch.no_grad():
            history += [len(a) for a, b in DataLoader(data, batch_sampler=[[1], [2, 3], [4]])]
    """,
    "a look, a sparse embedding, frozen layers, several losses, all data at once": """
        words = TensorDataset(torch.arange(119) % 13, y)
        loader = DataLoader(words, 12, shuffle=True)
        first, _ = next(iter(loader))
        model = nn.Sequential(nn.Embedding(13, 6, sparse=True), nn.Linear(6, 6), net())
        model[1].requires_grad_(False)
        optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[2].parameters())]
        for a, b in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            out = model(a)
            F.mse_loss(out, b).backward(retain_graph=True)
            torch.autograd.backward([out.abs().mean(), out.pow(4).mean()])
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(model(words.tensors[0]), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    """,
    "checkpointed layers, batch normalisation in evaluation, the training set evaluated": """
        from torch.utils.checkpoint import checkpoint

        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9).eval(), nn.Linear(9, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(data, 8, shuffle=True)
        for epoch in range(2):
            for a, b in loader:
                optimizer.zero_grad()
                hidden = checkpoint(model[0], a.requires_grad_(), use_reentrant=epoch == 0)
                F.mse_loss(model[1:](hidden), b).backward()
                optimizer.step()
            with torch.inference_mode():
                history.append(sum(F.mse_loss(model(a), b, reduction="sum").item() for a, b in loader))
    """,
    "batches drawn by hand": """
        for step in range(9):
            chosen = torch.randint(0, 119, (8,))
            optimizer.zero_grad()
            F.mse_loss(nn.functional.dropout(model(x[chosen])), y[chosen]).backward()
            optimizer.step()
    """,
    "an evaluation under grad that counts its batches, and never asks for the end": """
        loader = DataLoader(data, 8, shuffle=True)
        for epoch in range(2):
            fit(loader)
            batches = iter(loader)
            for _ in range(len(loader)):
                next(batches)
    """,
    "phases with gradients on in evaluation mode, a checkpoint in a temporary folder": """
        from tempfile import TemporaryDirectory

        loaders = {"train": DataLoader(data, 8, shuffle=True), "val": DataLoader(data, 10)}
        with TemporaryDirectory() as folder:
            for epoch in range(2):
                for phase in ("train", "val"):
                    model.train(phase == "train")
                    total = 0.0
                    for a, b in loaders[phase]:
                        with torch.set_grad_enabled(phase == "train"):
                            loss = F.mse_loss(model(a), b)
                        if phase == "train":
                            optimizer.zero_grad()
                            loss.backward()
                            optimizer.step()
                        total += loss.item() * len(a)
                history.append(total)
                torch.save(model.state_dict(), f"{folder}/best.pt")
                model.load_state_dict(torch.load(f"{folder}/best.pt"))
    """,
    "what cannot be divided": """
        model, history = net(), []
        loader = DataLoader(data, 7, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for a, b in loader:  # by torch.autograd.grad
            for p, g in zip(model.parameters(), torch.autograd.grad(F.mse_loss(model(a), b), model.parameters())):
                p.grad = g
            optimizer.step()
        optimizer.zero_grad()
        sum(F.mse_loss(model(a), b) for a, b in DataLoader(data, 7, shuffle=True)).backward()  # one loss of all batches
        optimizer.step()
        batches, ahead = iter(DataLoader(data, 7, shuffle=True)), None
        for batch in batches:  # fetched ahead
            if ahead is not None:
                optimizer.zero_grad()
                F.mse_loss(model(ahead[0]), ahead[1]).backward()
                optimizer.step()
            ahead = batch
        for a, b in DataLoader(data, 7, shuffle=True):
            model.zero_grad()
            penalty = torch.autograd.grad(model(a).sum(), model.parameters(), create_graph=True)
            (F.mse_loss(model(a), b) + sum(g.pow(2).sum() for g in penalty) / 100).backward()
            optimizer.step()
        fit(DataLoader(data, 2, shuffle=True))  # fewer samples than ranks
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        fit(DataLoader(data, 7, shuffle=True))
    """,
    "modes within the step, losses that are read": """
        model, plateau = net(), []
        train, val = DataLoader(data, 11, shuffle=True), DataLoader(data, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for epoch in range(3):
            total = 0.0
            for a, b in train:
                model.train()
                optimizer.zero_grad()
                loss = F.mse_loss(model(a), b)
                (loss / 2).backward()
                optimizer.step()
                total += loss.item() + float(f"{loss:.12f}")
            schedule.step(total)
            history += [total, float(loss)]
            for a, b in val:
                model.eval()
                history.append(F.mse_loss(model(a), b).item())
    """,
    "losses that are read before their backward(), terms of losses": """
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for a, b in DataLoader(data, 10, shuffle=True):
                out = model(a)
                error, size, total = F.mse_loss(out, b), out.abs().mean(), (out - b).abs().sum()
                loss = error + 0.1 * size
                history += [loss.item(), float(total.detach()), float(2 * size)]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history += [error.item(), size.item(), loss.item()]
            heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(17))
            optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
            for a, b in DataLoader(data, 60, shuffle=True):
                losses = [F.mse_loss(head(a), b) for head in heads]
                read = [(loss.item(), loss.backward()) for loss in losses]
                history += [loss.item() for loss in losses]
                optimizer.step()
            with torch.enable_grad():
                history.append(F.mse_loss(model(x), y, reduction="sum").item())
    """,
    "losses that compare samples, or weigh classes": """
        history.append(0.0)
        model, other = net(), net()
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.01)
        for a, b in DataLoader(data, 10, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(a) @ other(-a).T, torch.arange(len(a))).backward()
            optimizer.step()
        model = nn.Sequential(net(), nn.Linear(1, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for a, b in DataLoader(data, 10, shuffle=True):
            optimizer.zero_grad()
            classes = (b.flatten() > 0).long()
            loss = F.cross_entropy(model(a), classes, weight=torch.tensor([1.0, 5.0, 1.0]))
            loss.backward()
            optimizer.step()
            history[0] += loss.item()
    """,
    "losses that are read in other ways, sums by the batch size, gradients of inputs": """
        from torch.amp import GradScaler

        model, scaler, read = net(), GradScaler("cpu", init_scale=8.0), torch.zeros(())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for a, b in DataLoader(data, 10, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(a), b, reduction="sum") / 10  # of 9 samples, too
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            read += loss.detach() + loss.data
            history += [loss.tolist(), float(loss.detach().numpy()), loss.data.item()]
        history.append(read.item())
        for a, b in DataLoader(data, 11, shuffle=True):
            given = a.clone().requires_grad_()
            F.mse_loss(model(given), b).backward()
            optimizer.zero_grad()
            F.mse_loss(model(a + 5 * given.grad), b).backward()
            optimizer.step()
    """,
    "losses that are neither a mean nor a sum over samples": """
        class Summed(torch.autograd.Function):
            forward = staticmethod(lambda context, part: part.sum())
            backward = staticmethod(lambda context, slope: slope.expand(CHOSEN, 1))

        def ignoring(out, b):
            classes = torch.where(b > 0.2, -100, (b > -0.5).long()).flatten()
            return F.cross_entropy(torch.cat([out, -out], 1), classes)

        def masked(out, b):
            return ((out - b).pow(2) * (b > 0)).sum() / (b > 0).sum().clamp(min=1)

        def vector(out, b):
            return (out - b).pow(2).flatten()

        losses = [
            ignoring,
            masked,
            vector,
            lambda out, b: Summed.apply((out - b).pow(2)),
            lambda out, b: sum(F.mse_loss(one, other) for one, other in zip(out, b)),
            lambda out, b: torch.dot((out - b).flatten(), (out - b).flatten()),
            lambda out, b: (F.mse_loss(out, b) - 0.3).abs() + 0.3,
            lambda out, b: F.mse_loss(out, b) + (out - b).abs().sum(),
            lambda out, b: F.mse_loss(out, b) * len(b),
            lambda out, b: (out - b).pow(2).flatten().topk(5).values.mean(),
            lambda out, b: (out - b)[b > 0].pow(2).mean(),
        ]
        model, CHOSEN = net(), 8
        optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
        for of in losses:
            for a, b in DataLoader(data, CHOSEN, shuffle=True, drop_last=True):
                optimizer.zero_grad()
                loss = of(model(a), b)
                loss.backward(torch.ones_like(loss))
                optimizer.step()
                history.append(loss.sum().item())
    """,
    "one batch in an epoch, of fewer samples than may be": """
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in (119, 128, 60):
            loader = DataLoader(data, size, shuffle=True, drop_last=size == 60)
            for epoch in range(3):
                fit(loader)
                history.append(epoch)
    """,
    "loops that ask for no end, as ignite's, and numbers of a loss afterwards": """
        class Engine:
            def __init__(self, step):
                self.step = step

            def run(self, epochs, after=lambda: None):
                batches = iter(loader)
                for _ in range(epochs):
                    done = 0
                    while done < len(loader):
                        try:
                            batch = next(batches)
                        except StopIteration:
                            batches = iter(loader)
                            continue
                        self.step(*batch)
                        done += 1
                    after()

        def train(a, b):
            model.train()
            optimizer.zero_grad()
            loss = F.mse_loss(model(a), b)
            loss.backward()
            optimizer.step()
            history.extend([(loss * 2).item(), (-loss / 3 * 1).item()])

        def look(a, b):
            model.eval()
            with torch.no_grad():
                history.append(F.mse_loss(model(a), b).item())

        loader = DataLoader(data, 32, shuffle=True)
        Engine(train).run(2, after=lambda: Engine(look).run(1))
    """,
    "random numbers that are drawn outside of the model": """
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for loader in (DataLoader(data, 16, shuffle=True), DataLoader(TensorDataset(x[:9], y[:9]), 1)):
            for epoch in range(2):
                for a, b in loader:
                    optimizer.zero_grad()
                    F.mse_loss(model(a + 0.1 * torch.randn(a.shape)), b).sqrt().backward()
                    optimizer.step()
                history += torch.rand(2).tolist()
    """,
    "what a model keeps of its batches": """
        class Keeping(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.at = net(), 0
                self.register_buffer("queue", torch.zeros(16, 6))

            def forward(self, a):
                out = self.inner(a) + self.inner(self.queue).mean()
                for row in a:
                    self.queue.data[self.at % 16] = row
                    self.at += 1
                return out

        model = Keeping()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(DataLoader(data, 8, shuffle=True))
    """,
    "two loaders in one step, and one that a thread reads": """
        from queue import Queue
        from threading import Thread

        class Ahead(DataLoader):
            def __iter__(self):
                given = Queue(1)
                Thread(target=lambda of: [*map(given.put, of), given.put(None)], args=(super().__iter__(),)).start()
                return iter(given.get, None)

        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in (12, 8):  # parts of other sizes, and on two and four ranks of equal ones
            pairs = DataLoader(data, size, shuffle=True, drop_last=True), DataLoader(x[:76], size, drop_last=size == 8)
            for _ in range(2):
                for (a, b), other in zip(*pairs):
                    optimizer.zero_grad()
                    (F.mse_loss(model(a), b) + model(other).pow(2).mean()).backward()
                    optimizer.step()
        fit(Ahead(data, 7, shuffle=True))
    """,
    "a compiled step": """
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        @torch.compile(backend="eager")
        def step(a, b):
            F.mse_loss(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()

        for a, b in DataLoader(data, 30, shuffle=True):
            step(a, b)
    """,
    "a state of the optimizer that is loaded, later parameters, float32": """
        torch.set_default_dtype(torch.float32)
        data = TensorDataset(x.float(), y.float())
        model, head = net(), nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(3):
            for a, b in DataLoader(data, 11, shuffle=True):
                optimizer.zero_grad()
                F.mse_loss(head(model(a)), b).backward()
                optimizer.step()
            if epoch == 0:
                state = optimizer.state_dict()
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                optimizer.load_state_dict(state)
            if epoch == 1:
                optimizer.add_param_group({"params": list(head.parameters())})
        history += [p.item() for p in head.parameters()]
    """,
}


def run(name: str, own: Path, shared: Path) -> dict[str, Any]:
    """Run a script, and return its parameters and its history.

    Args:
        name: Which script.
        own: This rank's folder, which gets the script.
        shared: The folder that the script writes to.
    """
    file = own / f"{'_'.join(name.split())[:40]}.py"
    file.write_text(f"FOLDER = {str(shared)!r}\n" + textwrap.dedent(HEAD) + textwrap.dedent(SCRIPTS[name]))
    try:
        left = runpy.run_path(str(file), run_name="__main__")
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        "parameters": [each.detach().double().flatten().tolist() for each in left["model"].parameters()],
        "history": left["history"],
    }
