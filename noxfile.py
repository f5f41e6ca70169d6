"""What can be done with a checkout; ``nox --list`` shows it."""

import os
import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests", "lint", "types"]

INTEGRATIONS = ["tests/integrations", "docs/recipes.md", "docs/streams.md"]  # what needs other packages
# What has sessions of its own.
APART = ["tests/composer", "tests/deepspeed", "tests/torchft", "tests/torchtitan", "tests/nodes"]
WITHOUT_INTEGRATIONS = [f"--ignore={path}" for path in [*INTEGRATIONS, *APART]]
PROJECT = nox.project.load_toml("pyproject.toml")["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# The lowest versions that the package says it works with, and the newest Python.
LOWEST_PYTHON = PROJECT["requires-python"].removeprefix(">=")
NEWEST_PYTHON = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3" in name][-1]
LOWEST = [requirement.replace(">=", "==") for requirement in PROJECT["dependencies"]]
DIST = Path("dist")
PINNED = [line.partition(" ")[0] for line in Path("constraints.txt").read_text().splitlines()]
# What the session pages runs.
MEASURED = [
    "bench",
    "imports",
    "agreement",
    "many_ranks",
    "gradient",
    "samplers",
    "audit",
    "peers",
    "packages",
    "unpatched",
    "composer",
    "deepspeed",
    "torchtitan",
    "torchft",
    "restarts",
    "pictures",
    "screenshots",
]
# The minor versions before those of constraints.txt, and what resumes within an epoch in these frameworks.
PREVIOUS = ["accelerate==1.14.0", "lightning==2.5.6", "pytorch-ignite==0.5.4", "transformers==5.22.2"]
RESUMING = [f"tests/integrations/test_{name}.py" for name in ("accelerate_resume", "hf_resume")]
RESUMING += [
    f"tests/integrations/test_{name}.py" for name in ("ignite_attached", "lightning_callback", "lightning_resume")
]
COMPOSER = ["mosaicml==0.32.1", "torch==2.7.0", "torchvision==0.22.0"]  # it takes no newer torch
# What the tests of integrations import: packages, and modules that these import when they are asked for.
IMPORTED = ["accelerate", "datasets", "ignite.engine", "lhotse", "lightning.pytorch", "torch_geometric", "torchmetrics"]
IMPORTED += ["torchdata.stateful_dataloader", "transformers.trainer", "webdataset", "yapf"]
BROWSERS = ["chromium", "chromium-browser", "google-chrome"]  # those that the session screenshots looks for
# What MosaicML's streams need for what the session packages tries. All of their needs would be clouds' clients, too.
STREAMING_NEEDS = ["brotli", "python-snappy", "xxhash", "zstd"]


@nox.session
def package(session: nox.Session) -> None:
    """Build the sdist, and from it the wheel, into ``dist/``, and check both."""
    install(session, *EXTRAS["package"])
    shutil.rmtree(DIST, ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation")  # hatchling is here, in the version of constraints.txt
    session.run("twine", "check", "--strict", *map(str, DIST.iterdir()))
    session.run("check-wheel-contents", str(DIST))


@nox.session
def demo(session: nox.Session) -> None:
    """Train a digit classifier on 2, 3 and 4 ranks and show that one process trains the same one."""
    install(session, "--no-compile", ".[demo]")  # one process imports for all: that compiles a third of what is there
    session.run("python", "docs/examples/digits.py")


@nox.session(requires=["package"], allow_parallel=True)
def tests(session: nox.Session) -> None:
    """Test the wheel with all that needs no third-party loader; arguments after ``--`` go to pytest."""
    install_wheel(session, "test")
    run_tests(session, *WITHOUT_INTEGRATIONS, *session.posargs)


@nox.session(requires=["package"])
def soak(session: nox.Session) -> None:
    """Run the long tests that CI leaves out, then random faults against random trainings: ``-- --rounds 500``.

    ``-- programs --seed 1`` runs random programs of users instead.
    """
    install_wheel(session, "test")
    environment = {"PYTHONPATH": "benchmarks:tests", "PYTHONSAFEPATH": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if session.posargs[:1] == ["programs"]:
        session.run("python", "-W", "ignore", "benchmarks/programs.py", *session.posargs[1:], env=environment)
        return
    run_tests(session, "-m", "soak", *WITHOUT_INTEGRATIONS)
    session.run("python", "-W", "ignore", "benchmarks/soak.py", *session.posargs, env=environment)


@nox.session
def same(session: nox.Session) -> None:
    """Run the same random programs against the checkout and another tree: ``-- --before FOLDER``."""
    install(session, ".[demo]")
    session.run("python", "benchmarks/same.py", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Test what differs on a GPU, with NCCL where that is there; arguments go to pytest. Skipped without a GPU."""
    if shutil.which("nvidia-smi") is None:
        session.skip("there is no nvidia-smi here, so no GPU of NVIDIA's, and tests/gpu needs one")
    install(session, ".[test]")
    session.run("pytest", "tests/gpu", "tests/ranks/test_device_ranks.py", *session.posargs)


@nox.session(requires=["package"], python=LOWEST_PYTHON)
def minimum(session: nox.Session) -> None:
    """Test the wheel with the lowest Python, torch and numpy, for ``docs/compatibility.md``; about 5 GB."""
    test_with(session, *LOWEST)


@nox.session(requires=["package"], python=NEWEST_PYTHON)
def newest(session: nox.Session) -> None:
    """Test the wheel with the newest Python, torch and numpy, for ``docs/compatibility.md``; about 5 GB.

    Every kind of loader is tried with workers started as Python 3.14 starts them.
    """
    test_with(session, "torch", "numpy")
    run_tests(session, "tests/unit/test_contract.py", "-k", "fork_server", "-m", "soak or not soak")


@nox.session(requires=["package"], allow_parallel=True)
def integrations(session: nox.Session) -> None:
    """Test the wheel and pages with other packages; arguments go to pytest.

    With ``-m "not ray"`` Ray is not installed either; ``-m soak`` runs the long tests that CI leaves out.
    """
    leaves_out_ray = any("not ray" in argument for argument in session.posargs)
    install_soundfile(session)
    install_wheel(session, "integrations" if leaves_out_ray else "integrations,ray", "--no-compile")
    # What the pages use of these needs no other packages; and newer pips refuse the metadata of catalyst.
    install(session, "--no-deps", "open-metric-learning")
    session.install("pip==24.0")
    install(session, "--no-deps", "catalyst")
    session.install("--upgrade", "pip")  # which the next run of the session needs
    # mmengine's samplers do without OpenCV.
    install(session, "addict", "termcolor", "yapf")
    install(session, "--no-deps", "mmengine")
    # One process compiles what the tests import, a fourth of what is installed. And yapf writes a file when it is first
    # imported; of processes that do so at once, one may read half of it.
    session.run("python", "-c", f"import {', '.join(IMPORTED)}")
    run_tests(session, *INTEGRATIONS, *session.posargs)


@nox.session(requires=["package"])
def torchft(session: nox.Session) -> None:
    """Follow torchft's quorum, then kill its replicas, for ``docs/torchft.md``; ``-- --schedules 1`` is short."""
    install_wheel(session, "test,torchft")
    run_tests(session, "tests/torchft")
    environment = {"PYTHONPATH": "docs/examples/frameworks", "OMP_NUM_THREADS": "1"}
    session.run("python", "-W", "ignore", "benchmarks/replicas.py", *session.posargs, env=environment)


@nox.session(requires=["package"])
def composer(session: nox.Session) -> None:
    """Train and resume with Composer, and see what it does unpatched, for ``docs/frameworks.md``; about 6 GB."""
    install_with(session, *COMPOSER)
    run_tests(session, "tests/composer", *session.posargs)
    see_unpatched(session, "with_composer")


@nox.session(requires=["package"])
def deepspeed(session: nox.Session) -> None:
    """Train and resume with DeepSpeed, and see what it does unpatched, for ``docs/frameworks.md``; needs a compiler."""
    install_wheel(session, "test,deepspeed")
    # It needs torch to build. What ranks without GPUs need of it is compiled now: else each of them would, for minutes.
    compiled = {"DS_BUILD_SHM_COMM": "1"}
    built = ["--no-cache-dir", "--no-build-isolation", "--no-deps", "deepspeed"]  # a kept build may lack that
    session.install("-c", "constraints.txt", *built, env=compiled)
    run_tests(session, "tests/deepspeed", *session.posargs)
    see_unpatched(session, "with_deepspeed")


@nox.session(requires=["package"])
def torchtitan(session: nox.Session) -> None:
    """Resume by torchtitan's checkpoints, and see what it does unpatched, for ``docs/frameworks.md``; about 3 GB."""
    install_wheel(session, "test,torchtitan")
    # All of its needs would be what reports to others, too.
    install(session, "--no-deps", "torchtitan", "torch_checkpointing")
    run_tests(session, "tests/torchtitan", *session.posargs)
    see_unpatched(session, "with_torchtitan")


@nox.session(requires=["package"])
def nodes(session: nox.Session) -> None:
    """Train on two and three nodes, made of network namespaces, for ``docs/gpu.md``; arguments go to pytest.

    Skipped without root, or where this machine lets nobody make namespaces.
    """
    if missing := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        session.skip(f"there is no {', no '.join(missing)} here; Debian's packages are iproute2 and util-linux")
    if os.geteuid():
        session.skip("only root may make network namespaces")
    if subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], check=False).returncode:  # noqa: S607
        session.skip("root may not make namespaces here, as in a container without the capability SYS_ADMIN")
    install_wheel(session, "integrations,torchft")
    run_tests(session, "tests/nodes", "-n", "2", *session.posargs)  # each test starts ranks on two or three nodes


@nox.session(requires=["package"])
def restarts(session: nox.Session) -> None:
    """Kill a node of jobs that restart, under torchrun and Ray, for ``docs/torchft.md``."""
    install_wheel(session, "test,ray")
    session.run("python", "-W", "ignore", "benchmarks/restarts.py", env={"PYTHONPATH": "tests"})


@nox.session(requires=["package"])
def previous(session: nox.Session) -> None:
    """Test resuming in frameworks, of the minor versions before those that ``integrations`` has."""
    install_soundfile(session)
    install_wheel(session, "integrations")
    session.install("--upgrade", *PREVIOUS, *[line for line in PINNED if line.startswith("torch==")])
    run_tests(session, *RESUMING, *session.posargs)


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Check style and format, the workflows and the citation."""
    install(session, *EXTRAS["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("zizmor", "--offline", "--quiet", "--persona", "pedantic", ".github/workflows")
    workflows = map(str, Path(".github/workflows").iterdir())
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("check-jsonschema", "--builtin-schema", "vendor.citation-file-format", "CITATION.cff")


@nox.session(requires=["package"], allow_parallel=True)
def types(session: nox.Session) -> None:
    """Check types, strictly: the checkout's, and those that users see of the wheel."""
    install_wheel(session, "demo,test,types", "--no-compile")  # torch is read here, not run
    install(session, "nox")
    session.run("mypy")
    # From the folder itself, where ddp_patch is the wheel's.
    with session.chdir("tests/typing"):
        # With the options of the first: what that has read of torch is in its cache.
        session.run("mypy", "--strict", "--warn-unreachable", "--config-file=", "--cache-dir=../../.mypy_cache", ".")
        session.run("basedpyright")
        stubs = {"PYTHONPATH": "typings"}  # from an installed package, pyright looks for other packages here alone
        session.run("basedpyright", "--verifytypes", "ddp_patch", "--ignoreexternal", env=stubs)


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Build the documentation into ``site/``, any warning an error, and print how many words each page has."""
    install(session, *EXTRAS["docs"], *EXTRAS["lint"])  # ruff formats the signatures
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "docs/words.py")


@nox.session
def peers(session: nox.Session) -> None:
    """Run every kind of loader on real ranks, with other libraries too, for ``docs/compatibility.md``."""
    install(session, ".[peers]")
    session.run("python", "-W", "ignore", "benchmarks/peers.py", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session
def agreement(session: nox.Session) -> None:
    """Measure what agreeing costs on 2 to 8 ranks, and write its table in ``docs/architecture.md``."""
    install(session, ".[demo]")
    session.run("python", "benchmarks/agreement.py")


@nox.session
def many_ranks(session: nox.Session) -> None:
    """Count what meetings of 2 to 64 ranks ask of the store, and write the table in ``docs/architecture.md``."""
    install(session, ".[demo]")
    session.run("python", "benchmarks/many_ranks.py")


@nox.session
def size(session: nox.Session) -> None:
    """Print how large the package is, and how many classes one follows in the examples of ``docs/architecture.md``."""
    install(session, ".[demo]")
    session.run("python", "-W", "ignore", "benchmarks/size.py", *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Measure audits of ten million samples and of 1024 ranks, as ``docs/audit.md`` tells of them."""
    install(session, ".[audit]")
    if session.posargs:
        session.run("python", "benchmarks/audit.py", *session.posargs)
        return
    session.run("python", "benchmarks/audit.py")
    many = ("--n", "1000000", "--world-size", "1024")
    session.run("python", "benchmarks/audit.py", *many, "--most-seconds", "8", "--most-mib", "500")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure speed, memory and balance, for ``docs/benchmarks.md``; ``-- --largest 6`` is shorter."""
    install_soundfile(session)  # for lhotse
    install(session, ".[bench]")
    install(session, "--no-deps", "open-metric-learning")
    session.run("python", "-W", "ignore", "benchmarks/speed.py", *session.posargs)
    session.run("python", "-W", "ignore", "benchmarks/steps.py")
    session.run("python", "-W", "ignore", "benchmarks/streams.py")
    session.run("python", "-W", "ignore", "benchmarks/even_steps.py")
    session.run("python", "-W", "ignore", "benchmarks/balance.py")
    session.run("python", "-W", "ignore", "benchmarks/balance_training.py")
    session.run("python", "-W", "ignore", "benchmarks/one_process.py")


@nox.session
def gradient(session: nox.Session) -> None:
    """Compare what ranks train with what one process trains, with other libraries too, for ``docs/benchmarks.md``."""
    install(session, ".[demo,peers]")
    session.run("python", "-W", "ignore", "benchmarks/gradient.py", env={"PYTHONPATH": "docs/examples"})


@nox.session
def pages(session: nox.Session) -> None:
    """Measure anew, one after the other, all that the pages of ``docs`` show; takes hours, and 15 GB."""
    for name in MEASURED:
        session.notify(name)


@nox.session
def imports(session: nox.Session) -> None:
    """Measure what ``import ddp_patch`` adds to ``import torch``."""
    install(session, ".[demo]")
    session.run("python", "benchmarks/imports.py", *session.posargs)


@nox.session
def samplers(session: nox.Session) -> None:
    """Measure the samplers, and draw the pictures of ``docs/samplers.md``; ``--n 100000`` is short."""
    install(session, ".[bench]")
    session.run("python", "benchmarks/samplers.py", *session.posargs)


@nox.session
def packages(session: nox.Session) -> None:
    """Try the loaders of other packages, and write ``docs/compatibility.md``; installs 8 GB."""
    pinned = ("-c", "constraints-packages.txt")
    session.install(*pinned, ".[packages]")
    session.install(*pinned, *STREAMING_NEEDS)
    session.install(*pinned, "--no-deps", "mosaicml-streaming")
    environment = {"PYTHONPATH": "tests", "OMP_NUM_THREADS": "1"}
    session.run("python", "-W", "ignore", "benchmarks/packages.py", *session.posargs, env=environment)


@nox.session(requires=["package"])
def unpatched(session: nox.Session) -> None:
    """Measure what frameworks do with loaders that are not patched, for ``docs/frameworks.md``."""
    install_soundfile(session)
    install_wheel(session, "integrations,ray")
    see_unpatched(session, *session.posargs)


@nox.session
def scripts(session: nox.Session) -> None:
    """Run scripts of others as one process, for ``docs/compatibility.md``; needs ``-- FOLDER``, their checkouts."""
    pinned = ("-c", "constraints-packages.txt")
    needed = "albumentations configargparse editdistance einx fire gymnasium h5py hydra-colorlog hydra-core imageio"
    needed += " imgaug kaldiio lightly lmdb natsort nltk numpydoc optuna poutyne pycocotools pytorch-ignite requests"
    needed += " rootutils scikit-image skorch tensorboard terminaltables torchinfo torchsummary tyro"
    needed += " vision_transformers wandb"
    session.install(*pinned, ".[packages]", *needed.split())
    session.run("python", "benchmarks/scripts.py", *session.posargs)


@nox.session
def pictures(session: nox.Session) -> None:
    """Share a loader on four ranks in three ways, and draw the pictures of ``docs/index.md`` and ``docs/audit.md``."""
    install(session, ".[bench]")
    session.run("python", "benchmarks/pictures.py")


@nox.session(requires=["docs"])
def screenshots(session: nox.Session) -> None:
    """Take screenshots of audits and of ``site/`` with Chromium; a page that is wider than its window is an error."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        session.skip(f"there is no browser here, none of {', '.join(BROWSERS)}; Debian's package is chromium")
    install(session, ".[screenshots]")
    session.run("python", "benchmarks/screenshots.py", browser)


def install(session: nox.Session, *packages: str) -> None:
    """Install what is named and all that it needs, in the versions of constraints.txt only."""
    session.install("-c", "constraints.txt", "--build-constraint", "constraints.txt", *packages)


def install_soundfile(session: nox.Session) -> None:
    """Install soundfile with its library: pip takes the wheel that fits best of any index, uv perhaps another."""
    install(session, "pip")
    session.run_install("python", "-m", "pip", "install", "-c", "constraints.txt", "soundfile")


def install_wheel(session: nox.Session, extras: str, *options: str) -> None:
    """Install the wheel that the session ``package`` built, anew where a kept environment has another one."""
    (wheel,) = DIST.glob("*.whl")
    if session.venv_backend == "uv" and "--no-compile" not in options:
        options = (*options, "--compile-bytecode")  # as pip does; else every process of the tests compiles the same
    install(session, *options, f"{wheel}[{extras}]")
    session.install("--no-deps", "--force-reinstall", str(wheel))


def see_unpatched(session: nox.Session, *frameworks: str) -> None:
    """Measure what frameworks do with loaders that are not patched, and write that into ``docs/frameworks.md``."""
    environment = {"PYTHONPATH": os.pathsep.join(["tests", "tests/integrations"]), "OMP_NUM_THREADS": "1"}
    session.run("python", "-W", "ignore", "benchmarks/unpatched.py", *frameworks, env=environment)


def install_with(session: nox.Session, *versions: str) -> None:
    """Install the wheel with these versions of other packages; what tests it is of the versions of constraints.txt."""
    (wheel,) = DIST.glob("*.whl")
    tools = {requirement.lower() for requirement in EXTRAS["test"] + EXTRAS["audit"]}
    pinned = [line for line in PINNED if line.split("==")[0].lower() in tools]
    session.install("--upgrade", *versions, *pinned, f"{wheel}[test]", "pip")  # which uv's environments lack


def test_with(session: nox.Session, *versions: str) -> None:
    """Test the wheel with these versions of what it needs."""
    install_with(session, *versions)
    session.run("python", "-m", "pip", "check")
    written = [] if session.posargs else [f"--write-compatibility={session.name.partition('-')[0]}"]
    run_tests(session, *WITHOUT_INTEGRATIONS, *written, *session.posargs)


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest in such a way that no process imports ``ddp_patch`` from the checkout."""
    # PYTHONSAFEPATH: the folder in which a process starts is not where it imports from.
    environment = {"PYTHONSAFEPATH": "1", "DDP_PATCH_DIST": str(DIST.resolve())}
    # Huge pages, where there are any: tests fork thousands of workers, and each fork copies what maps the memory.
    environment |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    environment |= {"OMP_NUM_THREADS": "1"}  # more threads only wait for each other: the processes use all cores
    # More processes than cores: on real ranks a test mostly waits.
    # And they take tests from each other: some take a hundred times as long as others.
    # Large packages wait for memory and files instead.
    workers = ["-n", str((os.cpu_count() or 1) + (2 if INTEGRATIONS[0] in arguments else 3)), "--dist", "worksteal"]
    session.run("pytest", *workers, *arguments, env=environment)
