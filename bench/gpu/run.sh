#!/usr/bin/env bash
# Measures Roommate on one NVIDIA GPU: bench/gpu/run.sh PART... [--out DIR] [--again] [--rehearse]; without a part it lists them.
# Needs the release program ($ROOMMATE, target/release/roommate or bench/gpu/.bin/roommate), python3 and PyTorch; installs nothing.
set -eu
exec python3 "$(dirname "$0")/parts.py" "$@"
