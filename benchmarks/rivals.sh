#!/bin/bash
# The policies of docs/examples/policies beside gfgen's, simulated with the H200 profile: 20 seeds, bursts and
# mixed jobs, one model or two, two loads, deadlines from the time on one GPU and on four; and reused steps.
# 80 minutes of a core; a call that is stopped goes on:
#     bash benchmarks/rivals.sh FOLDER
set -u
policies=$(printf -- "--policy %s " docs/examples/policies/*.py)
for deadlines_from in 4 1; do
    folder=$1/from-$deadlines_from
    paper="python -m gfgen bench paper --simulate --figure 3c --seeds 20 --jobs 80 -o $folder
        --model qwen-image+wan2.2-ti2v-5b --model qwen-image --model wan2.2-ti2v-5b
        --deadlines-from $deadlines_from"
    $paper --policy auto,reuse=if-late
    cp "$folder/paper.md" "$1/reuse-$deadlines_from.md"
    $paper $policies --policy docs/examples/policies/rssp.py,short=1,medium=2,long=4
done
