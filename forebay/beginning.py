"""How a run begins: what is refused before anything is made, and whether the input is taken in or an earlier
run, which was interrupted, taken up again.

What an earlier run left is ``state``'s subject; what happens to the batch then is ``run``'s.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Collection
from dataclasses import replace

from dispatcher.batches.record import new_batch_id
from dispatcher.batches.storage import Storage
from forebay import submission
from forebay.errors import RunRefused
from forebay.results import replaceable
from forebay.run_settings import RunSettings
from forebay.state import Manifest, RunState, fingerprint, same_file
from workers.errors import SettingsError
from workers.limits import DEFAULT_LIMIT


def own_queue(batch_id: str) -> str:
    """The queue that only this run's dispatchers serve, and that goes with it."""
    return f"run-{batch_id}"


def check(settings: RunSettings) -> None:
    """Refuse what cannot work, before anything is made."""
    if not settings.workers and settings.redis_url is None:
        raise SettingsError("no worker is given; name at least one with --worker URL")
    if None not in (settings.redis_url, settings.queue) and settings.storage is None:
        raise SettingsError(
            f"others may serve the queue {settings.queue} too, and would not see the files of this run; add "
            "--storage, or leave --queue out"
        )
    for variable in {spec.api_key_env for spec in settings.workers} - {None}:
        if variable not in os.environ:
            raise SettingsError(f"the environment has no variable {variable}, named by --api-key-env")
    if not settings.input.exists():
        raise RunRefused(f"{settings.input}: there is no such file")
    if not settings.input.is_file():
        raise RunRefused(
            f"{settings.input} is no ordinary file, which a run could take up again; copy it to one"
        )
    for target in settings.targets:
        if not target.absolute().parent.is_dir():
            raise RunRefused(f"{target}: there is no folder {target.parent} to write it in")
        if target.is_dir():
            raise RunRefused(f"{target} is a folder, not a file")
        if target.exists() and target.samefile(settings.input):
            raise RunRefused(f"{target} is the input itself")
    if not replaceable(settings.output):
        raise RunRefused(
            f"{settings.output} is no ordinary file, by which a run could be taken up again; name a file"
        )
    for one, other in itertools.combinations(settings.targets, 2):
        if one.absolute() == other.absolute():
            raise RunRefused(f"two of results, failed lines and decisions cannot both go to {one}")


def take_in_or_up(settings: RunSettings, state: RunState) -> tuple[str, bool]:
    """The batch of this run, and whether an earlier run left it."""
    replaced = _replaced(state) if settings.restart else None
    manifest = None if settings.restart else state.manifest()
    if manifest is not None:
        _check_same(settings, manifest)
        return manifest.batch_id, True
    try:
        _refuse_to_overwrite(settings)
        state.clear()
        return _take_in(settings, state, replaced), False
    except BaseException:
        if state.made:
            state.remove()
        raise


def _check_same(settings: RunSettings, manifest: Manifest) -> None:
    if not same_file(settings.input, manifest.fingerprint):
        raise RunRefused(
            f"{settings.input} has changed since the run that {settings.output} was begun with; "
            "put it back to resume, or start again with --restart"
        )
    if settings.storage is not None and settings.storage != manifest.storage:
        kept = manifest.storage or "the folder beside the output"
        raise RunRefused(f"that run was begun with its files in {kept}; use that, or --restart")
    if manifest.targets:  # those are that run's own
        _refuse_to_overwrite(settings, manifest.targets)


def _refuse_to_overwrite(settings: RunSettings, own: Collection[str] = ()) -> None:
    for target in settings.targets:
        somebodys = str(target.absolute()) not in own and replaceable(target) and target.exists()
        if somebodys and not settings.overwrite:
            raise RunRefused(f"{target} exists already; name another, or pass --overwrite")


def _replaced(state: RunState) -> str | None:
    """The batch that a run which is started again leaves behind, without its files; None: there is none."""
    try:
        manifest = state.manifest()
    except RunRefused:
        return None
    return manifest.batch_id if manifest is not None and manifest.storage is None else None


def _take_in(settings: RunSettings, state: RunState, replaced: str | None) -> str:
    batch_id = new_batch_id(random.SystemRandom())
    queue = settings.queue or own_queue(batch_id)
    seen = fingerprint(settings.input)
    with settings.input.open("rb") as source:
        submission.prepare(
            Storage(settings.storage or str(state.storage)),
            source,
            name=settings.input.name,
            options=replace(settings.options, queue=queue),
            now_s=time.time(),
            slots=len(settings.workers) * DEFAULT_LIMIT or submission.USUAL_SLOTS,
            batch_id=batch_id,
            limits=settings.limits,
        )
    if not same_file(settings.input, seen):
        raise RunRefused(f"{settings.input} changed while it was read; run the command again")
    # From here on the batch can be taken up again.
    targets = tuple(str(target.absolute()) for target in settings.targets)
    input_ = str(settings.input.absolute())
    state.keep(Manifest(input_, seen, batch_id, settings.storage, targets, replaced))
    return batch_id
