#!/bin/sh
# From a checkpoint to the first finding: ingest, then ask. Run by `make demo`.
set -eu
model=$1
store=${HEADATLAS_STORE:-atlas}

say() { printf '\n\033[1m%s\033[0m\n\n' "$1"; }

headatlas ingest "$model" --name SmolLM2-135M-Instruct --operator both

say 'Closure: a sparse few heads nearly satisfy T^2 = alpha T (closure >= 0.9)'
headatlas closure
echo
headatlas closure --by head --operator raw

say "Mismatch: another head's values never close"
headatlas mismatch --operator raw

say 'Shared values: where head j is strong, T_i T_j = alpha_j T_i for the heads of its group'
headatlas algebra --operator raw

say 'The published panel, and this model beside it'
headatlas panel

cat <<END

The store is ./$store. Next:

  . .venv/bin/activate
  headatlas closure --by layer
  headatlas schema heads
  headatlas sql "SELECT label, closure, alpha, cos_mean FROM heads WHERE operator = 'raw' ORDER BY closure DESC LIMIT 5"
  headatlas ingest YOUR_MODEL        a directory, a .safetensors, .bin or .gguf file, or org/name
END
