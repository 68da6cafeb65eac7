# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Plan the changes of containerd's files, and keep the record of the changes for their removal."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._host import change_record
from ..._host.secret_masking import changed_lines
from .config import (
    DROP_IN,
    MARK,
    Change,
    File,
    Settings,
    candidates,
    differences,
    edit,
    has_no_settings,
    read_cdi_values,
    restore_values,
    shorten_differences,
)
from .daemon import ContainerdError, Daemon

#: Suffix of the backup of a file that existed before this collection changed it.
BACKUP = ".before-dra-accelerators"


def fingerprint(text: str) -> str:
    """Return the SHA-256 digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """One changed file: whether it was created, the digest of the written text, its previous values, and the digest of its backup.

    ``backup`` is empty for a file without a backup and in records of earlier versions.
    """

    created: bool
    written: str
    before: Mapping[str, Any]
    backup: str = ""


@dataclass(frozen=True)
class Record:
    """The changes of this collection on the node, and whether a restart is pending."""

    files: Mapping[str, Entry] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    restart: bool = False

    def __bool__(self) -> bool:
        return bool(self.files or self.folders or self.restart)

    def to_text(self) -> str:
        """Return the text of the record."""
        files = {
            path: {
                "created": entry.created,
                "written": entry.written,
                "before": dict(entry.before),
                "backup": entry.backup,
            }
            for path, entry in sorted(self.files.items())
        }
        return change_record.to_text({"files": files, "folders": list(self.folders), "restart": self.restart})


def read_record(text: str | None, path: str) -> Record:
    """Read a record. Return an empty record if there is no text. Raises AcceleratorError."""
    if text is None:
        return Record()
    hint = (
        f"To revert the changes, remove the lines with {MARK} from containerd's files manually. Then delete the record."
    )
    return change_record.read(text, path, _record_of, of="changes for containerd", hint=hint)


def _record_of(content: Any) -> Record:
    files = {
        name: Entry(bool(entry["created"]), str(entry["written"]), dict(entry["before"]), str(entry.get("backup", "")))
        for name, entry in content["files"].items()
    }
    return Record(files, tuple(content["folders"]), bool(content["restart"]))


def plan_present(
    daemon: Daemon, settings: Settings, imported: Sequence[File], wanted: Sequence[str], preferred: str
) -> list[Change]:
    """Return the change that enables CDI and changes nothing else. Empty if CDI is enabled. Raises ContainerdError."""
    if not settings.has_cdi_settings:
        raise _without_cdi(daemon, settings)
    if settings.reads(wanted):
        return []
    undisturbed = _baseline(daemon, settings, imported)
    folder = daemon.drop_in_folder(preferred)
    rejected = []
    for each in candidates(settings, daemon.read(daemon.config), daemon.config, imported, folder, wanted):
        if daemon.generated and each.path == daemon.config:
            rejected.append(f"{each.path}: it is regenerated at each start")
            continue
        if each.problem:
            rejected.append(each.problem)
            continue
        after = daemon.settings_after(settings, imported, [each])
        if after is None:
            rejected.append(f"{each.path}: containerd rejects the file")
            continue
        other = list(differences(undisturbed.rest, after.rest))
        if not other and after.reads(wanted):
            return [each]
        why = f"it would change more than CDI ({shorten_differences(other)})" if other else "CDI would stay disabled"
        rejected.append(f"{each.path}: {why}")
    raise ContainerdError(
        f"CDI cannot be enabled for containerd by a change of one file: {'; '.join(rejected)}",
        hint=daemon.advice
        or f"Set enable_cdi = true in the plugin's table manually, so that "
        f"`{daemon.command} --config {daemon.config} config dump` shows it. Nothing was changed.",
        code="no-safe-change",
    )


def _without_cdi(daemon: Daemon, settings: Settings) -> ContainerdError:
    """Return the error for a containerd whose plugins for the kubelet are disabled, or that is too old for CDI."""
    if settings.disabled:
        names = ", ".join(settings.disabled)
        return ContainerdError(
            f"containerd cannot serve a kubelet, because disabled_plugins in {daemon.config} contains {names}",
            hint=f"Remove {names} from disabled_plugins in {daemon.config} or in the file that it imports, and restart {daemon.service}.",
            code="no-cdi",
        )
    return ContainerdError(
        "The settings of containerd have no cdi_spec_dirs, expected containerd 1.7.2 or newer",
        hint="Upgrade containerd.",
        code="no-cdi",
    )


def plan_absent(daemon: Daemon, record: Record, drop_in_folders: Sequence[str]) -> list[Change]:
    """Return the changes that revert this collection's changes. Files that were edited since lose only this collection's keys."""
    changes = []
    own_files = dict(record.files)
    for folder in drop_in_folders:
        path = posixpath.join(folder, DROP_IN)
        found = daemon.read(path)
        if path not in own_files and found is not None and MARK in found.text.partition("\n")[0]:
            own_files[path] = Entry(created=True, written=fingerprint(found.text), before={})
    for path, entry in sorted(own_files.items()):
        found = daemon.read(path)
        if found is None:
            continue
        after = text_before(daemon, found, entry)
        if after != found.text:
            changes.append(Change(path, found.text, after))
    return changes


def text_before(daemon: Daemon, file: File, entry: Entry) -> str | None:
    """Return a file's text without this collection's part, or None to remove the file."""
    if entry.created:
        untouched = fingerprint(file.text) == entry.written
        rest = None if untouched else restore_values(file, dict.fromkeys(read_cdi_values(file)))
        return None if rest is None or has_no_settings(File(file.path, rest)) else rest
    backup = daemon.read(file.path + BACKUP)
    intact = backup is not None and entry.backup in ("", fingerprint(backup.text))
    if backup is not None and intact and _differs_by_our_keys(backup, file):
        return backup.text
    return restore_values(file, entry.before)


def _differs_by_our_keys(backup: File, file: File) -> bool:
    """Return whether the file equals its backup except for this collection's keys, which means no other edits."""
    before, after = read_cdi_values(backup), read_cdi_values(file)
    values = {key: after[key] for key in after if after[key] != before[key]}
    return edit(backup, file.table(), values).after == file.text if values else backup.text == file.text


def refuse_other_changes(
    daemon: Daemon, settings: Settings, imported: Sequence[File], changes: Sequence[Change]
) -> None:
    """Verify that the changes affect only CDI. Raises ContainerdError."""
    undisturbed = _baseline(daemon, settings, imported)
    after = daemon.settings_after(settings, imported, changes)
    other = ["containerd rejects the files"] if after is None else list(differences(undisturbed.rest, after.rest))
    if other:
        raise ContainerdError(
            f"Reverting the change of {', '.join(each.path for each in changes)} would change more than CDI: {shorten_differences(other)}",
            hint=f"Remove the lines with {MARK} manually. Nothing was changed.",
            code="no-safe-change",
        )


def recorded(record: Record, changes: Sequence[Change]) -> Record:
    """Return the record after the changes, with a pending restart. The original values are kept from the first change."""
    files = dict(record.files)
    for each in changes:
        if each.after is None:
            files.pop(each.path, None)
            continue
        known = files.get(each.path)
        created = known.created if known else each.before is None
        before = known.before if known else {} if each.before is None else read_cdi_values(File(each.path, each.before))
        backup = known.backup if known else "" if each.before is None else fingerprint(each.before)
        files[each.path] = Entry(created, fingerprint(each.after), before, backup)
    return Record(files, record.folders, restart=True)


def _baseline(daemon: Daemon, settings: Settings, imported: Sequence[File]) -> Settings:
    found = daemon.settings_after(settings, imported, [])
    other = ["it refuses them"] if found is None else list(differences(settings.rest, found.rest))
    if found is None or other:
        raise ContainerdError(
            f"containerd returns other settings for copies of {daemon.config} and its imported files ({shorten_differences(other)}), "
            "so a change cannot be verified before it is applied",
            hint="Set enable_cdi = true in the table of its plugin for the kubelet manually.",
            code="no-trial",
        )
    return found


def changes_diff(changes: Sequence[Change]) -> dict[str, str]:
    """Return the diff of the changes in Ansible's form: only the lines that change, because others can hold registry passwords."""
    return {"prepared": "".join(changed_lines(each.path, each.before, each.after) for each in changes)}
