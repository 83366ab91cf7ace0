"""The suggested learning rate, against what is known of a quadratic and against full grids of plain runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import make_data, make_model, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
import hocket_tools
from hocket_testkit import run_ranks
from hocket_tools.tuning import range_test

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class Quadratic(hocket.Task):
    """The loss w·diag(curvatures)·w / 2, from w = 1."""

    def __init__(self, *curvatures: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(len(curvatures)))
        self.curvatures = torch.tensor(curvatures)

    def forward(self, batch: Tensor) -> Tensor:
        return self.w

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return (self.curvatures * outputs.square()).sum() / 2


def quadratic(*curvatures: float, **changes: Any) -> hocket.Trainer:
    arguments = {"optimizer": "sgd(lr=1e-3)", "train_data": [torch.zeros(4, 1)] * 10, "device": "cpu", **changes}
    return hocket.Trainer(Quadratic(*curvatures), **arguments)


@pytest.mark.parametrize("curvature", [1e-2, 1.0, 37.0, 1e4])
def test_a_quadratic_of_known_curvature(curvature: float) -> None:
    """Gradient descent with the rate 1 / curvature ends in one step, and diverges from 2 / curvature on."""
    result = hocket_tools.tune(quadratic(curvature), "lr")
    assert result.suggestion is not None
    assert 1 / 3 <= result.suggestion * curvature <= 2


def test_a_quadratic_of_many_curvatures() -> None:
    """The best constant rate for many steps is 2 / (smallest + largest curvature) (Nesterov 2004, theorem 2.1.15)."""
    curvatures = (10.0, 3.0, 1.0, 0.3, 0.1)
    result = hocket_tools.tune(quadratic(*curvatures), "lr", run_steps=60)
    assert result.suggestion is not None
    assert 1 / 3 <= result.suggestion / (2 / (10.0 + 0.1)) <= 1


def test_a_range_test_alone() -> None:
    result = hocket_tools.tune(quadratic(5.0), "lr", run_steps=0)
    (found,) = result
    assert not found.runs and "geometric mean" in found.reason
    assert found.suggestion is not None and 0.02 < found.suggestion < 0.4
    rates, losses = zip(*found.table, strict=True)
    assert rates == tuple(range_test.rates(1e-7, 1e3, 100)[: len(rates)])
    # The recursion of gradient descent, by hand: after a step with each rate.
    w, expected = 1.0, []
    for rate in rates:
        w -= rate * 5.0 * w
        expected.append(5.0 * w * w / 2)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert found.ended == "the loss diverged" and losses[-1] > losses[0]


def grid(make: Callable[[float], hocket.Trainer], rates: list[float], steps: int) -> dict[float, float]:
    """The mean loss of the last tenth of plain runs at constant rates."""
    ends = {}
    for rate in rates:
        losses: list[float] = []

        class Losses(hocket.Callback):
            def batch_end(self, state: hocket.State, losses: list[float] = losses) -> None:
                losses.append(float(state.loss))

        run = make(rate)
        run.state.bus.attach(hocket.hookspecs.attachment.Attachment("callbacks", "losses", Losses()))
        try:
            run.fit(f"{steps}ba")
        except FloatingPointError:
            losses.append(math.inf)
        ends[rate] = statistics.fmean(losses[-(steps // 10) :])
    return ends


def check_against_grid(make: Callable[[float], hocket.Trainer], centre: float, steps: int) -> None:
    """The rates are a factor of 10**(1/3) apart, over nearly three decades."""
    ends = grid(make, [centre * 10 ** (thirds / 3) for thirds in range(-4, 5)], steps)
    best = min(ends, key=ends.__getitem__)
    assert best not in (min(ends), max(ends)), "the grid has the best rate inside"
    result = hocket_tools.tune(make(1e-3), "lr")
    assert result.suggestion is not None
    assert 1 / 3 <= result.suggestion / best <= 3, (best, ends, str(result))


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer, centre", [("adamw(lr={}, weight_decay=0.05)", 0.01), ("sgd(lr={}, momentum=0.9)", 0.1)]
)
def test_digits(optimizer: str, centre: float) -> None:
    pytest.importorskip("sklearn")
    from hocket_vision.datasets import digits
    from hocket_vision.models import small_resnet

    def make(rate: float) -> hocket.Trainer:
        torch.manual_seed(17)
        return hocket.Trainer(
            small_resnet(), loss="cross_entropy", train_data=digits("train", batch_size=64),
            optimizer=optimizer.format(rate), device="cpu", seed=17,
        )  # fmt: skip

    check_against_grid(make, centre, 115)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_text() -> None:
    """A small GPT on the sources of Python's standard library."""
    transformers = pytest.importorskip("transformers")
    import hocket_nlp

    def make(rate: float) -> hocket.Trainer:
        torch.manual_seed(17)
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=64, vocab_size=1024, n_positions=64, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
        )  # fmt: skip
        return hocket.Trainer(
            hocket_nlp.HuggingFaceTask(model=transformers.GPT2LMHeadModel(config)),
            train_data=hocket_nlp.text_python(batch_size=16, length=64, drop_last=True),
            optimizer=f"adamw(lr={rate})", device="cpu", seed=17, clip_gradients=1.0,
        )  # fmt: skip

    check_against_grid(make, 0.003, 120)


# --- the arithmetic


def test_smoothing_is_that_of_adam() -> None:
    """torch's Adam divides a moving average of gradients, with the same bias correction, by their root mean square."""
    losses = [3.0, -1.0, 4.0, 1.0, -5.0]
    value = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = torch.optim.Adam([value], lr=1.0, betas=(0.8, 0.0), eps=0.0)
    for loss, average in zip(losses, range_test.smoothed(losses, 0.8), strict=True):
        before = value.item()
        value.grad = torch.full((1,), loss, dtype=torch.float64)
        adam.step()
        assert before - value.item() == pytest.approx(average / abs(loss))


def test_divergence_does_not_depend_on_the_unit_or_the_sign() -> None:
    falls = [5.0, 5.01, 4.99, 5.0, 5.0, 5.0, 5.01, 5.0, 4.0, 3.0, 2.0, 2.0]
    rises = [3.0, 5.0, 8.0, 9.0, 12.0]
    assert not range_test.diverges(falls)
    ends = [range_test.diverges([*falls, *rises[:count]]) for count in range(len(rises) + 1)]
    assert ends[-1] and not ends[2]
    for scale, shift in ((1e-9, 0.0), (1e6, -7e6), (1.0, -100.0)):
        assert ends == [
            range_test.diverges([scale * loss + shift for loss in [*falls, *rises[:count]]])
            for count in range(len(rises) + 1)
        ]


# --- what happens on the way


def test_a_loss_that_becomes_infinite_or_nan_ends_the_test_and_is_said() -> None:
    class Cliff(Quadratic):
        def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
            loss = super().loss(outputs, batch)
            return loss if outputs.abs().max() < 1.05 else loss * math.nan

    for policy in ("raise", "skip", "warn"):
        run = hocket.Trainer(
            Cliff(1.0), train_data=[torch.zeros(4, 1)] * 10, optimizer="sgd(lr=0.1)", device="cpu", nonfinite=policy
        )
        (found,) = hocket_tools.tune(run, "lr", steps=60, run_steps=10)
        assert found.ended == "the loss or the gradients became NaN or infinite"
        assert all(math.isfinite(loss) for _, loss in found.table) and len(found.table) < 60
        assert found.suggestion is not None and 1 / 3 <= found.suggestion <= 2


def test_nothing_to_learn_has_no_suggestion() -> None:
    (found,) = hocket_tools.tune(quadratic(0.0), "lr", steps=30)
    assert found.suggestion is None and not found.runs
    assert "did not fall below its noise at any rate from 1e-07 to 1e+03" in str(found)


def test_schedules_are_out_of_the_way_and_groups_keep_their_proportions() -> None:
    """A schedule whose first rate is 0, and two groups of which one has a tenth of the other's rate."""
    seen: list[tuple[float, float]] = []

    class Notes(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(tuple(group["lr"] for group in self.param_groups))
            return super().step(closure)

    model = make_model()
    optimizer = Notes(
        [{"params": [*model[0].parameters()], "lr": 0.01}, {"params": [*model[3].parameters()], "lr": 0.1}], lr=0.1
    )
    run = make_trainer(model=model, optimizer=optimizer, schedule="cosine(warmup=0.5dur)", device="cpu")
    rates = [group["lr"] for group in optimizer.param_groups]
    (found,) = hocket_tools.tune(run, "lr", steps=20, low=1e-4, high=1.0, run_steps=0)
    assert [high for _, high in seen] == pytest.approx(range_test.rates(1e-4, 1.0, 20)[: len(seen)])
    assert [low * 10 for low, _ in seen] == pytest.approx([high for _, high in seen])
    assert found.current == 0.1 and [group["lr"] for group in optimizer.param_groups] == rates


class Two(hocket.Task):
    """Two quadratics of other curvatures, each with an optimizer; the second steps in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Quadratic(1.0), Quadratic(100.0)

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            "first": torch.optim.SGD(self.first.parameters(), lr=1e-3),
            "second": torch.optim.SGD(self.second.parameters(), lr=1e-3),
        }

    def train_batch(self, batch: Tensor, step: Any) -> None:
        step(lambda batch: self.first.loss(self.first(batch), batch), batch, "first")
        if step.batch % 2:
            step(lambda batch: self.second.loss(self.second(batch), batch), batch, "second")


def test_several_optimizers_one_by_one() -> None:
    run = hocket.Trainer(Two(), train_data=[torch.zeros(4, 1)] * 10, device="cpu")
    result = hocket_tools.tune(run, "lr", run_steps=20)
    first, second = result
    assert (first.optimizer, second.optimizer) == ("first", "second")
    assert 1 / 3 <= first.suggestion <= 2 and 1 / 300 <= second.suggestion <= 2 / 100
    assert str(result).startswith("optimizer first, learning rate: ")
    with pytest.raises(ValueError, match="There are several optimizers, 'first', 'second'"):
        _ = result.suggestion


@pytest.mark.parametrize(
    "changes",
    [{"microbatch": 8}, {"accumulate": "2ba"}, {"precision": "bf16"}, {"microbatch": "auto"},
     pytest.param({"compile": True}, marks=pytest.mark.long)],
)  # fmt: skip
def test_the_steps_are_those_of_a_fit(changes: dict[str, Any]) -> None:
    """The losses are those of a run whose schedule rises in the same way."""

    def make(**more: Any) -> hocket.Trainer:
        return make_trainer(train_data=make_data(shuffle=False), device="cpu", seed=3, **changes, **more)

    (found,) = hocket_tools.tune(make(), "lr", low=1e-3, high=0.1, steps=20, run_steps=0)
    rates = range_test.rates(1e-3, 0.1, 20)
    losses: list[float] = []

    class Losses(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            losses.append(float(state.loss))

    make(schedule=lambda clock: rates[min(clock.timestamp.batch, 19)] / 0.1, callbacks=[Losses()]).fit("21ba")
    assert [loss for _, loss in found.table] == pytest.approx(losses[1:], rel=1e-6)


def test_two_ranks_agree() -> None:
    """Of a run on two ranks the suggestion is that of one, and the weights afterwards those of before."""
    pytest.importorskip("hocket_strategies")

    def data() -> DataLoader[Any]:
        inputs = torch.randn(84, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), 32)

    def rank_main(rank: int) -> Any:
        run = make_trainer(train_data=data(), global_batch=32, seed=3, strategy="ddp", device="cpu")
        run.fit("1ba")
        before = {name: value.clone() for name, value in run.model_state_dict().items()}
        (found,) = hocket_tools.tune(run, "lr", steps=30, run_steps=5)
        same = all(torch.equal(value, before[name]) for name, value in run.model_state_dict().items())
        run.fit("2ba")
        return found.as_json(), same, {name: value.clone() for name, value in run.model_state_dict().items()}

    (first, same, weights), (second, also, _) = run_ranks(rank_main, 2)
    assert first == second and first["suggestion"] is not None and same and also
    alone = make_trainer(train_data=data(), global_batch=32, seed=3, device="cpu")
    alone.fit("3ba")
    for name, value in alone.model_state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


def test_ranks_with_other_arguments_are_refused() -> None:
    pytest.importorskip("hocket_strategies")

    def rank_main(rank: int) -> str:
        try:
            hocket_tools.tune(make_trainer(strategy="ddp", device="cpu"), "lr", steps=30 + rank)
        except ValueError as error:
            return str(error)
        return ""

    assert all("tune(steps)" in message for message in run_ranks(rank_main, 2))


@pytest.mark.parametrize(
    "what, options, message",
    [
        ("learning_rate", {}, r"what='learning_rate', which is str; it should be 'lr' or 'batch_size'"),
        ("batch-size", {}, r"Write what='batch_size'"),
        ("lr", {"low": 1.0, "high": 0.1}, "low=1, high=0.1 is not a range of learning rates. Write low=1e-7"),
        ("lr", {"steps": 3}, "steps=3 is too small"),
        ("batch_size", {"limit": 0}, "limit=0 is too small. Give 1 or more"),
        (
            "lr",
            {"limit": 64},
            r"limit=64 has no effect on tune\(trainer, 'lr', …\)\. Remove it",
        ),
        (
            "batch_size",
            {"steps": 50},
            r"steps=50 has no effect on tune\(trainer, 'batch_size', …\)",
        ),
    ],
)
def test_wrong_arguments(what: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hocket_tools.tune(quadratic(1.0), what, **options)  # type: ignore[call-overload]


def test_arguments_of_another_type() -> None:
    trainer = quadratic(1.0)
    for options, message in (
        ({"steps": "20"}, "steps='20', which is str; it should be an integer. Write steps=20"),
        ({"limit": "512"}, "Write limit=512"),
        ({"low": "1e-7"}, "Write low=1e-07"),
    ):
        with pytest.raises(TypeError, match=message):
            hocket_tools.tune(trainer, "lr", **options)  # type: ignore[call-overload]
    for call in (hocket_tools.tune, hocket_tools.export):
        with pytest.raises(
            TypeError, match=r"trainer=Linear.*an object of class Trainer\. Write trainer=hocket\.Trainer"
        ):
            call(torch.nn.Linear(1, 1), "lr")  # type: ignore[operator]


def test_without_an_optimizer_or_data() -> None:
    with pytest.raises(ValueError, match=r"There is no optimizer to search with\. Write optimizer="):
        hocket_tools.tune(
            hocket.Trainer(make_model(), loss="cross_entropy", train_data=make_data(), device="cpu"), "lr"
        )
    with pytest.raises(ValueError, match="There is no training data to search with"):
        hocket_tools.tune(
            hocket.Trainer(make_model(), loss="cross_entropy", optimizer="sgd(lr=0.1)", device="cpu"), "lr"
        )


def test_the_figure_shows_the_table_and_the_suggestion() -> None:
    pytest.importorskip("matplotlib").use("agg")
    result = hocket_tools.tune(quadratic(1.0), "lr", run_steps=5)
    (axis,) = result.figure().axes
    drawn = axis.get_lines()[0].get_xydata().tolist()
    assert drawn == [list(row) for row in result[0].table]
    assert [*axis.get_lines()[-1].get_xdata()] == [result.suggestion] * 2


def test_a_loader_is_iterated_from_the_beginning_of_an_epoch() -> None:
    """Also where the run is within one: the first loss is that of the first batch."""
    data = DataLoader(make_data().dataset, 12)
    run = make_trainer(train_data=data, device="cpu", optimizer="sgd(lr=1e-9)")
    run.fit("3ba")
    (found,) = hocket_tools.tune(run, "lr", low=1e-9, high=1e-8, steps=20, run_steps=0)
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(run.state.model(inputs), targets).item() for inputs, targets in data]
    assert [loss for _, loss in found.table[:6]] == pytest.approx(losses[1:7], rel=1e-4)


def test_an_argument_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match=r"stepz.*steps"):
        hocket_tools.tune(None, "lr", stepz=3)  # type: ignore[call-overload]
