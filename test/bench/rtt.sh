#!/usr/bin/env bash
# The product beside the bare hop over a link with a round trip between Node and
# broker: `make rtt`. Broker, Edge and Node are processes of their own on both sides;
# RTTS and ROUNDS change it. It stops what it started.
set -euo pipefail
cd "$(dirname "$0")"
IOP=${IOP:-../../bin/iop}
ROUNDS=${ROUNDS:-3}
RTTS=${RTTS:-"0ms 50ms 250ms"}
mkdir -p bin
go build -o bin/ ./cmd/...
DATA=$(mktemp -d)
PIDS=()
stop() { for p in "${PIDS[@]}"; do kill "$p" 2>/dev/null || true; done; wait 2>/dev/null || true; PIDS=(); }
trap 'stop; rm -rf "$DATA"' EXIT
up() { "$@" >>"$DATA/procs.log" 2>&1 & PIDS+=($!); LAST=$!; }
for rtt in $RTTS; do
  OUT=out/rtt-$rtt; mkdir -p "$OUT"; rm -f "$OUT"/*.jsonl
  C=$DATA/certs-$rtt H=$DATA/hosts-$rtt
  up bin/mockprovider; MOCK=$LAST
  up bin/natshop -role broker -certs "$C"; B=$LAST
  until [ -f "$C/client.key" ]; do sleep 0.1; done; sleep 0.7
  up bin/delayproxy -listen 127.0.0.1:18601 -to 127.0.0.1:18222 -rtt "$rtt"
  up bin/natshop -role edge -certs "$C"; E=$LAST
  sleep 0.5
  up bin/natshop -role node -broker 127.0.0.1:18601 -certs "$C"; N=$LAST
  "$IOP" init --out "$H" --edge local --broker 127.0.0.1:18333 --node n1 >/dev/null
  sed -i 's/0.0.0.0:8400/127.0.0.1:18334/; s/127.0.0.1:8401/127.0.0.1:18335/; /{name: /d' "$H/edge/edge.yaml"
  sed -i '/adapters:/a\        - {name: mock, type: openai_compat, base_url: "http://127.0.0.1:18000", capacity: 20000}' "$H/edge/edge.yaml"
  sed -i 's/127.0.0.1:18333/127.0.0.1:18602/' "$H/node-n1/node-n1.yaml"
  up bin/delayproxy -listen 127.0.0.1:18602 -to 127.0.0.1:18333 -rtt "$rtt"
  up "$IOP" broker --log-level warn --config "$H/broker-1/broker-1.yaml"; HB=$LAST
  up "$IOP" edge --log-level warn --config "$H/edge/edge.yaml"; HE=$LAST
  up "$IOP" node --log-level warn --config "$H/node-n1/node-n1.yaml"; HN=$LAST
  KEY=$(cat "$H/edge/api-key")
  until curl -sf -H "Authorization: Bearer $KEY" http://127.0.0.1:18334/v1/models | grep -q '"m"'; do sleep 0.2; kill -0 $HE $HB $HN; done
  T=(-t "direct|http://127.0.0.1:18000|$MOCK" -t "nats-min|http://127.0.0.1:18004|$B,$E,$N" -t "iop-hosts|http://127.0.0.1:18334|$HB,$HE,$HN|m|$KEY")
  sleep 1
  bin/load -mode small-json -c 1 -d 3s -rounds "$ROUNDS" "${T[@]}" >"$OUT/json-c1.jsonl"
  bin/load -mode stream -c 32 -delay-us 20000 -chunks 50 -d 4s -rounds "$ROUNDS" "${T[@]}" >"$OUT/stream-paced.jsonl"
  bin/load -mode stream -c 8 -chunks 2000 -d 4s -rounds "$ROUNDS" "${T[@]}" >"$OUT/stream-max.jsonl"
  bin/load -mode download -c 2 -mib 32 -d 6s -rounds "$ROUNDS" "${T[@]}" >"$OUT/download.jsonl"
  bin/load -mode upload -c 2 -mib 32 -d 6s -rounds "$ROUNDS" "${T[@]}" >"$OUT/upload.jsonl"
  echo "round trip $rtt: load $(cut -d' ' -f1-3 /proc/loadavg)"
  bin/ratios -hop nats-min -of iop-hosts "$OUT"/*.jsonl
  stop
done
