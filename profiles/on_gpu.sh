#!/usr/bin/env bash
# One command for some minutes of a machine with a supported GPU and no network: verifies the kernels in cute_mla/artifacts, times the
# benchmark rows beside other libraries, and measures constants of the clock on Hopper. Runs from the tree and installs nothing.
#
#   profiles/on_gpu.sh OUTDIR [--seconds N] [--python PYTHON] [--rows D1,D5] [--wheels FOLDER]
#
# --seconds: time for everything, 460 by default. Needs Python >= 3.11 with torch, numpy, click, rich and cuda-bindings; nvcc for the
# microbenchmarks. --wheels: libraries to time beside ours, such as sgl-flash-mla, fa3-fwd and flash-attn-4 with their dependencies. They
# go to a temporary folder; one that cannot be installed is left out.
#
# Steps, each with a time limit, and its results in OUTDIR before the next begins: preflight, the quick suite (less than a quarter right
# ends the run), bits of that suite beside those of the simulated device, rows, microbenchmarks, and the smoke suite for what time is left.
# Writes preflight, quick, bits, profile, smoke and status.json, microbenchmarks.jsonl, a roofline and a .log of each step.
# Exit: 0 all passed, 1 a step did not (status.json says which), 2 usage, 3 this machine cannot run the kernels, 4 ended by the quick suite.
set -u

usage() {
    sed -n '5,9p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2
    exit 2
}

TREE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
OUT="" PYTHON="python3" TOTAL=460 ROWS="" WHEELS="" SCRATCH=""
while [ $# -gt 0 ]; do
    case "$1" in
        --python | --seconds | --rows | --wheels) [ $# -ge 2 ] || usage ;;&
        --python) PYTHON="$2"; shift 2 ;;
        --seconds) TOTAL="$2"; shift 2 ;;
        --rows) ROWS="$2"; shift 2 ;;
        --wheels) WHEELS="$2"; shift 2 ;;
        -*) usage ;;
        *) [ -z "$OUT" ] || usage; OUT="$1"; shift ;;
    esac
done
[ -n "$OUT" ] || usage
[[ "$TOTAL" =~ ^[1-9][0-9]*$ ]] || { echo "--seconds takes a whole number of seconds, got '$TOTAL'" >&2; exit 2; }
[ -z "$WHEELS" ] || WHEELS="$(cd "$WHEELS" && pwd)" || exit 2
mkdir -p "$OUT" || exit 2
OUT="$(cd "$OUT" && pwd)"
SCRATCH="$(mktemp -d)" || exit 2
trap 'rm -rf "$SCRATCH"' EXIT
export PYTHONPATH="$TREE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
rm -f "$OUT"/{preflight,quick,bits,profile,smoke,status}.json "$OUT"/microbenchmarks.jsonl "$OUT"/roofline.svg
rm -f "$OUT"/{wheels,preflight,quick,bits,profile,build,microbenchmarks,smoke}.log

STEPS="" FAILED=0
# note NAME STATUS: writes status.json with one more step. null: the step did not run.
note() {
    STEPS="$STEPS${STEPS:+, }\"$1\": $2"
    [ "$2" = 0 ] || FAILED=1
    status_json null
}
status_json() {
    printf '{"exit": %s, "steps": {%s}, "seconds": %s}\n' "$1" "$STEPS" "$SECONDS" >"$OUT/status.json"
}

# limited NAME SECONDS COMMAND...: runs a command that Ctrl-C ends after its time, or SIGKILL half a second later; output to NAME.log.
limited() {
    local name="$1" seconds="$2"
    shift 2
    (cd "$OUT" && exec timeout --signal=INT --kill-after=0.5 "$seconds" "$@") >>"$OUT/$name.log" 2>&1
    local status=$?
    [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || echo "$name ran past its $seconds s" | tee -a "$OUT/$name.log"
    return "$status"
}

# step NAME SECONDS COMMAND...: runs a step within its time and what is left, shows the end of its log, and returns its status.
step() {
    local name="$1" seconds=$(($2 < TOTAL - SECONDS ? $2 : TOTAL - SECONDS))
    shift 2
    if [ "$seconds" -lt 1 ]; then
        echo "== no time left for $name"
        note "$name" null
        return 1
    fi
    echo "== $SECONDS s: $name (at most $seconds s)"
    limited "$name" "$seconds" "$@"
    local status=$?
    tail -n 30 "$OUT/$name.log"
    note "$name" "$status"
    return "$status"
}

finish() {
    status_json "$1"
    echo "== exit $1 after $SECONDS s; results in $OUT"
    exit "$1"
}

verify() { # verify NAME SECONDS OPTION...
    step "$1" "$2" "$PYTHON" -m cute_mla.cli verify --arch all --device cuda "${@:3}" --json "$OUT/$1.json"
}

if ! command -v "$PYTHON" >/dev/null; then
    echo "cannot run here: no $PYTHON on this machine" | tee "$OUT/preflight.log" >&2
    note preflight 127
    finish 3
fi
if [ -n "$WHEELS" ]; then
    # The folder comes last on the path. It must be a site directory, because some packages install a .pth file.
    SITE="$SCRATCH/site"
    mkdir "$SITE"
    for wheel in "$WHEELS"/*.whl; do
        limited wheels 60 "$PYTHON" -m pip install --quiet --no-deps --no-index --no-compile --upgrade --target "$SITE" "$wheel" ||
            echo "left out: $wheel"
    done
    printf 'import os, site\nsite.addsitedir(os.path.dirname(os.path.abspath(__file__)))\n' >"$SITE/sitecustomize.py"
    export PYTHONPATH="$PYTHONPATH:$SITE"
fi
step preflight 60 "$PYTHON" -m cute_mla.profiles.preflight "$OUT/preflight.json" || finish 3

if grep -qE '"arch": "sm1[0-9]+"' "$OUT/preflight.json" 2>/dev/null; then
    echo "the microbenchmarks are for Hopper: left out" | tee "$OUT/build.log"
elif command -v nvcc >/dev/null; then
    limited build "$((120 < TOTAL - SECONDS ? 120 : TOTAL - SECONDS))" nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a \
        "$TREE/profiles/microbenchmarks/microbenchmarks.cu" -o "$SCRATCH/microbenchmarks" >/dev/null 2>&1 &
else
    echo "no nvcc on this machine: the microbenchmarks are left out" | tee "$OUT/build.log"
fi

verify quick 110 --suite quick
ran="$(grep -cE '"passed": (true|false)' "$OUT/quick.json" 2>/dev/null)"
right="$(grep -c '"passed": true' "$OUT/quick.json" 2>/dev/null)"
echo "== ${right:-0} of ${ran:-0} runs of the quick suite are right"
if [ $((${right:-0} * 4)) -lt "${ran:-0}" ] || [ "${ran:-0}" -eq 0 ]; then
    echo "== less than a quarter: read quick.log"
    finish 4
fi
verify bits 50 --suite quick --against sim

wait # for nvcc, which would disturb the times of rows
budget=$((200 < TOTAL - SECONDS - 20 ? 200 : TOTAL - SECONDS - 20)) # ends before the time limit, with the plots
step profile 220 "$PYTHON" -m cute_mla.cli profile --arch all --device cuda --budget "$((budget > 0 ? budget : 0))" \
    --json "$OUT/profile.json" --plot "$OUT/roofline.svg" ${ROWS:+--rows "$ROWS"}

# microbenchmarks PROGRAM FILE: runs each group, so that one that hangs costs itself.
microbenchmarks() {
    local status=0
    for group in $("$1" list); do
        timeout --foreground --kill-after=1 12 "$1" "$group" >>"$2" || { echo "$group ended with $?" && status=1; }
    done
    return "$status"
}
if [ -x "$SCRATCH/microbenchmarks" ]; then
    export -f microbenchmarks
    step microbenchmarks 60 bash -c 'microbenchmarks "$@"' - "$SCRATCH/microbenchmarks" "$OUT/microbenchmarks.jsonl"
fi
verify smoke "$TOTAL" --suite smoke
finish "$FAILED"
