"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hocket.basics.dtensors import full, mesh_of, shard_like
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.surgery import NoEffectWarning
from hocket_general.optimizer_helpers import loss_of


class Muon(Optimizer):
    """Orthogonalize the momentum of hidden matrices; train everything else with AdamW at the same learning rate.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the learning rate as in Liu et al. 2025,
    section 2.2 ("Muon is Scalable for LLM Training", arXiv 2502.16982): updates are scaled by ``0.2 * sqrt(max(rows,
    columns))``, so that their root mean square is that of AdamW's, whose learning rate and weight decay fit both. The steps
    are those of ``torch.optim.Muon``, computed for all matrices of one shape together, and ``torch.optim.AdamW``'s own; under
    fsdp each rank gathers one update after the other.
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
            raise WrongValue(
                "Muon was not told which parameters are hidden matrices, so AdamW would train all of them. By name it finds "
                "them in the model: «optimizer='muon(lr=1e-3)'». Elsewhere write Muon([{'params': matrices, 'muon': True}, "
                "{'params': others}]); Muon.routes(model) says which is which."
            )
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "betas": betas, "eps": eps, "adjust_lr_fn": adjust_lr_fn, "muon": bool(muon),
        }  # fmt: skip
        super().__init__(given, defaults)
        self._make_inner()

    def _make_inner(self) -> None:
        """Make torch's AdamW, which steps on the groups and the state of this optimizer; torch's Muon checks the options."""
        parameters, one = [torch.zeros(1, 1)], self.defaults
        of_muon = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        constants = torch.optim.Muon(parameters, **{key: one[key] for key in of_muon}).defaults
        self._coefficients, self._eps = constants["ns_coefficients"], constants["eps"]
        self._adamw = torch.optim.AdamW(parameters, **{key: one[key] for key in _OF_ADAMW})

    def __setstate__(self, state: dict[str, Any]) -> None:  # after pickling and copying
        super().__setstate__(state)
        self._make_inner()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see torch's Optimizer."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["muon"] and (wrong := [each for each in group["params"] if each.ndim < 2 or each.is_complex()]):
            kind = "complex parameter" if wrong[0].is_complex() else "parameter"
            raise WrongValue(
                f"Muon was given a {kind} of shape {tuple(wrong[0].shape)} in a group with «muon=True», but it trains real "
                "matrices. Write 'muon': False for it, so that AdamW trains it."
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
                "«optimizer='adamw'», or choose matrices with «groups=[{'match': …, 'muon': True}]».",
                NoEffectWarning,
            )
        return {name: {"muon": id(each) in hidden} for name, each in module.named_parameters()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step on the gradients in ``.grad``; parameters without one are skipped."""
        loss = loss_of(closure)
        adamw = self._adamw
        adamw.state, adamw.param_groups = self.state, []
        for group in self.param_groups:
            if not group["muon"]:
                options = {key: group[key] for key in _OF_ADAMW}
                adamw.param_groups.append({**adamw.defaults, **options, "params": group["params"]})
                continue
            stacks: dict[Any, list[Tensor]] = {}
            for parameter in (each for each in group["params"] if each.grad is not None):
                if mesh_of(parameter) is None:
                    stacks.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
                else:  # one by one: the full gradients need not be in memory together
                    self._step_on([parameter], group)
            for parameters in stacks.values():
                most = max(1, _STACKED // parameters[0].numel())
                for start in range(0, len(parameters), most):
                    self._step_on(parameters[start : start + most], group)
        adamw.step()
        return loss

    def _step_on(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Step on parameters of one shape. A sharded one comes alone: each rank computes the update of the full matrix."""
        lr, momentum, first = float(group["lr"]), group["momentum"], parameters[0]
        gradients = [each.grad for each in parameters if each.grad is not None]
        averages = [self._momentum(each) for each in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        directions = averages
        if group["nesterov"] and len(gradients) > 1:
            directions = list(torch._foreach_lerp(gradients, averages, momentum))
        elif group["nesterov"]:  # DTensors come alone, and torch has no such operation for them
            directions = [gradients[0].lerp(averages[0], momentum)]
        matrices = torch.stack([full(each).flatten(1) for each in directions])
        updates = orthogonalized(matrices, self._coefficients, group["ns_steps"], self._eps).to(first.dtype)
        size = _scale(group["adjust_lr_fn"], *matrices.shape[1:])
        kept = 1 - lr * group["weight_decay"]
        if first.dtype.itemsize > 2:
            torch._foreach_mul_(parameters, kept)
        else:  # on CPUs that would round the factor to 16 bits too
            for each in parameters:
                each.mul_(kept)
        changes = [shard_like(update.view(first.shape), each) for update, each in zip(updates, parameters, strict=True)]
        torch._foreach_add_(parameters, changes, alpha=-lr * size)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum_buffer"]
        return momentum


#: The options of groups that torch's AdamW takes.
_OF_ADAMW = ("lr", "weight_decay", "betas", "eps")
#: Elements of the matrices that are orthogonalized together: many small ones, or a large one alone.
_STACKED = 1 << 25


def orthogonalized(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the nearest semi-orthogonal matrices, roughly, by Newton-Schulz iterations in bfloat16.

    The iteration is that of ``torch.optim.Muon``, with the same result, for a stack of matrices: a step of a network of many
    equal layers takes as many operations as that of one layer.

    Args:
        matrices: of shape (number, rows, columns).
        coefficients: of the quintic polynomial.
        eps: below this a norm is not divided by.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)  # a spectral norm of at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _scale(rule: str | None, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix, as torch does."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns if rule == "spectral_unclamped" else max(1, rows / columns))


def _matrices(module: nn.Module) -> Iterator[Tensor]:
    """Yield weights of linear layers and convolutions, and those of embeddings, in the order of modules; tied ones twice."""
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False):
            flat = parameter.ndim == 2 or (isinstance(inner, _ConvNd) and parameter.ndim > 2)
            if flat and name.endswith("weight"):
                yield parameter
