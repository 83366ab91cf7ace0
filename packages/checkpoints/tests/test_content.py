"""What is in a checkpoint, and what is said when it does not fit."""

from __future__ import annotations

import copy
import enum
import random
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from hocket import Algorithm, Callback, Event, State, Trainer, plugins
from hocket.basics import seeding
from hocket.basics.plain_data import decode, encode
from hocket.data import seeded
from hocket.data.generators import DataGenerators
from hocket.data.samplers import Indices
from hocket_checkpoints.content import ContentError
from hocket_cli.yaml_messages import in_yaml

np = pytest.importorskip("numpy")
pytest.importorskip("torchmetrics")
pytest.importorskip("hocket_general")  # plug-ins that have something to keep

# --- plain data

_leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4)
)
_keys = st.integers() | st.text(max_size=3) | st.sampled_from(["~tuple", "~", "~int"]) | st.tuples(st.integers())


def _nested(inner: Any) -> Any:
    return (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(_keys, inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
    )


def _plain(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(type(key) is str for key in tree) and all(map(_plain, tree.values()))
    if type(tree) is list:
        return all(map(_plain, tree))
    return tree is None or type(tree) in (bool, int, float, str, bytes, torch.Tensor)


@given(st.recursive(_leaves, _nested, max_leaves=12))
def test_any_nesting_comes_back(value: Any) -> None:
    tree = encode(value)
    assert _plain(tree)
    back = decode(tree)
    assert back == value
    assert repr(back) == repr(value) or "{" in repr(value)  # 1 == True; the order of a set may differ


def test_other_kinds_of_values() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    array, number = np.arange(6, dtype=np.uint16).reshape(2, 3), np.float32(0.1)
    back = decode(
        encode(
            {"a": array, "n": number, "d": deque([1]), "c": Counter([3, 3]), "t": torch.bfloat16, "e": Colour.RED,
             "v": torch.device("cpu", 1), "s": torch.Size([2]), "p": nn.Parameter(torch.ones(2))}
        )
    )  # fmt: skip
    assert back["a"].dtype == array.dtype and (back["a"] == array).all()
    assert type(back["n"]) is np.float32 and back["n"] == number
    assert (back["d"], back["c"], back["c"][9]) == (deque([1]), Counter({3: 2}), 0)
    assert (back["t"], back["e"], back["v"], back["s"]) == (torch.bfloat16, "red", torch.device("cpu", 1), (2,))
    assert type(back["p"]) is torch.Tensor and not back["p"].requires_grad


@pytest.mark.parametrize("value", [object(), 1j, len, np.array([None]), np.array(["a"])])
def test_what_is_not_data_is_refused_by_place(value: Any) -> None:
    with pytest.raises(TypeError, match="callback 'x'/best/0"):
        encode({"best": [value]}, "callback 'x'")


def test_reading_keeps_no_tensor_of_the_tree() -> None:
    tree = encode({"a": (torch.zeros(2),), "b": np.zeros(2)})
    back = decode(tree)
    back["a"][0].add_(1)
    back["b"] += 1
    assert tree["a"]["~tuple"][0].sum() == 0 and tree["b"]["~array"].sum() == 0


# --- random numbers


def test_random_numbers_go_through_a_tree() -> None:
    random.gauss(0, 1), np.random.standard_normal()  # each keeps a second one back
    tree = copy.deepcopy(seeding.to_tree(seeding.capture()))
    assert _plain(tree)
    drawn = [random.gauss(0, 1), np.random.standard_normal(), random.random(), np.random.rand(), torch.rand(()).item()]
    seeding.restore(seeding.from_tree(tree))
    again = [random.gauss(0, 1), np.random.standard_normal(), random.random(), np.random.rand(), torch.rand(()).item()]
    assert drawn == again


def test_generators_of_data_are_found_where_they_are_and_restored() -> None:
    class Data(TensorDataset):
        def __init__(self) -> None:
            super().__init__(torch.zeros(4))
            self.a, self.b, self.c = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)

    loader = DataLoader(Data(), 2, shuffle=True, generator=torch.Generator().manual_seed(4))
    sources = DataGenerators(loader)
    tree = copy.deepcopy(sources.capture())
    assert set(tree) == {"loader.generator", "dataset.a", "dataset.b", "dataset.c"}  # the sampler's is the loader's
    assert _plain(tree)

    def draw() -> list[float]:
        data = loader.dataset
        return [data.a.random(), data.b.random(), data.c.rand(), torch.rand((), generator=loader.generator).item()]  # type: ignore[attr-defined]

    drawn = draw()
    sources.restore(tree)
    assert draw() == drawn


# --- the order of samples

_samplers: dict[str, Any] = {
    "random": lambda n: RandomSampler(range(n)),
    "own generator": lambda n: RandomSampler(range(n), generator=torch.Generator().manual_seed(3)),
    "replacement": lambda n: RandomSampler(range(n), True, 2 * n + 40, generator=torch.Generator().manual_seed(3)),
    "in order": lambda n: SequentialSampler(range(n)),
}


@given(
    st.sampled_from(sorted(_samplers)),
    st.integers(1, 70),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_the_rest_of_a_pass_is_drawn_again(
    name: str, samples: int, size: int, drop_last: bool, seed: int, data: st.DataObject
) -> None:
    def sampler() -> Any:
        return BatchSampler(_samplers[name](samples), size, drop_last)

    torch.manual_seed(seed)
    plain = list(sampler())
    torch.manual_seed(seed)
    whole = Indices(given_sampler := sampler(), _sources(given_sampler))
    assert list(whole) == plain  # as without us
    skip = data.draw(st.integers(0, len(plain)))
    torch.manual_seed(seed + 1)
    rest = Indices(again := sampler(), _sources(again), whole.first, skip)
    assert list(rest) == plain[skip:]
    assert (rest.asked, rest.ended) == (whole.asked, whole.ended)


def _sources(sampler: Any) -> DataGenerators:
    return DataGenerators(DataLoader(range(100), batch_sampler=sampler))  # type: ignore[arg-type]


# --- samples with random numbers of their own


def test_seeded_samples_depend_on_seed_epoch_and_index_only() -> None:
    class Noise:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> list[float]:
            return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    one, other = seeded(Noise(), 1), seeded(Noise(), 2)
    before = seeding.capture()
    first = [one[i] for i in range(6)]
    after = seeding.capture()
    assert before["python"] == after["python"] and torch.equal(before["torch"], after["torch"])
    assert [one[i] for i in reversed(range(6))] == first[::-1]
    assert len({number for sample in first for number in sample}) == 18
    assert [other[i] for i in range(6)] != first
    one.set_epoch(1)
    assert not {n for i in range(6) for n in one[i]} & {n for sample in first for n in sample}
    in_workers = DataLoader(one, None, num_workers=2, persistent_workers=True)
    for epoch in (1, 2, 0):
        one.set_epoch(epoch)
        expected = [one[i] for i in range(6)]
        assert [sample for sample in in_workers] == expected
    assert [one[i] for i in range(6)] == first
    with pytest.raises(TypeError, match="no indices"):
        seeded(iter([]))


# --- what fits what


class Counts(Callback):
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def batch_end(self, state: State) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Silent(Callback):
    """Keeps nothing."""


class Noisy(Algorithm):
    """Keeps nothing but random numbers."""

    events = frozenset({Event.BATCH_START})

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def apply(self, event: Event, state: State) -> None:
        self.drawn.append(torch.rand((), generator=state.generator(self)).item())


def make(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, features: int = 3, **options: Any
) -> Trainer:
    data = TensorDataset(torch.randn(12, features, generator=torch.Generator().manual_seed(0)), torch.zeros(12).long())
    return Trainer(
        **{
            "model": nn.Linear(features, 2),
            "loss": nn.functional.cross_entropy,
            "train_data": DataLoader(data, 4),
            "optimizer": lambda parameters: optimizer(parameters, lr=0.1),
            "duration": "2ep",
            **options,
        }
    )


def test_two_callbacks_of_one_class_each_get_their_own() -> None:
    first = make(callbacks=[Counts(10), Silent(), Counts(20)])
    first.fit()
    one, other = Counts(), Counts()
    make(callbacks=[one, other, Silent()]).load_state_dict(first.state_dict())
    assert (one.count, other.count) == (16, 26)


def test_random_numbers_of_plug_ins_go_on_without_a_seed_too() -> None:
    whole, part, rest = Noisy(), Noisy(), Noisy()
    torch.manual_seed(4)
    make(algorithms=[whole]).fit()
    torch.manual_seed(4)
    first = make(algorithms=[part])
    first.fit("2ba")
    torch.manual_seed(5)
    second = make(algorithms=[rest])
    second.load_state_dict(first.state_dict())
    second.fit()
    assert part.drawn + rest.drawn == whole.drawn


def test_another_optimizer_is_an_error_and_changes_nothing() -> None:
    tree = make().state_dict()
    other = make(torch.optim.AdamW)
    weights = other.model_state_dict()["weight"].clone()
    with pytest.raises(ContentError, match=r"torch.optim.sgd.SGD, but the Trainer has torch.optim.adamw.AdamW"):
        other.load_state_dict(tree)
    assert torch.equal(other.model_state_dict()["weight"], weights)
    with pytest.warns(UserWarning, match="strict=False"):
        other.load_state_dict(tree, strict=False)
    assert torch.equal(other.model_state_dict()["weight"], tree["model"]["network.weight"])


def test_a_missing_plug_in_is_named_with_what_brings_it() -> None:
    tree = copy.deepcopy(make(callbacks=[Counts()], algorithms=["ema"]).state_dict())
    with pytest.raises(ContentError, match=r"algorithm 'ema' .* not attached. Pass algorithms=\['ema'\]") as caught:
        make(callbacks=[Counts()]).load_state_dict(tree)
    smooth = copy.deepcopy(make(algorithms=[{"ema": {"half_life": "3ba"}}]).state_dict())
    with pytest.raises(ContentError, match=r"Pass algorithms=\[{'ema': {'half_life': '3ba'}}\] to") as with_arguments:
        make().load_state_dict(smooth)
    assert "`algorithms: [{ema: {half_life: 3ba}}]`" in in_yaml(with_arguments.value)
    with pytest.raises(
        ContentError, match=r"callback 'counts' .* Pass an instance of it to the Trainer: callbacks=\[Counts"
    ):
        make(algorithms=["ema"]).load_state_dict(tree)
    (ema,) = (each for each in tree["attached"] if each["name"] == "ema")
    assert ema["dist"] and ema["version"] and ema["config"] == {}
    ema |= {"name": "vibrato", "dist": "hocket-vibrato", "version": "1.2"}
    with pytest.raises(ContentError, match=r"a wheel of hocket-vibrato; and pass algorithms=\['vibrato'\]"):
        make(callbacks=[Counts()]).load_state_dict(tree)
    assert isinstance(caught.value, plugins.PluginError)


def test_plug_ins_that_were_not_there() -> None:
    tree = make().state_dict()
    make(callbacks=[Silent()]).load_state_dict(tree)  # has nothing to restore
    with pytest.raises(ContentError, match="callback 'counts' is attached, but the checkpoint was taken without it"):
        make(callbacks=[Counts()]).load_state_dict(tree)
    with pytest.raises(ContentError, match="algorithm 'label-smoothing' is attached"):
        make(algorithms=["label-smoothing"]).load_state_dict(tree)
    counts = Counts(3)
    with pytest.warns(UserWarning, match="taken without it"):
        make(callbacks=[counts]).load_state_dict(tree, strict=False)
    assert counts.count == 3


def test_another_class_under_the_name_is_an_error() -> None:
    tree = copy.deepcopy(make(callbacks=[Counts()]).state_dict())
    next(each for each in tree["attached"] if each["name"] == "counts")["class"] = "elsewhere.Counts"
    with pytest.raises(ContentError, match=r"'counts' is a elsewhere.Counts in the checkpoint"):
        make(callbacks=[Counts()]).load_state_dict(tree)


def test_weights_of_other_shapes() -> None:
    tree = make(features=3).state_dict()
    refused = make(features=5)
    before = copy.deepcopy(refused.model_state_dict())
    shape = r"network.weight \(\[2, 3\], the module has \[2, 5\]\)"
    with pytest.raises(ContentError, match=rf"{shape}.*ignore=\['model.network.weight'\]"):
        refused.load_state_dict(tree)
    assert all(torch.equal(value, before[name]) for name, value in refused.model_state_dict().items())
    other = make(features=5, optimizer=torch.optim.AdamW)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        other.load_state_dict(tree, strict=False)
    assert any("1 loaded; skipped in the checkpoint: network.weight" in str(each.message) for each in told)
    assert torch.equal(other.model_state_dict()["bias"], tree["model"]["network.bias"])


def test_optimizer_state_of_other_shapes() -> None:
    trained = make(torch.optim.AdamW)
    trained.fit()
    tree = trained.state_dict()
    of_weight = "optimizers.0.state.state.~int.0.*"
    other = make(torch.optim.AdamW, features=5)
    with pytest.raises(ContentError, match=rf"AdamW .* for network.weight\. .*{re.escape(of_weight)}"):
        other.load_state_dict(tree, ignore=["model.network.weight"])
    assert not torch.equal(other.model_state_dict()["bias"], tree["model"]["network.bias"])
    for ignored in (of_weight, "optimizers.*"):
        other = make(torch.optim.AdamW, features=5, duration="3ep")
        other.load_state_dict(tree, ignore=["model.network.weight", ignored])
        other.fit()
        again = make(torch.optim.AdamW, features=5, duration="3ep")
        again.fit("1ep")  # has state of its own, which is ignored too
        again.load_state_dict(tree, ignore=["model.network.weight", "optimizers.*"])
    other = make(torch.optim.AdamW, features=5, duration="3ep")
    with (
        pytest.warns(UserWarning, match="other shapes for network.weight"),
        pytest.warns(UserWarning, match="1 loaded"),
    ):
        other.load_state_dict(tree, strict=False)
    other.fit()
    steps = [other.state.optimizers[0].state[parameter]["step"].item() for parameter in other.state.model.parameters()]
    assert steps == [3, 9]  # that of the bias was loaded


def test_other_parameter_groups() -> None:
    tree = make().state_dict()

    def grouped(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=5 * lr)

    other = make(optimizer=grouped)
    before = copy.deepcopy(other.model_state_dict())
    with pytest.raises(
        ContentError, match=r"groups of \[2\] parameters, and the Trainer's has \[1, 1\].*'optimizers.\*'"
    ):
        other.load_state_dict(tree)
    assert all(torch.equal(value, before[name]) for name, value in other.model_state_dict().items())
    other.load_state_dict(tree, ignore=["optimizers.*"])
    assert torch.equal(other.model_state_dict()["weight"], tree["model"]["network.weight"])
    other = make(optimizer=grouped)
    with pytest.warns(UserWarning, match="groups of"):
        other.load_state_dict(tree, strict=False)
    assert [group["lr"] for group in other.state.optimizers[0].param_groups] == [0.5, 0.5]


class Resized(nn.Linear):
    """Takes a history of any length."""

    def __init__(self, length: int = 0) -> None:
        super().__init__(3, 2)
        self.register_buffer("history", torch.zeros(length))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.history = torch.empty_like(state_dict[f"{prefix}history"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_modules_that_take_other_shapes_are_asked() -> None:
    tree = make(model=Resized(4)).state_dict()
    other = make(model=Resized())
    other.load_state_dict(tree)
    assert other.state.model.history.shape == (4,)


def test_state_that_is_not_data_is_an_error_that_names_the_plug_in() -> None:
    class Opaque(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": [object()]}

    with pytest.raises(TypeError, match="callback 'opaque'/seen/0 holds a object"):
        make(callbacks=[Opaque()]).state_dict()


def test_a_tree_is_plain_and_can_be_loaded_twice() -> None:
    first = make(torch.optim.AdamW, algorithms=["ema"])
    first.fit("3ba")
    tree = copy.deepcopy(first.state_dict())
    assert _plain(tree)
    results = []
    for _ in range(2):
        again = make(torch.optim.AdamW, algorithms=["ema"])
        again.load_state_dict(tree)
        again.fit()
        results.append(again.model_state_dict()["weight"].clone())
    assert torch.equal(*results)


def test_content_of_another_version_is_refused() -> None:
    tree = {**make().state_dict(), "version": 99}
    with pytest.raises(ContentError, match="version 99, and this hocket reads 1"):
        make().load_state_dict(tree)


def test_loading_during_a_fit_is_refused() -> None:
    class Loads(Callback):
        def batch_checkpoint(self, state: State) -> None:
            trainer.load_state_dict(trainer.state_dict())

    trainer = make(callbacks=[Loads()])
    with pytest.raises(RuntimeError, match="before fit starts"):
        trainer.fit()


class Sums:
    """A metric of one's own, with nothing but attributes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.total = self.total + outputs.sum()
        self.count += len(targets)

    def compute(self) -> Any:
        return self.total / self.count


def test_metrics_of_the_epoch_under_way() -> None:
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

    def metrics() -> dict[str, Any]:
        group = torchmetrics.MetricCollection([MulticlassPrecision(2), MulticlassRecall(2)])
        listed = torchmetrics.CatMetric()
        return {"own": Sums(), "accuracy": MulticlassAccuracy(2), "group": group, "listed": Listed(listed)}

    class Listed(torchmetrics.Metric):
        """Keeps a list of tensors."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.add_state("seen", [], "cat")

        def update(self, outputs: Any, targets: Any) -> None:
            self.seen.append(outputs.sum().reshape(1))

        def compute(self) -> Any:
            return torch.cat(list(self.seen)).sum()

    torch.manual_seed(0)
    weights = nn.Linear(3, 2)
    whole = make(model=copy.deepcopy(weights), train_metrics=metrics, duration="1ep").fit()
    first = make(model=copy.deepcopy(weights), train_metrics=metrics, duration="1ep")
    first.fit("2ba")
    second = make(train_metrics=metrics, duration="1ep")
    second.load_state_dict(first.state_dict())
    assert second.fit().metrics == whole.metrics
    assert len(whole.metrics) == 6
