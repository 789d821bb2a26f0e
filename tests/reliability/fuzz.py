"""Fuzzes for as long as it is asked to: a script, for `make fuzz`.

    make fuzz SECONDS=600

The C++ core takes mutated inputs under the sanitizers; random configurations are
trained beside the NumPy reference; a table is trained for 50,000 steps.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import cc_programs

DRIVER = sorted(cc_programs.TESTS.glob("fuzz_*.cc"))
LIBFUZZER = [
    *("-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"),
    "-DTPU_EMBEDDING_LIBFUZZER",
]
LOAD_STEPS = 50_000


def compile_libfuzzer(compiler: str, folder: pathlib.Path) -> str:
    """Builds the driver of the C++ core's targets by clang; the path of the program."""
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"`make fuzz-clang` needs clang with libFuzzer, and {compiler!r} is not on "
            "the PATH. Install it (Debian: apt-get install clang), or name another "
            "with CLANG=clang++-16. `make fuzz` needs g++ alone."
        )
    program = str(folder / "fuzz_clang")
    sources = [*DRIVER, *sorted(cc_programs.CC.glob("core/*.cc"))]
    command = [compiler, *cc_programs.FLAGS, *LIBFUZZER, *map(str, sources)]
    subprocess.run([*command, "-o", program], check=True)
    return program


def run_driver(build: str, seconds: float, seed: int, folder: pathlib.Path) -> str:
    """Runs g++'s driver; what it prints. Fails where a sanitizer or a check does."""
    program = cc_programs.build_program(DRIVER, build, folder)
    arguments = ("--seconds", str(seconds), "--seed", str(seed))
    ran = cc_programs.run_program(program, *arguments, timeout=2 * seconds + 60)
    if ran.returncode:
        raise SystemExit(f"{program} --seed {seed}\n{ran.stdout}\n{ran.stderr}")
    return ran.stdout.strip()


def run_libfuzzer(program: str, seconds: float, folder: pathlib.Path) -> None:
    """Runs libFuzzer, which prints what it does."""
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    time_limit = f"-max_total_time={int(seconds)}"
    subprocess.run([program, time_limit, str(corpus)], check=True)


def fuzz_configurations(seconds: float, seed: int) -> int:
    """Trains random problems until the time is over; how many."""
    import conftest  # noqa: F401 - makes logical devices, before TensorFlow starts
    import hypothesis
    from reliability import test_fuzz

    count = 0

    def one(problem: test_fuzz.Problem) -> None:
        nonlocal count
        count += 1
        test_fuzz.train(problem)

    end = time.monotonic() + seconds
    settings = hypothesis.settings(
        max_examples=20,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    while time.monotonic() < end:
        seed += 1
        os.environ["TPU_EMBEDDING_ENGINE"] = "portable" if seed % 5 == 0 else "host"
        test = hypothesis.given(test_fuzz.problems())(one)
        hypothesis.seed(seed)(settings(test))()
    return count


def main() -> None:
    """Reads the arguments and fuzzes."""
    parser = argparse.ArgumentParser(description="Fuzzes.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--clang", help="run libFuzzer, built by this compiler")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    seconds = arguments.seconds
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if arguments.clang:
            program = compile_libfuzzer(arguments.clang, folder)
            run_libfuzzer(program, seconds, folder)
            return
        for build, share in (("fast_address", 0.25), ("thread", 0.15)):
            printed = run_driver(build, share * seconds, arguments.seed, folder)
            for line in printed.splitlines():
                print(f"{build}: {line}", flush=True)
    count = fuzz_configurations(0.45 * seconds, arguments.seed)
    print(f"configurations: {count} trained beside the reference", flush=True)
    from reliability import load

    os.environ["TPU_EMBEDDING_ENGINE"] = "host"
    print(f"load: {load.run(LOAD_STEPS, arguments.seed)}", flush=True)


if __name__ == "__main__":
    main()
