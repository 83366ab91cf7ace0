"""Tensor parallelism: single layers are divided over ranks, alone or together with sharded data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from hocket import Task
from hocket.basics import seeding
from hocket_strategies.fsdp import FSDP
from hocket_strategies.mesh import data_group
from hocket_strategies.tensor_plans import find_plan, parallelize


class TensorParallel(FSDP):
    """Divide layers as Megatron does (Shoeybi et al. 2019, arXiv 1909.08053), with torch's ``parallelize_module``.

    ``tensor`` neighbouring ranks compute one forward pass together on the same data: each holds part of the outputs of a
    ``"colwise"`` layer, and the following ``"rowwise"`` layer sums them up. Modules outside of the plan are replicated.
    ``replicate × shard`` such groups divide each batch, and shard and average as ``fsdp`` does: a mesh of up to three axes.

    The plan maps module names, with ``*`` as wildcard, to ``"colwise"``, ``"rowwise"``, ``"colwise_gather_output"``
    (replicated outputs), ``"rowwise_split_input"`` (replicated inputs), or a
    ``torch.distributed.tensor.parallel.ParallelStyle``. It comes from ``plan=``, else from the model's attribute
    ``tensor_parallel_plan``, else from built-in plans for transformers models with the layers of GPT-2 or Llama. Divided
    dimensions must be divisible by ``tensor``.

    Args:
        tensor: number of ranks that divide layers; None for world size ÷ (``replicate`` × ``shard``).
        plan: see above.
        replicate, shard, options: as for :class:`~hocket_strategies.fsdp.FSDP`; ``shard`` is 1 unless given.

    Raises:
        ValueError: ``replicate × shard × tensor`` is not the number of ranks; later, if there is no plan, or if it names a
            missing module or one that cannot be divided.

    Example:
        >>> import hocket, hocket_strategies, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        >>> strategy = hocket_strategies.TensorParallel(tensor=2, plan={"0": "colwise", "2": "rowwise"})
        >>> trainer = hocket.Trainer(model=model, strategy=strategy, devices=2)  # doctest: +SKIP
    """

    _name = "tensor-parallel"

    def __init__(
        self,
        *,
        tensor: int | None = None,
        plan: Mapping[str, Any] | None = None,
        replicate: int = 1,
        shard: int | None = 1,
        **options: Any,
    ) -> None:
        super().__init__(replicate=replicate, shard=shard, **options)
        self._given["tensor"] = tensor
        self._plan = plan
        self._degree = 1

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's data; neighbours that divide layers have the same data."""
        return self.rank // self._degree

    @property
    def data_ranks(self) -> int:
        """Return the number of such groups of neighbours."""
        return self.world_size // self._degree

    def setup_environment(self, device: Any) -> Any:
        """Join the ranks and arrange them in a mesh."""
        on = super().setup_environment(device)
        self._degree = self._mesh["tensor"].size() if "tensor" in self._mesh.mesh_dim_names else 1
        self.data_group = data_group(self._mesh)
        return on

    def _parallelize(self, module: nn.Module) -> None:
        if self._degree == 1:
            return
        model = module.model if isinstance(module, Task) else module
        parallelize(model, find_plan(model, self._plan, self._degree), self._mesh["tensor"])
        # Neighbours must drop out the same activations and shuffle identically; without a seed they would not.
        box = [seeding.capture()]
        group = self._mesh["tensor"].get_group()
        dist.broadcast_object_list(box, group=group, group_src=0)
        seeding.restore(box[0])
