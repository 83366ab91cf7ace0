"""Training with an emulation of CUDA graphs on the CPU, for test_cuda_graphs.py: a backend of torch.compile.

It runs apart, because a process that has compiled cannot be forked any more. Its arguments name cases; none is all.

When a forward pass begins and no backward pass is pending, everything that earlier calls returned and that is still in memory
becomes NaN; torch raises where it is read. That is what `torch._inductor.cudagraph_trees` does without marks of steps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import hocket

DATA = [(torch.randn(8, 8), torch.randint(0, 3, (8,))) for _ in range(4)]


class Graphs:
    """What the compiled code of one run has returned."""

    def __init__(self) -> None:
        self._alive: list[Tensor] = []
        self._pending = False
        self._others: set[int] = set()
        self.backend = aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            inference_compiler=self._compiler("inference"),
        )

    def _compiler(self, kind: str) -> Callable[..., Any]:
        def compile(graph: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                if kind != "backward" and not self._pending:
                    for each in self._alive:
                        each.fill_(float("nan"))
                    self._alive.clear()
                self._pending = kind == "forward"
                self._others |= {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
                outputs = graph(*args)
                self._alive += [
                    each.detach()
                    for each in outputs
                    if isinstance(each, Tensor)
                    and each.is_floating_point()
                    and each.untyped_storage().data_ptr() not in self._others
                ]
                return outputs

            return make_boxed_func(run)

        return compile


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu())


class WithLoss(Net):
    """Computes its loss itself, as models of transformers do."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Logs(hocket.Task):
    """Logs values that it computes in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, batch: Any) -> Tensor:
        outputs = self.net(batch[0])
        self.log("norm", outputs.norm())
        self.log("last", outputs.sum().double(), reduce="last")
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


class TwoSteps(hocket.Task):
    """Keeps what steps return."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.seen: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return {name: torch.optim.SGD(getattr(self, name).parameters(), 0.1) for name in ("trunk", "head")}

    def keeping(self, batch: Any) -> hocket.Loss:
        hidden = self.trunk(batch[0])
        return hocket.Loss(F.cross_entropy(self.head(hidden), batch[1]), kept=hidden)

    def two(self, batch: Any) -> dict[str, Tensor]:
        return {
            "a": F.cross_entropy(self.head(self.trunk(batch[0])), batch[1]),
            "b": self.head(batch[0]).square().mean(),
        }

    def train_batch(self, batch: Any, step: Any) -> None:
        first, second = step(self.keeping, batch, "trunk"), step(self.two, batch, "head")
        self.seen += [first.loss, first.kept, *second.losses.values()]


class ByHand(hocket.Task):
    """Adds the gradients of two parts of a batch, with a model that it has compiled itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = WithLoss()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)

    def train_batch(self, batch: Any, step: Any) -> None:
        with step.manual() as by_hand:
            for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
                by_hand.backward(self.net(x, y)["loss"])
            by_hand.step()


class Logits:
    """A metric that keeps all outputs until the end."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.outputs: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs)

    def compute(self) -> float:
        return torch.cat(self.outputs).square().sum().item()


def run(model: nn.Module, data: Any = DATA, **options: Any) -> list[Tensor]:
    """Return weights, losses, metrics and what the model has kept."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    options = {"optimizer": None if isinstance(model, TwoSteps | ByHand) else "sgd(lr=0.1)", **options}
    trainer = hocket.Trainer(model, data, duration="2ep", device="cpu", log_every="3ba", **options)
    with trainer:
        result = trainer.fit()
    losses = [torch.tensor(result.history[name]) for name in sorted(result.history) if "second" not in name]
    values = torch.tensor([value for _, value in sorted(result.metrics.items())])
    assert trainer.state.loss is not None
    return [*trainer.model_state_dict().values(), trainer.state.loss, *losses, values, *getattr(model, "seen", [])]


CE = {"loss": F.cross_entropy}
NAMED = [{"x": x, "y": y} for x, y in DATA]
OWN = {"data": NAMED, "loss_reduction": "mean"}


#: What is trained, and the Trainer's arguments.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (WithLoss, OWN),
    "microbatch": (WithLoss, {**OWN, "microbatch": 2}),
    "accumulate": (WithLoss, {**OWN, "accumulate": "2ba"}),
    "sam": (WithLoss, {**OWN, "algorithms": ["sam"], "eval_data": NAMED}),
    "metrics": (Net, {**CE, "eval_data": DATA, "metrics": {"logits": Logits()}, "train_metrics": {"logits": Logits()}}),
    "clip": (Net, {**CE, "microbatch": 4, "algorithms": ["ema", "label-smoothing"], "clip_gradients": 1.0, "eval_data": DATA}),
    "selective": (Net, {"loss": nn.CrossEntropyLoss(), "microbatch": 4, "algorithms": ["selective-backprop"]}),
    "bf16": (Net, {**CE, "microbatch": 4, "precision": "bf16"}),
    "logs": (Logs, {"microbatch": 4}),
    "two-steps": (TwoSteps, {}),
    "two-steps-microbatch": (TwoSteps, {"microbatch": 4}),
}  # fmt: skip
#: Models that the user has compiled.
COMPILED: dict[str, tuple[Callable[[Any], nn.Module], dict[str, Any]]] = {
    "method": (lambda backend: compiled(WithLoss(), backend), {**OWN, "microbatch": 4}),
    "function": (lambda backend: torch.compile(WithLoss(), backend=backend), {**OWN, "microbatch": 4}),
    "by-hand": (lambda backend: compiled(ByHand(), backend, "net"), {}),
}


def compiled(model: nn.Module, backend: Any, part: str = "") -> nn.Module:
    model.get_submodule(part).compile(backend=backend)
    return model


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names or [*CASES, *COMPILED]:
        found = []
        for backend in ("aot_eager", Graphs().backend):
            torch._dynamo.reset()
            if name in CASES:
                make, options = CASES[name]
                found.append(run(make(), compile={"backend": backend}, **options))
            else:
                make_compiled, options = COMPILED[name]
                found.append(run(make_compiled(backend), **options))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
        print(name, "is equal")


if __name__ == "__main__":
    main(sys.argv[1:])
