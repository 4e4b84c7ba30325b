"""Run one stage: look for its output, otherwise make it under a lock and publish it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from headwater.core.errors import ConfigError, PermanentError
from headwater.core.fingerprint import Fingerprint, source_hash
from headwater.core.journal import delete_journal
from headwater.core.locks import file_lock
from headwater.core.meter import Reading
from headwater.core.store import (
    OutputWriter,
    StageOutput,
    disk_errors,
    library_versions,
    load_output,
    nearest_difference,
    set_aside_damaged,
)
from headwater.stages.base import RowStage, Stage, StageContext, TableStage, fingerprint_view
from headwater.stages.engines import EnginePool

_SHOWN_DIFFERENCES = 6


@dataclass(frozen=True)
class StageResult:
    output: StageOutput
    reused: bool
    fingerprint: Fingerprint


def fingerprint_of(
    stage: Stage[Any], inputs: Mapping[str, StageOutput], run_seed: int, engines: EnginePool
) -> Fingerprint:
    """The content address of what `stage` makes of `inputs`."""
    return Fingerprint(
        {
            "stage": stage.name,
            "version": stage.version,
            "source": source_hash(type(stage).__module__),
            "config": fingerprint_view(stage.config),
            "inputs": {name: output.content_hash for name, output in inputs.items()},
            "external": dict(stage.external_inputs()),
            "models": {name: engines.identity(config) for name, config in stage.engine_configs().items()},
            "seed": run_seed,
        }
    )


def find_output(
    stage: Stage[Any], inputs: Mapping[str, StageOutput], context: StageContext
) -> tuple[Fingerprint, StageOutput | None]:
    """The stage's fingerprint and its finished output, if there is one."""
    fingerprint = fingerprint_of(stage, inputs, context.run_seed, context.engines)
    return fingerprint, load_output(context.workspace.output_path(stage.name, fingerprint))


def check_columns(stage: Stage[Any], node: str, inputs: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ConfigError unless every declared input is there with every declared column."""
    for name, columns in stage.inputs.items():
        if name not in inputs:
            raise ConfigError(f"Stage {node!r} has no input {name!r}.", todo="Connect it in the pipeline's graph.")
        needed = ["id", *columns] if isinstance(stage, RowStage) and name == "rows" else columns
        lacking = [column for column in needed if column not in inputs[name]]
        if lacking:
            raise ConfigError(
                f"Stage {node!r} needs the columns {lacking} of its input {name!r}, which has {list(inputs[name])}.",
                todo="Connect it to a stage that declares them.",
            )


def run_stage(stage: Stage[Any], inputs: Mapping[str, StageOutput], context: StageContext) -> StageResult:
    """The output of `stage`: reused if its fingerprint is already there, otherwise made and published.

    Two processes that need the same output wait for each other. Raises the stage's own typed errors; whatever was
    finished before an error is kept.
    """
    check_columns(stage, context.node, {name: tuple(output.manifest["schema"]) for name, output in inputs.items()})
    fingerprint, output = find_output(stage, inputs, context)
    if output is not None:
        _drop_journal(stage, fingerprint, context)
        return reused(output, fingerprint, context)
    lock = context.workspace.lock_path(stage.name, fingerprint)
    with disk_errors(f"stage {context.node}"), file_lock(lock, waiting=_say_waiting(context), poll=context.check):
        final = context.workspace.output_path(stage.name, fingerprint)
        output = load_output(final)
        if output is not None:
            return reused(output, fingerprint, context)
        _explain(stage, fingerprint, context)
        aside = set_aside_damaged(final)
        if aside is not None:
            context.note(f"{final.name} did not match its manifest; it was set aside as {aside.name} and is made anew.")
        return StageResult(_make(stage, inputs, context, fingerprint), False, fingerprint)


def _make(
    stage: Stage[Any], inputs: Mapping[str, StageOutput], context: StageContext, fingerprint: Fingerprint
) -> StageOutput:
    context.events.emit("stage_started", stage=context.node, fingerprint=fingerprint.digest, pid=os.getpid())
    started, clock = time.time(), time.monotonic()
    final = context.workspace.output_path(stage.name, fingerprint)
    out = OutputWriter(final, stage.output, f"Stage {context.node}")
    try:
        with _written(stage, inputs, out, context, fingerprint) as reading:
            _check_outcome(stage, inputs, out, context)
            output = out.publish(
                fingerprint,
                {
                    "node": context.node,
                    "stage": stage.name,
                    "models": fingerprint.parts["models"],
                    "seed": context.run_seed,
                    "libraries": library_versions(),
                    "started": round(started, 3),
                    "seconds": round(time.monotonic() - clock, 3),
                    "meter": asdict(reading),
                    "parents": {name: given.path.name for name, given in inputs.items()},
                },
            )
    except BaseException:
        out.abandon()
        raise
    _drop_journal(stage, fingerprint, context)
    context.events.emit(
        "stage_finished",
        stage=context.node,
        reused=False,
        counts=output.manifest["counts"],
        seconds=output.manifest["seconds"],
        output=output.path.name,
        meter=output.manifest["meter"],
    )
    return output


@contextmanager
def _written(
    stage: Stage[Any],
    inputs: Mapping[str, StageOutput],
    out: OutputWriter,
    context: StageContext,
    fingerprint: Fingerprint,
) -> Iterator[Reading]:
    """Has `stage` write everything to `out`; gives what it used, now and before a crash."""
    if isinstance(stage, RowStage):
        from headwater.stages.row_runner import run_rows

        with run_rows(stage, inputs, out, context, fingerprint) as journal:
            yield journal.reading()
    elif isinstance(stage, TableStage):
        stage.run(inputs, out, context)
        yield Reading()
    else:
        raise TypeError(f"{type(stage).__name__} is neither a TableStage nor a RowStage")


def _drop_journal(stage: Stage[Any], fingerprint: Fingerprint, context: StageContext) -> None:
    """Its rows are published; a crash right after publishing may have left it behind."""
    path = context.workspace.journal_path(stage.name, fingerprint)
    if path.exists():
        delete_journal(path)


def _check_outcome(
    stage: Stage[Any], inputs: Mapping[str, StageOutput], out: OutputWriter, context: StageContext
) -> None:
    node, total, reasons = context.node, out.accepted + out.rejected, _by_number(out.reasons)
    if out.rows == 0 and not stage.may_be_empty:
        why = f": {total:,} attempted, all rejected ({reasons})" if total else ""
        before, look = _lost_before(inputs, context)
        raise PermanentError(
            f"Stage {node} produced no rows{why}.{before}",
            todo=f"Loosen the filter or mend the input: nothing empty is published silently.{look}{_kept_rejects(out)}",
        )
    tried = total - sum(out.reasons.get(reason, 0) for reason in stage.untried)
    faults = {reason: n for reason, n in out.reasons.items() if reason not in {*stage.untried, *stage.verdicts}}
    count = sum(faults.values())
    if tried and count / tried > stage.max_reject_share:
        advice = _ADVICE.get(max(faults, key=lambda reason: faults[reason]), "Mend the input")
        raise PermanentError(
            f"Stage {node} rejected {count:,} of {tried:,} rows ({reasons}), more than its limit of "
            f"{stage.max_reject_share:.0%}.",
            todo=f"{advice}, or raise the stage's reject limit in the recipe.{_kept_rejects(out)}",
        )


def _lost_before(inputs: Mapping[str, StageOutput], context: StageContext) -> tuple[str, str]:
    """Where the rows were lost that never reached a stage, nearest first, and how to look at them.

    A stage before it is named when it kept next to nothing; where next to nothing came in, those before that are looked
    at too.
    """
    told: dict[str, str] = {}
    waiting, seen = list(inputs.values()), set[str]()
    while waiting:
        output = waiting.pop(0)
        if output.path.name in seen:
            continue
        seen.add(output.path.name)
        counts, name = output.manifest["counts"], str(output.manifest["node"])
        if counts["rejected"] and counts["accepted"] <= _NEXT_TO_NOTHING:
            reasons = _by_number(output.manifest["reasons"])
            told[name] = f"{name} kept {counts['accepted']:,} of {counts['attempted']:,} ({reasons})"
        if counts["attempted"] <= _NEXT_TO_NOTHING:
            parents = output.manifest.get("parents", {}).values()
            found = (load_output(context.workspace.stages / parent) for parent in parents)
            waiting += [parent for parent in found if parent is not None]
    if not told:
        return "", ""
    look = ", ".join(f"`pipeline rows RUN --stage {name} --rejects`" for name in told)
    return f" Before it, {'; '.join(told.values())}.", f" What was rejected there: {look}."


_NEXT_TO_NOTHING = 10
"""Rows. From no more than these a later stage may well make none."""


def _by_number(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items(), key=lambda r: -r[1]))


_ADVICE = {
    "cut_at_length": "Give the replies more room (`max_tokens` of the stage's sampling)",
    "several_lines": "Let the replies end at a line break (`stop` of the stage's sampling)",
}


def _kept_rejects(out: OutputWriter) -> str:
    return f" The rejected rows, with their raw text, are kept in {out.keep_rejects()}." if out.rejected else ""


def reused(output: StageOutput, fingerprint: Fingerprint, context: StageContext) -> StageResult:
    """The result for an output that was already there; says so in the events."""
    context.events.emit(
        "stage_finished",
        stage=context.node,
        reused=True,
        counts=output.manifest["counts"],
        seconds=0.0,
        output=output.path.name,
        meter=asdict(Reading()),
    )
    return StageResult(output, True, fingerprint)


def _say_waiting(context: StageContext) -> Any:
    return lambda holder: context.note(f"waiting for {holder}, which is making the same output")


def _explain(stage: Stage[Any], fingerprint: Fingerprint, context: StageContext) -> None:
    changed = nearest_difference(context.workspace.stages, stage.name, context.node, fingerprint)
    fed = [difference.partition(": ")[0].removeprefix("inputs.") for difference in changed if _is_of_input(difference)]
    own = [difference for difference in changed if not _is_of_input(difference)]
    shown = own[:_SHOWN_DIFFERENCES]
    if len(own) > len(shown):
        shown.append(f"{len(own) - len(shown)} more")
    if fed:  # two hashes would tell nobody more
        shown.append(f"what it reads now of {', '.join(fed)}")
    if shown:
        context.note("made anew because of " + "; ".join(shown))


def _is_of_input(difference: str) -> bool:
    return difference.startswith("inputs.")
