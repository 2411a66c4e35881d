"""Owns what is read of a workspace before planning: declaration, digests of plug-ins and files, archs.

Knows nothing of TVM, of records or of what is done with all this.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneldecl.declare.document import Declaration, declare
from kerneldecl.declare.overrides import OPTION, overridden
from kerneldecl.errors import DeclarationError, StaleError
from kerneldecl.model import uses
from kerneldecl.planning.explain import NOT_CHECKED, ONLY_CHECKED
from kerneldecl.planning.meanings import FILE as MEANINGS
from kerneldecl.planning.meanings import read_meanings
from kerneldecl.planning.plan import ROWS, Inputs
from kerneldecl.planning.sources import Named
from kerneldecl.plugins.digest import Reading, files_digest, plugin_files, specialize_digest, specialize_files
from kerneldecl.plugins.find import PACKAGE, shown_in
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.plugins.policy_order import is_tuner, policies_behind, ranking_policies, reads_records
from kerneldecl.rule import WorkspaceFile
from kerneldecl.store.keys import digest
from kerneldecl.store.local import LocalStore
from kerneldecl.store.protocol import Store
from kerneldecl.toolchain.companions import allocator_digest
from kerneldecl.toolchain.rows_dispatch import dispatch_digest

if TYPE_CHECKING:
    from kerneldecl.store.shared import SharedStore

FILE = "workloads.toml"
LOCK = "workloads.lock"
IMPORTED = "import"
"""Folder of the cache with imported packages, by the digests that the lock holds."""


@dataclass(frozen=True)
class Workspace:
    """A folder with a workloads.toml, and all that its plan depends on besides records."""

    root: Path
    sources: Path
    """Folder of the files that the plan and the workers read: the root itself, or a snapshot of what lies in it."""
    declaration: Declaration
    inputs: Inputs
    extra_files: tuple[Path, ...]
    """Files outside the plug-in folders that keys depend on."""
    case_files: Mapping[str, tuple[Path, ...]]
    """What inputs and references of each rule's workloads come from: the rule's files, and those that attributes name."""
    behind: Mapping[str, Named]
    """The files that each digest of a plug-in stands for, those of templates once anybody has asked for their digest."""
    reading: Reading
    """What was read of plug-ins' files."""
    surroundings: str = ""
    """Digest of kerneldecl itself and of the machine as they were when the snapshot was taken; empty without one."""
    overlay: Store | None = None
    """What stands in for the workspace's store where nothing is to be kept."""
    shared: SharedStore | None = None
    """The store with the cache that several machines share behind it, while a build uses that."""
    is_overridden: bool = False
    """Whether entries have other settings than the declared ones: a try, of which nothing is linked, locked or remembered."""
    is_current: Callable[[], bool] = lambda: True
    """Whether kerneldecl itself, which no snapshot holds, is as it was when the snapshot was taken."""

    def check_current(self) -> None:
        """Raise StaleError where what was found out since the snapshot may come from other code than its key says."""
        if not self.is_current():
            raise StaleError("kerneldecl itself was changed while this build ran; what it found with the new code is not kept: build again")

    @property
    def cache(self) -> Path:
        """The folder of what builds keep: the store, locks, and what the last build left."""
        return self.root / "cache"

    @property
    def store(self) -> Store:
        return self.overlay or self.shared or self.own_store

    @property
    def own_store(self) -> LocalStore:
        """The store on disk, to which blobs are added; nothing that makes any is run where nothing is to be kept."""
        return LocalStore(self.cache)


def open_workspace(root: Path, sources: Path | None = None) -> Workspace:
    """Read a workspace, or a snapshot of its sources; raise DeclarationError with every mistake in it."""
    reading = read_meanings(root / "cache" / MEANINGS)
    if sources is None or sources == root:
        return workspace_of(root, declare(root), reading=reading)
    try:
        return replace(workspace_of(sources, declare(sources), reading=reading), root=root)
    except DeclarationError:
        open_workspace(root)  # which words the mistake with what lies beside
        raise


def with_overrides(workspace: Workspace, values: Mapping[str, Any], option: str = OPTION) -> Workspace:
    """Return a workspace whose entries all have other settings, values as workloads.toml has them; raise DeclarationError for a mistake."""
    declaration = workspace.declaration
    workloads = overridden(workspace.sources, values, declaration, option)
    fresh = workspace_of(workspace.sources, replace(declaration, workloads=workloads), reading=workspace.reading)
    return replace(fresh, root=workspace.root, is_overridden=True)


def workspace_of(
    root: Path, declaration: Declaration, known: Mapping[str, Mapping[str, str]] | None = None, reading: Reading | None = None
) -> Workspace:
    """Return the workspace of a declaration, with the digests of what its workloads use.

    `known` gives digests of policies and templates, by `plugins_key`, that need not be looked for; `reading` is what was read before.
    """
    behind: dict[str, Named] = {}

    def noted(joint: str, files: Iterable[Path]) -> str:
        behind[joint] = tuple((shown_in(root, file), file) for file in files)
        return joint

    seen = reading or Reading()

    names = sorted({workload.rule for workload in declaration.workloads})
    file_attrs = {name: _file_attrs(root, name) for name in names}
    paths = {(w.rule, str(value)) for w in declaration.workloads for name, value in w.attrs if name in file_attrs[w.rule] and value}
    archs = {target: load_arch(root, arch) for target, arch in declaration.targets}
    kinds: set[tuple[str, str]] = {(use.name, archs[w.target].kind) for w in declaration.workloads for use in uses(w.policy)}
    policies = {(policy, kind): policies_behind(root, policy, kind) for policy, kind in kinds}
    tuners = frozenset(policy for policy, _ in kinds if is_tuner(root, policy))
    readers = frozenset(policy for policy in tuners if reads_records(root, policy))
    # A tuner's list depends on the policies whose space it searches.
    searched = {chosen: ranking_policies(root, *chosen) if chosen[0] in tuners else () for chosen in policies}
    keyed = {chosen: (*behind, *searched[chosen]) for chosen, behind in policies.items()}
    rules = {name: plugin_files("rules", root, name, seen) for name in names}
    digests = {chosen: (known or {}).get(plugins_key(*chosen)) for chosen in policies}
    plugins = {chosen: _policy_files(root, several, seen) for chosen, several in keyed.items() if digests[chosen] is None}
    found = {
        chosen: {name: noted(files_digest(root, files, seen=seen), files) for name, files in several.items()}
        for chosen, several in plugins.items()
    }

    @functools.cache
    def template(name: str) -> str:
        files = plugin_files("templates", root, name, seen)
        return noted(files_digest(root, files, seen=seen), files)

    custom_kernels = {w.specialize: specialize_files(root, w.specialize) for w in declaration.workloads if w.specialize}
    inputs = Inputs(
        toolchain=dict(declaration.toolchain),
        archs=archs,
        rules={name: noted(files_digest(root, files, ONLY_CHECKED, seen), files) for name, files in rules.items()},
        references={name: noted(files_digest(root, files, NOT_CHECKED, seen), files) for name, files in rules.items()},
        files={(rule, path): digest((root / path).read_bytes()) for rule, path in paths},
        file_attrs=file_attrs,
        policies=policies,
        plugins={chosen: digests[chosen] or found[chosen] for chosen in policies},
        template=template,
        tuners=tuners,
        readers=readers,
        specialize={path: noted(specialize_digest(root, files), files) for path, files in custom_kernels.items()},
        linked_with={"cuda": allocator_digest(), ROWS: dispatch_digest()},
    )
    of_policies = [files for several in plugins.values() for files in several.values()]
    extra = {root / path for _, path in paths} | _followed(root, [*rules.values(), *custom_kernels.values()], of_policies, seen)
    case_files = {name: (*files, *(root / path for rule, path in sorted(paths) if rule == name)) for name, files in rules.items()}
    return Workspace(root, root, declaration, inputs, tuple(sorted(extra)), case_files, behind, seen)


def _followed(root: Path, of_entries: Iterable[Iterable[Path]], of_policies: Iterable[Iterable[Path]], seen: Reading) -> set[Path]:
    """Return the files of plug-ins that a build looks at to say whether anything was changed: the package answers for its own itself."""
    # A checkout is a workspace that holds kerneldecl itself, of which no snapshot has a copy.
    templates = (plugin_files("templates", root, file.stem, seen) for file in (root / "templates").glob("[!_]*.py"))
    own = {file for files in (*of_policies, *templates) for file in files if file.is_relative_to(root)}
    return {file for file in (*own, *(file for files in of_entries for file in files)) if not file.is_relative_to(PACKAGE)}


def plugins_key(policy: str, kind: str) -> str:
    """Return the name under which the digests of a policy for a kind of arch are kept."""
    return f"{policy} {kind}"


def _file_attrs(root: Path, rule: str) -> tuple[str, ...]:
    hints = typing.get_type_hints(load_rule(root, rule))
    return tuple(sorted(name for name, hint in hints.items() if hint is WorkspaceFile))


def _policy_files(root: Path, policies: Iterable[str], seen: Reading) -> dict[str, tuple[Path, ...]]:
    """Return the files of each policy by its name."""
    return {name: plugin_files("policies", root, name, seen) for name in policies}
