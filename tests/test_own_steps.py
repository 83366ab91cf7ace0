"""What holds around tasks that take their own steps: mistakes, plug-ins, schedules, logs, ranks that differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pages import ROOT, blocks
from torch import Tensor, nn
from torch.optim import SGD

import hocket
from hocket.basics.plugin_errors import PlanError
from hocket_testkit.ranks import RankError, run_ranks

DATA = [torch.full((4, 3), 1.0 + number) for number in range(4)]

pytestmark = pytest.mark.filterwarnings("ignore:.*in no batch of the first epoch")


class Two(hocket.Task):
    """Two layers, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def configure_optimizers(self) -> Any:
        return {"a": SGD(self.a.parameters(), lr=0.1), "b": SGD(self.b.parameters(), lr=0.1)}

    def loss_a(self, batch: Tensor) -> Tensor:
        return self.a(batch).square().mean()

    def loss_b(self, batch: Tensor) -> Tensor:
        return (self.b(batch) - self.a(batch)).square().mean()

    def train_batch(self, batch: Any, step: Any) -> Any:
        step(self.loss_a, batch, "a")
        step(self.loss_b, batch, "b")


class Batches:
    """The same batch five times."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * 5)


def trainer(task: hocket.Task, folder: Path, **options: Any) -> hocket.Trainer:
    return hocket.Trainer(
        **{"model": task, "train_data": DATA, "duration": "1ep", "device": "cpu", "folder": folder, **options}
    )


class Wrong(Two):
    def __init__(self, train_batch: Any) -> None:
        super().__init__()
        self._train_batch = train_batch

    def train_batch(self, batch: Any, step: Any) -> Any:
        return self._train_batch(self, batch, step)


def nested(task: Any, batch: Any, step: Any) -> None:
    step(lambda part: step(task.loss_a, part, "a").loss, batch, "a")


def backward_first(task: Any, batch: Any, step: Any) -> None:
    task.loss_b(batch).backward()
    step(task.loss_a, batch, "a")


def grown(task: Any, batch: Any, step: Any) -> None:
    step(task.loss_a, batch, "a")
    torch._foreach_lerp_([task.frozen], [task.a.weight], 0.5)


@pytest.mark.parametrize(
    ("train_batch", "error", "said"),
    [
        (lambda task, batch, step: step(task.loss_a, batch, "c"), ValueError, "'c'.* does not name an optimizer; there are"),
        (lambda task, batch, step: task.loss_a(batch), TypeError, r"returned Tensor.*Call step\(loss_function, batch\)"),
        (nested, RuntimeError, "not in a loss function: return the loss there"),
        (lambda task, batch, step: step(task.loss_a, {"x": batch, "y": batch[:2]}, "a"), ValueError, "Cannot tell how many"),
        (lambda task, batch, step: step(lambda part: 1.0, batch, "a"), TypeError, "returned float.*A number has no gradient"),
        (lambda task, batch, step: step(task.both, batch, "a", "b"), ValueError, "Apart of 'a', 'c' in a step of .* a, b"),
        (lambda task, batch, step: step(task.loss_a(batch), batch, "a"), TypeError, "given Tensor as its loss function"),
        (lambda task, batch, step: step(task.loss_a, "a"), TypeError, "given 'a' as its batch"),
        (lambda task, batch, step: step(task.loss_a, batch, ["a"]), TypeError, "given list as the name of an optimizer"),
        (backward_first, RuntimeError, "computed gradients before its first step"),
        (lambda task, batch, step: step(task.keeps_a_number, batch, "a"), ValueError, "kept dict that does not have one entry"),
        (lambda task, batch, step: step(task.both_of, task.a(batch), "a", "b"), ValueError, "where they would meet"),
        (grown, RuntimeError, r"changed frozen under autograd.*torch.no_grad\(\)"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(train_batch: Any, error: Any, said: str, tmp_path: Path) -> None:
    task: Any = Wrong(train_batch)
    task.frozen = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    task.both = lambda batch: hocket.Apart(a=task.loss_a(batch), c=task.loss_b(batch))
    task.keeps_a_number = lambda batch: hocket.Loss(task.loss_a(batch), kept={"largest": batch.max()})
    task.both_of = lambda batch: hocket.Apart(a=batch.square().mean(), b=task.b.weight.square().mean())
    with pytest.raises(error, match=said):
        trainer(task, tmp_path).fit()


def test_a_train_batch_of_other_arguments_is_refused_before_training(tmp_path: Path) -> None:
    class Lightning(Two):
        def train_batch(self, batch: Any) -> Any:  # type: ignore[override]
            pass

    with pytest.raises(TypeError, match=r"takes other arguments than \(batch, step\)"):
        trainer(Lightning(), tmp_path)


def test_a_step_is_called_in_train_batch_only(tmp_path: Path) -> None:
    kept = []
    with pytest.warns(UserWarning, match=r"called step\(…\) in no batch of this epoch"):
        trainer(Wrong(lambda task, batch, step: kept.append(step)), tmp_path).fit()
    with pytest.raises(RuntimeError, match="called in train_batch"):
        kept[0](Two().loss_a, DATA[0])


def test_only_the_steps_own_parameters_have_gradients(tmp_path: Path) -> None:
    seen = []

    class Look(hocket.Callback):
        def after_train_batch(self, state: hocket.State) -> None:
            named = state.task.named_parameters()
            seen.append((state.step.name, [name for name, parameter in named if parameter.grad is not None]))
            assert len(state.trained_parameters()) == 2

        def batch_end(self, state: hocket.State) -> None:
            assert len(state.trained_parameters()) == 4

    run = trainer(Two(), tmp_path, callbacks=[Look()], duration="1ba")
    run.fit()
    assert seen == [("a", ["a.weight", "a.bias"]), ("b", ["b.weight", "b.bias"])]
    assert all(parameter.requires_grad for parameter in run.state.task.parameters())


@pytest.mark.parametrize("clip", [0.05, None])
def test_gradients_are_clipped_step_by_step(clip: float | None, tmp_path: Path) -> None:
    norms = []

    class Look(hocket.Callback):
        def after_train_batch(self, state: hocket.State) -> None:
            gradients = [parameter.grad for parameter in state.trained_parameters()]
            norms.append(torch.cat([each.flatten() for each in gradients if each is not None]).norm())

        def batch_end(self, state: hocket.State) -> None:
            if clip is not None:
                assert state.gradient_norm is not None
                norms.append(state.gradient_norm)

    task = Two()
    trainer(task, tmp_path, callbacks=[Look()], duration="1ba", clip_gradients=clip).fit()
    if clip is None:
        return
    torch.testing.assert_close(norms[2], norms[1])  # the second step's own norm, before clipping
    by_hand = Two()
    for part, loss in ((by_hand.a, by_hand.loss_a), (by_hand.b, by_hand.loss_b)):
        by_hand.zero_grad()
        loss(DATA[0]).backward()
        torch.nn.utils.clip_grad_norm_(part.parameters(), clip)
        SGD(part.parameters(), lr=0.1).step()
    for mine, other in zip(task.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-7)


def test_a_step_that_is_not_finite_is_skipped_alone(tmp_path: Path) -> None:
    taken = []

    def train_batch(task: Any, batch: Any, step: Any) -> None:
        bad = step.batch == 1
        taken.append(step(lambda part: task.loss_a(part) * (float("nan") if bad else 1.0), batch, "a").taken)
        taken.append(step(task.loss_b, batch, "b").taken)

    run = trainer(Wrong(train_batch), tmp_path, nonfinite="skip", duration="2ba")
    with pytest.warns(RuntimeWarning, match="batch 1.*step 'a'"):
        run.fit()
    assert taken == [True, True, False, True]


def test_losses_are_logged_by_step(tmp_path: Path) -> None:
    logger = hocket.plugins.get("loggers", "memory")()
    run = trainer(Two(), tmp_path, loggers=[logger], callbacks=["lr-monitor"], log_every="1ba")
    run.fit()
    task = Two()
    optimizers = task.configure_optimizers()
    for number, batch in enumerate(DATA, 1):
        for name, loss_of in (("a", task.loss_a), ("b", task.loss_b)):
            task.zero_grad()
            (loss := loss_of(batch)).backward()
            optimizers[name].step()
            assert dict(logger.metrics[f"train/{name}/loss"])[number] == loss.item()
    assert dict(logger.metrics["lr/b/group0"])[4] == 0.1
    assert "train/loss" not in logger.metrics


def test_each_schedule_follows_its_own_optimizer(tmp_path: Path) -> None:
    def train_batch(task: Any, batch: Any, step: Any) -> None:
        step(task.loss_a, batch, "a")
        if step.batch % 2:
            step(task.loss_b, batch, "b")

    run = trainer(
        Wrong(train_batch),
        tmp_path,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        schedule_every="1ba",
    )
    run.fit()
    a, b = (optimizer.param_groups[0]["lr"] for optimizer in run.state.optimizers)
    assert (a, b) == (0.1 * 0.5**4, 0.1 * 0.5**2)


def test_algorithms_between_outputs_and_loss_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="'label-smoothing' acts on before_loss"):
        trainer(Two(), tmp_path, algorithms=["label-smoothing"]).fit()


def test_sam_takes_its_step_for_each_step(tmp_path: Path) -> None:
    from hocket_general.functional import sam_perturbation

    task, by_hand = Two(), Two()
    trainer(task, tmp_path, algorithms=[{"sam": {"rho": 0.1}}], duration="3ba").fit()
    for batch in DATA[:3]:
        for part, loss in ((by_hand.a, by_hand.loss_a), (by_hand.b, by_hand.loss_b)):
            by_hand.zero_grad()
            loss(batch).backward()
            held = [*part.parameters()]
            before = [parameter.detach().clone() for parameter in held]
            with torch.no_grad():
                torch._foreach_add_(held, sam_perturbation([p.grad for p in held if p.grad is not None], 0.1, 1e-12))
            by_hand.zero_grad()
            loss(batch).backward()
            with torch.no_grad():
                for parameter, value in zip(held, before, strict=True):
                    parameter.copy_(value)
            SGD(held, lr=0.1).step()
    for mine, other in zip(task.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_gradients_computed_again_and_a_graph_in_the_batch_are_refused(tmp_path: Path) -> None:
    def train_batch(task: Any, batch: Any, step: Any) -> None:
        step(lambda part: task.b(part).square().mean(), batch + task.a(batch).mean(), "a")

    with pytest.raises(RuntimeError, match="its graph can be used only once"):
        trainer(Wrong(train_batch), tmp_path, algorithms=["sam"]).fit()


@pytest.mark.filterwarnings("ignore:optimizer= is used")
def test_optimizers_by_the_names_of_parts(tmp_path: Path) -> None:
    given = {"a": "sgd(lr=0.1)", "b": lambda parameters: SGD(parameters, lr=0.1)}
    run = trainer(Two(), tmp_path / "1", optimizer=given)
    run.fit()
    same = trainer(Two(), tmp_path / "2")
    same.fit()
    assert run.state.optimizer_names == ["a", "b"]
    for mine, other in zip(run.state.task.parameters(), same.state.task.parameters(), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ValueError, match=r"'c': …\} names no submodule of Two, which has a, b"):
        trainer(Two(), tmp_path, optimizer={"a": "sgd(lr=0.1)", "c": "sgd(lr=0.1)"})


def test_a_loss_that_is_a_sum_is_noticed(tmp_path: Path) -> None:
    def train_batch(task: Any, batch: Any, step: Any) -> None:
        step(lambda part: task.a(part).square().sum(), batch, "a")

    with pytest.raises(ValueError, match="this is a sum over samples"):
        trainer(Wrong(train_batch), tmp_path, microbatch=2).fit()


def test_an_evaluation_that_has_nothing_to_call_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Two has train_batch and no forward\(batch\)"):
        trainer(Two(), tmp_path, eval_data=DATA)


def test_evaluation_of_a_task_with_steps(tmp_path: Path) -> None:
    class Evaluated(Two):
        def forward(self, batch: Any) -> Tensor:
            return self.b(batch) - self.a(batch)

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return outputs.square().mean()

    task = Evaluated()
    result = trainer(task, tmp_path, eval_data=DATA[:1]).fit()
    assert result.metrics["eval/loss"] == pytest.approx(float(task.loss(task(DATA[0]), DATA[0])), rel=1e-6)


def test_ranks_that_take_other_steps_are_told_apart(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        def train_batch(task: Any, batch: Any, step: Any) -> None:
            step(task.loss_a, batch, "a")
            if number:
                step(task.loss_b, batch, "b")

        trainer(Wrong(train_batch), tmp_path, strategy={"ddp": {"split_data": False}}).fit()

    with pytest.raises(
        RankError, match=r"rank 0 returned from train_batch; rank 1 called step\(…\) with Two.loss_b .* for b"
    ):
        run_ranks(rank, 2)


def test_unequal_batches_of_ranks_weigh_by_their_samples(tmp_path: Path) -> None:
    """The second rank has fewer samples, then none."""
    whole = [torch.arange(15.0).view(5, 3) / 10, torch.arange(9.0).view(3, 3) / 10]

    def rank(number: int) -> list[Tensor]:
        task = Wrong(lambda task, batch, step: Two.train_batch(task, batch[0], step))
        own = [(whole[0][:3],), (whole[1],)] if number == 0 else [(whole[0][3:],)]
        trainer(task, tmp_path, train_data=own, strategy={"ddp": {"split_data": False}}).fit()
        return [parameter.detach() for parameter in task.parameters()]

    first, second = run_ranks(rank, 2)
    by_hand = Two()
    for batch in whole:
        for part, loss in ((by_hand.a, by_hand.loss_a), (by_hand.b, by_hand.loss_b)):
            by_hand.zero_grad()
            loss(batch).backward()
            SGD(part.parameters(), lr=0.1).step()
    for mine, other, expected in zip(first, second, by_hand.parameters(), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_strategies_that_step_everything_refuse_in_the_plan(tmp_path: Path) -> None:
    class Whole(hocket.Strategy):
        offers = hocket.Need.FULL_PARAMETERS

    with pytest.raises(PlanError, match=r"takes its own optimizer steps.*steps all optimizers at once"):
        trainer(Two(), tmp_path, strategy=Whole())


GUIDES = ("gan", "manual-optimization", "momentum-encoder", "recurrent", "several-optimizers")


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_train_every_part(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of docs/how-to run; another epoch of each changes all its weights, and those of a target network."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(ROOT / f"docs/how-to/{guide}.md"):
        exec(compile("\n" * (block.line - 1) + block.text, f"{guide}.md", "exec"), names)
    guide_trainer: hocket.Trainer = names["trainer"]
    parameters = dict(guide_trainer.state.model.named_parameters())
    before = {name: value.detach().clone() for name, value in parameters.items()}
    guide_trainer.fit("1ep")
    assert before and not [name for name, value in parameters.items() if torch.equal(value, before[name])]


def test_microbatches_are_found_for_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step runs out of memory with more than two samples at once."""
    sizes = []

    def train_batch(task: Any, batch: Any, step: Any) -> None:
        def dear(part: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                sizes.append(len(part))
            if len(part) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return F.mse_loss(task.b(part), task.a(part))

        step(task.loss_a, batch, "a")
        step(dear, batch, "b")

    task, same = Wrong(train_batch), Two()
    with pytest.warns(UserWarning, match="Out of memory with 4 samples"):
        trainer(task, tmp_path / "1", microbatch="auto").fit()
    trainer(same, tmp_path / "2").fit()
    assert set(sizes) == {4, 2}
    for mine, other in zip(task.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


class Cycle(Two):
    """Uses the same parameters within the loss function and, by the graph of its batch, before it."""

    def train_batch(self, batch: Any, step: Any) -> Any:
        step(self.loss_of_both, {"real": batch, "fake": self.a(batch)}, "a")

    def loss_of_both(self, batch: Any) -> Tensor:
        return self.a(torch.cat([batch["fake"], batch["real"][:, :1]], 1)).square().mean() + batch["fake"].mean()


@pytest.mark.parametrize("microbatch", [pytest.param(None, marks=pytest.mark.long), 1])
@pytest.mark.parametrize("unused", [False, True])
def test_parameters_used_before_and_within_a_loss_function_agree_over_ranks(
    microbatch: int | None, unused: bool, tmp_path: Path
) -> None:
    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(number)) for number in range(3)]

    def rank(number: int) -> list[Tensor]:
        own = [{"x": batch[2 * number : 2 * number + 2]} for batch in data]
        ddp = {"ddp": {"split_data": False, "find_unused_parameters": unused}}
        wrapped = Wrong(lambda wrong, batch, step: Cycle.train_batch(wrong, batch["x"], step))
        wrapped.loss_of_both = lambda batch: Cycle.loss_of_both(wrapped, batch)  # type: ignore[attr-defined, arg-type]
        trainer(wrapped, tmp_path, train_data=own, strategy=ddp, microbatch=microbatch).fit()
        return [parameter.detach() for parameter in wrapped.parameters()]

    first, second = run_ranks(rank, 2)
    by_hand = Cycle()
    for batch in data:
        by_hand.zero_grad()
        by_hand.loss_of_both({"real": batch, "fake": by_hand.a(batch)}).backward()
        SGD(by_hand.a.parameters(), lr=0.1).step()
    for mine, other, expected in zip(first, second, by_hand.parameters(), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_microbatches_and_ranks_of_weight_zero_count_nothing(ranks: int, tmp_path: Path) -> None:
    """A mean over the samples that count, of which the second half has none: 0 / 0."""
    whole, counts = torch.randn(8, 3), torch.tensor([1.0] * 4 + [0.0] * 4)

    def masked(task: Any, batch: Any) -> Any:
        return (task.a(batch["x"]).square().mean(1) * batch["mask"]).sum() / batch["mask"].sum(), batch["mask"].sum()

    def rank(number: int) -> list[Tensor]:
        rows = slice(8 * number // ranks, 8 * (number + 1) // ranks)
        task = Wrong(lambda task, batch, step: step(lambda part: masked(task, part), batch, "a"))
        strategy = {"ddp": {"split_data": False}} if ranks > 1 else "single"
        data = [{"x": whole[rows], "mask": counts[rows]}]
        trainer(task, tmp_path, train_data=data, strategy=strategy, microbatch=2).fit()
        return [parameter.detach() for parameter in task.parameters()]

    first, *others = run_ranks(rank, 2) if ranks > 1 else [rank(0)]
    by_hand = Two()
    masked(by_hand, {"x": whole, "mask": counts})[0].backward()
    SGD(by_hand.a.parameters(), lr=0.1).step()
    for mine, *same, expected in zip(first, *others, by_hand.parameters(), strict=True):
        assert all(torch.equal(mine, other) for other in same)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_loss_functions_are_told_apart_by_their_code(tmp_path: Path) -> None:
    def train_batch(task: Any, batch: Any, step: Any) -> None:
        step(lambda part: task.a(part).square().mean(), batch, "a")
        step(lambda part: task.a(part).square().sum(), batch, "a")

    with pytest.raises(ValueError, match="this is a sum over samples"):
        trainer(Wrong(train_batch), tmp_path, microbatch=2).fit()


@pytest.mark.parametrize("batches", [1, 3])
def test_parameters_that_a_step_over_ranks_does_not_use_are_named_in_the_same_batch(
    batches: int, tmp_path: Path
) -> None:
    """Also in the last batch, after which torch would have said nothing and left gradients that differ between ranks."""

    def rank(number: int) -> None:
        task = Wrong(lambda task, batch, step: step(task.loss_a, batch + number))
        trainer(task, tmp_path, strategy={"ddp": {"split_data": False}}, duration=f"{batches}ba").fit()

    with pytest.raises(
        RankError, match=r"does not depend on b.weight, b.bias, .*step\(self.loss_function, batch, 'opt"
    ):
        run_ranks(rank, 2)


def test_parameters_that_a_step_over_ranks_does_not_use_are_searched_with_the_option(tmp_path: Path) -> None:
    def rank(number: int) -> list[Tensor]:
        task = Wrong(lambda task, batch, step: step(task.loss_a, batch + number))
        ddp = {"ddp": {"split_data": False, "find_unused_parameters": True}}
        trainer(task, tmp_path, strategy=ddp, duration="1ba").fit()
        return [parameter.detach() for parameter in task.parameters()]

    first, second = run_ranks(rank, 2)
    by_hand = Two()
    by_hand.loss_a(torch.cat([DATA[0], DATA[0] + 1])).backward()
    SGD(by_hand.a.parameters(), lr=0.1).step()
    for mine, other, expected in zip(first, second, by_hand.parameters(), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_gradients_with_respect_to_weights_of_another_optimizer_are_explained(tmp_path: Path) -> None:
    def penalty(task: Any, batch: Any) -> Tensor:
        loss = task.loss_b(batch)
        return loss + torch.autograd.grad(loss, task.b.weight, create_graph=True)[0].square().sum()

    def train_batch(*names: str) -> Any:
        return lambda task, batch, step: step(lambda part: penalty(task, part), batch, *names)

    with pytest.raises(RuntimeError, match="does not require grad") as error:
        trainer(Wrong(train_batch("a")), tmp_path / "1").fit()
    assert error.value.__notes__[0].startswith(
        "In a step of 'a' the parameters of 'b' require no gradient: b.weight, b.bias. To compute a gradient with respect to "
        "them in the loss function, name their optimizer too, as in step(…, 'a', 'b')"
    )
    trainer(Wrong(train_batch("a", "b")), tmp_path / "2").fit()


def test_ranks_with_other_loss_functions_are_told_apart(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        task = Wrong(lambda task, batch, step: step(task.loss_b if number else task.loss_a, batch, "a"))
        trainer(task, tmp_path, strategy={"ddp": {"split_data": False}}).fit()

    with pytest.raises(
        RankError, match=r"rank 0 called step\(…\) with Two.loss_a .*; rank 1 called step\(…\) with Two.loss_b"
    ):
        run_ranks(rank, 2)


def test_a_rank_without_samples_keeps_its_carry_and_all_have_the_same_buffers(tmp_path: Path) -> None:
    class Queue(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(2))
            self.kept: list[Any] = []

        def train_batch(self, batch: Any, step: Any) -> Any:
            carried = torch.full((len(batch["x"]), 1), 7.0)
            result = step(self.kept_loss, batch, "a", carry=carried)
            self.kept.append(result.kept)
            self.queue = result.kept.mean().repeat(2) + batch["x"].mean()

        def kept_loss(self, batch: Any, carry: Any) -> Any:
            return hocket.Loss(self.a(batch["x"]).square().mean(), kept=carry + 1)

    def rank(number: int) -> tuple[list[Any], Tensor]:
        task = Queue()
        own = [{"x": torch.ones(2, 3) + number}] * (2 - number)  # the second rank has one batch less
        trainer(task, tmp_path, train_data=own, strategy={"ddp": {"split_data": False}}).fit()
        return [kept.tolist() for kept in task.kept], task.queue

    (first, queue), (second, other) = run_ranks(rank, 2)
    assert first == [[[8.0], [8.0]]] * 2
    assert second == [[[8.0], [8.0]], [[7.0], [7.0]]]
    assert torch.equal(queue, other)


def test_optimizers_of_other_names_or_order_are_refused_on_resume(tmp_path: Path) -> None:
    class Reversed(Two):
        def configure_optimizers(self) -> Any:
            return dict(reversed(super().configure_optimizers().items()))

    tree = trainer(Two(), tmp_path / "1")
    tree.fit()
    with pytest.raises(
        hocket.checkpoints.ContentError, match="optimizers 'a', 'b' in this order, and the Trainer 'b', 'a'"
    ):
        trainer(Reversed(), tmp_path / "2").load_state_dict(tree.state_dict())


def test_schedules_by_the_names_of_optimizers(tmp_path: Path) -> None:
    def halved(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    run = trainer(Two(), tmp_path, schedule={"b": halved}, schedule_every="1ba")
    run.fit()
    assert [optimizer.param_groups[0]["lr"] for optimizer in run.state.optimizers] == [0.1, 0.1 * 0.5**4]


def test_microbatches_are_found_with_something_carried(tmp_path: Path) -> None:
    def train_batch(task: Any, batch: Any, step: Any) -> None:
        def dear(part: Tensor, carry: Tensor) -> Any:
            if len(part) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return hocket.Loss((task.a(part) + carry).square().mean(), kept=carry)

        assert torch.equal(step(dear, batch, "a", carry=batch[:, :2]).kept, batch[:, :2])

    trainer(Wrong(train_batch), tmp_path, microbatch="auto").fit()


class Shared(Two):
    """Both optimizers hold the layer ``a``."""

    def configure_optimizers(self) -> Any:
        return {"a": SGD(self.a.parameters(), lr=0.1), "both": SGD(self.parameters(), lr=0.1)}


@pytest.mark.parametrize("names", [("a", "both"), ()])
def test_one_step_of_optimizers_that_share_parameters_is_refused(names: Any, tmp_path: Path) -> None:
    class Once(Shared):
        def train_batch(self, batch: Any, step: Any) -> Any:
            step(self.loss_b, batch, *names)

    with pytest.raises(ValueError, match=r"'a' and 'both' share parameters.* step\(…, 'a'\), then step\(…, 'both'\)"):
        trainer(Once(), tmp_path).fit()


def test_shared_parameters_are_refused_without_steps_of_ones_own(tmp_path: Path) -> None:
    class Single(Shared):
        train_batch = hocket.Task.train_batch

        def forward(self, batch: Any) -> Any:
            return self.b(batch)

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.square().mean()

    with pytest.raises(ValueError, match=r"stepped twice a batch.*define train_batch"):
        trainer(Single(), tmp_path)


def in_place(part: Any) -> Tensor:
    part["fake"].mul_(0.5)
    return part["fake"].square().mean()


def in_place_elsewhere(part: Any) -> Tensor:
    part["fake"].detach().clamp_(-0.1, 0.1)
    return part["fake"].square().mean()


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("loss_function", [in_place, in_place_elsewhere])
def test_in_place_changes_of_a_tensor_with_a_graph_are_explained(
    loss_function: Any, microbatch: int | None, tmp_path: Path
) -> None:
    """The second is an error in plain PyTorch, too, where the graph needs the value: tanh keeps its result."""

    def train_batch(task: Any, batch: Any, step: Any) -> None:
        step(loss_function, {"fake": torch.tanh(task.a(batch))}, "a")

    with pytest.raises(RuntimeError, match=r"(?i)in-?place") as raised:
        trainer(Wrong(train_batch), tmp_path, microbatch=microbatch).fit()
    assert any("Compute a new tensor from it instead" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("last", [3, 1])
def test_a_carry_of_another_size_is_refused(microbatch: int | None, last: int, tmp_path: Path) -> None:
    """With one sample in the last batch it would be broadcast, without an error."""

    class Carrying(Two):
        hidden: Any = None

        def train_batch(self, batch: Any, step: Any) -> Any:
            self.hidden = step(self.kept_loss, batch, "a", carry=self.hidden).kept

        def kept_loss(self, batch: Any, hidden: Any) -> Any:
            outputs = self.a(batch) + (0 if hidden is None else hidden)
            return hocket.Loss(outputs.square().mean(), kept=outputs)

    with pytest.raises(ValueError, match=f"a carry of 4 samples with a batch of {last}.*drop_last=True"):
        trainer(Carrying(), tmp_path, train_data=[torch.ones(4, 3), torch.ones(last, 3)], microbatch=microbatch).fit()


def test_a_task_that_splits_and_joins_may_carry_anything(tmp_path: Path) -> None:
    """Here a hidden state of one entry for a batch of any size."""

    class Joining(Two):
        total: Any = torch.zeros(1)

        def split(self, batch: Any, size: int) -> Any:
            return [batch] * 2 if len(batch) == 1 else list(batch.split(size))

        def join(self, parts: Any) -> Any:
            return parts[0]

        def train_batch(self, batch: Any, step: Any) -> Any:
            self.total = step(self.kept_loss, batch, "a", carry=self.total).kept

        def kept_loss(self, batch: Any, total: Any) -> Any:
            return hocket.Loss(self.a(batch).square().mean(), kept=total + 1)

    task = Joining()
    trainer(task, tmp_path, microbatch=2).fit()
    assert task.total.item() == len(DATA)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_backward_within_a_loss_function_is_refused(strategy: str, tmp_path: Path) -> None:
    def train_batch(task: Any, batch: Any, step: Any) -> None:
        def twice(part: Tensor) -> Tensor:
            loss = task.loss_a(part)
            loss.backward(retain_graph=True)
            return loss

        step(twice, batch, "a")

    def rank(number: int) -> None:
        given = {"ddp": {"split_data": False}} if strategy == "ddp" else strategy
        trainer(Wrong(train_batch), tmp_path, strategy=given, microbatch=2).fit()

    if strategy == "single":
        with pytest.raises(RuntimeError, match=r"computed gradients by backward\(\).*Return the sum of the losses"):
            rank(0)
    else:
        with pytest.raises(RankError, match=r"computed gradients by backward\(\)"):
            run_ranks(rank, 2)


def test_a_loss_function_may_use_gradients_that_it_removes(tmp_path: Path) -> None:
    """A penalty on gradients, with ``backward`` instead of ``torch.autograd.grad``."""

    def train_batch(task: Any, batch: Any, step: Any) -> None:
        def penalized(part: Tensor) -> Tensor:
            loss = task.loss_a(part)
            loss.backward(retain_graph=True)
            scale = task.a.weight.grad.norm()
            task.a.zero_grad()
            return loss * scale

        step(penalized, batch, "a")

    task = Wrong(train_batch)
    before = task.a.weight.detach().clone()
    trainer(task, tmp_path).fit()
    assert not torch.equal(before, task.a.weight)
