"""What methods that replace modules of a model share: choose modules, say which are left alone, replace the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning, Policies, Policy, Replacement, preview, replace_modules, why_no_effect

if TYPE_CHECKING:
    from hocket.state.state import State


class Substitution:
    """Which modules a method replaces, and by what. Subclasses say which, and are picklable."""

    #: The method, as in messages, and what a module becomes, as in the plan.
    method: str
    becomes: str
    #: What to say if no module matched: what the model lacks, and what to do.
    nothing: str
    #: The classes of the replacements, which say that the method is applied already.
    made: type[nn.Module] | tuple[type[nn.Module], ...] = ()

    def wants(self, module: nn.Module) -> bool:
        """Whether the method is about this module."""
        raise NotImplementedError

    def obstacle(self, module: nn.Module) -> str:
        """Return why a module that the method is about is left alone, or an empty string."""
        raise NotImplementedError

    def build(self, module: Any) -> nn.Module:
        """Return the replacement of a module."""
        raise NotImplementedError

    def choose(self, model: nn.Module) -> dict[nn.Module, str]:
        """Return the submodules that the method is about, each with its obstacle or an empty string."""
        return {part: self.obstacle(part) for name, part in model.named_modules() if name and self.wants(part)}

    def policies(self, model: nn.Module) -> Policies:
        """Return the policies that replace the chosen modules."""
        chosen = self.choose(model)
        return {nn.Module: Policy(lambda old, index: self.build(old), lambda old: chosen.get(old) == "")}

    def operate(self, model: nn.Module) -> list[Replacement]:
        """Replace the chosen modules; warn of those with an obstacle, and if there are none."""
        chosen = self.choose(model)
        kept = [f"{name} ({chosen[part]})" for name, part in model.named_modules() if chosen.get(part)]
        if kept:
            warn(f"{self.method} does not replace these modules: {', '.join(kept)}.")
        changed = replace_modules(model, self.policies(model))
        if not changed:
            applied = {name: part for name, part in model.named_modules() if isinstance(part, self.made)}
            warn(why_no_effect(self.method, model, self.nothing, applied), NoEffectWarning)
        return changed


class SurgeryAlgorithm(Algorithm):
    """Base of algorithms that replace modules once, before optimizers exist, and log their number."""

    events = {Event.INIT}
    phase = Phase.MODEL
    substitution: Substitution

    def apply(self, event: Event, state: State) -> None:
        """Replace modules of the model."""
        changed = self.substitution.operate(state.model)
        state.replacements += changed
        state.log({f"{state.attachment_of(self).name.rpartition('/')[2]}/modules": len(changed)})

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each module that would be replaced."""
        return [
            f"{name}: {type(model.get_submodule(name)).__name__} {self.substitution.becomes}"
            for name in preview(model, self.substitution.policies(model))
        ]


def not_plain(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> str:
    """Return why a module's forward may not be that of its class in torch, or an empty string."""
    if isinstance(module, LazyModuleMixin):
        return f"{type(module).__name__}, which does not know its shape before its first batch"
    if type(module) not in kinds:
        return f"{type(module).__name__}, whose forward may be its own"
    return ""
