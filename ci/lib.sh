# shellcheck shell=bash disable=SC2034 # variables used by the scripts that source this
# Sourced by the scripts beside it: goes to the repository's root, prints headings and timings.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# All packages but Python's native module, which maturin builds (ci/python); the published ones; those of them that the
# least features build; and those with unsafe code of their own.
ALL=(--workspace --exclude egmem-python)
PUBLISHED=(-p egmem -p egmem-driver -p egmem-core -p egmem-heap -p egmem-kv -p egmem-ledger -p egmem-shapes -p egmem-share -p egmem-exchange -p egmem-service -p egmem-doctor)
BASE=(-p egmem -p egmem-driver -p egmem-core -p egmem-heap)
UNSAFE=(-p egmem-driver -p egmem-core -p egmem-heap -p egmem-kv -p egmem-ledger -p egmem-shapes -p egmem-share)
# Published too: the C API and the command line.
FACES=(-p egmem-capi -p egmem-cli)

# The feature sets that CI builds: everything the packages have; the features that need no program beside the
# compilers, for the sanitizers, aarch64 and GPUs; and the least it builds with. Tests, examples and benchmarks turn the
# simulator on, with every set.
FULL=(--features "async,interop,kv,doctor,service,certs,etcd")
PORTABLE=(--features "async,interop,kv,doctor,service,certs")
BARE=(--no-default-features)
# The programs that tests start.
PROGRAMS=(--bin egmem --example egm-demo --example fabric-exchange)

# For ci/setup: hwloc; the programs and files to build and test the feature etcd, to cut a network in tests, and to convert
# traces for replay; those that make and enter the Debian root; libFuzzer, which comes as C++ with its crate; mpirun.
FULL_NEEDS=(
    hwloc protoc:protobuf-compiler /usr/include/google/protobuf/descriptor.proto:libprotobuf-dev
    etcd:etcd-server etcdctl:etcd-client ip:iproute2 python3:python3
)
ROOT_NEEDS=(
    mount:mount mmdebstrap:mmdebstrap /usr/share/keyrings/debian-archive-keyring.gpg:debian-archive-keyring
)
FUZZ_NEEDS=(g++:g++)
MPI_NEEDS=(mpirun:openmpi-bin)

# CI builds each state once: incremental data would only cost time and disk.
if [ -n "${CI:-}" ]; then
    export CARGO_INCREMENTAL=0
fi
export CARGO_TERM_PROGRESS_WHEN=never
# Backtraces with lines: the rest of the debug information takes time and disk.
export CARGO_PROFILE_DEV_DEBUG=line-tables-only

# Tests crash child processes on purpose, some with much memory mapped.
ulimit -c 0

# Most tests wait most of the time, for deadlines and for other processes.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(($(nproc) > 4 ? $(nproc) : 4))}

# From here on cargo also lints each crate of the workspace that it builds: clippy's driver is a compiler, so that
# nothing is built a second time to be linted.
lint_as_built() {
    cargo clippy --version >/dev/null || die "cargo clippy is missing (rustup component add clippy)"
    export RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__
}

SECTIONS=()
SECTION=
SECTION_START=0

section() {
    close_section
    SECTION=$*
    SECTION_START=$SECONDS
    printf '\n=== %s: %s\n' "${0##*/}" "$SECTION"
}

close_section() {
    if [ -n "$SECTION" ]; then
        SECTIONS+=("$(printf '%5d s  %s' "$((SECONDS - SECTION_START))" "$SECTION")")
        SECTION=
    fi
}

# For `trap timings EXIT`: prints the duration of each section and, if it stopped early, the section.
timings() {
    local status=$? last=$SECTION
    close_section
    if [ "$status" = 0 ]; then
        printf '\n=== %s: passed in %d s\n' "${0##*/}" "$SECONDS"
    else
        printf '\n=== %s: FAILED after %d s in: %s\n' "${0##*/}" "$SECONDS" "${last:-the start}"
    fi
    printf '%s\n' "${SECTIONS[@]}"
}

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Whether version $1 is at least $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

# Prints the prefix of a command that needs root: nothing, or "sudo -n"; fails where neither works.
root_prefix() {
    [ "$(id -u)" = 0 ] && return
    command -v sudo >/dev/null && sudo -n true 2>/dev/null && echo sudo -n
}

# Where cargo builds to.
target_directory() {
    cargo metadata --locked --no-deps --format-version 1 |
        sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p'
}

# Whether a program links libhwloc.
links_hwloc() {
    ldd "$1" | grep libhwloc >/dev/null # -q would end ldd early
}

# Cases of a property test where everything runs slowly, if the test does not say how many; elsewhere 256.
SLOW_CASES=32

# For RUSTFLAGS where the crates with unsafe code are tested alone, because their results depend on the processor's
# memory model or instructions: tests/all leaves out the others' topics.
UNSAFE_ONLY="--cfg egmem_unsafe_only"
# For RUSTFLAGS where everything runs slowly too (ThreadSanitizer, emulators): tests say by
# `cfg_attr(egmem_slow, ignore = "…")` why they are left out there.
SLOW="$UNSAFE_ONLY --cfg egmem_slow"

# For RUSTFLAGS in the Debian root, whose rustc links by gcc's linker if not told.
MOLD="-Clink-arg=-B/usr/libexec/mold"

# ranks PROGRAM…: runs four ranks of it by Open MPI, which counts cores and refuses root otherwise. A rank that waits for
# ever fails.
ranks() {
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 300 mpirun --oversubscribe -n 4 "$@"
}
