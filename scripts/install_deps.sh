#!/usr/bin/env bash
# Installs what building needs and this machine lacks: a C compiler, make, Open MPI, oneDNN, cJSON, zlib.
# Says what it installs; uses sudo only where it must. Tested with apt (Debian, Ubuntu); dnf and pacman
# have a list of packages.
#
#   scripts/install_deps.sh          what `make` needs
#   scripts/install_deps.sh --test   also what the tests use: git, ps, python3
#   scripts/install_deps.sh --ci     also what the long tests use: clang, clang-format, numpy
set -euo pipefail

want_test=false want_ci=false
case ${1:-} in
    --test) want_test=true ;;
    --ci) want_test=true want_ci=true ;;
esac

if command -v apt-get >/dev/null; then
    packages="gcc g++ make libc6-dev openmpi-bin libopenmpi-dev libdnnl-dev libcjson-dev zlib1g-dev"
    $want_test && packages+=" git procps python3"
    $want_ci && packages+=" clang clang-format llvm python3-numpy python3-venv"
    is_installed() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }
    refresh() { $root apt-get update -qq; }
    install() { $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; }
elif command -v dnf >/dev/null; then
    packages="gcc gcc-c++ make openmpi openmpi-devel onednn-devel cjson-devel zlib-devel"
    $want_test && packages+=" git procps-ng python3"
    $want_ci && packages+=" clang clang-tools-extra compiler-rt python3-numpy"
    is_installed() { rpm -q "$1" >/dev/null 2>&1; }
    refresh() { :; }
    install() { $root dnf install -y -q "$@"; }
elif command -v pacman >/dev/null; then
    packages="gcc make openmpi onednn cjson zlib"
    $want_test && packages+=" git procps-ng python"
    $want_ci && packages+=" clang compiler-rt python-numpy"
    is_installed() { pacman -Q "$1" >/dev/null 2>&1; }
    refresh() { :; }
    install() { $root pacman -S --noconfirm --needed "$@"; }
else
    echo "error: no apt-get, dnf or pacman here; install a C compiler, make, Open MPI, oneDNN, cJSON" \
         "and zlib with their headers (oneDNN can be left out: make DNNL=0; MPI too: make MPI=0)" >&2
    exit 2
fi

missing=()
for package in $packages; do
    is_installed "$package" || missing+=("$package")
done

root=""
# needs_root: sudo, where this is not root and something must be installed.
needs_root() {
    [ "$(id -u)" -eq 0 ] && return
    command -v sudo >/dev/null || {
        echo "error: these packages are missing and only root can install them: $*" >&2
        exit 2
    }
    root=sudo
}

# add PACKAGE...: installs them, or ends with what the package manager said.
add() {
    local log
    log=$(mktemp)
    needs_root "$@"
    echo "installing $*${root:+ (with sudo)}"
    if ! { refresh && install "$@"; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "error: the package manager could not install: $*" >&2
        rm -f "$log"
        exit 2
    fi
    rm -f "$log"
}

[ ${#missing[@]} -eq 0 ] || add "${missing[@]}"

# The sanitizers of clang come in a package that carries its version.
if $want_ci && command -v apt-get >/dev/null; then
    runtime=libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev
    if ! is_installed "$runtime" && apt-cache show "$runtime" >/dev/null 2>&1; then add "$runtime"; fi
fi
