#!/usr/bin/env bash
# Measures Roommate on one NVIDIA GPU: bench/gpu/run.sh PART... [--out DIR] [--again] [--rehearse];
# without a part it lists them. Needs the release program ($ROOMMATE, target/release/roommate or
# bench/gpu/.bin/roommate), python3 and PyTorch; installs nothing.
set -eu
# Where PyTorch was installed without compiled modules, each start of a job would compile them
# again, for 5 to 15 s.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-${TMPDIR:-/tmp}/roommate-bench-pycache}"
exec python3 "$(dirname "$0")/parts.py" "$@"
