#!/bin/sh
# The published panel beside four real decoders, 1,014 heads. Run by `make panel`.
set -eu
models=$1

headatlas ingest "$models/SmolLM2-135M-Instruct.gguf" --name SmolLM2-135M-Instruct --operator both
headatlas ingest "$models/gemma-3-270m.gguf" --name Gemma-3-270M --operator both
headatlas ingest "$models/qwen2.5-coder-0.5b.gguf" --name Qwen2.5-Coder-0.5B-Instruct --operator both
headatlas ingest "$models/qwen2.5-coder-1.5b.gguf" --name Qwen2.5-Coder-1.5B-Instruct --operator both
headatlas null --operator raw --draws 1000
headatlas capacity --operator raw
echo
headatlas panel
