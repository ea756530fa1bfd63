"""What an installation brings, and what importing it brings along."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import specdec

ROOT = Path(__file__).parents[1]


def python(code: str, cwd: Path, *options: str) -> str:
    """The output of a fresh interpreter that begins its path at ``cwd``."""
    run = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy of the sources, with the build backend that is installed."""
    pytest.importorskip("setuptools", minversion="77", reason="needs a build backend")
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("specdec", "kernels"):
        shutil.copytree(ROOT / folder, source / folder, ignore=junk)
    for file in ("pyproject.toml", "setup.cfg", "README.md"):
        shutil.copy(ROOT / file, source)
    code = "import sys; from setuptools.build_meta import build_wheel as b; b(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_names_in_the_wheel(wheel):
    names = wheel.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "specdec",
        "specdec_kernels",
    }
    # every source file is in it, and what is not source but needed
    for package, folder in (("specdec", ROOT), ("specdec_kernels", ROOT / "kernels")):
        for kind in ("*.py", "py.typed", "*.json"):
            for file in (folder / package).rglob(kind):
                assert file.relative_to(folder).as_posix() in names


def test_kernels_does_not_resolve_to_the_wheel(wheel, tmp_path):
    """Hugging Face has a package of that name, and transformers imports it."""
    wheel.extractall(tmp_path)
    code = (
        "import importlib.util as u, os; spec = u.find_spec('kernels');"
        "print(spec is not None and str(spec.origin).startswith(os.getcwd()));"
        "print(os.path.dirname(u.find_spec('specdec_kernels').origin))"
    )
    shadowed, found = python(code, tmp_path).split("\n")
    assert shadowed == "False"
    assert Path(found) == tmp_path / "specdec_kernels"


def test_names_of_the_installed_distribution():
    top = importlib.metadata.distribution("specdec").read_text("top_level.txt")
    assert top.split() == ["specdec", "specdec_kernels"]
    assert importlib.metadata.version("specdec") == specdec.__version__


def test_kernels_at_the_repository_root():
    """There Python finds the folder: a namespace without code at most, and transformers works."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = (
        "import importlib.util as u; spec = u.find_spec('kernels');"
        "print(spec and spec.origin);"
        "import transformers, transformers.integrations.hub_kernels, specdec.hf;"
        "from transformers import LlamaForCausalLM"
    )
    origin = python(code, ROOT)
    assert origin == "None" or str(ROOT) not in origin


@pytest.mark.parametrize(
    "imported, unwanted",
    [
        ("specdec", "torch transformers triton numpy matplotlib specdec_kernels"),
        ("specdec.theory", "torch transformers"),
        ("specdec_kernels", "transformers specdec tokenizers"),
    ],
)
def test_what_an_import_brings_along(imported, unwanted, tmp_path):
    code = f"import sys, {imported}; print([m for m in {unwanted.split()} if m in sys.modules])"
    assert python(code, tmp_path) == "[]"


def test_public_names(tmp_path):
    """Each resolves, once asked for; any other name is an AttributeError."""
    assert set(specdec.__all__) <= set(dir(specdec))
    for name in specdec.__all__:
        assert getattr(specdec, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        specdec.nonsense  # noqa: B018
    assert python("from specdec import *; print(NGram(), generate.__name__)", tmp_path)
