"""Owns the tests of the way from a model to where it runs: what the documents show, and an environment that has TVM's runtime alone.

Knows nothing of matching, nor of how libraries are loaded.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.spaces import REPOSITORY, Space, clean_environment

pytestmark = pytest.mark.slow

NEEDED = ("tvm_ffi", "typing_extensions", "numpy")
"""What the documents say that a deployed model needs besides TVM's runtime library, and what that package itself needs."""
BARE = """
import importlib.util
for absent in ("kerneldecl", "tvm", "click", "pydantic", "ml_dtypes"):
    assert importlib.util.find_spec(absent) is None, absent
exec(open("alone.py").read())
mapped = open("/proc/self/maps").read()
assert "libtvm_runtime.so" in mapped
assert "libtvm_compiler" not in mapped
"""


def example(document: str, name: str) -> str:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    found = re.search(rf"<!-- (?:example|commands): {re.escape(name)} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found is not None, f"{document} has no example {name}"
    return found[1]


def python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the README's commands and scripts were run."""
    space = Space(tmp_path_factory.mktemp("deployed"))
    space.write({name: example("docs/guides/deploying.md", name) for name in ("model.py", "deploy.py", "run.py")})
    space.write({name: example("docs/guides/deploying.md", name) for name in ("order.py", "alone.py")})
    for command in example("docs/guides/deploying.md", "model").splitlines():
        program, *arguments = command.split()
        assert program == "kerneldecl"
        space.run(*arguments)
    said = python("deploy.py", cwd=space.root)
    assert "kernels for 3 of 3 functions" in said
    return space.root


def test_the_readmes_model_is_extracted_built_deployed_and_runs(deployed: Path) -> None:
    python("run.py", cwd=deployed)


def test_init_declares_what_a_model_calls(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.write({"model.py": example("docs/guides/deploying.md", "model.py")})
    assert "3 new, 0 known" in space.run("init", "--target", "h200", "--from", "model:mlp").stdout
    assert "3 entries declared, no mistakes" in space.run("check").stdout


def test_the_documented_order_of_passes_is_one(deployed: Path) -> None:
    python("order.py", cwd=deployed)


def place_of(module: str) -> Path:
    """Return the file or folder of an installed module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    return path.parent if path.name == "__init__.py" else path


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a virtual environment that has what a deployed model needs and nothing else."""
    root = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (packages,) = root.glob("lib/python*/site-packages")
    places = [place_of(name) for name in NEEDED]
    for place in (*places, places[-1].with_name("numpy.libs")):  # the latter is a part of NumPy's package
        if place.exists():
            (packages / place.name).symlink_to(place)
    return root / "bin" / "python"


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "separate"])
def test_a_model_runs_in_an_environment_without_kerneldecl_and_compiler(deployed: Path, bare: Path, linked: bool, tmp_path: Path) -> None:
    if linked:
        shutil.copy(deployed / "mlp.so", tmp_path)
    else:
        export = f'export_model(executable, "{tmp_path / "mlp.so"}")'
        script = re.sub(r"^export_model\(.*", export, example("docs/guides/deploying.md", "deploy.py"), flags=re.MULTILINE)
        (deployed / "separate.py").write_text(script, encoding="utf-8")
        python("separate.py", cwd=deployed)
        (library,) = deployed.glob("dist/*/host/lib/*.so")
        shutil.copy(library, tmp_path / "kernels.so")
    shutil.copy(deployed / "alone.py", tmp_path)
    shutil.copy(place_of("tvm") / "lib" / "libtvm_runtime.so", tmp_path)
    command = [str(bare), "-I", "-c", BARE, *([] if linked else ["./kernels.so"])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
