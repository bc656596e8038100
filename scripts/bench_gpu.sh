#!/usr/bin/env bash
# The benchmark of one GPU, a part of the acceptance kit; its name in 0.1.
exec bash "$(dirname "${BASH_SOURCE[0]}")/gpu_acceptance.sh" --only benchmark "$@"
