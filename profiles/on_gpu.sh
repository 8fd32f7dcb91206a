#!/usr/bin/env bash
# One command for a machine with a Hopper or Blackwell GPU and no network: verifies the kernels in cute_mla/artifacts, then times
# the benchmark rows of all ops by priority. Runs from the tree and installs nothing.
#
#   profiles/on_gpu.sh OUTDIR [--python PYTHON] [--verify-seconds N] [--profile-seconds N] [--suite quick|smoke|full] [--rows D1,D5]
#                      [--wheels FOLDER]
#
# Needs Python >= 3.11 with torch, numpy, click, rich and cuda-bindings. --wheels: libraries to time beside ours, such as
# sgl-flash-mla, fa3-fwd and flash-attn-4 with their dependencies. They go to a temporary folder; one that cannot be installed is left out.
# Writes to OUTDIR: preflight.json, verify.json, profile.json, roofline.svg, roofline-latency.svg, a .log of each step, and
# status.json with the exit status of each step.
# Exit: 0 all passed, 2 usage, 3 this machine cannot run the kernels, 4 verify failed, 5 profile failed, 6 both failed.
set -u

usage() {
    sed -n '5,12p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2
    exit 2
}

seconds_of() {
    [[ "$2" =~ ^[1-9][0-9]*$ ]] || { echo "$1 takes a whole number of seconds, got '$2'" >&2; exit 2; }
    printf '%s' "$2"
}

TREE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
OUT="" PYTHON="python3" VERIFY_SECONDS=240 PROFILE_SECONDS=300 SUITE="smoke" ROWS="" WHEELS="" SITE=""
while [ $# -gt 0 ]; do
    case "$1" in
        --python | --verify-seconds | --profile-seconds | --suite | --rows | --wheels) [ $# -ge 2 ] || usage ;;&
        --python) PYTHON="$2"; shift 2 ;;
        --verify-seconds) VERIFY_SECONDS="$(seconds_of "$1" "$2")" || exit 2; shift 2 ;;
        --profile-seconds) PROFILE_SECONDS="$(seconds_of "$1" "$2")" || exit 2; shift 2 ;;
        --suite) SUITE="$2"; shift 2 ;;
        --rows) ROWS="$2"; shift 2 ;;
        --wheels) WHEELS="$2"; shift 2 ;;
        -*) usage ;;
        *) [ -z "$OUT" ] || usage; OUT="$1"; shift ;;
    esac
done
[ -n "$OUT" ] || usage
[ -z "$WHEELS" ] || WHEELS="$(cd "$WHEELS" && pwd)" || exit 2
mkdir -p "$OUT" || exit 2
OUT="$(cd "$OUT" && pwd)"
export PYTHONPATH="$TREE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
rm -f "$OUT"/{preflight,verify,profile,status}.json "$OUT"/{wheels,preflight,verify,profile}.log "$OUT"/roofline{,-latency}.svg
trap '[ -z "$SITE" ] || rm -rf "$SITE"' EXIT

# step NAME SECONDS COMMAND...: runs a command with a time limit, copies its output to NAME.log, and returns its status.
step() {
    local name="$1" limit="$2"
    shift 2
    echo "== $name (at most $limit s)"
    (cd "$OUT" && timeout --kill-after=10 "$limit" "$@") 2>&1 | tee -a "$OUT/$name.log"
    local status="${PIPESTATUS[0]}"
    [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || echo "$name ran past its $limit s" | tee -a "$OUT/$name.log" >&2
    return "$status"
}

# finish EXIT PREFLIGHT VERIFY PROFILE: writes status.json (null: the step was not run) and exits.
finish() {
    printf '{"exit": %s, "wheels": %s, "preflight": %s, "verify": %s, "profile": %s, "seconds": %s}\n' \
        "$1" "$wheels" "$2" "$3" "$4" "$SECONDS" >"$OUT/status.json"
    echo "== exit $1 after $SECONDS s; results in $OUT"
    exit "$1"
}

wheels=null
if ! command -v "$PYTHON" >/dev/null; then
    echo "cannot run here: no $PYTHON on this machine" | tee "$OUT/preflight.log" >&2
    finish 3 127 null null
fi
if [ -n "$WHEELS" ]; then
    # The folder comes last on the path. It must be a site directory, because some packages install a .pth file.
    SITE="$(mktemp -d)" || exit 2
    wheels=0
    for wheel in "$WHEELS"/*.whl; do
        step wheels 120 "$PYTHON" -m pip install --quiet --no-deps --no-index --no-compile --upgrade --target "$SITE" "$wheel" || wheels=$?
    done
    printf 'import os, site\nsite.addsitedir(os.path.dirname(os.path.abspath(__file__)))\n' >"$SITE/sitecustomize.py"
    export PYTHONPATH="$PYTHONPATH:$SITE"
fi
step preflight 120 "$PYTHON" -m cute_mla.profiles.preflight "$OUT/preflight.json"
preflight=$?
[ "$preflight" -eq 0 ] || finish 3 "$preflight" null null

step verify "$VERIFY_SECONDS" "$PYTHON" -m cute_mla.cli verify --arch all --device cuda --suite "$SUITE" --json "$OUT/verify.json"
verify=$?

# The budget ends before the time limit, so that the rows timed by then are written.
budget=$((PROFILE_SECONDS > 60 ? PROFILE_SECONDS - 40 : PROFILE_SECONDS / 3))
step profile "$PROFILE_SECONDS" "$PYTHON" -m cute_mla.cli profile --arch all --device cuda --budget "$budget" \
    --json "$OUT/profile.json" --plot "$OUT/roofline.svg" ${ROWS:+--rows "$ROWS"}
profile=$?

code=0
[ "$verify" -eq 0 ] || code=4
[ "$profile" -eq 0 ] || code=$((code == 4 ? 6 : 5))
finish "$code" 0 "$verify" "$profile"
