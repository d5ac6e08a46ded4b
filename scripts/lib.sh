# shellcheck shell=bash
# Shared by shell scripts: find a Python, make .venv, install jaxllm into it. Source it from the repository root.

LIBTPU=0.0.51 # the TPU's compiler, of the time of the locked jax

say() { printf 'jaxllm: %s\n' "$*"; }
die() { printf 'jaxllm: %s\n' "$*" >&2; exit 1; }

# Run a candidate rather than trusting its name: a pyenv shim exists for versions that the current folder does not select.
python_facts() { # CANDIDATE -> "executable has_venv", or failure if it is no Python >= 3.12
  "$1" -c '
import importlib.util, sys
if sys.version_info < (3, 12): sys.exit(1)
has_venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
print("yes" if has_venv else "no", sys.executable)' 2>/dev/null </dev/null
}

python_candidates() {
  local version
  for version in 3.12 3.13 3.14; do
    printf '%s\n' "python$version" \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python \
      "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"/cpython-"$version"*/bin/python3 \
      "/usr/local/bin/python$version" "/opt/homebrew/bin/python$version"
  done
  printf '%s\n' python3 python
}

find_python() { # prints the path of a Python >= 3.12 that can make virtual environments
  local candidate facts without_venv=""
  if [ -n "${PYTHON:-}" ]; then
    facts=$(python_facts "$PYTHON") || die "PYTHON=$PYTHON is not a Python 3.12 or newer"
    [ "${facts%% *}" = yes ] || die_no_venv "${facts#* }"
    echo "${facts#* }"
    return
  fi
  while IFS= read -r candidate; do
    facts=$(python_facts "$candidate") || continue
    if [ "${facts%% *}" = yes ]; then
      echo "${facts#* }"
      return
    fi
    without_venv=${without_venv:-${facts#* }}
  done < <(python_candidates)
  [ -z "$without_venv" ] || die_no_venv "$without_venv"
  die "no Python 3.12 or newer found; install one (with pyenv, uv or your system's packages), or set PYTHON to its path"
}

die_no_venv() { # EXECUTABLE
  local version
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  die "$1 cannot make virtual environments; on Debian and Ubuntu: apt-get install python$version-venv"
}

make_venv() {
  local python
  # Kept if it works and was made here: the programs in a copied or moved one still point to where it was.
  if .venv/bin/python -c 'import pip' 2>/dev/null && grep -qF "$(pwd -P)/.venv" .venv/bin/activate; then
    python_facts .venv/bin/python >/dev/null || die ".venv has a Python older than 3.12; remove .venv and run this again"
    return
  fi
  # --clear would empty the folder that it leads to, which others use.
  [ ! -L .venv ] || die ".venv is a link to $(readlink .venv), made for another folder; remove the link and run this again"
  python=$(find_python) || exit 1
  say "making .venv with $("$python" -V) ($python)"
  "$python" -m venv --clear .venv || die "could not make .venv with $python"
}

# The stamp's first line says what was installed from where; its second lists the extras that are in.
wanted_stamp() { { pwd -P; cat pyproject.toml requirements.lock; } | cksum; }

ensure_env() { # [EXTRA]: .venv holds jaxllm (editable), its locked dependencies and EXTRA (serve, or what it had)
  local extra=${1:-} stamp=.venv/jaxllm-installed wanted had=""
  wanted=$(wanted_stamp)
  [ -r "$stamp" ] && had=$(sed -n 2p "$stamp")
  [ -n "$extra" ] || extra=${had:-serve}
  if [ -r "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$wanted" ] && [ "$had" = "$extra" ] && [ -x .venv/bin/jaxllm ] &&
    .venv/bin/python -c '' 2>/dev/null; then
    return
  fi
  make_venv
  rm -f "$stamp"
  say "installing jaxllm${extra:+ with [$extra]} and its locked dependencies into .venv"
  pip_install pip setuptools
  pip_install --no-build-isolation -e ".${extra:+[$extra]}"
  printf '%s\n%s\n' "$wanted" "$extra" >"$stamp"
}

# Show what is downloaded and how large; the rest of pip's output only when it fails.
pip_install() {
  local log
  log=$(mktemp)
  if ! .venv/bin/python -m pip install --disable-pip-version-check -c requirements.lock "$@" 2>&1 </dev/null | tee "$log" |
    awk '/^ *Downloading .*\([0-9.]+ [MG]B\)$/ { sub(/^ */, ""); print "  " $0; fflush() }'; then
    cat "$log" >&2
    rm -f "$log"
    die "pip could not install the dependencies (see above); mend the cause and run this again"
  fi
  rm -f "$log"
}

suggest_accelerator() { # says which extra to install where an accelerator is present
  if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then
    say "an NVIDIA GPU is present; to use it: .venv/bin/python -m pip install -e '.[cuda13]'"
  elif compgen -G '/dev/accel*' >/dev/null || compgen -G '/dev/vfio/[0-9]*' >/dev/null; then
    say "a TPU seems to be present; to use it: .venv/bin/python -m pip install -e '.[tpu]'"
  fi
}
