# shellcheck shell=bash
# Shared by the scripts: Debian's packages, the virtual environment .venv, and the project in it.
# Each step first checks whether there is anything to do, so that a second run starts in about a second.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without it, commands compile everything that they load and take three times as long to start
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin" # Debian keeps slurmctld and munged there, off an ordinary user's PATH

say() { printf 'penstock: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# quietly COMMAND...: runs it without output; if it fails, shows the end of its output.
quietly() {
  local log status=0
  log=$(mktemp)
  "$@" </dev/null >"$log" 2>&1 || status=$?
  [ "$status" = 0 ] || tail -n 12 "$log" | sed 's/^/  | /' >&2
  rm -f "$log"
  return "$status"
}

# set_up EXTRAS [slurm|accounting]: installs the project with these extras of pyproject.toml, and its tools for developers
# (loopback/), into .venv, and Slurm and MUNGE on the machine; for accounting also slurmdbd, MariaDB, and what builds and runs
# the plugins for Slurm. If Slurm cannot be installed, it says so and sets no_slurm=1. If the virtual environment cannot be
# made, it ends.
set_up() {
  find_python
  no_slurm=
  local missing_slurm=() missing_venv=()
  find_missing_slurm "${2:-}"
  # Debian leaves ensurepip, not venv, to a package of its own.
  venv_is_good || "$python" -c 'import ensurepip, venv' 2>/dev/null || missing_venv=("python${version%.*}-venv")
  if [ "$no_slurm" ] || [ "${#missing_slurm[@]}" = 0 ]; then
    [ "${#missing_venv[@]}" = 0 ] || install_packages "${missing_venv[@]}" || exit 1
  else
    install_packages "${missing_slurm[@]}" ${missing_venv[@]+"${missing_venv[@]}"} || no_slurm=1
    [ -z "$no_slurm" ] || [ "${#missing_venv[@]}" = 0 ] || die "Slurm is optional, but ${missing_venv[*]} is required"
  fi
  make_venv
  install_project "$1"
}

find_python() { # sets python and version
  local remedy="PENSTOCK_PYTHON=/path/to/python3.14 $0"
  python=${PENSTOCK_PYTHON:-python3}
  version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
    die "$python does not run; install Python 3.11 or newer, or name one: $remedy"
  case $version in
    3.1[1-4].*) untested= ;;
    [0-2].* | 3.[0-9].* | 3.10.*) die "$python is Python $version; Penstock needs Python 3.11 or newer. Name one: $remedy" ;;
    *)
      untested=", which Penstock has not been tested with (3.11 to 3.14 have). If it fails, name another: $remedy"
      say "$python is Python $version$untested" ;;
  esac
}

find_missing_slurm() { # fills set_up's missing_slurm
  local pair needed=()
  case $1 in slurm | accounting) needed+=(munged=munge slurmctld=slurmctld slurmd=slurmd scontrol=slurm-client) ;; esac
  case $1 in accounting) needed+=(slurmdbd=slurmdbd mariadbd=mariadb-server) ;; esac
  for pair in ${needed[@]+"${needed[@]}"}; do
    command -v "${pair%=*}" >/dev/null || missing_slurm+=("${pair#*=}")
  done
  if command -v scontrol >/dev/null && ! dpkg -S "$(readlink -f "$(command -v scontrol)")" >/dev/null 2>&1; then
    [ "${#missing_slurm[@]}" != 0 ] || return 0
    say "this machine has a Slurm of its own ($(command -v scontrol)) without: ${missing_slurm[*]}"
    say "Debian's Slurm is not installed beside it"
    no_slurm=1
    return 0
  fi
  # The tests build the SPANK plugin, run job_submit.lua in the oldest and the newest Lua that Slurm supports, and run the boot
  # scripts of cloud nodes.
  case $1 in
    accounting)
      for pair in gcc=gcc make=make lua5.1=lua5.1 lua5.4=lua5.4 curl=curl; do
        command -v "${pair%=*}" >/dev/null || missing_slurm+=("${pair#*=}")
      done
      [ -e /usr/include/stdio.h ] || missing_slurm+=(libc6-dev)
      [ -e /usr/include/slurm/spank.h ] || missing_slurm+=(libslurm-dev) ;;
  esac
}

# Runs as root, with the packages as arguments. The tests start these services themselves, on ports of their own, so the packages'
# services stay off, now (through Debian's policy-rc.d) and at the next boot. Services that ran before are not touched.
# Without an init system Debian starts nothing by itself.
# shellcheck disable=SC2016 # the other shell expands it
install_as_root='
policy=/usr/sbin/policy-rc.d
if [ -e /sbin/init ] && [ ! -e "$policy" ]; then
  trap "rm -f $policy" EXIT
  trap "exit 130" INT TERM
  { echo "#!/bin/sh"
    echo "# For the length of one installation, by the set-up of Penstock; delete it if you find it later."
    echo "case \$1 in munge* | slurm* | mariadb* | mysql* | postgresql* | prometheus*) exit 101;; esac"
    echo "exit 0"
  } >"$policy"
  chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o DPkg::Lock::Timeout=300 update &&
apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" || exit 1
if [ -d /run/systemd/system ]; then
  for package; do systemctl disable --quiet "${package%-server}" 2>/dev/null; done
fi
exit 0'

# install_packages PACKAGE...: installs Debian's packages, or says why it cannot, with the remedy, and returns 1.
install_packages() {
  local root=()
  if ! command -v apt-get >/dev/null; then
    say "this is not Debian or Ubuntu; install what Debian calls: $*"
    return 1
  fi
  if [ "$(id -u)" != 0 ]; then
    # Without a terminal, sudo may not stop to ask for a password.
    if ! command -v sudo >/dev/null || { [ ! -t 0 ] && ! sudo -n true 2>/dev/null; } || ! sudo true; then
      say "some Debian packages are missing, and installing them needs root or sudo. As root, run:"
      say "    apt-get update && apt-get install -y --no-install-recommends $*"
      return 1
    fi
    root=(sudo)
  fi
  say "installing Debian packages ($*): up to a minute ..."
  quietly ${root[@]+"${root[@]}"} sh -c "$install_as_root" sh "$@" || { say "apt-get could not install: $*"; return 1; }
}

# A virtual environment contains its path and its interpreter's version, so it must be made again when either changes.
venv_is_good() { [ "$(cat .venv/made-for 2>/dev/null)" = "$PWD $version" ]; }

make_venv() {
  venv_is_good && return
  quietly "$python" -m venv --clear .venv || die "could not make a virtual environment with $python in $PWD/.venv"
  echo "$PWD $version" >.venv/made-for
}

install_project() {
  local stamp
  stamp=$(cat pyproject.toml loopback/pyproject.toml | sha256sum)
  # [dev] contains all other extras.
  if [ "$(cat ".venv/has-$1" 2>/dev/null)" = "$stamp" ] || [ "$(cat .venv/has-dev 2>/dev/null)" = "$stamp" ]; then
    return 0
  fi
  say "installing the project and its Python packages into .venv: about a minute ..."
  .venv/bin/pip uninstall -q -y penstock >/dev/null 2>&1 # what the project was called before penstock-scheduler
  pip_install -e ".[$1]" -e ./loopback || die "could not install the project; above is the end of what pip said${untested:+. $python is Python $version$untested}"
  echo "$stamp" >".venv/has-$1"
}

# install_torch: PyTorch for the tests of the executor, if PENSTOCK_TORCH says what to install: `torch==2.13.0`, or `yes` for any.
# From the public registry it comes with gigabytes of CUDA libraries. pip may find a build for CPUs alone (200 MB), which uv
# would not search for.
install_torch() {
  [ -n "${PENSTOCK_TORCH:-}" ] || return 0
  [ "$(cat .venv/has-torch 2>/dev/null)" != "$PENSTOCK_TORCH" ] || return 0
  local what=$PENSTOCK_TORCH
  [ "$what" != yes ] || what=torch
  say "installing PyTorch ($what) ..."
  if quietly .venv/bin/pip install -q --disable-pip-version-check "$what"; then
    echo "$PENSTOCK_TORCH" >.venv/has-torch
  else
    say "could not install PyTorch, so the tests that need it are skipped"
  fi
}

# install_airflow: Airflow, the provider's wheel and its test dependencies into an environment of their own, because Airflow pins
# versions. A changed provider is built and installed again, in a few seconds: the tests run what ships.
# PENSTOCK_AIRFLOW names another version of Airflow, or `oldest`, which is every dependency at its lower bound. It gets an
# environment of its own.
install_airflow() {
  local needs code folder=.venv-airflow extra=test what=()
  [ -z "${PENSTOCK_AIRFLOW_PYTHON:-}" ] || return 0
  if [ -n "${PENSTOCK_AIRFLOW:-}" ]; then
    folder=.venv-airflow-$PENSTOCK_AIRFLOW extra=smoke what=("apache-airflow==$PENSTOCK_AIRFLOW")
    [ "$PENSTOCK_AIRFLOW" != oldest ] ||
      mapfile -t what < <(sed -n '/^dependencies = /s/>=/==/gp' airflow_provider/pyproject.toml | grep -o '[a-z0-9.-]*==[0-9.]*')
    export PENSTOCK_AIRFLOW_PYTHON=$PWD/$folder/bin/python
  fi
  needs="$PWD $version $(sha256sum <airflow_provider/pyproject.toml)"
  code="$needs $(cd airflow_provider && find airflow_provider_penstock -name '*.py' -print0 | sort -z | xargs -0 sha256sum | sha256sum)"
  [ "$(cat "$folder/has-provider" 2>/dev/null)" != "$code" ] || return 0
  if [ "$(cat "$folder/made-for" 2>/dev/null)" != "$needs" ]; then
    say "installing Airflow into $folder: one or two minutes ..."
    quietly "$python" -m venv --clear "$folder" &&
      quietly "$folder/bin/pip" install -q --disable-pip-version-check ${what[@]+"${what[@]}"} "./airflow_provider[$extra]" ||
      die "could not install Airflow; above is the end of what pip said"
    echo "$needs" >"$folder/made-for"
  else
    quietly "$folder/bin/pip" install -q --disable-pip-version-check --no-deps --force-reinstall ./airflow_provider ||
      die "could not install the provider into $folder; above is the end of what pip said"
  fi
  echo "$code" >"$folder/has-provider"
}

# uv is several times as fast as pip, but does not read pip's settings. So pip is used if it has an index configured.
pip_install() {
  if ! .venv/bin/pip config list 2>/dev/null | grep -qE 'index|find.links|proxy'; then
    if quietly .venv/bin/pip install -q --disable-pip-version-check uv &&
      quietly .venv/bin/uv pip install -q --python .venv/bin/python "$@"; then
      return 0
    fi
    say "uv failed here; trying pip, which takes a few minutes ..."
  fi
  quietly .venv/bin/pip install -q --disable-pip-version-check "$@"
}
