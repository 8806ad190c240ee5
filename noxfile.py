"""Every check of this repository as a session: `nox -s tests`, `nox -s lint types docs`, `nox -s
bench -- tokenizing`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_missing_interpreters = True

# One jax line per Python: 0.10 is the last for 3.11, accelerator machines in use run 0.11, and 0.12
# is what pip resolves today.
JAX_LINES = [("3.11", "0.10"), ("3.12", "0.11"), ("3.13", "0.12")]
PLACES = ["src", "tests", "benchmarks", "docs", "noxfile.py"]
# what docs/problems.md and docs/coming_from.md are tried with
PEERS = (
    "torch==2.13.0",
    "trl==1.16.0",
    "datasets==5.2.0",
    "grain==0.2.18",
)
TEST_ENV = {
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",  # no test may depend on a network
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "true",
}


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite on the current interpreter. Arguments after `--` go to pytest."""
    session.install(".[test]")
    _pytest(session)


@nox.session
@nox.parametrize("python,jax", JAX_LINES)
def tests_all(session: nox.Session, jax: str) -> None:
    """The whole suite on every supported Python, each with its own jax line."""
    session.install(".[test]", f"jax=={jax}.*")
    _pytest(session)


@nox.session
def core_only(session: nox.Session) -> None:
    """Without the extra `[train]` data is prepared, loaded and saved; training is refused."""
    session.install(".", "pytest>=8")
    session.run(
        "python",
        "-c",
        "import importlib.util as util; assert not util.find_spec('jax'), 'jax is installed'",
    )
    session.run(
        "pytest",
        "--noconftest",
        "tests/test_core_only.py",
        *session.posargs,
        env=TEST_ENV | {"EASYPIPE_CORE_ONLY": "all"},
    )


@nox.session
def dist(session: nox.Session) -> None:
    """The sdist, and the wheel that it builds: their metadata are valid, and the tests in the sdist
    pass on the wheel.
    """
    session.install("build>=1.2", "twine>=6", "pytest>=8")
    made = Path(session.create_tmp()).resolve()
    session.run("python", "-m", "build", "--outdir", str(made))
    [sdist], [wheel] = made.glob("*.tar.gz"), made.glob("*.whl")
    session.run("twine", "check", "--strict", str(sdist), str(wheel))
    session.install(str(wheel))
    session.run("python", "-m", "tarfile", "-e", str(sdist), str(made))
    session.chdir(made / sdist.name.removesuffix(".tar.gz"))
    env = TEST_ENV | {"EASYPIPE_CORE_ONLY": "all"}
    session.run("pytest", "--noconftest", "tests/test_core_only.py", *session.posargs, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Rules and format."""
    session.install(
        *nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["lint"]
    )
    session.run("ruff", "check", *PLACES)
    session.run("ruff", "format", "--check", *PLACES)


@nox.session
def audit(session: nox.Session) -> None:
    """Known holes in the packages that an installation brings along. It gates nothing: asks a
    service, whose answer changes by the day.
    """
    session.install(".[train]", "pip-audit>=2.7")
    session.run("pip-audit", "--skip-editable", *session.posargs, success_codes=[0, 1])


@nox.session
def types(session: nox.Session) -> None:
    """Pyright, strict (see pyproject.toml for the rules that are left out); then over a script
    of a user's, in which it has to find what is wrong and nothing else."""
    session.install(".[types]")
    session.run("pyright", "--pythonpath", str(Path(session.bin) / "python"))
    session.run(
        "pytest", "--noconftest", "tests/test_user_types.py", env={"EASYPIPE_TYPES": "required"}
    )


@nox.session
def laws(session: nox.Session) -> None:
    """The test files that call the checks of tests/laws.py or draw examples, with ten times the
    Hypothesis examples that they name (half of those in the normal run).
    """
    session.install(".[test]")
    draws = re.compile(r"^\s*((from|import) laws\b|@given\b)", re.MULTILINE)
    files = [
        str(path)
        for path in sorted(Path("tests").rglob("test_*.py"))
        if draws.search(path.read_text())
    ]
    session.run(
        "pytest",
        "-n",
        "logical",
        *files,
        *session.posargs,
        env=TEST_ENV | {"EASYPIPE_EXAMPLES": "10"},
    )


@nox.session
def masks(session: nox.Session) -> None:
    """What is proven of the chat templates in the wheels of trl and axolotl, which are fetched
    without what they depend on; writes docs/masks.md.
    """
    session.install(".[test]")
    file, templates = "tests/transforms/test_wheel_templates.py", _templates(session)
    session.run("pytest", "-q", file, env=TEST_ENV | {"EASYPIPE_TEMPLATES": templates})
    session.run("python", file, templates, env=TEST_ENV)


@nox.session
def renderers(session: nox.Session) -> None:
    """A second opinion on those masks: what `renderers` says that a model itself wrote, where it
    writes conversations as one of those templates does. Its figures stand in docs/masks.md.
    """
    session.install(".[test]", "renderers==0.1.12")
    env = TEST_ENV | {"EASYPIPE_TEMPLATES": _templates(session)}
    session.run("pytest", "-q", "tests/transforms/test_renderers.py", *session.posargs, env=env)


@nox.session
def faults(session: nox.Session) -> None:
    """Puts known faults into a copy of the code, one by one, and looks whether the tests of their
    rooms fail, which have to pass without: half an hour of processor time for all.

    Words after `--` choose among them by file or name; `--jobs 4` tries four at once.
    """
    session.install(".[test]")
    session.run("python", "tests/faults.py", *session.posargs)


@nox.session
def disasters(session: nox.Session) -> None:
    """Jobs struck at every file operation, in every way, and damage to every kind of file: hours.
    The normal run tries a few. Needs Linux and a C compiler. Stopped, it goes on where it was.
    """
    session.install(".[test,ray]")
    log = str(Path(session.create_tmp()) / "struck.jsonl")
    session.run("python", "tests/disasters/strike.py", log, env=TEST_ENV)
    session.run(
        "pytest",
        "tests/test_disasters.py",
        "tests/executors/test_ray.py",
        *session.posargs,
        env=TEST_ENV | {"EASYPIPE_DISASTERS": "all"},
    )


@nox.session
def fuzz(session: nox.Session) -> None:
    """Draws bad input for ten minutes, or `nox -s fuzz -- MINUTES [TARGET ...]`: readers, configs,
    templates, tokenizer files, answers of web servers. What it finds becomes a case of
    tests/bad_input. With `--atheris`, which is installed then, it follows branches of one target.
    """
    session.install(".[test]", *(["atheris>=3"] if "--atheris" in session.posargs else []))
    session.run("python", "tests/fuzz.py", *(session.posargs or ["10"]), env=TEST_ENV)


@nox.session
def soak(session: nox.Session) -> None:
    """Loaders with pauses, restores and epochs for 30 minutes, or `nox -s soak -- MINUTES`: memory,
    threads and handles stay as they are, and batches are those of the plan.
    """
    session.install(".[test]")
    session.run("python", "tests/disasters/soak.py", *session.posargs, env=TEST_ENV)


@nox.session(python="3.12")
def aot_gpu(session: nox.Session) -> None:
    """Compiles loss and attention for an H200 on a machine without one: the jax of the H200
    machines, and 4.4 GB of CUDA wheels.
    """
    session.install(".[test,cuda13]", "jax==0.11.2")
    # Without a GPU nothing can be tried out; cuBLAS is what autotuning chooses for products of this
    # size.
    flags = {"XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"}
    session.run(
        "pytest",
        "-s",
        "-q",
        "tests/kernels/test_aot_gpu.py",
        *session.posargs,
        env=TEST_ENV | flags,
    )


@nox.session
def aot_tpu(session: nox.Session) -> None:
    """Loss and attention compiled for every TPU generation, and an 8 B model for 64 chips, by
    libtpu. The normal run compiles a few.
    """
    session.install(".[test]")
    files = (
        "tests/kernels/test_aot_tpu.py",
        "tests/train/test_attention.py",
        "tests/train/test_plan_step.py",
    )
    session.run(
        "pytest", "-n", "logical", *files, *session.posargs, env=TEST_ENV | {"EASYPIPE_AOT": "all"}
    )


@nox.session
def parity(session: nox.Session) -> None:
    """Every model family against torch, both ways, its exports against transformers and PEFT, and
    loaders under torch's DataLoader. The normal run has no torch: it compares with what torch gave
    once (tests/train/goldens).
    """
    session.install(".[parity]")
    session.run(
        "pytest",
        "tests/train/test_hf_torch.py",
        "tests/interop/test_exported.py",
        "tests/interop/test_torch.py",
        "tests/compat",
        *session.posargs,
        env=TEST_ENV,
    )


@nox.session
def lm_eval(session: nox.Session) -> None:
    """Scores of three tasks of our own, and the time they take, against lm-eval's `hf` model on the
    same folder.
    """
    session.install(".[parity,eval]", "lm-eval==0.4.13")
    session.run("pytest", "-s", "tests/train/test_harness.py", *session.posargs, env=TEST_ENV)


@nox.session
def gguf(session: nox.Session) -> None:
    """GGUF files of every family, run by llama.cpp, which llama-cpp-python compiles from source:
    10 to 30 minutes on two cores.
    """
    session.install(".[test]")
    # for any machine of its kind, as CI's may differ from the one that compiled it
    build = {"CMAKE_ARGS": "-DGGML_NATIVE=OFF"}
    package = "llama-cpp-python"
    session.install("--no-binary", package, f"{package}==0.3.36", env=build)
    session.run("pytest", "tests/interop/test_gguf.py", *session.posargs, env=TEST_ENV)


@nox.session
def trl(session: nox.Session) -> None:
    """TRL's own preparation of the rows whose tokens and masks the normal run compares with
    tests/trl_oracle.py: the oracle is right, and so are we; and the losses of its KTO and DPO
    trainers of the same logits.
    """
    session.install(".[test]", "trl==1.16.0", "torch==2.13.0")
    session.run(
        "pytest",
        "tests/interop/test_trl.py",
        "tests/transforms/test_trl_shapes.py",
        *session.posargs,
        env=TEST_ENV | {"EASYPIPE_TRL": "required"},
    )


@nox.session
def peers(session: nox.Session) -> None:
    """The blocks of other libraries in the docs: what docs/problems.md says fails there fails, and
    what docs/coming_from.md and docs/elsewhere.md show runs (MosaicML's in the session `shards`,
    Levanter's in `levanter`, EasyDeL's in `easydel`: their pins do not fit).
    """
    session.install(".", "pytest>=8", *PEERS)
    session.run(
        "pytest",
        "--noconftest",
        "tests/test_docs.py",
        "-k",
        "other_libraries and not MosaicML and not Levanter and not EasyDeL",
        *session.posargs,
        env=TEST_ENV | {"EASYPIPE_PEERS": "all"},
    )


@nox.session(python="3.12")
def levanter(session: nox.Session) -> None:
    """Levanter's sections of docs/elsewhere.md and docs/coming_from.md. Its pin of safetensors
    excludes ours, so easypipe is installed without what it depends on; its loss does not run with
    jax 0.10.
    """
    project = nox.project.load_toml("pyproject.toml")["project"]
    ours = [one for one in project["dependencies"] if not one.startswith("safetensors")]
    theirs = ("levanter==1.2.dev1644", "haliax==1.4.dev453", "jax==0.7.2", "gitpython", "chex")
    session.install(*theirs, *ours, "pytest>=8")
    session.install("--no-deps", ".")
    session.run(
        "pytest",
        "--noconftest",
        "tests/test_docs.py",
        "-k",
        "other_libraries and Levanter",
        env=TEST_ENV | {"EASYPIPE_PEERS": "all"},
    )


@nox.session(python="3.11")
def easydel(session: nox.Session) -> None:
    """EasyDeL's section of docs/coming_from.md: its jax is older than the one that trains here."""
    session.install(".", "pytest>=8", "easydel==0.3.0")
    session.run(
        "pytest",
        "--noconftest",
        "tests/test_docs.py",
        "-k",
        "other_libraries and EasyDeL",
        env=TEST_ENV | {"EASYPIPE_PEERS": "all"},
    )


@nox.session
def notebooks(session: nox.Session) -> None:
    """The tutorials as notebooks, run by Jupyter in a new folder: minutes. Names after `--` choose
    among them.
    """
    session.install(".[train]", "nbclient>=0.10", "ipykernel>=6")
    env = TEST_ENV | {"EASYPIPE_CACHE": str(Path(session.create_tmp()) / "cache")}
    session.run("python", "docs/notebooks.py", *session.posargs, env=env)


@nox.session
def trackers(session: nox.Session) -> None:
    """Runs in trackio and MLflow, stopped and resumed."""
    session.install(".[test,trackio,mlflow]")
    file = "tests/train/test_named_callbacks.py"
    session.run("pytest", file, "-k", "goes_on_in_its_run", *session.posargs, env=TEST_ENV)


@nox.session
def shards(session: nox.Session) -> None:
    """MDS folders and WebDataset tars that these libraries write, read by both, row by row; and
    MosaicML's section of docs/coming_from.md.
    """
    session.install(".", "pytest>=8", "mosaicml-streaming==0.13.0", "webdataset==1.0.2")
    session.run(
        "pytest",
        "--noconftest",
        "tests/interop/test_shards.py",
        *session.posargs,
        env=TEST_ENV | {"EASYPIPE_SHARDS": "all"},
    )
    session.run(
        "pytest",
        "--noconftest",
        "tests/test_docs.py",
        "-k",
        "other_libraries and MosaicML",
        env=TEST_ENV | {"EASYPIPE_PEERS": "all"},
    )


@nox.session
def html(session: nox.Session) -> None:
    """The pages of commands and of the site in a headless Chromium: the one of this machine, else
    one that playwright downloads.
    """
    session.install(".[test,docs]")
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        session.install("playwright")
        session.run("playwright", "install", "--with-deps", "chromium")
        where = (
            "from playwright.sync_api import sync_playwright as p; "
            "print(p().start().chromium.executable_path)"
        )
        browser = str(session.run("python", "-c", where, silent=True)).strip()
    session.run(
        "pytest",
        "tests/test_pages.py",
        "tests/test_preview.py",
        "tests/train/test_report.py",
        *session.posargs,
        env=TEST_ENV | {"EASYPIPE_CHROMIUM": browser},
    )


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the site into site/, offline; a warning is an error. The examples in it are run by
    tests/test_docs.py.
    """
    session.install(".[docs]")
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """All benchmarks, or `nox -s bench -- tokenizing --megabytes 20` for one with its options."""
    session.install(".[bench]")
    named = (
        [Path("benchmarks") / f"{session.posargs[0]}.py"]
        if session.posargs
        else sorted(Path("benchmarks").glob("[!_]*.py"))
    )
    for script in named:
        session.run("python", str(script), *session.posargs[1:], env={"JAX_PLATFORMS": "cpu"})


def _templates(session: nox.Session) -> str:
    """Returns the folder of the chat templates in two wheels, which are fetched alone."""
    folder = Path(session.create_tmp())
    wheels = ("trl==1.16.0", "axolotl==0.19.0")
    session.run("pip", "download", "-q", "--no-deps", "-d", str(folder), *wheels)
    for wheel in folder.glob("*.whl"):
        session.run("python", "-m", "zipfile", "-e", str(wheel), str(folder / "templates"))
    return str(folder / "templates")


def _pytest(session: nox.Session) -> None:
    arguments = session.posargs or [
        "-n",
        "logical",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "--durations",
        "15",
    ]
    session.run("pytest", *arguments, env=TEST_ENV)
