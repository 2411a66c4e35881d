"""Owns the commands about packages: push, pull, and the forms that `export` writes of a whole artifact.

Knows nothing of how packages are made, moved or checked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerneldecl.cli.deploy import chosen_artifact
from kerneldecl.cli.options import Settings, json_option, opened, print_result

if TYPE_CHECKING:
    from kerneldecl.package.folder import Package
    from kerneldecl.store.signing import Sign, Verify

FORMS = ("tar", "wheel", "hf-kernel")
key_option = click.option("--key", "keys", multiple=True, metavar="ed25519:…", help="A public key that must have signed it. Repeatable.")


@click.command()
@click.argument("reference", metavar="oci://HOST/NAME:TAG")
@click.option("--artifact", type=click.Path(path_type=Path), help="The artifact's folder, or a package; by default the workspace's.")
@click.option("--overwrite", is_flag=True, help="Replace what is published under this tag.")
@json_option
@click.pass_obj
def push(settings: Settings, reference: str, artifact: Path | None, overwrite: bool, as_json: bool) -> None:
    """Publish an artifact in an OCI registry, with its records, what it was built from and on what it was measured.

    Without a tag, its version is the tag. KERNELDECL_SIGNING_KEY signs it.
    """
    from dataclasses import replace

    from kerneldecl.package import registry
    from kerneldecl.package.tar import write_tar
    from kerneldecl.store.scratch import scratch_folder

    asked = _reference(reference)
    if asked.digest:
        raise click.UsageError("a digest follows from what is published: name a tag, or nothing for the version")
    with _package(settings, artifact) as package, scratch_folder() as scratch:
        manifest = package.manifest
        place = asked if asked.tag else replace(asked, tag=str(manifest["version"]))
        tar = scratch / "package.tar"
        write_tar(package.folder, tar)
        named = {"title": package.name, "version": str(manifest["version"])}
        annotations = {f"org.opencontainers.image.{name}": value for name, value in named.items()}
        found, was_there = registry.push(place, tar, package.content, annotations, overwrite=overwrite)
        _note_published(settings, package, str(found))
        result = {"schema": 1, "reference": str(found), "was_there": was_there, "signed_by": list(package.signers)}

    def text(_: Any) -> str:
        signed = f"signed by {', '.join(result['signed_by'])}" if result["signed_by"] else "not signed"  # type: ignore[arg-type]
        return f"{'is there already: ' if was_there else 'pushed '}{found}\n{signed}"

    print_result(as_json, result, text)


@click.command()
@click.argument("reference", metavar="oci://HOST/NAME[:TAG][@sha256:DIGEST]")
@click.option("-o", "folder", type=click.Path(path_type=Path), help="The folder to make; by default the name, here.")
@key_option
@json_option
@click.pass_obj
def pull(settings: Settings, reference: str, folder: Path | None, keys: tuple[str, ...], as_json: bool) -> None:
    """Bring a package from an OCI registry into a new folder, checked: digests, statements, signature."""
    from kerneldecl.package.folder import read_package
    from kerneldecl.package.place import bring

    asked = _reference(reference)
    place = folder or settings.root / asked.name.rpartition("/")[2]
    verify = trusted_by(settings, keys)
    found = bring(asked, place, verify)
    package = read_package(place, verify)
    manifest = package.manifest
    result = {"schema": 1, "reference": str(found), "folder": str(place), "artifact": package.name, "target": manifest["target"]}
    result |= {"signed_by": list(package.signers), "is_trusted": package.is_trusted}

    def text(_: Any) -> str:
        kernels = f"{len(manifest['entries'])} kernels in {os.path.relpath(place)}"
        return f"{package.name} for {manifest['target']}: {kernels}\n{found}\n{signed_text(package)}"

    print_result(as_json, result, text)


def export_package(settings: Settings, artifact: str | None, form: str, name: str | None, output: Path | None) -> Path:
    """Write an artifact as one of the forms of a package, and return the file or folder."""
    from kerneldecl.package.hf_kernel import write_hf_kernel
    from kerneldecl.package.tar import write_tar
    from kerneldecl.package.wheel_file import module_name, write_wheel
    from kerneldecl.tuning.bundle_files import FILE as BUNDLE

    if artifact and form == "tar" and (Path(artifact) / BUNDLE).is_file():
        path = output or Path(f"{Path(artifact).resolve().name}.tar")
        write_tar(Path(artifact), path)
        return path
    with _package(settings, Path(artifact) if artifact else None) as package:
        module = module_name(name or package.manifest["name"])
        if form == "tar":
            path = output or Path(f"{package.name}-{package.manifest['target']}.tar")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tar(package.folder, path)
            return path
        if form == "wheel":
            folder = output or Path()
            folder.mkdir(parents=True, exist_ok=True)
            return write_wheel(package.folder, folder, module)
        return write_hf_kernel(package.folder, output or Path(module), module)


def trusted_by(settings: Settings, keys: tuple[str, ...]) -> Verify | None:
    """Return what signatures are verified by: the given keys, else those of the workspace's [trust]; None where there are none."""
    from kerneldecl.store.signing import verifier

    trusted = trusted_keys(settings, keys)
    return verifier(trusted) if trusted else None


def trusted_keys(settings: Settings, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given public keys, else those of the workspace's [trust]."""
    from kerneldecl.declare.shared_cache import are_public_keys
    from kerneldecl.declare.toml_keys import FILE

    if not are_public_keys(list(keys)):
        raise click.UsageError('--key takes a public key such as "ed25519:…", as `kerneldecl cache key` prints it')
    return keys or (opened(settings).declaration.trusted if (settings.root / FILE).is_file() else ())


def signed_text(package: Package) -> str:
    """Return who has signed a package, and whether that says anything."""
    if not package.signers:
        return "not signed"
    said = "" if package.is_trusted else ", whom nothing here says to trust"
    return f"signed by {', '.join(package.signers)}{said}"


def _reference(text: str) -> Any:
    from kerneldecl.package.registry import reference_of

    try:
        return reference_of(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@contextlib.contextmanager
def _package(settings: Settings, artifact: Path | None) -> Iterator[Package]:
    """Provide the package that is meant: one that is there, or one that is made of an artifact."""
    from kerneldecl.artifact.load import checked_artifact
    from kerneldecl.declare.toml_keys import FILE
    from kerneldecl.package.folder import is_package, read_package
    from kerneldecl.package.make import Origin, make_package
    from kerneldecl.package.place import is_packed, opened_package
    from kerneldecl.stages.origin import is_of, origin_of
    from kerneldecl.store.scratch import scratch_folder

    if artifact is not None and (is_packed(artifact) or is_package(artifact)):
        with opened_package(artifact, trusted_by(settings, ())) as package:
            yield package
        return
    named = chosen_artifact(settings, artifact)
    if named is None:
        raise click.UsageError("there is no workspace here; name the artifact")
    folder, manifest = checked_artifact(named)
    workspace = opened(settings) if (settings.root / FILE).is_file() else None
    origin = origin_of(workspace, manifest) if workspace and is_of(workspace, folder) else Origin()
    with scratch_folder() as scratch:
        made = scratch / "package"
        made.mkdir()
        make_package(made, folder, manifest, origin, _signer())
        yield read_package(made, None)


def _signer() -> Sign | None:
    from kerneldecl.store.signing import signer_of

    return signer_of(os.environ)


def _note_published(settings: Settings, package: Package, reference: str) -> None:
    from kerneldecl.declare.toml_keys import FILE
    from kerneldecl.planning.published import note

    if (settings.root / FILE).is_file() and opened(settings).declaration.artifact == package.manifest["name"]:
        note(settings.root, package.manifest, reference)
