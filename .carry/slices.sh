# bash .carry/slices.sh RANKS_PER_GPU PART...: what sharing costs, and the tests of several ranks on one GPU.
# LIMIT: seconds for all parts (535); each part has a bound of its own, and nothing is begun that has none left.
RANKS=$1; shift
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 GFGEN_TEST_RANKS_PER_GPU=$RANKS
export PYTHONPATH=$PWD:$PWD/tests:$PWD/tests/gfc:$PWD/.carry:$PYTHONPATH
began=$SECONDS; left() { echo $((${LIMIT:-535} - SECONDS + began)); }
step() { echo; echo "=== [$((SECONDS - began)) s] $*"; }
# A test's own limit: pytest-timeout where it is, else the stacks of what it was doing.
python3 -c 'import pytest_timeout' 2>/dev/null && BOUND=--timeout=100 || BOUND=--override-ini=faulthandler_timeout=80
tests() { # seconds, then pytest's arguments
  s=$1; shift; [ "$(left)" -lt "$s" ] && s=$(left); [ "$s" -lt 15 ] && { echo "no time for $*"; return; }
  step "$@"; timeout -k 5 "$s" python3 -m pytest -m gpu -vv -rfEs --durations=0 --tb=short $BOUND "$@" 2>&1; echo "exit $?"
}
a_run() { # of two jobs, on two ranks at once; its log is shown, and the stacks of all processes if it hangs
  step "a run at degree 2"
  for id in a b; do echo '{"id": "'$id'", "prompt": "a red circle", "size": "64x64", "frames": 5, "steps": 4}'; done >/tmp/jobs.jsonl
  timeout 100 python3 -m gfgen --debug run /tmp/jobs.jsonl -o /tmp/out-$RANKS --device cuda --ranks-per-gpu $RANKS --policy srtf,degree=2 2>/tmp/run.err >/tmp/run.out & run=$!
  ( sleep 80; kill -0 $run 2>/dev/null && { echo "it hangs"; for p in $(pgrep -f 'python3 -m gfgen|forkserver'); do kill -ABRT $p; done; } ) & guard=$!
  wait $run; echo "exit $?"; kill $guard 2>/dev/null; tail -5 /tmp/run.out; tail -40 /tmp/run.err; cp /tmp/run.err "$OUT/run$RANKS.err"
  grep -o '"layouts": *\[[^]]*\]' /tmp/out-$RANKS/manifest.jsonl
}
nvidia-smi -L; python3 -c 'import torch, pytest, sys; print(sys.version_info[:3], torch.__version__, pytest.__version__)'; echo "$BOUND"
step build; [ -f gfgen/gfc/_native*312*.so ] || python3 setup.py --quiet build_ext --inplace 2>&1 | tail -3
mkdir -p .pytest_cache/d/gfgen
(GFGEN_CACHE=$PWD/.pytest_cache/d/gfgen timeout 200 python3 -c 'from gfgen.models.registry import make_tiny_models, tiny_dir, TINY_NAMES; make_tiny_models(tiny_dir(), TINY_NAMES)' >/tmp/tiny.log 2>&1 &)
(timeout 200 python3 -c 'import pathlib, tempfile, planted
from gfgen.gfc.cuda import compiler
sources = planted.write_sources(pathlib.Path(tempfile.mkdtemp())); compiler.source_dir = lambda: sources
compiler.compiled("sm_90")' >/tmp/planted.log 2>&1 &)
for part; do
  case $part in
    probe) step probe; timeout 70 python3 .carry/slices_probe.py 2>&1 ;;
    run) a_run ;;
    deaths) tests 170 tests/runtime/test_deaths_on_gpus.py ;;
    device) tests 190 tests/gfc/test_cuda_device.py -k "not five_seconds" ;;
    still) tests 60 tests/gfc/test_cuda_device.py -k five_seconds ;;
    planted) tests 110 tests/gfc/test_planted_faults.py -rP ;;
    forwards) tests 120 tests/models/test_forwards_on_gpus.py ;;
    memcheck) tests 90 tests/gfc/test_memcheck.py ;;
    serve) tests 110 tests/server/test_serve_on_gpus.py ;;
    cli) tests 300 tests/cli/test_run_on_gpus.py ;;
    killed) tests 100 tests/cli/test_run_on_gpus.py -k "killed_costs or degree" ;;
    attention) tests 150 tests/models/test_attention_device.py ;;
    branches) tests 120 tests/models/test_branches_on_gpus.py ;;
    single) tests 60 tests/models/test_texts.py tests/models/test_rows.py ;;
    *) echo "no part: $part" ;;
  esac
done
step end
