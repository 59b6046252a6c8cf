"""What an interrupted run leaves, and when it is taken up again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dispatcher.batches.storage import Storage
from forebay import beginning
from forebay import run as runs
from forebay.errors import RunRefused
from forebay.run_settings import RunSettings
from forebay.state import Manifest, RunState, fingerprint, same_file
from forebay.submission import read_record
from workers.errors import SettingsError
from workers.spec import WorkerSpec

LINE = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"prompt":"a","max_tokens":%d}}\n'


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"".join(LINE % (number, number + 1) for number in range(5)))
    return RunSettings(
        input=tmp_path / "in.jsonl",
        output=tmp_path / "out.jsonl",
        errors=tmp_path / "out.errors.jsonl",
        workers=(WorkerSpec(url="http://127.0.0.1:9"),),
    )


def take(settings):
    with RunState(settings.output) as state:
        return beginning.take_in_or_up(settings, state)


def test_a_queue_of_others_needs_files_that_they_see(settings):
    beside_others = changed(settings, redis_url="redis://shared", queue="default")
    with pytest.raises(SettingsError, match="add --storage, or leave --queue out"):
        beginning.check(beside_others)
    beginning.check(changed(beside_others, storage="s3://bucket"))
    beginning.check(changed(beside_others, redis_url=None))


def test_a_run_of_a_redis_of_its_own_is_not_taken_up_on_a_queue_of_others(settings):
    batch_id, _ = take(changed(settings, queue="default"))
    with RunState(settings.output) as state:
        runs._Batch(settings, state, batch_id, fresh=False)
        with pytest.raises(RunRefused, match="begun on the queue default"):
            runs._Batch(changed(settings, redis_url="redis://shared"), state, batch_id, fresh=False)


def changed(settings, **changes):
    from dataclasses import replace

    return replace(settings, **changes)


def test_the_same_command_takes_up_what_it_left(settings):
    batch_id, resumed = take(settings)
    assert not resumed
    assert take(settings) == (batch_id, True)


def test_a_restart_takes_the_input_in_anew(settings):
    first, _ = take(settings)
    second, resumed = take(changed(settings, restart=True))
    assert not resumed
    assert second != first
    assert Storage(str(settings.output) + ".forebay/storage").batch_ids() == [second]


def test_an_input_that_changed_is_not_taken_up(settings):
    take(settings)
    with settings.input.open("ab") as more:
        more.write(LINE % (9, 9))
    with pytest.raises(RunRefused, match=r"has changed since.*--restart"):
        take(settings)


def test_an_input_that_was_only_touched_is_the_same(settings):
    batch_id, _ = take(settings)
    os.utime(settings.input, (1, 1))
    assert take(settings) == (batch_id, True)


def test_an_input_of_the_same_length_that_says_other_things_is_not_the_same(settings):
    before = fingerprint(settings.input)
    settings.input.write_bytes(settings.input.read_bytes().replace(b'"a"', b'"b"', 1))
    os.utime(settings.input, (1, 1))
    assert not same_file(settings.input, before)


def test_an_output_of_our_own_interrupted_run_may_exist(settings):
    batch_id, _ = take(settings)
    settings.output.write_text("half")
    assert take(settings) == (batch_id, True)


def test_a_file_that_is_not_of_the_interrupted_run_is_not_overwritten(settings, tmp_path):
    batch_id, _ = take(settings)
    (tmp_path / "notes.jsonl").write_text("mine")
    other = changed(settings, errors=tmp_path / "notes.jsonl")
    with pytest.raises(RunRefused, match=r"notes\.jsonl exists already"):
        take(other)
    assert take(changed(other, overwrite=True)) == (batch_id, True)


def test_failed_lines_may_go_to_a_device(settings):
    assert take(changed(settings, errors=Path("/dev/null")))[1] is False


def test_files_kept_elsewhere_are_not_mixed_up(settings, tmp_path):
    take(settings)
    with pytest.raises(RunRefused, match="begun with its files in the folder beside the output"):
        take(changed(settings, storage=str(tmp_path / "elsewhere")))


def test_one_run_at_a_time_writes_an_output(settings):
    with RunState(settings.output), pytest.raises(RunRefused, match="another `forebay run` is writing"):
        take(settings)
    take(settings)


def test_files_that_are_gone_are_told_with_the_way_out(settings):
    batch_id, _ = take(settings)
    with RunState(settings.output) as state:
        Storage(str(state.storage)).files(batch_id).remove_all()
        with pytest.raises(RunRefused, match=r"are gone.*--restart"):
            runs._Batch(settings, state, batch_id, fresh=False)


@pytest.mark.parametrize(
    "content", [b"{", b'{"input": 1}', b'{"input":"a","batch_id":"b","fingerprint":{"size":1}}']
)
def test_a_damaged_manifest_is_told_with_the_way_out(settings, content):
    with RunState(settings.output) as state:
        (state.folder / "manifest.json").write_bytes(content)
        with pytest.raises(RunRefused, match="--restart"):
            state.manifest()


def test_a_manifest_of_another_version_is_told_with_the_way_out(settings):
    with RunState(settings.output) as state:
        state.keep(Manifest("in", fingerprint(settings.input), "batch_1", version=2))
        with pytest.raises(RunRefused, match="another version"):
            state.manifest()


def test_a_run_on_somebodys_redis_has_a_queue_of_its_own(settings):
    on_redis = changed(settings, redis_url="redis://127.0.0.1:1/0")
    batch_id, _ = take(on_redis)
    with RunState(settings.output) as state:
        batch = runs._Batch(on_redis, state, batch_id, fresh=True)
        assert batch.queue == f"run-{batch_id}"
        assert batch.services().queues == (f"run-{batch_id}",)
        assert read_record(batch.files).request_counts.total == 5


def test_the_folder_is_nobody_elses_business(settings):
    with RunState(settings.output) as state:
        assert state.folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_somebody_else_prepared_is_not_used(settings, tmp_path, monkeypatch):
    take(settings)
    somebody = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: somebody)
        with pytest.raises(RunRefused, match=r"out\.jsonl\.forebay is another user's"):
            RunState(settings.output)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked.jsonl.forebay").symlink_to(tmp_path / "elsewhere")
    RunState(tmp_path / "linked.jsonl").close()  # a link of one's own is fine
