#!/usr/bin/env bash
# Start `lmcache server` with our store behind it.
#
#   configs/lmcache-server.sh gpu configs/nvmeof.yaml
#   configs/lmcache-server.sh cpu configs/embedded.yaml
#
# `none` in place of the configuration: the same server without our store, to compare with.
# Further arguments are handed on to the server. Then start vLLM with configs/vllm-mp.yaml.
set -euo pipefail

variant=${1:-} config=${2:-}
if [[ $# -lt 2 ]]; then
    echo "usage: $0 gpu|cpu CONFIG.yaml|none [ARGUMENT OF lmcache server]..." >&2
    exit 2
fi
shift 2

# workers    one thread per vLLM worker process (tensor-parallel ranks x instances): LMCache binds
#            each worker to a thread, and workers that share one wait for each other's copies.
# in_flight  prefetches at once. One session already keeps all members busy; more only keep short
#            requests from queueing behind long ones (LMCache's default is 8). For LMCache 0.5.6 and
#            before.
# l1_gb      host memory. Every prefetch in flight needs room for its whole session, and the
#            evictor starts at 0.8: in_flight x session <= 0.8 x l1_gb.
# watermark  LMCache 0.5.7 and later count bytes instead: no further prefetch begins while those in
#            flight fill this share of l1_gb. So much lower than the evictor's 0.8 that one more
#            session fits in between; for `gpu` that comes to the same 16 sessions.
case $variant in
    gpu) workers=8 in_flight=16 l1_gb=160 ;; # 16 x 7.05 GiB: 29,800 tokens of a 480B model
    cpu) workers=2 in_flight=4 l1_gb=1 ;;    # 4 x 0.11 GiB: 29,800 tokens of the demo's model
    *)
        echo "$0: unknown variant '$variant': use gpu or cpu" >&2
        exit 2
        ;;
esac

watermark=0.7

# Which flags there are depends on the release: what it does not know it refuses, and what it
# ignores it still takes.
if ! known=$(lmcache server --help 2>&1); then
    printf '%s\n%s: `lmcache server --help` failed: is LMCache installed here?\n' "$known" "$0" >&2
    exit 1
fi
has() { grep --quiet --fixed-strings --word-regexp -- "$1" <<<"$known"; }

if has --l2-prefetch-inflight-watermark; then
    by_release=(--l2-prefetch-inflight-watermark "$watermark")
else
    by_release=(--l2-prefetch-max-in-flight "$in_flight")
fi

# A key for the admin API: the path of a file that holds it, in LMCache's own variable.
if [[ -n ${LMCACHE_API_KEY_FILE:-} ]]; then
    if ! has --api-key-file; then
        echo "$0: LMCACHE_API_KEY_FILE is set, but this LMCache would ask nobody for a key:" \
            "unset it, or install LMCache 0.5.7 or later" >&2
        exit 1
    fi
    by_release+=(--api-key-file "$LMCACHE_API_KEY_FILE")
fi

# The adapter's JSON, with its `eviction` block, comes from our YAML.
store=()
if [[ $config != none ]]; then
    adapter=$(fx100 l2-adapter "$config")
    store=(--l2-adapter "$adapter")
fi

# No bytes from a client are unpickled: lmcache_driven moves KV through CUDA IPC (on CPU through
# POSIX shared memory of the vLLM worker) and registers no handler that unpickles. The others,
# engine_driven and auto, unpickle whatever a client commits, also when --shm-name is set.
# --shm-name belongs to those modes; empty keeps L1 private to the server.
#
# Everything listens on loopback: without a key nobody asks a client who it is. 5655 is the port of the
# vLLM workers, 8180 that of the admin API and of /metrics.
#
# The two time limits are LMCache's defaults. Our deadlines rest on them, so they are stated.
arguments=(
    --host 127.0.0.1
    --port 5655
    --http-host 127.0.0.1
    --http-port 8180
    --supported-transfer-mode lmcache_driven
    --shm-name ""
    --chunk-size 256
    --hash-algorithm blake3
    --max-workers "$workers"
    --l1-size-gb "$l1_gb"
    --l1-read-ttl-seconds 300
    --l1-write-ttl-seconds 600
    --eviction-policy LRU
)
exec lmcache server "${arguments[@]}" "${by_release[@]}" "${store[@]}" "$@"
