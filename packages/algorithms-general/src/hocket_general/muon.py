"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hocket.distributed.dtensors import full, mesh_of, shard_like
from hocket.help import warn
from hocket.surgery import NoEffectWarning
from hocket_general.stepping import loss_of


class Muon(Optimizer):
    """Orthogonalize the momentum of hidden matrices; train everything else with AdamW at the same learning rate.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the learning rate as in Liu et al. 2025,
    section 2.2 ("Muon is Scalable for LLM Training", arXiv 2502.16982): updates are scaled by ``0.2 * sqrt(max(rows,
    columns))``, so that their root mean square is that of AdamW's, whose learning rate and weight decay fit both. Both steps
    are torch's own, ``torch.optim.Muon`` and ``torch.optim.AdamW``; under fsdp each rank gathers one update after the other.
    Weights of convolutions are matrices of output channels times the rest. In hocket, :meth:`routes` chooses the matrices, and
    ``groups`` with the option ``muon`` overrides it.

    Args:
        params: groups of parameters; those with ``"muon": True`` get Muon's steps, the others AdamW's.
        lr: learning rate of both.
        weight_decay: decoupled weight decay of both.
        momentum, nesterov, ns_steps: of Muon; ``ns_steps`` is the number of Newton-Schulz iterations.
        betas, eps: of AdamW.
        adjust_lr_fn: ``"match_rms_adamw"``, or ``"original"`` or None for Jordan's scale, which needs another learning rate.
        muon: whether groups that do not say it get Muon's steps. None is False, and at least one group has to say it.

    Raises:
        ValueError: a group with ``"muon": True`` holds a parameter that is no matrix; or neither ``muon`` nor a group says
            which parameters are hidden matrices, which shapes alone do not tell.

    Example:
        >>> import hocket, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        >>> trainer = hocket.Trainer(
        ...     model=model, loss=torch.nn.MSELoss(), optimizer="muon(lr=1e-3)", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10,
        ... )
        >>> trainer.fit("1ep").timestamp.batch
        10
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adjust_lr_fn: str | None = "match_rms_adamw",
        muon: bool | None = None,
    ) -> None:
        given: list[Any] = list(params)
        if muon is None and given and not any(isinstance(group, dict) and "muon" in group for group in given):
            raise ValueError(
                "Muon was not told which parameters are hidden matrices, so AdamW would train all of them. By name it finds "
                "them in the model: optimizer='muon(lr=1e-3)'. Elsewhere write Muon([{'params': matrices, 'muon': True}, "
                "{'params': others}]); Muon.routes(model) says which is which."
            )
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "betas": betas, "eps": eps, "adjust_lr_fn": adjust_lr_fn, "muon": bool(muon),
        }  # fmt: skip
        super().__init__(given, defaults)
        self._make_inner()

    def _make_inner(self) -> None:
        """Make torch's optimizers, which step on the groups and the state of this one."""
        parameters, one = [torch.zeros(1, 1)], self.defaults
        self._muon = torch.optim.Muon(parameters, **{key: one[key] for key in (*_SHARED, *_OF_MUON)})
        self._adamw = torch.optim.AdamW(parameters, **{key: one[key] for key in (*_SHARED, *_OF_ADAMW)})

    def __setstate__(self, state: dict[str, Any]) -> None:  # after pickling and copying
        super().__setstate__(state)
        self._make_inner()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see torch's Optimizer."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["muon"] and (wrong := [tuple(each.shape) for each in group["params"] if each.ndim < 2]):
            raise ValueError(
                f"Muon was given a parameter of shape {wrong[0]} in a group with muon=True, but it trains matrices. Write "
                "'muon': False for it, so that AdamW trains it."
            )

    @staticmethod
    def routes(module: nn.Module) -> dict[str, dict[str, bool]]:
        """Return ``{"muon": True}`` or ``{"muon": False}`` by the names of parameters: whether each is a hidden matrix.

        Hidden matrices are parameters of two dimensions whose names end in "weight", and weights of convolutions, but neither
        embeddings, nor the last of the matrices (the head), nor, in a model without embeddings, the first (the input layer).
        The order is that in which modules were assigned. A head that is tied to an embedding is an embedding.

        Warns:
            NoEffectWarning: the model has no hidden matrix.
        """
        matrices = list(_matrices(module))
        embedded = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
        outer = {id(each) for each in matrices[-1:] + ([] if embedded else matrices[:1])} | embedded
        hidden = {id(each) for each in matrices} - outer
        if not hidden:
            warn(
                f"muon found no hidden matrix in {type(module).__name__}, so AdamW trains all parameters. Write "
                "optimizer='adamw', or choose matrices with groups=[{'match': …, 'muon': True}].",
                NoEffectWarning,
            )
        return {name: {"muon": id(each) in hidden} for name, each in module.named_parameters()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step on the gradients in ``.grad``; parameters without one are skipped."""
        loss = loss_of(closure)
        muon, adamw = self._muon, self._adamw
        muon.state, muon.param_groups = defaultdict(dict), []
        adamw.state, adamw.param_groups = self.state, []
        sharded: list[tuple[Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            if group["muon"]:
                held = [each for each in group["params"] if each.grad is not None]
                sharded += [(each, group) for each in held if mesh_of(each) is not None]
                plain = [self._matrix(each) for each in held if mesh_of(each) is None]
                muon.param_groups.append(_group(muon, group, plain, _OF_MUON))
            else:
                adamw.param_groups.append(_group(adamw, group, group["params"], _OF_ADAMW))
        muon.step()
        adamw.step()
        for parameter, group in sharded:  # one by one: the full gradients need not be in memory together
            self._step_gathered(parameter, group)
        return loss

    def _matrix(self, parameter: Tensor) -> Tensor:
        """Return the parameter as a matrix that shares its memory, with its gradient; its momentum is set in torch's Muon."""
        momentum, gradient = self._momentum(parameter), parameter.grad
        assert gradient is not None
        order = _order(parameter)
        matrix = _as_matrix(parameter.detach(), order)
        matrix.grad = gradient.permute(order).reshape(matrix.shape)
        self._muon.state[matrix] = {"momentum_buffer": _as_matrix(momentum, order)}
        return matrix

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        momentum: Tensor | None = state.get("momentum_buffer")
        if momentum is None:
            momentum = torch.zeros_like(parameter)
        elif momentum.stride() != parameter.stride():  # from a checkpoint of a model in another memory format
            momentum = torch.empty_like(parameter).copy_(momentum)
        state["momentum_buffer"] = momentum
        return momentum

    def _step_gathered(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Step on a sharded parameter: momentum on shards, and the same orthogonal update of the full matrix on each rank."""
        momentum, gradient = self._momentum(parameter), parameter.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = full(gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)
        update = torch.zeros_like(direction)
        order = _order(update)
        matrix = _as_matrix(update, order)
        matrix.grad = direction.permute(order).reshape(matrix.shape)
        only = _group(
            self._muon, {**group, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}, [matrix], _OF_MUON
        )
        self._muon.state, self._muon.param_groups = defaultdict(dict), [only]
        self._muon.step()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(shard_like(update, parameter))


#: The options of groups that both take, torch's Muon, and torch's AdamW.
_SHARED = ("lr", "weight_decay")
_OF_MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
_OF_ADAMW = ("betas", "eps")


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions in the order in memory, which may be channels-last, the first one first."""
    return [0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)]


def _as_matrix(tensor: Tensor, order: list[int]) -> Tensor:
    """Return a view: the first dimension times all others. The order of columns does not matter to an orthogonal update."""
    return tensor if tensor.ndim == 2 else tensor.permute(order).view(tensor.shape[0], -1)


def _group(of: Optimizer, group: dict[str, Any], params: list[Tensor], keys: tuple[str, ...]) -> dict[str, Any]:
    return {**of.defaults, "params": params, **{key: group[key] for key in (*_SHARED, *keys)}}


def _matrices(module: nn.Module) -> Iterator[Tensor]:
    """Yield weights of linear layers and convolutions, and those of embeddings, in the order of modules; tied ones twice."""
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False):
            flat = parameter.ndim == 2 or (isinstance(inner, _ConvNd) and parameter.ndim > 2)
            if flat and name.endswith("weight"):
                yield parameter
