#!/bin/bash
# Figures 6, 8 and 11 on the GPUs of this machine, for as many SECONDS; the same call goes on:
#     bash benchmarks/paper.sh SECONDS FOLDER
# It measures a profile, then cells seed by seed on ranks that stay. Later calls keep 190 s for diffusers on
# the same jobs and a bare loop. RANKS and TRACE may be set: on CPU ranks, after `gfgen profile`,
#     RANKS="--device cpu --ranks 2 --model tiny-qwen-image" TRACE="--steps 3 --minutes 0.06 --seeds 1"
set -u
limit=$1 folder=$2
RANKS=${RANKS---random-weights --ranks 2 --model qwen-image}
TRACE=${TRACE---steps 6 --minutes 0.5}
until_left() { timeout --foreground -s INT $((limit - SECONDS - $1)) python -m "${@:2}"; }
paper() { until_left "$1" gfgen bench paper $RANKS $TRACE --jobs 1000 --profile "$folder/profile.json" -o "$folder" "${@:2}"; }
mkdir -p "$folder"
if [ ! -f "$folder/profile.json" ]; then
    until_left 15 gfgen profile $RANKS -o "$folder/profile.json"
    paper 15 --figure 6 --figure 11
else
    paper 190 --figure 6 --figure 11
    paper 80 --figure 8
    until_left 10 benchmarks.elasticity $RANKS --samples 40 --only 'fcfs*' > "$folder/8.txt"
fi
python -m gfgen bench paper --simulate $RANKS $TRACE --jobs 1000 --profile "$folder/profile.json" -o "$folder" \
    --figure 6 --figure 8 --figure 11
