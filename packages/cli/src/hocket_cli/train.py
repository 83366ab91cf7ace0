"""``hocket train config.yaml``, and ``hocket train --from runs/a``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hocket.basics.run_files import METRICS, SUMMARY, content, lines
from hocket.hookspecs.command import Command
from hocket.plugins import PluginError
from hocket_cli import forms, recorded_config
from hocket_cli.common_options import RUN, add_arguments as add_configuration, json_alone, json_text
from hocket_cli.completion import completes, paths
from hocket_cli.document import Node, flow
from hocket_cli.imports import reference
from hocket_cli.overrides import configuration
from hocket_cli.template import print_config

if TYPE_CHECKING:
    from hocket.run.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, or the run to repeat."""
    add_configuration(parser)
    source = parser.add_argument(
        "--from", dest="source", metavar="RUN", help=f"repeat a run: {RUN}. The new run has another name and folder"
    )
    completes(source, paths)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="with --from: compare the new run with the journal of the recorded one, and end it at the first difference",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print metrics, weights and what --verify says as JSON; all else goes to stderr",
    )
    parser.add_argument("--trial", metavar="FILE", help=argparse.SUPPRESS)  # how a sweep starts its trials


def run(args: argparse.Namespace) -> int:
    """Print the plan, fit, and write the weights into the run's folder."""
    if args.print_config:
        return print_config(args)
    if args.verify and args.source is None:
        raise PluginError(
            "--verify compares a repeated run with the recorded one. Name it: hocket train --from runs/a --verify."
        )
    if args.trial is None:
        return _train(args)
    from hocket_cli.sweeps.trial import end_with_sweep, note_error

    end_with_sweep(args.trial)
    try:
        return _train(args)
    except Exception as error:
        note_error(args.trial, error)
        raise


def _train(args: argparse.Namespace) -> int:
    found: dict[str, Any] = {}
    with json_alone(args.json) as out:
        try:
            _fit(args, found)
        finally:  # a run that differs is an answer, too
            if args.json and found:
                print(json_text(found), file=out, flush=True)
    return 0


def _fit(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Fit, and note on rank 0 what there is to say of it."""
    from hocket.hookspecs.attachment import Attachment
    from hocket_checkpoints.weights import write_tensors
    from hocket_cli.config import trainer_from
    from hocket_cli.sweeps.trial import Trial, note_plan

    if args.verify:
        _check_journals(args)
    with trainer_from(args, needs=("train_data", "duration")) as trainer:
        if args.verify:
            _journal([each.obj for each in trainer.state.bus.attachments], args).compare_with(
                args.source, trainer.state
            )
        if trainer.state.strategy.rank == 0:
            plan = trainer.plan()
            print(plan, flush=True)
            if args.trial is not None:
                note_plan(args.trial, str(plan))
        folder = trainer.state.folder
        folder.check()  # fail before training if the weights cannot be written there
        _record(trainer, args)
        trial = None if args.trial is None else Trial(args.trial)
        if trial is not None:
            trainer.state.bus.attach(Attachment("callbacks", "sweep-trial", trial))
        try:
            result = trainer.fit()
        except BaseException:
            _forget(trainer)
            if verification := _verification(trainer, args):
                found |= {"run": str(folder.path), "metrics": {}, "weights": None, **verification}
            raise
        weights = trainer.model_state_dict(evaluated=True)
        if trainer.state.strategy.rank == 0:
            lasting = str(folder.path) if folder.lasting else None
            found |= {"run": lasting, "metrics": dict(result.metrics), "weights": None, **_verification(trainer, args)}
            for name, value in result.metrics.items():
                print(f"{name} {value:.6g}")
            if folder.lasting:
                # Copies: tied weights share memory, which safetensors does not support.
                file = folder.claim() / "weights.safetensors"
                write_tensors({name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}, file)
                found["weights"] = str(file)
                print(f"weights in {file}")
        if trial is not None:
            trial.finish(result, trainer.state)


def _verification(trainer: Trainer, args: argparse.Namespace) -> dict[str, Any]:
    """Return on rank 0 what the journal has written of a comparison; empty if it has written nothing."""
    if not args.verify or trainer.state.strategy.rank:
        return {}
    compared = content(trainer.state.folder.path / "verification.json")
    return {"verification": compared} if compared else {}


def _check_journals(args: argparse.Namespace) -> None:
    """Raise PluginError, before anything is made, if this run keeps no journal, or the recorded run has none."""
    items = configuration(args).value.get("callbacks", Node([], "", "")).value or []
    if isinstance(items, list) and not any(map(reference, items)):
        names = [forms.named(each, "callbacks", "callbacks") for each in items]
        _journal([forms.find(*each, "callbacks", "callbacks")[1] for each in names], args).check_recorded(args.source)


def _journal(callbacks: Iterable[Any], args: argparse.Namespace) -> Any:
    """Return the callback, or class of one, that keeps the run's journal. Raises PluginError that says how to add it."""
    if keeping := next((each for each in callbacks if hasattr(each, "compare_with")), None):
        return keeping
    source = args.source
    recorded, given = (
        [] if (node := document.value.get("callbacks")) is None else node.plain() or []
        for document in (recorded_config.read(source)[0], configuration(args))
    )
    journals = [each["journal"] or {} for each in recorded if isinstance(each, dict) and "journal" in each]
    callbacks = flow([{"journal": {"every": journals[0].get("every", "100ba") if journals else "100ba"}}, *given])
    what = (
        "has a journal, and this run would keep none to compare with it. Omit `callbacks=`, or add the journal of that run"
        if journals
        else "was recorded without a journal, so --verify has nothing to compare with. Repeat it with one, and verify that run"
    )
    again = f"hocket train --from {shlex.quote(source)}{' --verify' * bool(journals)}"
    raise PluginError(f"{source} {what}: {again} {shlex.quote(f'callbacks={callbacks}')}.")


def _record(trainer: Trainer, args: argparse.Namespace) -> None:
    """Write ``config.yaml`` into the run's folder, and set the command that resumes the run."""
    from hocket_cli.overrides import of_environment, split, without_secrets

    state = trainer.state
    folder, identity = state.folder, state.identity
    if folder.lasting and state.strategy.rank == 0 and identity.config is not None:
        identity.config = recorded_config.continued(folder.claim() / recorded_config.NAME, identity.config)
        recorded_config.write(folder.path, identity.config)
    given = {split(each)[0]: each for each in [*of_environment(), *args.changes]}.values()  # the last of one key counts
    changes = [without_secrets(each, "…") for each in given if not each.startswith("resume=")]
    config = str(folder.path / recorded_config.NAME) if args.source is not None else args.config
    trust = ["--trust"] if args.trust else []
    trainer.command = ("hocket", "train", config, *([] if args.source is not None else changes), "resume=auto", *trust)


def _forget(trainer: Trainer) -> None:
    """Remove the folder of a run that ended before its first step, if it recorded no value: its name stays free."""
    state = trainer.state
    if state.folder.lasting and state.strategy.rank == 0 and not state.timestamp.batch:
        valueless = all("hyperparameters" in line for line in lines(state.folder.path / METRICS))
        state.folder.abandon(recorded_config.NAME, *((METRICS, SUMMARY) if valueless else ()))


command = Command("Train a model as a configuration describes", add_arguments, run)
