"""DDP without a Trainer: processes, collectives, the wrapped model."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket import Need
from hocket.devices.cpu import CPU
from hocket.devices.mps import MPS
from hocket_strategies import DDP
from hocket_strategies.collective_errors import CollectiveError, Explained
from hocket_testkit.ranks import RankError, run_ranks


def ready(**options) -> DDP:
    strategy = DDP(**options)
    strategy.setup_environment(CPU())
    return strategy


# --- processes


def test_alone_it_says_how_to_start_more(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"RANK, WORLD_SIZE.*torchrun --nproc-per-node 2.*strategy='single'"):
        ready()


def test_a_device_without_a_backend_is_refused():
    def rank_main(rank):
        DDP().setup_environment(MPS())

    with pytest.raises(RankError, match=r"runs on cpu and cuda, not on mps|one mps device|sees no Apple GPU"):
        run_ranks(rank_main, 2)


def test_two_ranks_with_one_gpu_are_refused_before_nccl_waits():
    from concurrent.futures import ThreadPoolExecutor

    from hocket.basics.launch_environment import Environment
    from hocket_strategies.rendezvous import _wait_for_all

    def join(store, gpus):
        environments = [Environment("slurm", rank, 2, rank, 2, "127.0.0.1", 1) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda e: _wait_for_all("ddp", store, e, 30.0, gpus[e.rank]), environments))

    assert join(dist.HashStore(), ["GPU a of here", "GPU b of here"]) == [None, None]
    with pytest.raises(ValueError, match=r"rank 0 and rank 1 would both compute on GPU a of here.*--gpus-per-task=1"):
        join(dist.HashStore(), ["GPU a of here", "GPU a of here"])


def test_a_process_group_of_others_is_used_and_left_alone():
    def rank_main(rank):
        strategy = DDP()
        device = strategy.setup_environment(CPU())
        strategy.shutdown()
        return device.type, strategy.rank, strategy.local_rank, strategy.world_size, dist.is_initialized()

    assert run_ranks(rank_main, 3) == [("cpu", rank, rank, 3, True) for rank in range(3)]


def test_what_it_initialised_itself_lives_as_long_as_its_last_user():
    """Through the variables that torchrun sets; twice, because keys of a first group must not mislead a second one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def rank_main(rank):
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        seen = []
        for _ in range(2):
            first, second = ready(), ready()
            seen.append(first.all_reduce(torch.tensor(rank), "sum").item())
            first.shutdown()
            first.shutdown()
            seen.append(second.all_reduce(torch.tensor(rank), "sum").item())
            second.barrier()
            second.shutdown()
            seen.append(dist.is_initialized())
        return seen

    assert run_ranks(rank_main, 2) == [[1, 1, False] * 2] * 2


def test_it_offers_what_algorithms_need():
    assert all(need in DDP.offers for need in Need)


# --- waiting for the others


def joined_with(timeout: float, port: int, world_size: int) -> DDP:
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world_size))
    strategy = DDP(timeout=timeout)
    strategy.setup_environment(CPU())
    return strategy


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_rank_that_does_not_come_is_named():
    port = free_port()

    def rank_main(rank):
        with pytest.raises(CollectiveError) as error:
            joined_with(2.0, port, 3)
        return str(error.value)

    messages = run_ranks(rank_main, 2)
    missing = f"strategy='ddp', rank 0 of 3: ranks [2] did not come to 127.0.0.1:{port} within 2 s"
    assert messages[0].startswith(missing) and "{'ddp': {'timeout': 4}}" in messages[0]
    assert messages[1].startswith("strategy='ddp', rank 1 of 3: ")  # the same, or that rank 0 has gone


@pytest.mark.long
def test_a_collective_that_one_leaves_out_ends_after_the_timeout():
    """In training too, where gradients are reduced inside backward."""
    port = free_port()

    def rank_main(rank):
        strategy = joined_with(3.0, port, 2)
        module = strategy.prepare_model(nn.Linear(2, 1))
        begin = time.monotonic()
        if rank == 1:
            time.sleep(12)  # is there, but does nothing
            return strategy.shutdown()
        messages = []
        with pytest.raises(CollectiveError) as error, strategy.accumulate(module, True):
            module(torch.ones(1, 2)).sum().backward()
        messages.append(str(error.value))
        with pytest.raises(CollectiveError) as error:
            strategy.all_reduce(torch.ones(1), "sum")
        messages.append(str(error.value))
        strategy.shutdown()
        return messages, time.monotonic() - begin

    messages, seconds = run_ranks(rank_main, 2)[0]
    assert "rank 0 of 2: waited 3 s for the others in vain" in messages[0] and "py-spy dump" in messages[0]
    assert "strategy='ddp', rank 0 of 2" in messages[1]
    assert 2.5 < seconds < 10


def test_a_rank_that_dies_is_not_waited_for():
    port = free_port()

    def rank_main(rank):
        strategy = joined_with(600.0, port, 2)
        strategy.barrier()
        if rank == 1:
            dist.destroy_process_group()
            return None
        with pytest.raises(CollectiveError) as error:
            strategy.all_reduce(torch.ones(1), "sum")
        dist.destroy_process_group()
        return str(error.value)

    assert "the connection to another rank is gone" in run_ranks(rank_main, 2)[0]


def test_errors_of_its_own_stay_what_they_are():
    explained = Explained("ddp", 0, 2, 1.0)
    with pytest.raises(RuntimeError, match="shapes timed out") as error, explained:
        raise RuntimeError("shapes timed out")
    assert not isinstance(error.value, CollectiveError)
    with pytest.raises(KeyError), explained:
        raise KeyError("gloo")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_is_a_time(timeout):
    with pytest.raises(ValueError, match="positive number of seconds"):
        DDP(timeout=timeout)


def test_several_machines_whose_launcher_does_not_name_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 4: the launcher \(mpich\) does not say where rank 0 is.*MASTER_ADDR"
    ):
        ready()


# --- collectives


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.int64,
        *(pytest.param(dtype, marks=pytest.mark.long) for dtype in (torch.float64, torch.int32, torch.uint8)),
    ],
)
def test_all_reduce(dtype):
    def rank_main(rank):
        strategy = ready()
        given = torch.tensor([[1, 2], [3 + rank, 9]], dtype=dtype)[:, rank]  # not contiguous
        kept = given.clone()
        reduced = {op: strategy.all_reduce(given, op) for op in ("sum", "mean", "min", "max")}
        assert torch.equal(given, kept)
        return reduced

    for reduced in run_ranks(rank_main, 2):
        # rank 0 has [1, 3], rank 1 has [2, 9]
        assert {op: value.tolist() for op, value in reduced.items()} == {
            "sum": [3, 12],
            "mean": [1.5, 6],
            "min": [1, 3],
            "max": [2, 9],
        }
        assert {op for op, value in reduced.items() if value.dtype != dtype} <= {"mean"}
        assert reduced["mean"].is_floating_point()


def test_all_reduce_of_scalars_and_truth_values():
    def rank_main(rank):
        strategy = ready()
        loss = torch.tensor(1.0 + rank, requires_grad=True)
        return strategy.all_reduce(loss, "mean"), strategy.all_reduce(torch.tensor([True, rank == 0]), "sum")

    for mean, votes in run_ranks(rank_main, 2):
        assert mean == 1.5 and mean.shape == () and not mean.requires_grad
        assert votes.tolist() == [2, 1]


def test_all_reduce_knows_no_other_operation():
    with pytest.raises(ValueError, match="no op='avg'; use one of 'sum', 'mean', 'min', 'max'"):
        DDP().all_reduce(torch.zeros(1), "avg")


def test_objects():
    def rank_main(rank):
        strategy = ready()
        gathered = strategy.all_gather_object({"rank": rank, "tensor": torch.tensor(rank)})
        return [int(item["tensor"]) for item in gathered], strategy.broadcast_object(f"from {rank}"), strategy.barrier()

    assert run_ranks(rank_main, 3) == [([0, 1, 2], "from 0", True)] * 3


# --- the model


class Counts(nn.Module):
    """Buffers of several dtypes, one of which is replaced, not changed in place."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.tensor(rank))
        self.register_buffer("flag", torch.tensor([rank == 0, True]), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.seen = self.seen + len(x)
        return self.norm(self.layer(x))


def test_ranks_start_from_the_weights_and_buffers_of_rank_0():
    def rank_main(rank):
        torch.manual_seed(rank)
        model = Counts(rank)
        prepared = ready().prepare_model(model)
        assert isinstance(prepared, DistributedDataParallel) and prepared.module is model
        return dict(model.named_parameters()) | dict(model.named_buffers())

    first, second = run_ranks(rank_main, 2)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    torch.manual_seed(0)
    torch.testing.assert_close(first["layer.weight"], nn.Linear(2, 2).weight)


def test_a_model_with_nothing_to_train_is_made_alike_and_left_unwrapped():
    def rank_main(rank):
        torch.manual_seed(rank)
        model = Counts(rank).requires_grad_(False)
        strategy = ready()
        assert strategy.prepare_model(model) is model
        assert isinstance(strategy.accumulate(model, False), contextlib.nullcontext)
        return model.state_dict()

    first, second = run_ranks(rank_main, 2)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_one_rank_alone_is_a_plain_process():
    def rank_main(rank):
        strategy = ready()
        model, loader = nn.Linear(2, 2), [1, 2]
        assert strategy.prepare_model(model) is model and strategy.prepare_data(loader, True) is loader
        return strategy.all_reduce(torch.tensor([3]), "mean").tolist()

    assert run_ranks(rank_main, 1) == [[3.0]]


def counted(prepared: DistributedDataParallel) -> list[int]:
    """Sizes of the gradient buckets that are reduced from now on."""
    sizes = []

    def hook(state, bucket):
        sizes.append(bucket.buffer().numel())
        return dist.all_reduce(bucket.buffer() / 2, async_op=True).get_future().then(lambda future: future.value()[0])

    prepared.register_comm_hook(None, hook)
    return sizes


def test_gradients_are_reduced_with_the_last_microbatch_only():
    def rank_main(rank):
        strategy = ready()
        torch.manual_seed(0)
        prepared = strategy.prepare_model(nn.Linear(2, 1))
        sizes = counted(prepared)
        data = torch.arange(12.0).view(2, 3, 2)[rank]
        for number in range(3):
            with strategy.accumulate(prepared, number == 2):
                prepared(data[number]).sum().backward()
            before = list(sizes) if number == 1 else None
            assert before in (None, [])
        return prepared.module.weight.grad, sizes

    for gradient, sizes in run_ranks(rank_main, 2):
        assert sum(sizes) == 3  # two weights and a bias, once
        torch.testing.assert_close(gradient, torch.arange(12.0).view(6, 2).sum(0, keepdim=True) / 2)


def test_buffers_are_rank_0s_after_every_batch_and_only_then():
    def rank_main(rank):
        strategy = ready()
        model = Counts(rank)
        prepared = strategy.prepare_model(model)
        between = []
        for number in range(2):
            with strategy.accumulate(prepared, number == 1):
                prepared(torch.randn(2 + 2 * rank, 2) + 10 * rank).sum().backward()
            between.append(model.seen.item())
        return between, model.norm.running_mean, model.norm.running_var, model.seen

    first, second = run_ranks(rank_main, 2)
    assert (first[0], second[0]) == ([2, 4], [4, 4])
    torch.testing.assert_close(second[1:], first[1:], rtol=0, atol=0)


def test_a_failed_batch_waits_for_nobody():
    def rank_main(rank):
        strategy = ready()
        prepared = strategy.prepare_model(Counts(rank))
        if rank == 0:
            with pytest.raises(ZeroDivisionError), strategy.accumulate(prepared, True):
                1 / 0  # noqa: B018
        return True

    assert run_ranks(rank_main, 2, timeout=60)


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1}])
def test_options_reach_torch_and_microbatches_stay_exact(options):
    def rank_main(rank):
        strategy = ready(**options)
        torch.manual_seed(0)
        prepared = strategy.prepare_model(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        assert prepared.static_graph == options.get("static_graph", False)
        assert prepared.find_unused_parameters == options.get("find_unused_parameters", False)
        if "bucket_cap_mb" in options:
            assert prepared.bucket_bytes_cap == 2**20
        data = torch.arange(16.0).view(2, 4, 2)[rank] / 16
        gradients = []
        for batch in range(4):
            prepared.zero_grad()
            pieces = data.split(1 if batch else 4)
            for number, piece in enumerate(pieces, 1):
                with strategy.accumulate(prepared, number == len(pieces)):
                    prepared(piece).square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in prepared.parameters()])
        return gradients

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    (alone(torch.arange(16.0).view(8, 2) / 16).square().sum() / 2).backward()
    expected = [parameter.grad for parameter in alone.parameters()]
    for gradients in run_ranks(rank_main, 2):
        for batch in gradients:
            torch.testing.assert_close(batch, expected)


def test_a_static_graph_that_begins_with_microbatches_is_refused():
    def rank_main(rank):
        strategy = ready(static_graph=True)
        strategy.accumulate(strategy.prepare_model(nn.Linear(1, 1)), False)

    with pytest.raises(RankError, match="static_graph=True cannot begin"):
        run_ranks(rank_main, 2)


def test_unused_parameters_need_the_option():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return self.used(x)

    def rank_main(rank, **options):
        strategy = ready(**options)
        prepared = strategy.prepare_model(Half())
        with strategy.accumulate(prepared, True):  # the first and perhaps last batch
            prepared(torch.ones(1, 2)).sum().backward()
        return prepared.module.unused.weight.grad

    assert run_ranks(lambda rank: rank_main(rank, find_unused_parameters=True), 2) == [None, None]
    with pytest.raises(
        RankError, match=r"depend on unused.weight, unused.bias, .*{'ddp': {'find_unused_parameters': True}}"
    ):
        run_ranks(rank_main, 2)


def test_states_have_plain_names_on_every_rank():
    def rank_main(rank):
        strategy = ready()
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        prepared = strategy.prepare_model(model)
        optimizer = torch.optim.Adam(model.parameters())
        prepared(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        saved = {k: v.clone() for k, v in strategy.model_state(prepared).items()}
        momentum = strategy.optimizer_state(prepared, optimizer)["state"][0]["exp_avg"].clone()
        with torch.no_grad():
            model.weight.zero_()
        assert strategy.load_model_state(prepared, saved)
        assert torch.equal(model.weight, saved["weight"])
        with pytest.raises(RuntimeError, match="bias"):
            strategy.load_model_state(prepared, {"weight": saved["weight"]})
        return saved, momentum

    first, second = run_ranks(rank_main, 2)
    assert list(first[0]) == ["weight", "bias"]
    torch.testing.assert_close(second, first, rtol=0, atol=0)


# --- compressed gradients


def gradients(compression, steps=1):
    """By rank: the reduced gradients of the last of ``steps`` batches, and this rank's own of each batch."""

    def rank_main(rank):
        strategy = ready(compression=compression)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
        data = torch.randn(steps, 2, 5, 8)[:, rank]
        own = []
        for batch in data:
            network.zero_grad()
            network(batch).square().sum().backward()
            own.append([parameter.grad.clone() for parameter in network.parameters()])
        prepared = strategy.prepare_model(network)
        for batch in data:
            prepared.zero_grad()
            with strategy.accumulate(prepared, True):
                prepared(batch).square().sum().backward()
        return [parameter.grad for parameter in prepared.parameters()], own

    return run_ranks(rank_main, 2)


@pytest.mark.parametrize("compression, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_gradients_in_16_bits(compression, dtype):
    """The mean of the ranks' gradients, each rounded before it travels: not the exact one, but that very one."""
    (reduced, own), (reduced_elsewhere, own_elsewhere) = gradients(compression)
    for got, elsewhere, mine, theirs in zip(reduced, reduced_elsewhere, own[0], own_elsewhere[0], strict=True):
        assert got.dtype is torch.float32 and torch.equal(got, elsewhere)
        rounded = (mine.to(dtype) / 2 + theirs.to(dtype) / 2).float()
        assert torch.equal(got, rounded)
        assert not torch.equal(got, (mine + theirs) / 2)


def test_powersgd():
    """One matrix of rank 1, after two batches without compression.

    With M the mean gradient plus what the last approximation left over, and q a vector, the approximation is p (M^T p)^T with
    p = M q of length 1: the projection of M onto p.
    """
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    exact = gradients(None, steps=3)
    early = gradients({"powersgd": options}, steps=2)
    late = gradients({"powersgd": options}, steps=3)
    for (got, own), (_, theirs) in zip(early, early[::-1], strict=True):
        torch.testing.assert_close(got, [(a + b) / 2 for a, b in zip(own[-1], theirs[-1], strict=True)])
    for (got, _), (full, _) in zip(late, exact, strict=True):
        for approximated, matrix in zip(got, full, strict=True):
            assert torch.linalg.matrix_rank(matrix) > 1
            assert torch.linalg.matrix_rank(approximated, rtol=1e-4) == 1
            p = torch.linalg.svd(approximated).U[:, :1]
            torch.testing.assert_close(approximated, p @ (p.T @ matrix), rtol=1e-4, atol=1e-4)


def test_a_compression_that_is_not_known_is_refused():
    for wrong in ("int8", {}, {"bf16": {"rank": 2}}, {"bf16": {}, "fp16": {}}):
        with pytest.raises(ValueError, match=r"is not known. Write one of 'bf16', 'fp16', 'powersgd'"):
            DDP(compression=wrong)
