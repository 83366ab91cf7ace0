"""Tasks that take several steps in a batch: ten loops as people write them, against plain PyTorch by hand."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import LBFGS, SGD, Adam, Optimizer

import hocket
from hocket_testkit.ranks import RankError, run_ranks

BATCHES, SIZE = 6, 8


def mlp(inputs: int, outputs: int, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def real_or_not(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def mix(parameters: Any, others: Any, weight: float) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([*parameters], [*others], weight)


class Plain:
    """A plain loop's step: zero gradients, backward, clip, step; with a loss scale of its own for each name."""

    def __init__(self, task: hocket.Task, optimizers: dict[str, Optimizer], half: bool) -> None:
        self.task, self.optimizers, self.half = task, optimizers, half
        self.scalers: dict[str, torch.amp.GradScaler] = {}

    def context(self) -> Any:
        return torch.autocast("cpu", dtype=torch.float16) if self.half else nullcontext()

    def step(self, name: str, loss_of: Callable[[], Tensor]) -> Tensor:
        self.task.zero_grad()
        with self.context():
            loss = loss_of()
        scaler = self.scalers.setdefault(name, torch.amp.GradScaler("cpu", enabled=self.half))
        scaler.scale(loss).backward()
        scaler.step(self.optimizers[name])
        scaler.update()
        return loss.detach()


# --- the ten


class DCGAN(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(4, 6), mlp(6, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "real": torch.randn(SIZE, 6, generator=generator) + 1, "z": torch.randn(SIZE, 4, generator=generator)
        }  # fmt: skip

    def configure_optimizers(self) -> Any:
        parts = {"generator": self.generator, "discriminator": self.discriminator}
        return {name: Adam(part.parameters(), lr=0.01) for name, part in parts.items()}

    def train_batch(self, batch: Any, step: Any) -> None:
        fake = self.generator(batch["z"])
        step(self.d_loss, {"real": batch["real"], "fake": fake.detach()}, "discriminator")
        step(self.g_loss, {"fake": fake}, "generator")

    def d_loss(self, batch: Any) -> Tensor:
        return real_or_not(self.discriminator(batch["real"]), True) + real_or_not(
            self.discriminator(batch["fake"]), False
        )

    def g_loss(self, batch: Any) -> Tensor:
        return real_or_not(self.discriminator(batch["fake"]), True)

    def by_hand(self, batch: Any, plain: Plain, number: int, ranks: int) -> None:
        with plain.context():
            fake = self.generator(batch["z"])
        plain.step("discriminator", lambda: self.d_loss({"real": batch["real"], "fake": fake.detach()}))
        plain.step("generator", lambda: self.g_loss({"fake": fake}))


class DCGANInside(DCGAN):
    """Fakes are computed in the loss functions, where weights that are sharded are gathered."""

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.d_loss_inside, batch, "discriminator")
        step(self.g_loss_inside, batch, "generator")

    def d_loss_inside(self, batch: Any) -> Tensor:
        return self.d_loss({"real": batch["real"], "fake": self.generator(batch["z"]).detach()})

    def g_loss_inside(self, batch: Any) -> Tensor:
        return self.g_loss({"fake": self.generator(batch["z"])})


class WGANGP(DCGAN):
    @staticmethod
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {**DCGAN.batch(generator), "mix": torch.rand(SIZE, 1, generator=generator)}

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.critic_loss, batch, "discriminator")
        if step.batch % 3 == 2:
            step(self.generator_loss, {"z": batch["z"]}, "generator")

    def critic_loss(self, batch: Any) -> dict[str, Tensor]:
        fake = self.generator(batch["z"]).detach()
        between = (batch["mix"] * batch["real"] + (1 - batch["mix"]) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        distance = self.discriminator(fake).mean() - self.discriminator(batch["real"]).mean()
        return {"distance": distance, "penalty": 10 * ((slope.norm(2, 1) - 1) ** 2).mean()}

    def generator_loss(self, batch: Any) -> Tensor:
        return -self.discriminator(self.generator(batch["z"])).mean()

    def by_hand(self, batch: Any, plain: Plain, number: int, ranks: int) -> None:
        plain.step("discriminator", lambda: torch.stack([*self.critic_loss(batch).values()]).sum())
        if number % 3 == 2:
            plain.step("generator", lambda: self.generator_loss(batch))


class BYOL(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.online = mlp(6, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @staticmethod
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        image = torch.randn(SIZE, 6, generator=generator)
        return {view: image + 0.1 * torch.randn(SIZE, 6, generator=generator) for view in ("a", "b")}

    def configure_optimizers(self) -> Any:
        return {"online": SGD(self.online.parameters(), lr=0.1, momentum=0.9)}

    def forward(self, batch: Any) -> Any:
        return self.online(batch["a"]), self.target(batch["b"])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return 2 - 2 * F.cosine_similarity(*outputs).mean()

    def train_batch(self, batch: Any, step: Any) -> None:
        if step(self.loss_of, batch, "online").taken:
            mix(self.target.parameters(), self.online.parameters(), 0.1)

    def by_hand(self, batch: Any, plain: Plain, number: int, ranks: int) -> None:
        plain.step("online", lambda: self.loss_of(batch))
        mix(self.target.parameters(), self.online.parameters(), 0.1)


class PPO(hocket.Task):
    """Two passes over each rollout, in minibatches."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = mlp(5, 3), mlp(5, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "state": torch.randn(SIZE, 5, generator=generator),
            "action": torch.randint(3, (SIZE,), generator=generator),
            "before": -torch.rand(SIZE, generator=generator) - 0.5,
            "advantage": torch.randn(SIZE, generator=generator),
            "return": torch.randn(SIZE, generator=generator),
        }

    def configure_optimizers(self) -> Any:
        return {"all": Adam(self.parameters(), lr=0.01)}

    def ppo_loss(self, batch: Any) -> dict[str, Tensor]:
        now = self.policy(batch["state"]).log_softmax(-1).gather(1, batch["action"][:, None]).squeeze(1)
        ratio = (now - batch["before"]).exp()
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"]).mean()
        return {"policy": -gain, "value": F.mse_loss(self.value(batch["state"]).squeeze(1), batch["return"])}

    def train_batch(self, rollout: Any, step: Any) -> None:
        size = len(rollout["action"])
        for _ in range(2):
            for start in range(0, size, size // 2):
                part = {key: value[start : start + size // 2] for key, value in rollout.items()}
                result = step(self.ppo_loss, part, "all")
            assert step.mean(1.0) == 1.0
            if step.any(result.losses["value"] > 1e6):
                break

    def by_hand(self, rollout: Any, plain: Plain, number: int, ranks: int) -> None:
        each = SIZE // ranks
        for _ in range(2):
            for start in range(0, each, each // 2):
                rows = [rank * each + start + row for rank in range(ranks) for row in range(each // 2)]
                part = {key: value[rows] for key, value in rollout.items()}
                plain.step("all", lambda part=part: torch.stack([*self.ppo_loss(part).values()]).sum())  # type: ignore[misc]


class MAML(hocket.Task):
    """A batch is one of tasks; the inner loop differentiates through its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(2, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(SIZE, 2, 4, 3, generator=generator)  # tasks, support and query, samples, inputs and target

    def configure_optimizers(self) -> Any:
        return {"meta": SGD(self.parameters(), lr=0.1)}

    def meta_loss(self, tasks: Tensor) -> Tensor:
        losses = []
        for support, query in tasks:
            weights = dict(self.network.named_parameters())
            inner = F.mse_loss(functional_call(self.network, weights, support[:, :2]), support[:, 2:])
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            losses.append(F.mse_loss(functional_call(self.network, fast, query[:, :2]), query[:, 2:]))
        return torch.stack(losses).mean()

    def train_batch(self, tasks: Any, step: Any) -> None:
        step(self.meta_loss, tasks, "meta")

    def by_hand(self, tasks: Any, plain: Plain, number: int, ranks: int) -> None:
        plain.step("meta", lambda: self.meta_loss(tasks))


class Carried(hocket.Task):
    """Truncated back-propagation through time: the hidden state goes on, without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(3, 5), nn.Linear(5, 3)
        self.hidden: Tensor | None = None

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(SIZE, 4, 3, generator=generator)

    def configure_optimizers(self) -> Any:
        return {"lm": SGD(self.parameters(), lr=0.1)}

    def text_loss(self, text: Tensor, hidden: Tensor | None) -> hocket.Loss:
        outputs = []
        for place in range(text.size(1) - 1):
            hidden = self.cell(text[:, place], hidden)
            outputs.append(self.out(hidden))
        return hocket.Loss(F.mse_loss(torch.stack(outputs, 1), text[:, 1:]), kept=hidden)

    def train_batch(self, text: Any, step: Any) -> None:
        self.hidden = step(self.text_loss, text, "lm", carry=self.hidden).kept

    def extra_state(self) -> Any:
        return self.hidden

    def load_extra_state(self, state: Any) -> None:
        self.hidden = state

    def by_hand(self, text: Any, plain: Plain, number: int, ranks: int) -> None:
        kept: list[Any] = []

        def loss() -> Tensor:
            found = self.text_loss(text, self.hidden)
            kept.append(found.kept.detach())
            return found.value

        plain.step("lm", loss)
        self.hidden = kept[0]


class ActorCritic(hocket.Task):
    """Two losses of one forward pass, each for its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = mlp(5, 4), nn.Linear(4, 3), nn.Linear(4, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return PPO.batch(generator)

    def configure_optimizers(self) -> Any:
        return {
            "actor": Adam([*self.trunk.parameters(), *self.actor.parameters()], lr=0.01),
            "critic": SGD(self.critic.parameters(), lr=0.1),
        }

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        features = self.trunk(batch["state"])
        return (
            F.cross_entropy(self.actor(features), batch["action"]),
            F.mse_loss(self.critic(features).squeeze(1), batch["return"]),
        )

    def both(self, batch: Any) -> hocket.Apart:
        actor, critic = self.losses(batch)
        return hocket.Apart(actor=actor, critic=critic)

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.both, batch, "actor", "critic")

    def by_hand(self, batch: Any, plain: Plain, number: int, ranks: int) -> None:
        self.zero_grad()
        with plain.context():
            actor, critic = self.losses(batch)
        scaler = plain.scalers.setdefault("actor", torch.amp.GradScaler("cpu", enabled=plain.half))
        held = [p for group in plain.optimizers["actor"].param_groups for p in group["params"]]
        scaler.scale(actor).backward(inputs=held, retain_graph=True)
        scaler.scale(critic).backward(inputs=[*self.critic.parameters()])
        for optimizer in plain.optimizers.values() if plain.half else ():
            scaler.unscale_(optimizer)
        if all(parameter.grad.isfinite().all() for parameter in self.parameters()):  # one step: both or none
            for optimizer in plain.optimizers.values():
                optimizer.step()
        scaler.update()


class Closure(hocket.Task):
    """LBFGS, which computes gradients as often as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(5, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return PPO.batch(generator)

    def configure_optimizers(self) -> Any:
        return {"all": LBFGS(self.parameters(), lr=0.1, max_iter=3)}

    def forward(self, batch: Any) -> Tensor:
        return self.network(batch["state"]).squeeze(1)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch["return"])

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.loss_of, batch, "all")

    def by_hand(self, batch: Any, plain: Plain, number: int, ranks: int) -> None:
        def closure() -> Tensor:
            self.zero_grad()
            loss: Tensor = self.loss_of(batch)
            loss.backward()
            return loss

        plain.optimizers["all"].step(closure)  # type: ignore[arg-type]


class Adversarial(hocket.Task):
    """An adversarial autoencoder: the encoder has two optimizers, one that reconstructs and one that deceives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.critic = mlp(6, 3), mlp(3, 6), mlp(3, 1)

    @staticmethod
    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.randn(SIZE, 6, generator=generator), "z": torch.randn(SIZE, 3, generator=generator)}

    def configure_optimizers(self) -> Any:
        return {
            "rebuild": Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=0.01),
            "critic": Adam(self.critic.parameters(), lr=0.01),
            "deceive": SGD(self.encoder.parameters(), lr=0.1, momentum=0.9),
        }

    def rebuild_loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(batch["x"])), batch["x"])

    def critic_loss(self, batch: Any) -> Tensor:
        code = self.encoder(batch["x"])
        return real_or_not(self.critic(batch["z"]), True) + real_or_not(self.critic(code), False)

    def deceive_loss(self, batch: Any) -> Tensor:
        return real_or_not(self.critic(self.encoder(batch["x"])), True)

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.rebuild_loss, batch, "rebuild")
        step(self.critic_loss, batch, "critic")
        step(self.deceive_loss, batch, "deceive")

    def by_hand(self, batch: Any, plain: Plain, number: int, ranks: int) -> None:
        plain.step("rebuild", lambda: self.rebuild_loss(batch))
        plain.step("critic", lambda: self.critic_loss(batch))
        plain.step("deceive", lambda: self.deceive_loss(batch))


TEN: list[type[Any]] = [Adversarial, DCGAN, DCGANInside, WGANGP, BYOL, PPO, MAML, Carried, ActorCritic, Closure]


# --- running them


def make(kind: type[Any]) -> Any:
    torch.manual_seed(3)
    return kind()


def batches(kind: type[Any], rank: int = 0, ranks: int = 1) -> list[Any]:
    """What a rank has of each global batch."""
    generator = torch.Generator().manual_seed(4)
    rows = slice(rank * SIZE // ranks, (rank + 1) * SIZE // ranks)
    whole = [kind.batch(generator) for _ in range(BATCHES)]
    return [{key: value[rows] for key, value in b.items()} if isinstance(b, dict) else b[rows] for b in whole]


def by_hand(kind: type[Any], half: bool = False, ranks: int = 1) -> dict[str, Tensor]:
    task = make(kind)
    plain = Plain(task, task.configure_optimizers(), half)
    for number, batch in enumerate(batches(kind)):
        task.by_hand(batch, plain, number, ranks)
    return {name: value.detach() for name, value in task.state_dict().items()}


def trained(kind: type[Any], folder: Path, rank: int = 0, ranks: int = 1, **options: Any) -> dict[str, Tensor]:
    options = {"device": "cpu", "duration": "1ep", "folder": folder, **options}
    with hocket.Trainer(model=make(kind), train_data=batches(kind, rank, ranks), **options) as trainer:
        trainer.fit()
        return trainer.model_state_dict()


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("kind", TEN)
def test_the_same_weights_as_by_hand(kind: type[Any], tmp_path: Path) -> None:
    assert difference(trained(kind, tmp_path), by_hand(kind)) == 0
    assert difference(by_hand(kind), {name: value.detach() for name, value in make(kind).state_dict().items()}) > 1e-3


@pytest.mark.parametrize("kind", TEN)
def test_the_same_weights_in_microbatches(kind: type[Any], tmp_path: Path) -> None:
    assert difference(trained(kind, tmp_path, microbatch=3), by_hand(kind)) < (1e-4 if kind is Closure else 1e-6)


@pytest.mark.parametrize("kind", [kind for kind in TEN if kind is not Closure])
def test_the_same_weights_with_a_loss_scale_for_each_step(kind: type[Any], tmp_path: Path) -> None:
    # A scale that overflows at first, in some steps and not in others.
    precision = {"fp16": {"init_scale": 2.0**16}}
    assert difference(trained(kind, tmp_path, precision=precision), by_hand(kind, half=True)) == 0


@pytest.mark.parametrize("microbatch", [pytest.param(None, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("kind", TEN)
def test_the_same_weights_over_two_ranks(kind: type[Any], microbatch: int | None, tmp_path: Path) -> None:
    def rank(number: int) -> dict[str, Tensor]:
        return trained(kind, tmp_path, number, 2, strategy={"ddp": {"split_data": False}}, microbatch=microbatch)

    first, second = run_ranks(rank, 2)
    assert difference(first, second) == 0
    assert difference(first, by_hand(kind, ranks=2)) < (1e-4 if kind is Closure else 2e-6)


#: What sharded parameters do not allow, and what the error says.
REFUSED = {
    DCGAN: "whose weights strategy='fsdp' has sharded",
    ActorCritic: "hocket.Apart needs full parameters",
    Closure: "LBFGS cannot step on sharded parameters",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", TEN)
def test_the_same_weights_sharded_over_two_ranks_or_an_error(kind: type[Any], tmp_path: Path) -> None:
    def rank(number: int) -> dict[str, Tensor]:
        wrap = {"wrap": ["Sequential"]} if kind is WGANGP else {}
        return trained(kind, tmp_path, number, 2, strategy={"fsdp": {"split_data": False, **wrap}})

    if kind in REFUSED:
        with pytest.raises(RankError, match=REFUSED[kind]):
            run_ranks(rank, 2)
        return
    first, second = run_ranks(rank, 2)
    assert difference(first, second) == 0
    assert difference(first, by_hand(kind, ranks=2)) < (1e-4 if kind is Closure else 2e-6)


class Kill(hocket.Callback):
    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", TEN)
def test_a_killed_run_resumes_bitwise(kind: type[Any], tmp_path: Path) -> None:
    def options(*callbacks: Any) -> dict[str, Any]:
        where = hocket.Checkpoints(tmp_path / "checkpoints", every="1ba")
        half = {} if kind is Closure else {"precision": "fp16"}
        return {"checkpoints": where, "resume": "auto", "callbacks": callbacks, "seed": 3, **half}

    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(lambda rank: trained(kind, tmp_path / "runs", **options(Kill())), 1)
    resumed = trained(kind, tmp_path / "runs", **options())
    assert difference(resumed, by_hand(kind, half=kind is not Closure)) == 0
