"""Every algorithm of the general and the vision package, with every other one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import plugins
from hocket.plugins import PluginError, catalog
from hocket.testkit import run_ranks

DISTRIBUTIONS = ("hocket-algorithms-general", "hocket-algorithms-vision")
#: Settings for those that cannot do without, or would otherwise do nothing in three batches.
SETTINGS: dict[str, dict[str, Any]] = {
    "ema": {"half_life": "1ba"},
    "gradient-clipping": {"kind": "norm", "threshold": 0.1},
}
# From the catalog, so that an algorithm that is added to a package is combined with the others without a change here.
NAMES = sorted(entry.name for entry in catalog.entries("algorithms") if entry.dist in DISTRIBUTIONS)
PAIRS = list(itertools.combinations(NAMES, 2))


def phase(name: str) -> hocket.Phase:
    return plugins.get("algorithms", name).phase


class Network(nn.Module):
    """A strided convolution and pooling for BlurPool, a mean over pixels so that any image size will do.

    Without ``memory`` what it makes of a sample depends on nothing else, so that it does not matter which rank computes it.
    """

    def __init__(self, memory: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1, bias=False)  # a bias before the norm would have no gradient
        self.norm = nn.BatchNorm2d(16) if memory else nn.GroupNorm(4, 16)
        self.pool = nn.MaxPool2d(2)
        self.second = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.dropout = nn.Dropout(0.2 if memory else 0.0)
        self.head = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(self.norm(self.first(images)).relu())
        return self.head(self.dropout(self.second(features).relu().mean((2, 3))))


def make(*names: str, memory: bool = True, **changes: Any) -> hocket.Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Network(memory)
        samples = TensorDataset(torch.rand(24, 1, 12, 12), torch.randint(3, (24,)))
    arguments = {
        "model": model,
        "loss": F.cross_entropy,
        "train_data": DataLoader(samples, 8, shuffle=True),
        "global_batch": 8,
        "eval_data": DataLoader(samples, 16),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "duration": "3ba",
        "algorithms": [{name: SETTINGS.get(name, {})} for name in names],
        "seed": 5,
    }
    return hocket.Trainer(**{**arguments, **changes})


def trained(*names: str, increments: tuple[str, ...] = ("3ba",), **changes: Any) -> dict[str, Tensor]:
    """The weights that training ends with, and those that evaluation uses."""
    trainer = make(*names, **changes)
    for increment in increments:
        trainer.fit(increment)
    assert trainer.state.timestamp.batch == 3
    used = {f"evaluated {name}": value for name, value in trainer.model_state_dict(evaluated=True).items()}
    return {**{name: value.clone() for name, value in trainer.model_state_dict().items()}, **used}


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_the_packages_are_there() -> None:
    """Otherwise the tests below would be about nothing."""
    assert len(NAMES) >= 7 and {"ema", "sam", "blurpool", "augmix"} <= set(NAMES)


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), *PAIRS, tuple(NAMES)], ids="+".join)
def test_they_attach_plan_and_train(names: tuple[str, ...]) -> None:
    """The plan names each, surgery reaches the model, and three batches train what there is to train."""
    trainer = make(*names)
    plan = trainer.plan()
    assert [attachment.name for attachment in plan.attachments if attachment.kind == "algorithms"] == list(names)
    assert all(name in str(plan) for name in names)
    before = {name: value.clone() for name, value in trainer.model_state_dict().items()}
    result = trainer.fit()
    assert result.timestamp.batch == 3
    assert torch.isfinite(torch.tensor(result.metrics["eval/loss"]))
    after = trainer.model_state_dict()
    assert all(value.isfinite().all() for value in after.values())
    parameters = {name for name, _ in trainer.state.model.named_parameters()}
    assert parameters <= set(different(before, after)), "every parameter was trained"
    assert ("blurpool" in names) is (type(trainer.state.model.second) is not nn.Conv2d)


@pytest.mark.parametrize("names", [pair for pair in PAIRS if phase(pair[0]) is not phase(pair[1])], ids="+".join)
def test_the_order_in_which_the_user_names_them_does_not_matter(names: tuple[str, str]) -> None:
    """Of two phases, the phases decide; and the random numbers of one do not depend on the other."""
    assert not different(trained(*names), trained(*reversed(names)))


@pytest.mark.parametrize("names", [*PAIRS, tuple(NAMES)], ids="+".join)
def test_a_fit_in_increments_is_one_fit(names: tuple[str, ...]) -> None:
    """What an algorithm keeps between batches survives the end of a fit within an epoch."""
    assert not different(trained(*names, increments=("1ba", "2ba")), trained(*names))


@pytest.mark.parametrize("name", NAMES)
def test_each_changes_the_run(name: str) -> None:
    """So that the tests above do not compare runs in which nothing happened."""
    alone, without = trained(name), trained()
    assert alone.keys() != without.keys() or different(alone, without)


#: What draws other random numbers for each rank's samples cannot be what one process computes.
PER_RANK = {"augmix"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("names", [*((name,) for name in NAMES), tuple(NAMES)], ids="+".join)
def test_on_two_ranks_they_are_what_they_are_in_one_process(names: tuple[str, ...], strategy: str) -> None:
    """Trained weights and those that evaluation uses; a refusal has to come with the plan, before training."""
    refused = _refused(names, strategy)

    def rank_main(rank: int) -> Any:
        try:
            return trained(*names, memory=False, strategy=strategy, device="cpu")
        except PluginError as error:
            return str(error)

    first, second = run_ranks(rank_main, 2)
    if refused:
        assert first == second and "needs" in first, first
        return
    assert first.keys() == second.keys() and not different(first, second), "both ranks hold the same weights"
    if PER_RANK.isdisjoint(names):
        alone = trained(*names, memory=False)
        assert first.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5, msg=name)


def _refused(names: tuple[str, ...], strategy: str) -> bool:
    offers = plugins.get("strategies", strategy).offers
    return any(plugins.get("algorithms", name).needs & ~offers for name in names)


class Pieces(hocket.Strategy):
    """What a pipeline would be: it owns the whole batch and computes its gradients in two pieces without their events."""

    microbatch_events = False

    def gradients(self, state: hocket.State) -> bool:
        bus, batch = state.bus, state.batch
        bus.before_train_batch(state)
        bus.zero_grad(state)
        losses = []
        for piece in bus.split_batch(state, batch, 4):
            piece = bus.move_batch(state, piece)
            loss = bus.loss(state, bus.forward(state, piece), piece).value * (len(piece[0]) / state.rank_samples)
            bus.backward(state, loss)
            losses.append(loss.detach())
        state.loss = torch.stack(losses).sum()
        for optimizer in state.optimizers:
            bus.unscale_gradients(optimizer)
        bus.after_train_batch(state)
        state.gradient_norm = bus.clip_gradients(state)
        return True


def test_an_algorithm_that_an_engine_would_not_call_is_refused() -> None:
    pytest.importorskip("hocket_general")
    with pytest.raises(
        hocket.plugins.PlanError, match=r"'label-smoothing' acts on before_loss.* but strategy 'pieces'"
    ):
        hocket.Trainer(
            model=nn.Linear(3, 1), loss=nn.functional.mse_loss, algorithms=["label-smoothing"], strategy=Pieces()
        )


@pytest.mark.parametrize("algorithms", [[], ["sam"], ["ema(half_life=2ba)"]], ids=str)
def test_an_engine_that_owns_the_batch_is_one_action(algorithms: list[str]) -> None:
    """Equal to core's own microbatches, closures of SAM included."""
    pytest.importorskip("hocket_general")
    data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(4)]
    results = []
    for strategy in ("single", Pieces()):
        torch.manual_seed(0)
        trainer = hocket.Trainer(
            model=nn.Linear(3, 1), loss=nn.functional.mse_loss, train_data=data, duration="2ep", device="cpu",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), algorithms=algorithms,
            clip_gradients=0.5, strategy=strategy, microbatch=4,
        )  # fmt: skip
        trainer.fit()
        weights = torch.cat([value.flatten() for value in trainer.model_state_dict(evaluated=True).values()])
        results.append((weights, trainer.state.loss, trainer.state.gradient_norm))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
